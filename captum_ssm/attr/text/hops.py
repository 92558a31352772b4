"""From the answer back to the prompt, through what was written in between.

Relevance r that went to a token of the text goes on along the row of that token's own explanation,
of its logit less the mean of all: a log-probability vanishes where the model is sure.  The row is
divided by its sum, so that r is what is passed on.  All tokens go on together, in one backward
pass: a sum of explanations is that of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..call.targets import Against, Total

#: A row counts as having no sum where its number is less than this share of the largest of all
#: entries that it is held against: what is divided by that would grow beyond all measure.
_LEAST = 0.1
#: Share of a span's relevance on the text from which on hops go on.
_LEFT = 0.01


class Row(Protocol):
    """An explained number, taken apart."""

    @property
    def tokens(self) -> Tensor:
        """Relevance of each token (B, L)."""

    @property
    def bias(self) -> Tensor:
        """What constants add (B,)."""

    @property
    def output(self) -> Tensor:
        """The number (B,)."""


@dataclass(frozen=True, eq=False)
class Hop:
    """Where the relevance of S spans stands after some hops; all of it is the spans' output.

    Attributes:
        prompt: on each token of the prompt (S, P).
        text: on each token of the text, to go on from there (S, n).
        unresolved: on tokens of the text whose own explanation has no sum, where it stays (S, n).
        constants: on biases and other constants, and on tokens that nobody gave the model (S,).
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
    """Ask for a text's spans, and for what they are due to; returns where their relevance stands.

    Args:
        text: its token ids (n,).
        spans: ranges of them.
        prompt: how many tokens the prompt has.
        contrast: what the spans' tokens are held against.
        hops: how often relevance goes on.
        logits: returns the model's of all tokens of the text (n, V).

    Yields:
        Questions, of which it is sent the answers.

    Returns:
        The spans' relevance after 0, 1, ... hops.
    """
    count = len(text)
    first = []
    for span in spans:
        some = torch.arange(span.start, span.stop)
        row = yield Against(Total(some - count, text[some]), contrast)
        first.append(_parts(row, prompt, count))
    found = [Hop(*map(torch.stack, zip(*first, strict=True)))]
    number, passes = _sums(logits() if hops else None, text)
    for _ in range(hops):
        latest = found[-1]
        going = latest.text * passes
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
            row = yield Against(Total(some - count, text[some], weights), "mean")
            arrived.append(_parts(row, prompt, count))
        on_prompt, on_text, _, constants = map(torch.stack, zip(*arrived, strict=True))
        found.append(Hop(latest.prompt + on_prompt, on_text, stays, latest.constants + constants))
    return found


def _parts(row: Row, prompt: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An explained number as one of S entries of a :class:`Hop`."""
    constants = row.output - row.tokens.sum(-1)
    tokens = row.tokens[0].detach().cpu().double()
    on_text = torch.zeros(count, dtype=torch.float64)
    on_text[: len(tokens) - prompt] = tokens[prompt:]
    nothing = torch.zeros_like(on_text)
    return tokens[:prompt], on_text, nothing, constants.detach().cpu().double().sum()


def _nothing(latest: Hop) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    empty = torch.zeros_like(latest.text[0])
    return torch.zeros_like(latest.prompt[0]), empty, empty, torch.zeros_like(latest.constants[0])


def _sums(logits: Tensor | None, text: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's logit less the mean, and where relevance passes through it, (n,) each."""
    if logits is None:
        return torch.ones(len(text), dtype=torch.float64), torch.ones(len(text))
    logits = logits.detach().cpu().double()
    rest = logits - logits.mean(-1, keepdim=True)
    number = rest.gather(-1, text[:, None])[:, 0]
    return number, (number.abs() >= _LEAST * rest.abs().amax(-1)).double()
