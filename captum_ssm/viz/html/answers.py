"""Compute relevance for each likely prediction (answer), so a page can switch between them.

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
from ...attr.comparison import Named
from ...attr.engine.decompose import Decomposition
from .example import ShownExample, Subject
from .outline import Outline
from .page import Facts
from .parts import Account, account, options_of_parts, roles_of

#: The 16-bit integer that encodes the largest absolute value of a row.
_STEPS = 2**15 - 1
#: Estimated size in bytes of one token's values and roles (six lists) in JSON.
_TOKEN_BYTES = 40


@dataclass(frozen=True, eq=False)
class AnswerParts:
    """A method's relevance for one prediction.

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


def relevance_by_answer(
    method: LatimFlow,
    subject: Subject,
    example: ShownExample,
    outline: Outline,
    *,
    options: Mapping[str, Any],
    roles: bool,
) -> list[AnswerParts]:
    """Explain each of ``outline.targets``; one forward run serves all, with or without roles."""
    grid = PatchGrid(subject.module) if example.is_image else None
    with nullcontext() if grid is None else grid.watch():
        accepted = options_of_parts(options)
        decompositions = method.decompose_each(
            example.inputs, outline.targets, example.additional or None, roles=roles, **accepted
        )
    tokens = [x.tokens if grid is None else grid.sums(x.inputs) for x in decompositions]
    return [
        AnswerParts(relevance, roles_of(x), account(x), _streams(x, outline))
        for relevance, x in zip(tokens, decompositions, strict=True)
    ]


def _streams(parts: Decomposition, outline: Outline) -> Tensor | None:
    """Return the relevance of each layer's input (N, L); None if layers differ in tokens."""
    tokens = {layer.tokens for layer in outline.layers} | {x.shape[-1] for x in parts.streams}
    if len(tokens) > 1 or len(parts.streams) != len(outline.layers):
        return None
    return torch.stack([x[0] for x in parts.streams]).detach().cpu().double()[:, outline.unpadded]


def layer_moves(streams: Tensor | None, query: int | None) -> list[float] | None:
    """Return the relevance that each layer moves between tokens; None without ``streams``."""
    if streams is None:
        return None
    # after the last layer, all relevance is at the query; without one, the last layer counts as 0
    final = torch.zeros_like(streams[-1])
    if query is None:
        final = streams[-1]
    else:
        final[query] = streams[-1].sum()
    moved: list[float] = (torch.cat([streams[1:], final[None]]) - streams).abs().sum(1).tolist()
    return moved


def pack_rows(streams: Tensor) -> bytes:
    """Pack relevance (N, L): each layer's absolute maximum as float32, and int16 shares of it."""
    scales = streams.abs().amax(-1, keepdim=True)
    steps = (streams / scales.where(scales > 0, 1.0) * _STEPS).round()
    return scales.numpy().astype("<f4").tobytes() + steps.numpy().astype("<i2").tobytes()


def estimated_size(outlines: Sequence[Outline], methods: Named) -> int:
    """Estimate the bytes that relevance by layer, token and role takes in a page, at most."""
    count = sum(explains_several(method, {}) for method in methods.values())
    sizes = ((len(x.targets), len(x.layers), len(x.unpadded)) for x in outlines)
    return count * sum(k * (n * (4 + 2 * t) + _TOKEN_BYTES * t) for k, n, t in sizes)


def answer_facts(
    answers: Sequence[AnswerParts], to_list: Callable[[Tensor], list[float | None]], prefix: str
) -> tuple[list[Facts], dict[str, bytes]]:
    """Return JSON values of a method's answers, and bytes of layers' relevance by block name."""
    facts, blocks = [], {}
    for index, answer in enumerate(answers):
        block = None if answer.streams is None else f"{prefix}-{index}"
        if answer.streams is not None and block is not None:
            blocks[block] = pack_rows(answer.streams)
        values = {
            "values": to_list(answer.tokens),
            "roles": {role: to_list(x) for role, x in answer.roles.items()},
            "output": answer.account.output,
            "bias": answer.account.bias,
            "references": answer.account.references + answer.account.baselines,
            "streams": block,
        }
        facts.append(values)
    return facts, blocks
