"""First-order linear recurrences by odd-even reduction, also called cyclic reduction.

    y[t] = a[t] y[t-1] + x[t]

Two steps make one step, y[t] = a[t] a[t-1] y[t-2] + (a[t] x[t-1] + x[t]).  So the outputs of every
second token need half as many steps, and every fourth token a quarter.  Each skipped token then
takes one step from the token before it.

:takes: decays a (B, T, H), between 0 and 1, and vectors x (S, B, T, H), some tokens at a time.
:gives: y (S, B, T, H), or the output of the adjoint, which runs from the last token to the first.
:cost: three multiplications with additions for each element; the number of calls grows with log T
    only.
:literature: Gander and Golub, Cyclic Reduction: History and Applications, 1997; for recurrences of
    networks, as a parallel scan, Martin and Cundy, Parallelizing Linear Recurrent Neural Nets Over
    Sequence Length, 2018.
:naive version: ``kernels.recurrence``
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .arithmetic import Scratch

#: Largest number of tokens to compute one after the other, which costs less than one more level.
_IN_TURN = 8


class FadingSteps:
    """The map y[t] = a[t] y[t-1] + x[t] of S stacked vectors, or its adjoint, some tokens per call.

    The adjoint runs from the last token to the first; step t uses the decay of token t + 1.

    Args:
        decays: function that returns the decays (B, T, H) of a slice of tokens.
        like: a tensor with the dtype and device of the decays.
        transposed: whether to run the adjoint.
    """

    def __init__(self, decays: Callable[[slice], Tensor], like: Tensor, transposed: bool) -> None:
        self.decays = decays
        self.transposed = transposed
        self._scratch = Scratch(like)
        self._state: Tensor | None = None

    def __call__(self, x: Tensor, part: slice, out: Tensor) -> None:
        """Map vectors (S, B, T, H) of the tokens ``part`` to ``out``, which may be ``x`` itself."""
        if x is not out:
            out.copy_(x)
        if self._state is not None:
            # into the token that is computed first
            token = part.stop if self.transposed else part.start
            decay = self.decays(slice(token, token + 1))
            self._every_second(out, 0, 1).addcmul_(decay, self._state)
        self._run(out, self.decays(slice(part.start + 1, part.stop)))
        self._state = self._every_second(out, out.shape[2] - 1, 1).clone()

    def _run(self, y: Tensor, decay: Tensor) -> None:
        """Replace x by y[t] = a[t] y[t-1] + x[t], for x in ``y`` (..., T, H).

        Tokens are joined in pairs, these pairs again in pairs, and so on. Then each level computes
        the tokens that it skipped.

        Args:
            y: the vectors x, overwritten.
            decay: decays between neighboring tokens (B, T - 1, H).
        """
        tokens = y.shape[-2]
        if tokens <= _IN_TURN:
            vectors, decays, sign = y.unbind(-2), decay.unbind(-2), -1 if self.transposed else 1
            pairs = list(zip(vectors, decays, vectors[1:], strict=False))
            for first, factor, second in pairs[::sign]:
                before, after = (first, second)[::sign]  # in the order of computation
                after.addcmul_(factor, before)
            return
        take, odd, even = self._every_second, tokens // 2, (tokens - 1) // 2  # 1, 3, ...; 2, 4, ...
        pair_ends = take(y, 1, odd)  # tokens 1, 3, ...; each step between them is two steps
        pair_ends.addcmul_(take(decay, 0, odd), take(y, 0, odd))
        joined = self._scratch(tokens, decay.shape[0], odd - 1, decay.shape[2])
        pair_decays = torch.mul(take(decay, 1, odd - 1), take(decay, 2, odd - 1), out=joined)
        self._run(pair_ends, pair_decays)
        take(y, 2, even).addcmul_(take(decay, 1, even), take(y, 1, even))

    def _every_second(self, x: Tensor, first: int, count: int) -> Tensor:
        """Return the tokens, or steps between tokens, ``first``, ``first`` + 2, and so on.

        They are numbered in the order of computation; step t leads from token t to token t + 1.
        """
        last = first + 2 * (count - 1)
        start = x.shape[-2] - 1 - last if self.transposed else first
        return x[..., start : start + 2 * count : 2, :]
