"""The selective scan and its adjoint as a loop over tokens, Mamba's recurrent mode.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t],      y[t] = C[t] . h[t]

Only the decays and states of a few tokens are in memory at a time, with channels contiguous.  They
stay in a CPU's cache, and each step is one operation on many elements.

:takes: dt (B, L, H), A as ``a`` (H, N), B and C as ``b`` and ``c`` (B, L, N) or per group
    (B, L, G, N), and vectors x (S, B, T, H), some tokens at a time.
:gives: y (S, B, T, H), or the adjoint of x, which runs from the last token to the first.
:cost: for every token and each of B H N states one exponential, and S multiplications with
    additions; memory for the states of a few tokens.
:literature: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
    whose GPU kernel keeps states in fast memory for the same reason.
:naive version: ``kernels.selective_scan``
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .arithmetic import BINARY, Scratch
from .portions import parts, vectors_of_heads

#: Number of groups of tokens to prepare inputs of together; one group's states are in memory.
_PREPARED = 8


class ScanCoefficients(Protocol):
    """Coefficients of a selective scan: dt (B, L, H), a (H, N), and b and c (B, L, [G,] N)."""

    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor


class ScanSteps:
    """The scan, or its adjoint, on S stacked vectors, some tokens per call.

    Forward, token t adds dt[t] B[t] x[t] to the state, and the output is C[t] . state.  The adjoint
    runs from the last token to the first: it adds C[t] x[t], its output is dt[t] B[t] . state, and
    its decay at token t is the decay of token t + 1.

    Args:
        scan: the coefficients dt, A, B and C.
        stack: number of stacked vectors, S.
        longest: largest number of tokens whose states are in memory.
        transposed: whether to run the adjoint.
    """

    def __init__(self, scan: ScanCoefficients, stack: int, longest: int, transposed: bool) -> None:
        self.key, self.read = (scan.c, scan.b) if transposed else (scan.b, scan.c)
        self.transposed = transposed
        self.dt = scan.dt.transpose(0, 1)[:, :, None]  # (L, B, 1, H)
        self.rate = (BINARY * scan.a.T).contiguous()  # (N, H), exponents of 2
        batch, _, self.heads = scan.dt.shape
        # fresh memory for every few tokens would cost as much as the arithmetic
        self.decays = self.dt.new_empty(longest, batch, *self.rate.shape)
        self.states = self.dt.new_empty(longest, stack, batch, *self.rate.shape)
        # views of each token, made only once
        self.decay_by_step, self.state_by_step = self.decays[:, None].unbind(), self.states.unbind()
        self.carried = torch.zeros_like(self.states[0])
        self._scratch = Scratch(self.dt)

    @torch.inference_mode()  # many calls, each faster without a graph
    def __call__(self, x: Tensor, part: slice, out: Tensor) -> None:
        """Map vectors ``x`` (S, B, T, H) of the tokens ``part``; write the outputs to ``out``."""
        for steps in parts(x.shape[2], _PREPARED * len(self.decays), self.transposed):
            tokens = slice(part.start + steps.start, part.start + steps.stop)
            self._map(x[:, :, steps], tokens, out[:, :, steps])

    def _map(self, x: Tensor, part: slice, out: Tensor) -> None:
        """Map the tokens ``part``: prepare all inputs, then compute states of a few at a time."""
        dt = self.dt[part].transpose(1, 2)  # (T, 1, B, H)
        x = x.permute(2, 0, 1, 3)  # (T, S, B, H)
        keys, reads = (self._time_first(y, part) for y in (self.key, self.read))
        if not self.transposed:
            x = torch.mul(x, dt, out=self._scratch("written", *x.shape))
        values, keys = x[..., None, :], keys.mT  # (T, S, B, 1, H), (T, 1, B, N, 1 or H)
        # the adjoint's state decays by the step of the token after
        shift = 1 if self.transposed else 0
        dt_of_decays = self.dt[part.start + shift : part.stop + shift]
        products = self._scratch("products", *x.shape[:3], 1, self.heads)
        read_states = _Readout(reads, self.states, products)
        for steps in parts(len(dt), len(self.decays), self.transposed):
            self._set_decays(dt_of_decays[steps], steps.stop - steps.start)
            self._run(values[steps], keys[steps])
            read_states(steps)
        products, out = products.squeeze(-2), out.permute(2, 0, 1, 3)
        if self.transposed:
            torch.mul(products, dt, out=out)
        else:
            out.copy_(products)

    def _run(self, values: Tensor, keys: Tensor) -> None:
        """Write h[t] = decay[t] h[t-1] + keys[t] values[t] to ``states``.

        The values are (T, S, B, 1, H), and the keys (T, 1, B, N, 1 or H).
        """
        count, state = len(values), self.carried
        order = slice(count - 1, None, -1) if self.transposed else slice(count)
        steps = zip(self.decay_by_step[order], self.state_by_step[order], strict=True)
        if values.stride(-1) == 0 and keys.shape[-1] == 1:  # expanded: the same for all channels
            written = (values[..., :1] * keys).unbind()
            for (decay, out), term in zip(steps, written[order], strict=True):
                state = torch.addcmul(term, decay, state, out=out)
        else:
            torch.mul(values, keys, out=self.states[:count])
            for decay, term in steps:
                state = term.addcmul_(decay, state)
        self.carried.copy_(state)  # the next tokens' states overwrite its memory

    def _set_decays(self, steps: Tensor, count: int) -> None:
        """Write to ``decays`` the decay between each token and the token computed before it.

        Args:
            steps: dt (T, B, 1, H); one token fewer if the adjoint begins with the last token.
            count: number of tokens.
        """
        torch.mul(steps, self.rate, out=self.decays[: len(steps)]).exp2_()
        if len(steps) < count:
            self.decays[count - 1].zero_()  # no token is run before the last one

    def _time_first(self, x: Tensor, part: slice) -> Tensor:
        """Return input or output vectors of the tokens ``part`` as (T, 1, B, 1 or H, N)."""
        return vectors_of_heads(x[:, part], self.heads).transpose(0, 1)[:, None]


class _Readout:
    """Products of output vectors (C, or B in the adjoint) and states, a few tokens at a time.

    Args:
        weights: the output vectors (T, 1, B, 1 or H, N).
        states: memory of the states of a few tokens (few, S, B, N, H).
        out: the products are written to this tensor (T, S, B, 1, H).
    """

    def __init__(self, weights: Tensor, states: Tensor, out: Tensor) -> None:
        self._per_token = states.shape[1] * states.shape[2]
        self._by_head = weights.shape[-2] > 1
        shared = weights.expand(-1, states.shape[1], -1, -1, -1)
        self._weights, self._states, self._out = (y.flatten(0, 2) for y in (shared, states, out))

    def __call__(self, steps: slice) -> None:
        """Write the products of the tokens ``steps``, whose states are in memory now."""
        part = slice(steps.start * self._per_token, steps.stop * self._per_token)
        weights, out = self._weights[part], self._out[part]
        states = self._states[: len(out)]
        if self._by_head:
            torch.sum(weights.mT * states, -2, keepdim=True, out=out)
        else:
            torch.bmm(weights, states, out=out)
