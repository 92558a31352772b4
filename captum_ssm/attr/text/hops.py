"""Relevance of the answer followed back to the prompt, through the generated text.

Relevance r of a token of the text is passed on along the row of that token's own explanation. The
row explains its logit less the mean of all, since a log-probability vanishes for a sure model. The
row is divided by its sum, so it passes on r in total. All tokens share one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..call.targets import Against, SumTarget

#: A token's row has no sum to divide by if its number is less than this share of the largest entry
#: that it is compared with: relevance divided by it would grow without bound.
_LEAST = 0.1
#: Share of a span's relevance on the text from which on hops go on.
_LEFT = 0.01


class Row(Protocol):
    """A decomposed number."""

    @property
    def tokens(self) -> Tensor:
        """Relevance of each token (B, L)."""

    @property
    def bias(self) -> Tensor:
        """Contribution of constants (B,)."""

    @property
    def output(self) -> Tensor:
        """The number (B,)."""


@dataclass(frozen=True, eq=False)
class Hop:
    """The relevance of S spans after some hops, which adds up to the spans' output.

    Attributes:
        prompt: relevance of each token of the prompt (S, P).
        text: relevance of each token of the text, to be passed on (S, n).
        unresolved: relevance that stays on tokens of the text whose row has no sum (S, n).
        constants: relevance of constants, and of tokens that the model was not given (S,).
    """

    prompt: Tensor
    text: Tensor
    unresolved: Tensor
    constants: Tensor

    @property
    def total(self) -> Tensor:
        """All of it (S,)."""
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
    """Ask for the spans of a text, and hop by hop for the text's tokens with relevance.

    A hop replaces the relevance of a text's token by its own row, scaled to the same sum.

    Args:
        text: token ids (n,).
        spans: ranges of the text's tokens.
        prompt: how many tokens the prompt has.
        contrast: the contrast of the spans' tokens.
        hops: how often relevance is passed on.
        logits: returns the model's logits at all tokens of the text (n, V).

    Yields:
        Questions; it is sent their answers.

    Returns:
        The spans' relevance after 0, 1, ... hops.
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
    """Return a decomposed number as one of S entries of a :class:`Hop`."""
    constants = row.output - row.tokens.sum(-1)
    tokens = row.tokens[0].detach().cpu().double()
    on_text = torch.zeros(count, dtype=torch.float64)
    on_text[: len(tokens) - prompt] = tokens[prompt:]
    nothing = torch.zeros_like(on_text)
    return tokens[:prompt], on_text, nothing, constants.detach().cpu().double().sum()


def _nothing(latest: Hop) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    empty = torch.zeros_like(latest.text[0])
    return torch.zeros_like(latest.prompt[0]), empty, empty, torch.zeros_like(latest.constants[0])


def _row_sums(logits: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum (n,) of each token's row, and 1 if it is large enough.

    Both are 0 if the sum, the logit less the mean, is too small to divide by, see :data:`_LEAST`.
    """
    logits = logits.detach().cpu().double()
    rest = logits - logits.mean(-1, keepdim=True)
    number = rest.gather(-1, text[:, None])[:, 0]
    return number, (number.abs() >= _LEAST * rest.abs().amax(-1)).double()
