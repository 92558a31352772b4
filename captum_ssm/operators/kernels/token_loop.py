"""The selective scan and its adjoint as a loop over tokens, Mamba's recurrent mode.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t],      y[t] = C[t] . h[t]

Decays and states of a few tokens are held at a time, with the channels side by side in memory.
They stay in a processor's cache, and each step is one operation on many numbers.

:takes: dt (B, L, H), A (H, N), B and C (B, L, N) or by group (B, L, G, N), and vectors x
    (S, B, T, H), some tokens at a time.
:gives: y (S, B, T, H), or the adjoint of x, which runs from the last token to the first.
:cost: for every token one exponential and one multiplication with addition for each of B H N
    states, and S of the latter; no state but the last outlives its few tokens.
:literature: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
    which keeps states in a GPU's fast memory for the same reason.
:naive version: ``kernels.selective_scan``
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .arithmetic import BINARY, Scratch
from .portions import parts, vectors_of_heads

#: How many times as many tokens are prepared as have their states held at a time.
_PREPARED = 8


class ScanCoefficients(Protocol):
    """dt (B, L, H), A (H, N), B and C (B, L, N) or (B, L, G, N) of a selective scan."""

    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor


class ScanSteps:
    """alpha, or its adjoint, on some tokens at a time of S stacked vectors.

    Forward, token t adds dt[t] B[t] x[t] to the state and reads it with C[t].  The adjoint runs
    from the last token to the first, adds C[t] x[t], reads with dt[t] B[t], and the state decays by
    the step of the token it comes from.  Decays are exponentials of single steps, at most 1.

    Args:
        scan: dt, A, B and C.
        stack: S.
        longest: the most tokens whose states are held at a time.
        transposed: whether this is the adjoint.
    """

    def __init__(self, scan: ScanCoefficients, stack: int, longest: int, transposed: bool) -> None:
        self.key, self.read = (scan.c, scan.b) if transposed else (scan.b, scan.c)
        self.transposed = transposed
        self.dt = scan.dt.transpose(0, 1)[:, :, None]  # (L, B, 1, H)
        self.rate = (BINARY * scan.a.T).contiguous()  # (N, H)
        batch, _, self.heads = scan.dt.shape
        # fresh memory for every few tokens would cost as much as the arithmetic
        self.decays = self.dt.new_empty(longest, batch, *self.rate.shape)
        self.states = self.dt.new_empty(longest, stack, batch, *self.rate.shape)
        self.each_decay, self.each_state = self.decays[:, None].unbind(), self.states.unbind()
        self.carried = torch.zeros_like(self.states[0])
        self._scratch = Scratch(self.dt)

    @torch.inference_mode()  # calls are many, and cost less where no graph may follow
    def __call__(self, x: Tensor, part: slice, out: Tensor) -> None:
        """Map vectors (S, B, T, H) of the tokens ``part`` into ``out``, of the same size."""
        for some in parts(x.shape[2], _PREPARED * len(self.decays), self.transposed):
            tokens = slice(part.start + some.start, part.start + some.stop)
            self._map(x[:, :, some], tokens, out[:, :, some])

    def _map(self, x: Tensor, part: slice, out: Tensor) -> None:
        """Map some tokens: prepare all that is smaller than states, then run a few at a time."""
        dt = self.dt[part].transpose(1, 2)  # (T, 1, B, H)
        x = x.permute(2, 0, 1, 3)  # (T, S, B, H)
        keys, read = (self._time_first(y, part) for y in (self.key, self.read))
        if not self.transposed:
            x = torch.mul(x, dt, out=self._scratch("written", *x.shape))
        values, keys = x[..., None, :], keys.mT
        # the adjoint's state decays by the step of the token after
        after = 1 if self.transposed else 0
        steps = self.dt[part.start + after : part.stop + after]
        found = self._scratch("found", *x.shape[:3], 1, self.heads)
        reading = _Reading(read, self.states, found)
        for some in parts(len(dt), len(self.decays), self.transposed):
            self._set_decays(steps[some], some.stop - some.start)
            self._run(values[some], keys[some])
            reading(some)
        found, out = found.squeeze(-2), out.permute(2, 0, 1, 3)
        if self.transposed:
            torch.mul(found, dt, out=out)
        else:
            out.copy_(found)

    def _run(self, values: Tensor, keys: Tensor) -> None:
        """Set the states of tokens of values (T, S, B, 1, H) and keys (T, 1, B, N, 1 or H)."""
        count, state = len(values), self.carried
        order = slice(count - 1, None, -1) if self.transposed else slice(count)
        steps = zip(self.each_decay[order], self.each_state[order], strict=True)
        if values.stride(-1) == 0 and keys.shape[-1] == 1:  # the same for all channels
            written = (values[..., :1] * keys).unbind()
            for (decay, out), share in zip(steps, written[order], strict=True):
                state = torch.addcmul(share, decay, state, out=out)
        else:
            torch.mul(values, keys, out=self.states[:count])
            for decay, begun in steps:
                state = begun.addcmul_(decay, state)
        self.carried.copy_(state)  # the next tokens' states take its memory

    def _set_decays(self, steps: Tensor, count: int) -> None:
        """Fill ``decays[:count]`` with the decay between each token and the one run before it.

        Args:
            steps: dt (T, B, 1, H), one fewer in the adjoint at the last token of all.
            count: how many tokens.
        """
        torch.mul(steps, self.rate, out=self.decays[: len(steps)]).exp2_()
        if len(steps) < count:
            self.decays[count - 1].zero_()  # no token is run before the last one

    def _time_first(self, x: Tensor, part: slice) -> Tensor:
        """Input or output vectors, (T, 1, B, 1 or H, N)."""
        return vectors_of_heads(x[:, part], self.heads).transpose(0, 1)[:, None]


class _Reading:
    """Products of reading vectors and states, a few tokens at a time.

    Args:
        weights: the reading vectors (T, 1, B, 1 or H, N).
        states: where the states of the few tokens are held (up to T, S, B, N, H).
        out: written to (T, S, B, 1, H).
    """

    def __init__(self, weights: Tensor, states: Tensor, out: Tensor) -> None:
        self._each = states.shape[1] * states.shape[2]
        self._by_head = weights.shape[-2] > 1
        shared = weights.expand(-1, states.shape[1], -1, -1, -1)
        self._weights, self._states, self._out = (y.flatten(0, 2) for y in (shared, states, out))

    def __call__(self, some: slice) -> None:
        """Read the states of the tokens ``some``, which are the ones that are held."""
        part = slice(some.start * self._each, some.stop * self._each)
        weights, out = self._weights[part], self._out[part]
        states = self._states[: len(out)]
        if self._by_head:
            torch.sum(weights.mT * states, -2, keepdim=True, out=out)
        else:
            torch.bmm(weights, states, out=out)
