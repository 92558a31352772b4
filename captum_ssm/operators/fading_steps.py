"""The steps of recurrences with one decay per token and channel, many tokens at a time.

y[t] = a[t] y[t-1] + x[t]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .scratch import Scratch


class FadingSteps:
    """The recurrence, or its adjoint, on some tokens at a time of S stacked vectors.

    The tokens are cut into runs, as many as a run has tokens, which take their steps side by side:
    first to find the state that each begins with, then from there.  The adjoint goes from the last
    token to the first, each with the decay of the token it comes from.

    Args:
        decays: from tokens to their decays (B, T, H).
        like: a tensor of the dtype and device of the decays.
        transposed: whether this is the adjoint.
    """

    def __init__(self, decays: Callable[[slice], Tensor], like: Tensor, transposed: bool) -> None:
        self.decays = decays
        self.transposed = transposed
        self.state: Tensor | None = None
        self._scratch = Scratch(like)

    def __call__(self, x: Tensor, part: slice, out: Tensor) -> None:
        """Vectors (S, B, T, H) of the tokens ``part`` to outputs of this size."""
        tokens = x.shape[2]
        if self.state is None:
            first = tokens - 1 if self.transposed else 0
            self.state = out[:, :, first].copy_(x[:, :, first])
            others = slice(0, first) if self.transposed else slice(1, tokens)
            x, out, tokens = x[:, :, others], out[:, :, others], tokens - 1
            part = slice(part.start + others.start, part.start + others.stop)
        ahead = 1 if self.transposed else 0
        decay = self.decays(slice(part.start + ahead, part.stop + ahead))
        run = max(1, math.isqrt(tokens))
        whole = tokens - tokens % run
        pieces = [slice(0, whole), slice(whole, tokens)]
        for piece in reversed(pieces) if self.transposed else pieces:
            length = min(run, piece.stop - piece.start)
            if length:
                decays, values, outputs = (
                    torch.unflatten(y[..., piece, :], -2, (-1, length)) for y in (decay, x, out)
                )
                self._side_by_side(decays, values, outputs)

    def stream(self, x: Tensor, part: slice) -> Tensor:
        """Values (B, T, H, 1) of the tokens ``part`` to outputs of the same size."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self(x[None, ..., 0], part, out[None, ..., 0])
        return out

    def _side_by_side(self, decay: Tensor, x: Tensor, out: Tensor) -> None:
        """Decays (B, R, T, H), values and outputs (S, B, R, T, H) of R runs of T tokens."""
        steps = self._in_order(decay.unbind(2), x.unbind(3), out.unbind(3))
        state = self._before_runs([(factor, new) for factor, new, _ in steps])
        for factor, new, into in steps:
            state = torch.addcmul(new, factor, state, out=into)
        self.state = state[:, :, 0 if self.transposed else -1]

    def _before_runs(self, steps: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The states (S, B, R, H) that the runs begin with.

        Args:
            steps: decays (B, R, H) and values (S, B, R, H) of the runs' tokens, in order.
        """
        assert self.state is not None
        (factor, new), *others = steps
        if new.shape[2] == 1:
            return self.state[:, :, None]
        product = self._scratch("product", *factor.shape).copy_(factor)
        alone = self._scratch("alone", *new.shape).copy_(new)  # without what came before
        for factor, new in others:
            product *= factor
            torch.addcmul(new, factor, alone, out=alone)
        before = self._scratch("before", *new.shape)
        (state, faded, added), *later = self._in_order(
            before.unbind(2), product.unbind(1), alone.unbind(2)
        )
        state.copy_(self.state)
        for into, next_faded, next_added in later:
            state = torch.addcmul(added, faded, state, out=into)
            faded, added = next_faded, next_added
        return before

    def _in_order(self, *parts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        found = list(zip(*parts, strict=True))
        return found[::-1] if self.transposed else found
