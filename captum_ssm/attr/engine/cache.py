"""The cache of softmax attention as a memory, with the same methods as the state of a recurrence.

A recurrence adds tokens to one state; the cache keeps each token's value separately.  Values do not
decay.  A value is removed only when no later token attends to it, as after a sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators.heads import DenseHeads

#: The number of rows of an attention matrix that :func:`is_causal` checks at a time.
_ROWS = 256


class Cache(NamedTuple):
    """The values of causal attention that are still in use after each token.

    After token t the cache holds the earlier tokens to which token t or a later token attends. It
    holds no padding, and no tokens that have left a sliding window.

    Attributes:
        value: the value of each token (B, L, H, P).
        matrices: attention weights of each head (B, H, query, source), each of size L.
        weight: output projection of each head (H, P, E), applied to values before a norm is taken;
            None for the norms of the values themselves.
    """

    value: Tensor
    matrices: Tensor
    weight: Tensor | None = None

    @property
    def width(self) -> int:
        """The number of stored values per token and value channel, which is 1 for a cache."""
        return 1

    def states(self, tokens: Sequence[int]) -> Tensor:
        """Return the cached values after each of T tokens (B, T, H, L, P); 0 if not cached."""
        value = self.value.transpose(1, 2)
        return torch.stack([self._is_cached(token)[..., None] * value for token in tokens], 1)

    def sizes(self, token: int) -> Tensor:
        """Return the norm (B, H, L) of each value that is cached after ``token``, else 0."""
        return self._is_cached(token) * self._norms()

    def erased(self, source: int, token: int) -> Tensor:
        """Return the loss of the source's value at each token up to ``token``, (B, H, L).

        The whole value is lost at one token, directly after the last token that attends to it.
        """
        erasure = 1 + self._last_reader(source)  # (B, H); L, which is no token, if never erased
        t = torch.arange(self.value.shape[1], device=erasure.device)
        # a source that no token reads, such as padding, was never cached
        is_erased = (t == erasure[..., None]) & (t <= token) & (erasure > source)[..., None]
        return is_erased * self._norms()[..., source, None]

    def without(self, source: int, token: int) -> Tensor:
        """Return the source's norm after ``token`` if token t erased nothing, (B, H, L) by t."""
        return self.sizes(token)[..., source, None] + self.erased(source, token)

    def half_lives(self) -> Tensor:
        """Return infinity (B, H, 1), because cached values do not decay."""
        batch, _, heads, _ = self.value.shape
        return self.value.new_full((batch, heads, 1), torch.inf)

    def _norms(self) -> Tensor:
        """Return the norm of each token's value, (B, H, L), after ``weight`` if it is not None."""
        if self.weight is None:
            norms: Tensor = self.value.norm(dim=-1)
            return norms.transpose(1, 2)
        pairs = zip(self.value.unbind(2), self.weight, strict=True)
        return torch.stack([(value @ weight).norm(dim=-1) for value, weight in pairs], 1)

    def _is_cached(self, token: int) -> Tensor:
        """Return 1 for tokens that the cache holds after ``token``, else 0, (B, H, L)."""
        is_read = self.matrices[:, :, token:].amax(-2) > 0
        is_read[..., token + 1 :] = False  # later tokens are not in the cache yet
        return is_read.to(self.value)

    def _last_reader(self, source: int) -> Tensor:
        """Return the last token that attends to ``source`` (B, H), or -1 if no token does."""
        positions = torch.arange(self.value.shape[1], device=self.value.device)
        readers: Tensor = torch.where(self.matrices[..., source] > 0, positions, -1)
        return readers.amax(-1)


def is_causal(attention: DenseHeads) -> bool:
    """Return True if no token attends to a later token, which a cache requires.

    Only the first head is checked, because all heads have the same mask.
    """
    strips = torch.split(attention.matrices[:, 0], _ROWS, 1)  # no copy of a whole matrix
    return not any(bool(strip.triu(1 + i * _ROWS).any()) for i, strip in enumerate(strips))
