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
from ..engine.result import part

#: A row is not used if its sum is below this fraction of the largest |logit - mean|, because
#: division by a small sum would give large relevance.
_LEAST = 0.1
#: Hops end if less than this fraction of the relevance is left on generated tokens.
_SMALLEST_REST = 0.01


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


@part
@dataclass(frozen=True, eq=False)
class SpanHop:
    """The relevance for S explained spans after some hops, which sums to the spans' outputs.

    Attributes:
        prompt: relevance of each feature, or each token, of the prompt (S, n_in).
        text: relevance of each span (S, S), or each token (S, n), of the text, to be passed on in
            the next hop.
        unresolved: relevance, as in ``text``, that stays on the text, because the sums of its
            tokens' explanations are too small to divide by.
        constants: relevance of biases, and of tokens that belong to no feature or span (S,).
    """

    prompt: Tensor
    text: Tensor
    unresolved: Tensor
    constants: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of all relevance (S,)."""
        return self.prompt.sum(1) + (self.text + self.unresolved).sum(1) + self.constants


def follow(
    text: Tensor,
    spans: Sequence[range],
    prompt_length: int,
    contrast: Any,
    hops: int,
    logits: Callable[[], Tensor],
) -> Generator[Against, Row, list[SpanHop]]:
    """Explain the spans of a text, then pass relevance on from the text's tokens in several hops.

    With the rows R[i] of the text's tokens, a hop replaces relevance r[i] by r[i] R[i] / sum(R[i]).
    Yield targets, for each of which the caller sends a :class:`Row`.

    Args:
        text: token ids of the text (n,).
        spans: ranges of the text's tokens.
        prompt_length: the number of prompt tokens.
        contrast: the contrast of the spans' tokens; hops use the contrast "mean".
        hops: the largest number of hops.
        logits: function that returns the model's logits for all tokens of the text (n, V).

    Returns:
        The relevance after 0, 1, ... hops.
    """
    count = len(text)
    rows = []
    for span in spans:
        positions = torch.arange(span.start, span.stop)
        # the model's input lacks the last token, so token i is predicted at i - count, from the end
        row = yield Against(SumTarget(positions - count, text[positions]), contrast)
        rows.append(_split_row(row, prompt_length, count))
    hops_done = [SpanHop(*map(torch.stack, zip(*rows, strict=True)))]  # S rows of each attribute
    # the sum of each token's row, and whether relevance can be divided by it
    row_sums, is_usable = _row_sums(logits(), text) if hops else (torch.empty(0), torch.empty(0))
    for _ in range(hops):
        latest = hops_done[-1]
        to_pass = latest.text * is_usable
        unresolved = latest.unresolved + (latest.text - to_pass)
        total = latest.prompt.abs().sum(1) + latest.text.abs().sum(1)
        if not bool((to_pass.abs().sum(1) > _SMALLEST_REST * total).any()):
            break
        next_rows = []
        for relevance in to_pass:  # (n,) for each span
            positions = relevance.nonzero().flatten()
            if not len(positions):
                next_rows.append(_zero_parts(latest))
                continue
            weights = relevance[positions] / row_sums[positions]
            row = yield Against(SumTarget(positions - count, text[positions], weights), "mean")
            next_rows.append(_split_row(row, prompt_length, count))
        on_prompt, on_text, _, constants = map(torch.stack, zip(*next_rows, strict=True))
        hops_done.append(
            SpanHop(latest.prompt + on_prompt, on_text, unresolved, latest.constants + constants)
        )
    return hops_done


def _split_row(row: Row, prompt_length: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split a row's relevance into the four attributes of :class:`SpanHop`; unresolved is 0."""
    constants = row.output - row.tokens.sum(-1)
    tokens = row.tokens[0].detach().cpu().double()
    on_text = torch.zeros(count, dtype=torch.float64)  # the model does not read the last token
    on_text[: len(tokens) - prompt_length] = tokens[prompt_length:]
    unresolved = torch.zeros_like(on_text)
    return tokens[:prompt_length], on_text, unresolved, constants.detach().cpu().double().sum()


def _zero_parts(latest: SpanHop) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return zeros in the form of :func:`_split_row`, for a span without relevance to pass on."""
    empty = torch.zeros_like(latest.text[0])
    return torch.zeros_like(latest.prompt[0]), empty, empty, torch.zeros_like(latest.constants[0])


def _row_sums(logits: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's logit minus the mean logit (n,), which is the sum of the token's row.

    Also return 1 for sums that are large enough to divide by (see :data:`_LEAST`), else 0 (n,).
    """
    logits = logits.detach().cpu().double()
    centered = logits - logits.mean(-1, keepdim=True)
    sums = centered.gather(-1, text[:, None])[:, 0]
    return sums, (sums.abs() >= _LEAST * centered.abs().amax(-1)).double()
