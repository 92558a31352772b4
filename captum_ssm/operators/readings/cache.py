"""What the cache of softmax attention holds of each token: its value, for as long as it is read.

A recurrence adds what tokens write; attention keeps every token in a place of its own.  Nothing
fades, and nothing is erased but what a window leaves behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..heads import DenseHeads

#: Rows that are looked at together.
_ROWS = 256


class Cache(NamedTuple):
    """Causal attention and the values that it is given.

    What it holds after a token is what that token or a later one reads: all tokens so far but
    padding, and those that a window has left behind.

    Attributes:
        value: of each token (B, L, H, P).
        matrices: how much each token reads of each, by head (B, H, L, L).
        weight: what becomes of a head's values behind the mixer (H, P, E); None where they are
            counted as they are.
    """

    value: Tensor
    matrices: Tensor
    weight: Tensor | None = None

    @property
    def width(self) -> int:
        """Numbers that are kept of a token, for each value channel."""
        return 1

    def states(self, tokens: Sequence[int]) -> Tensor:
        """What is kept after tokens were read: values in places of their own, (B, T, H, L, P)."""
        value = self.value.transpose(1, 2)
        return torch.stack([self._held(token)[..., None] * value for token in tokens], 1)

    def sizes(self, token: int) -> Tensor:
        """How large each token's value is, by head (B, H, L); 0 where it is not held."""
        return self._held(token) * self._sizes()

    def erased(self, source: int, token: int) -> Tensor:
        """What is gone of a source: all of it, at the first token from which on nobody reads it."""
        left = 1 + self._last_reader(source)  # (B, H)
        at = torch.arange(self.value.shape[1], device=left.device)
        gone = (at == left[..., None]) & (at <= token) & (left > source)[..., None]
        return gone * self._sizes()[..., source, None]

    def without(self, source: int, token: int) -> Tensor:
        """How much would be held of a source, had each token left it there, by head (B, H, L)."""
        return self.sizes(token)[..., source, None] + self.erased(source, token)

    def half_lives(self) -> Tensor:
        """Infinity (B, H, 1): nothing fades."""
        batch, _, heads, _ = self.value.shape
        return self.value.new_full((batch, heads, 1), torch.inf)

    def _sizes(self) -> Tensor:
        """(B, H, L), some of the model's width at a time."""
        if self.weight is None:
            sizes: Tensor = self.value.norm(dim=-1)
            return sizes.transpose(1, 2)
        pairs = zip(self.value.unbind(2), self.weight, strict=True)
        return torch.stack([(value @ weight).norm(dim=-1) for value, weight in pairs], 1)

    def _held(self, token: int) -> Tensor:
        """1 for what a token or a later one reads of those up to it, (B, H, L)."""
        read = self.matrices[:, :, token:].amax(-2) > 0
        read[..., token + 1 :] = False
        return read.to(self.value)

    def _last_reader(self, source: int) -> Tensor:
        """The last token that reads a source, (B, H); -1 where none does."""
        at = torch.arange(self.value.shape[1], device=self.value.device)
        readers: Tensor = torch.where(self.matrices[..., source] > 0, at, -1)
        return readers.amax(-1)


def is_causal(attention: DenseHeads) -> bool:
    """Whether no token reads a later one, so that there is a cache."""
    strips = torch.split(attention.matrices[:, 0], _ROWS, 1)  # beside a matrix, no second one
    return not any(bool(x.triu(1 + i * _ROWS).any()) for i, x in enumerate(strips))
