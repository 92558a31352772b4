"""Relevance of generated tokens, passed on to the prompt in several hops.

A hop replaces the relevance r of a generated token by the explanation (row) of this token, scaled
so that the row's sum is r. The row explains the token's logit minus the mean of all logits, because
a log-probability is near 0 if the model is certain. All tokens of a hop share one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..call.targets import Against, SumTarget

#: A row is not used if its sum is below this fraction of the largest |logit - mean|, because
#: division by a small sum would give large relevance.
_LEAST = 0.1
#: Hops end if less than this fraction of the relevance is left on generated tokens.
_LEFT = 0.01


class Row(Protocol):
    """The contributions of tokens and constants to one output value."""

    @property
    def tokens(self) -> Tensor:
        """Relevance of each token (B, L)."""

    @property
    def bias(self) -> Tensor:
        """Contribution of constants (B,)."""

    @property
    def output(self) -> Tensor:
        """The explained value (B,)."""


@dataclass(frozen=True, eq=False)
class Hop:
    """The relevance for S explained spans after some hops, which sums to the spans' outputs.

    Attributes:
        prompt: relevance of each prompt token (S, P).
        text: relevance of each token of the generated text (S, n), for the next hop.
        unresolved: relevance (S, n) left on generated tokens whose rows have too small sums.
        constants: relevance of constants and of tokens that the model inserts (S,).
    """

    prompt: Tensor
    text: Tensor
    unresolved: Tensor
    constants: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of all relevance (S,)."""
        on_text = self.text + self.unresolved
        return self.prompt.sum(1) + on_text.sum(1) + self.constants


def follow(
    text: Tensor,
    spans: Sequence[range],
    prompt: int,
    contrast: Any,
    hops: int,
    logits: Callable[[], Tensor],
) -> Generator[Against, Row, list[Hop]]:
    """Explain the spans of a text, then pass relevance on from the text's tokens in several hops.

    Args:
        text: token ids of the text (n,).
        spans: ranges of the text's tokens.
        prompt: the number of prompt tokens.
        contrast: the contrast of the spans' tokens.
        hops: the largest number of hops.
        logits: function that returns the model's logits for all tokens of the text (n, V).

    Yields:
        Targets to decompose. The caller sends each decomposition back.

    Returns:
        The relevance after 0, 1, ... hops.
    """
    count = len(text)
    first = []
    for span in spans:
        some = torch.arange(span.start, span.stop)
        row = yield Against(SumTarget(some - count, text[some]), contrast)
        first.append(_parts(row, prompt, count))
    found = [Hop(*map(torch.stack, zip(*first, strict=True)))]
    # a token's row adds up to its number
    number, has_sum = _row_sums(logits(), text) if hops else (torch.empty(0), torch.empty(0))
    for _ in range(hops):
        latest = found[-1]
        going = latest.text * has_sum
        stays = latest.unresolved + (latest.text - going)
        large = latest.prompt.abs().sum(1) + latest.text.abs().sum(1)
        if not bool((going.abs().sum(1) > _LEFT * large).any()):
            break
        arrived = []
        for relevance in going:
            some = relevance.nonzero().flatten()
            if not len(some):
                arrived.append(_nothing(latest))
                continue
            weights = relevance[some] / number[some]
            row = yield Against(SumTarget(some - count, text[some], weights), "mean")
            arrived.append(_parts(row, prompt, count))
        on_prompt, on_text, _, constants = map(torch.stack, zip(*arrived, strict=True))
        found.append(Hop(latest.prompt + on_prompt, on_text, stays, latest.constants + constants))
    return found


def _parts(row: Row, prompt: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split a row's relevance into the four attributes of :class:`Hop`; unresolved is 0."""
    constants = row.output - row.tokens.sum(-1)
    tokens = row.tokens[0].detach().cpu().double()
    on_text = torch.zeros(count, dtype=torch.float64)
    on_text[: len(tokens) - prompt] = tokens[prompt:]
    nothing = torch.zeros_like(on_text)
    return tokens[:prompt], on_text, nothing, constants.detach().cpu().double().sum()


def _nothing(latest: Hop) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return zeros in the form of :func:`_parts`, for a span without relevance to pass on."""
    empty = torch.zeros_like(latest.text[0])
    return torch.zeros_like(latest.prompt[0]), empty, empty, torch.zeros_like(latest.constants[0])


def _row_sums(logits: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's logit minus the mean logit (n,), which is the sum of the token's row.

    Also return 1 for sums that are large enough to divide by (see :data:`_LEAST`), else 0 (n,).
    """
    logits = logits.detach().cpu().double()
    rest = logits - logits.mean(-1, keepdim=True)
    number = rest.gather(-1, text[:, None])[:, 0]
    return number, (number.abs() >= _LEAST * rest.abs().amax(-1)).double()
