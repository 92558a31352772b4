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
from typing import NamedTuple

import torch
from torch import Tensor

from .arithmetic import Scratch

#: Largest number of tokens to compute one after the other, which costs less than one more level.
_IN_TURN = 8

#: Tensors (out, a, b) of a step that writes a * b to out, or adds it to out.
_Update = tuple[Tensor, Tensor, Tensor]


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
        self._outputs: Scratch | None = None
        self._state: Tensor | None = None
        self._reduction: _Reduction | None = None

    def __call__(self, x: Tensor, part: slice, out: Tensor) -> None:
        """Map vectors (S, B, T, H) of the tokens ``part`` to ``out``, which may be ``x`` itself."""
        if self._reduction is None or self._reduction.out is not out:
            self._reduction = _Reduction(out, self._scratch, self.transposed)
        arriving: Tensor | None = None
        if self._state is not None:
            token = part.stop if self.transposed else part.start
            arriving = self.decays(slice(token, token + 1)) * self._state
        last = self._reduction.run(x, self.decays(slice(part.start + 1, part.stop)), arriving)
        self._state = last.clone()

    def stream(self, x: Tensor, part: slice) -> Tensor:
        """Map values (B, T, H, 1) of the tokens ``part``; the next call overwrites the result."""
        self._outputs = self._outputs or Scratch(x)
        out = self._outputs("out", 1, *x.shape[:3])
        self(x[None, ..., 0], part, out)
        return out[0, ..., None]


class _Reduction:
    """The steps that compute the outputs of some tokens, prepared once as views of reused memory.

    The lowest level joins tokens in pairs, the next level joins these pairs, and so on.  The few
    tokens of the top level are computed one after the other.  Then each level, from the top down,
    computes the tokens that it skipped.

    Args:
        out: the outputs (S, B, T, H), written to.
        scratch: memory for products of decays.
        backwards: whether to run from the last token to the first.
    """

    def __init__(self, out: Tensor, scratch: Scratch, backwards: bool) -> None:
        self.out = out
        _, batch, tokens, heads = out.shape
        self._lowest = level = _ReductionLevel(tokens, backwards)
        self._first, self._last = level.at(out, 0), level.at(out, tokens - 1)
        self._odd, self._even = level.odd(out), level.even(out)
        self._second, self._before_even = level.at(out, 1), level.before_even(out)
        self._products: list[_Update] = []
        self._steps: list[_Update] = []
        down: list[_Update] = []
        values, decay = self._odd, scratch((level, "pairs"), batch, max(0, level.pairs - 1), heads)
        self._pairs = decay
        while level.pairs > _IN_TURN:
            level = _ReductionLevel(level.pairs, backwards)
            self._steps += [(level.odd(values), level.before_odd(decay), level.before_odd(values))]
            down.append((level.even(values), level.before_even(decay), level.before_even(values)))
            joined = scratch((level, "pairs"), batch, max(0, level.pairs - 1), heads)
            self._products.append((joined, *level.joined(decay)))
            values, decay = level.odd(values), joined
        self._steps += [*level.one_by_one(values, decay), *reversed(down)]

    def run(self, x: Tensor, decay: Tensor, arriving: Tensor | None) -> Tensor:
        """Write y[t] = a[t] y[t-1] + x[t] to ``out``; return a view (S, B, 1, H) of its last token.

        Args:
            x: the vectors (S, B, T, H); may be the tensor of the outputs.
            decay: decays between neighboring tokens (B, T - 1, H).
            arriving: a[t] y[t-1] for the first token t to compute (S, B, 1, H); None for zero.
        """
        if not x.stride(-1):  # loops are slow over two operands of one number for all channels
            x = self.out.copy_(x)
        level = self._lowest
        to_even = level.before_even(decay)
        torch.addcmul(level.odd(x), level.before_odd(decay), level.before_odd(x), out=self._odd)
        if arriving is None:
            self._first.copy_(level.at(x, 0))
        else:
            torch.add(level.at(x, 0), arriving, out=self._first)
            self._second.addcmul_(level.at(decay, 0), arriving)
        torch.mul(*level.joined(decay), out=self._pairs)
        for into, one, other in self._products:
            torch.mul(one, other, out=into)
        for into, factor, before in self._steps:
            into.addcmul_(factor, before)
        torch.addcmul(level.even(x), to_even, self._before_even, out=self._even)
        return self._last


class _ReductionLevel(NamedTuple):
    """One level of the reduction: T tokens in pairs, numbered from 0 in the order of computation.

    The methods return views of a tensor (..., T, H) of tokens, or (..., T - 1, H) of steps, where
    step t leads from token t to token t + 1.

    Attributes:
        tokens: number of tokens, T.
        backwards: whether token 0 is the last token of the tensors.
    """

    tokens: int
    backwards: bool

    @property
    def pairs(self) -> int:
        return self.tokens // 2

    def at(self, x: Tensor, index: int) -> Tensor:
        """Return token ``index`` (..., 1, H), or an empty view if there is no such token."""
        return self._every_second(x, index, min(1, self.tokens - index))

    def odd(self, x: Tensor) -> Tensor:
        """Return tokens 1, 3, 5, ...: the second token of each pair."""
        return self._every_second(x, 1, self.pairs)

    def before_odd(self, x: Tensor) -> Tensor:
        """Return tokens 0, 2, 4, ..., or the steps from them to the odd tokens."""
        return self._every_second(x, 0, self.pairs)

    def even(self, x: Tensor) -> Tensor:
        """Return tokens 2, 4, 6, ...: the first token of each pair except the first pair."""
        return self._every_second(x, 2, (self.tokens - 1) // 2)

    def before_even(self, x: Tensor) -> Tensor:
        """Return tokens 1, 3, 5, ..., or the steps from them to the tokens 2, 4, 6, ..."""
        return self._every_second(x, 1, (self.tokens - 1) // 2)

    def joined(self, decay: Tensor) -> tuple[Tensor, Tensor]:
        """Return steps 1, 3, ... and steps 2, 4, ..., which lead from odd token to odd token."""
        steps = max(0, self.pairs - 1)
        return self._every_second(decay, 1, steps), self._every_second(decay, 2, steps)

    def one_by_one(self, values: Tensor, decay: Tensor) -> list[_Update]:
        """Return the updates ``values[t] += decay[t] * values[t - 1]``, in order of computation."""
        each, between = values.unbind(-2), decay.unbind(-2)
        order = range(len(between))
        if self.backwards:
            return [(each[i], between[i], each[i + 1]) for i in reversed(order)]
        return [(each[i + 1], between[i], each[i]) for i in order]

    def _every_second(self, x: Tensor, first: int, count: int) -> Tensor:
        """Return the ``count`` entries first, first + 2, first + 4, ... of ``x``."""
        last = first + 2 * (count - 1)
        start = x.shape[-2] - 1 - last if self.backwards else first
        return x[..., start : start + 2 * count : 2, :] if count > 0 else x[..., :0, :]
