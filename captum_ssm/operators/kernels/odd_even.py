"""First-order linear recurrences by odd-even reduction, also called cyclic reduction.

    y[t] = a[t] y[t-1] + x[t]

Two steps make one step, y[t] = a[t] a[t-1] y[t-2] + (a[t] x[t-1] + x[t]).  So every second token
needs half as many steps, every fourth token a quarter.  Each skipped token then takes one step from
the token before it.

:takes: decays a (B, T, H), between 0 and 1, and vectors x (S, B, T, H), some tokens at a time.
:gives: y (S, B, T, H), or the adjoint's output, which runs from the last token to the first.
:cost: three multiplications with additions for each number; the number of calls grows with log T
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

#: Up to this number of tokens are computed one after the other: a level would cost more.
_IN_TURN = 8

#: An output tensor, and the two tensors that are multiplied.
_Product = tuple[Tensor, Tensor, Tensor]


class FadingSteps:
    """The recurrence, or its adjoint, on S stacked vectors, some tokens per call.

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
        self._ladder: _Ladder | None = None

    def __call__(self, x: Tensor, part: slice, out: Tensor) -> None:
        """Map vectors (S, B, T, H) of the tokens ``part`` to ``out``, which may be ``x`` itself."""
        if self._ladder is None or self._ladder.out is not out:
            self._ladder = _Ladder(out, self._scratch, self.transposed)
        arriving: Tensor | None = None
        if self._state is not None:
            token = part.stop if self.transposed else part.start
            arriving = self.decays(slice(token, token + 1)) * self._state
        last = self._ladder.climb(x, self.decays(slice(part.start + 1, part.stop)), arriving)
        self._state = last.clone()

    def stream(self, x: Tensor, part: slice) -> Tensor:
        """Map values (B, T, H, 1) of the tokens ``part``; the next call overwrites the result."""
        self._outputs = self._outputs or Scratch(x)
        out = self._outputs("out", 1, *x.shape[:3])
        self(x[None, ..., 0], part, out)
        return out[0, ..., None]


class _Ladder:
    """Views and steps for some tokens, prepared once for outputs in the same memory.

    The lowest level (rung) joins tokens in pairs, the next level joins these pairs, and so on.  The
    few tokens of the top level are computed one after the other.  Then each level, from the top
    down, computes the tokens that it skipped.

    Args:
        out: the outputs (S, B, T, H), written to.
        scratch: memory for products of decays.
        backwards: whether to run from the last token to the first.
    """

    def __init__(self, out: Tensor, scratch: Scratch, backwards: bool) -> None:
        self.out = out
        _, batch, tokens, heads = out.shape
        self._lowest = rung = _Rung(tokens, backwards)
        self._first, self._last = rung.at(out, 0), rung.at(out, tokens - 1)
        self._odd, self._even = rung.odd(out), rung.even(out)
        self._second, self._before_even = rung.at(out, 1), rung.before_even(out)
        self._products: list[_Product] = []
        self._steps: list[_Product] = []
        down: list[_Product] = []
        values, decay = self._odd, scratch((rung, "pairs"), batch, max(0, rung.pairs - 1), heads)
        self._pairs = decay
        while rung.pairs > _IN_TURN:
            rung = _Rung(rung.pairs, backwards)
            self._steps.append((rung.odd(values), rung.before_odd(decay), rung.before_odd(values)))
            down.append((rung.even(values), rung.before_even(decay), rung.before_even(values)))
            joined = scratch((rung, "pairs"), batch, max(0, rung.pairs - 1), heads)
            self._products.append((joined, *rung.joined(decay)))
            values, decay = rung.odd(values), joined
        self._steps += [*rung.in_turn(values, decay), *reversed(down)]

    def climb(self, x: Tensor, decay: Tensor, arriving: Tensor | None) -> Tensor:
        """Write the outputs, and return the last token's output (S, B, 1, H).

        Args:
            x: the vectors (S, B, T, H); may be the tensor of the outputs.
            decay: decays of the steps between neighboring tokens (B, T - 1, H).
            arriving: output of the token before the first token, times a decay; None for zero.
        """
        if not x.stride(-1):  # loops are slow over two operands of one number for all channels
            x = self.out.copy_(x)
        rung = self._lowest
        to_even = rung.before_even(decay)
        torch.addcmul(rung.odd(x), rung.before_odd(decay), rung.before_odd(x), out=self._odd)
        if arriving is None:
            self._first.copy_(rung.at(x, 0))
        else:
            torch.add(rung.at(x, 0), arriving, out=self._first)
            self._second.addcmul_(rung.at(decay, 0), arriving)
        torch.mul(*rung.joined(decay), out=self._pairs)
        for into, one, other in self._products:
            torch.mul(one, other, out=into)
        for into, factor, before in self._steps:
            into.addcmul_(factor, before)
        torch.addcmul(rung.even(x), to_even, self._before_even, out=self._even)
        return self._last


class _Rung(NamedTuple):
    """One level of the reduction: tokens in pairs, numbered in the order of computation.

    The methods take tensors (..., T, H) of the tokens, or (..., T - 1, H) of the steps between
    them, and return views.

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
        """Return the second token of each pair, that is, tokens 1, 3, 5, ..."""
        return self._every_second(x, 1, self.pairs)

    def before_odd(self, x: Tensor) -> Tensor:
        """Return the token before each odd token, or of a tensor of steps the step to it."""
        return self._every_second(x, 0, self.pairs)

    def even(self, x: Tensor) -> Tensor:
        """Return the tokens 2, 4, 6, ..."""
        return self._every_second(x, 2, (self.tokens - 1) // 2)

    def before_even(self, x: Tensor) -> Tensor:
        """Return the token before each token of :meth:`even`, or of steps the step to it."""
        return self._every_second(x, 1, (self.tokens - 1) // 2)

    def joined(self, decay: Tensor) -> tuple[Tensor, Tensor]:
        """Return both steps from each pair's second token to the next pair's second token."""
        steps = max(0, self.pairs - 1)
        return self._every_second(decay, 1, steps), self._every_second(decay, 2, steps)

    def in_turn(self, values: Tensor, decay: Tensor) -> list[_Product]:
        """Return the products to add, in order: to each value a decay times the value before."""
        each, between = values.unbind(-2), decay.unbind(-2)
        order = range(len(between))
        if self.backwards:
            return [(each[i], between[i], each[i + 1]) for i in reversed(order)]
        return [(each[i + 1], between[i], each[i]) for i in order]

    def _every_second(self, x: Tensor, first: int, count: int) -> Tensor:
        last = first + 2 * (count - 1)
        start = x.shape[-2] - 1 - last if self.backwards else first
        return x[..., start : start + 2 * count : 2, :] if count > 0 else x[..., :0, :]
