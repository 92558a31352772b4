"""Compute relevance for each likely prediction, so a page can switch between them.

Relevance is linear in the explained number, so the page subtracts the relevance of two predictions
to explain one prediction rather than another. Shapes: L tokens, N layers.
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

#: The 16-bit integer that encodes the largest absolute value of a row.
_STEPS = 2**15 - 1
#: Estimated size in bytes of one token's values and roles (six lists) in JSON.
_WRITTEN = 40


@dataclass(frozen=True, eq=False)
class Answer:
    """A method's explanation of one prediction.

    Attributes:
        tokens: the relevance of tokens (1, L), or of a grid of patches.
        roles: the relevance by role; empty if the rule has no roles.
        account: the output as a sum of relevance and constants.
        streams: relevance of each layer's input (N, L), without padding; None if the layers do not
            all mix the example's tokens.
    """

    tokens: Tensor
    roles: dict[str, Tensor]
    account: Account
    streams: Tensor | None


def explains_several(method: Any, options: Mapping[str, Any]) -> bool:
    """Return True if a method object or class can explain several predictions in one run."""
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
    """Explain each of ``known.targets`` with one forward run, with or without roles."""
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
    """Return the relevance of each layer's input (N, L); None if layers differ in tokens."""
    tokens = {layer.tokens for layer in known.layers} | {x.shape[-1] for x in found.streams}
    if len(tokens) > 1 or len(found.streams) != len(known.layers):
        return None
    return torch.stack([x[0] for x in found.streams]).detach().cpu().double()[:, known.real]


def moved(streams: Tensor | None, asking: int | None) -> list[float] | None:
    """Return the relevance that each layer moves between tokens; None without ``streams``."""
    if streams is None:
        return None
    leaving = torch.zeros_like(streams[-1])
    if asking is None:
        leaving = streams[-1]
    else:
        leaving[asking] = streams[-1].sum()
    found: list[float] = (torch.cat([streams[1:], leaving[None]]) - streams).abs().sum(1).tolist()
    return found


def packed(streams: Tensor) -> bytes:
    """Pack relevance (N, L): each layer's absolute maximum as float32, and int16 shares of it."""
    scales = streams.abs().amax(-1, keepdim=True)
    steps = (streams / scales.where(scales > 0, 1.0) * _STEPS).round()
    return scales.numpy().astype("<f4").tobytes() + steps.numpy().astype("<i2").tobytes()


def packed_size(known: Outline) -> int:
    """Estimate the bytes that one method's relevance by layer, token and role takes in a page."""
    layers, tokens = len(known.layers), len(known.real)
    return len(known.targets) * (layers * (4 + 2 * tokens) + _WRITTEN * tokens)


def facts_of(
    answers: Sequence[Answer], values: Callable[[Tensor], list[float | None]], name: str
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return a method's answers as JSON values, and the layers' relevance as bytes, by name."""
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
            "references": answer.account.references + answer.account.baselines,
            "streams": block,
        }
        facts.append(told)
    return facts, blocks
