"""What a method that decomposes the output says of each prediction, so that a page can switch.

Relevance is linear in what is explained: that of one prediction rather than another is the
difference of theirs, which the page takes by itself.

Shapes: L tokens, N layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...attr import LatimFlow
from ...attr.call.layout import PatchGrid
from ...attr.engine.decompose import Decomposition
from .example import ShownExample, Subject
from .outline import Outline
from .parts import Account, account, options_of_parts, roles_of

#: Streams are held in this share of the largest of their layer, in 16 bits.
_STEPS = 2**15 - 1


@dataclass(frozen=True, eq=False)
class Answer:
    """What a method says of one prediction.

    Attributes:
        tokens: relevance in the form in which methods return it, (1, L) or a grid of patches.
        roles: the same by role; empty where the rule tells none.
        account: what the output is made of.
        streams: relevance of each token of what enters each layer (N, L), without padding; None
            where the layers do not all mix the example's tokens.
    """

    tokens: Tensor
    roles: dict[str, Tensor]
    account: Account
    streams: Tensor | None


def switches(method: Any, options: Mapping[str, Any]) -> bool:
    """Whether a method, or a class of them, says more than one prediction's relevance in one run.

    Args:
        method: the method.
        options: its options; with a contrast what is explained is no prediction.
    """
    kind = method if isinstance(method, type) else type(method)
    return issubclass(kind, LatimFlow) and options.get("contrast") is None


def answers_of(
    method: LatimFlow,
    subject: Subject,
    example: ShownExample,
    known: Outline,
    *,
    options: Mapping[str, Any],
    roles: bool,
) -> list[Answer]:
    """What a method says of each of an outline's targets, from one forward run.

    Args:
        method: the method.
        subject: the model.
        example: the example.
        known: its outline.
        options: those of the method's ``attribute``.
        roles: whether relevance is told apart by role.
    """
    grid = PatchGrid(subject.module) if example.is_image else None
    with nullcontext() if grid is None else grid.watch():
        found = method.decompose_each(
            example.inputs,
            known.targets,
            example.additional or None,
            roles=roles,
            **options_of_parts(options),
        )
    return [
        Answer(
            each.tokens if grid is None else grid.sums(each.inputs),
            roles_of(each),
            account(each),
            _streams(each, known),
        )
        for each in found
    ]


def _streams(found: Decomposition, known: Outline) -> Tensor | None:
    """Relevance of what enters each layer (N, L), without padding."""
    tokens = {layer.tokens for layer in known.layers} | {x.shape[-1] for x in found.streams}
    if len(tokens) > 1 or len(found.streams) != len(known.layers):
        return None
    return torch.stack([x[0] for x in found.streams]).detach().cpu().double()[:, known.real]


def start_layer(streams: Tensor | None, asking: int | None) -> int | None:
    """The layer that takes most relevance from one token to another; None if that is not known.

    Args:
        streams: of the explained answer (N, L), or None.
        asking: the token at which the output is read, or None.
    """
    if streams is None:
        return None
    leaving = torch.zeros_like(streams[-1])
    if asking is None:
        leaving = streams[-1]
    else:
        leaving[asking] = streams[-1].sum()
    moved = (torch.cat([streams[1:], leaving[None]]) - streams).abs().sum(1)
    return int(moved.argmax())


def packed(streams: Tensor) -> bytes:
    """Pack values by layer: the scales (N,), and all values (N, L) in 32767ths of them.

    The scale of a layer is its largest absolute value. Scales are little-endian float32, values
    int16.

    Args:
        streams: (N, L).
    """
    scales = streams.abs().amax(-1, keepdim=True)
    steps = (streams / scales.where(scales > 0, 1.0) * _STEPS).round()
    return scales.numpy().astype("<f4").tobytes() + steps.numpy().astype("<i2").tobytes()


def packed_size(known: Outline) -> int:
    """Bytes of the streams of all targets of an outline, by one method."""
    layers, tokens = len(known.layers), len(known.real)
    return len(known.targets) * layers * (4 + 2 * tokens)


def facts_of(
    answers: Sequence[Answer], values: Callable[[Tensor], list[float | None]], name: str
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """What a page is told of a method's answers, and the blocks that hold their streams."""
    facts, blocks = [], {}
    for number, answer in enumerate(answers):
        block = None if answer.streams is None else f"{name}-{number}"
        if answer.streams is not None and block is not None:
            blocks[block] = packed(answer.streams)
        told = {
            "values": values(answer.tokens),
            "roles": {role: values(x) for role, x in answer.roles.items()},
            "output": answer.account.output,
            "bias": answer.account.bias,
            "streams": block,
        }
        facts.append(told)
    return facts, blocks
