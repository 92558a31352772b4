"""The cache of softmax attention as a memory: it holds a token's value as long as it is read.

A recurrence sums its tokens; attention keeps every token in a separate place.  Nothing fades, and
nothing is erased but tokens that a window has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators.heads import DenseHeads

#: Rows that are checked together.
_ROWS = 256


class Cache(NamedTuple):
    """Causal attention and its values.

    After a token it holds the tokens that this one or a later one reads: all tokens so far but
    padding, and those that a window has passed.

    Attributes:
        value: of each token (B, L, H, P).
        matrices: how much each token reads of each, by head (B, H, L, L).
        weight: output projection of each head (H, P, E), behind which sizes are measured; None to
            measure the values themselves.
    """

    value: Tensor
    matrices: Tensor
    weight: Tensor | None = None

    @property
    def width(self) -> int:
        """Numbers that are kept of a token, for each value channel."""
        return 1

    def states(self, tokens: Sequence[int]) -> Tensor:
        """Return the values held after each of T tokens, zeros for others, (B, T, H, L, P)."""
        value = self.value.transpose(1, 2)
        return torch.stack([self._held(token)[..., None] * value for token in tokens], 1)

    def sizes(self, token: int) -> Tensor:
        """How large each token's value is, by head (B, H, L); 0 where it is not held."""
        return self._held(token) * self._sizes()

    def erased(self, source: int, token: int) -> Tensor:
        """How much of a source each token up to ``token`` erased, by head (B, H, L).

        All of it goes at the first token from which on no token reads it.
        """
        end = 1 + self._last_reader(source)  # (B, H)
        at = torch.arange(self.value.shape[1], device=end.device)
        gone = (at == end[..., None]) & (at <= token) & (end > source)[..., None]
        return gone * self._sizes()[..., source, None]

    def without(self, source: int, token: int) -> Tensor:
        """How much of a source would be held, had each token not erased it, by head (B, H, L)."""
        return self.sizes(token)[..., source, None] + self.erased(source, token)

    def half_lives(self) -> Tensor:
        """Infinity (B, H, 1): nothing fades."""
        batch, _, heads, _ = self.value.shape
        return self.value.new_full((batch, heads, 1), torch.inf)

    def _sizes(self) -> Tensor:
        """Return the norm of each token's value, by head (B, H, L)."""
        if self.weight is None:
            sizes: Tensor = self.value.norm(dim=-1)
            return sizes.transpose(1, 2)
        pairs = zip(self.value.unbind(2), self.weight, strict=True)
        return torch.stack([(value @ weight).norm(dim=-1) for value, weight in pairs], 1)

    def _held(self, token: int) -> Tensor:
        """1 for the tokens up to ``token`` that it or a later one reads, else 0, (B, H, L)."""
        read = self.matrices[:, :, token:].amax(-2) > 0
        read[..., token + 1 :] = False
        return read.to(self.value)

    def _last_reader(self, source: int) -> Tensor:
        """Return the last token that reads a source, (B, H); -1 where none does."""
        at = torch.arange(self.value.shape[1], device=self.value.device)
        readers: Tensor = torch.where(self.matrices[..., source] > 0, at, -1)
        return readers.amax(-1)


def is_causal(attention: DenseHeads) -> bool:
    """Return True if no token reads a later one, so that there is a cache."""
    strips = torch.split(attention.matrices[:, 0], _ROWS, 1)  # no copy of a whole matrix
    return not any(bool(x.triu(1 + i * _ROWS).any()) for i, x in enumerate(strips))
