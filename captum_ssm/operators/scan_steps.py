"""The steps of a selective scan and of its adjoint, token by token.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t],      y[t] = C[t] . h[t]

Decays and states of a few tokens are held at a time, with the channels side by side in memory, so
that they stay in a processor's second cache and each step is one operation on many numbers.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Coefficients(Protocol):
    """Those of a selective scan: dt (B, L, H), A (H, N), B and C (B, L, N) or (B, L, G, N)."""

    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor


class ScanSteps:
    """alpha, or its adjoint, on some tokens at a time of S stacked vectors.

    Forward, token t adds dt[t] B[t] x[t] to the state and reads it with C[t].  The adjoint runs
    from the last token to the first, adds C[t] x[t], reads with dt[t] B[t], and the state decays
    by the step of the token it comes from.  Decays are exponentials of single steps, all at
    most 1.

    Args:
        scan: dt, A, B and C.
        stack: S.
        longest: the most tokens whose states are held at a time.
        transposed: whether this is the adjoint.
    """

    def __init__(self, scan: Coefficients, stack: int, longest: int, transposed: bool) -> None:
        self.key, self.read = (scan.c, scan.b) if transposed else (scan.b, scan.c)
        self.transposed = transposed
        self.dt = scan.dt.transpose(0, 1)[:, :, None]  # (L, B, 1, H)
        self.rate = scan.a.T.contiguous()  # (N, H)
        batch, _, self.heads = scan.dt.shape
        # fresh memory for every few tokens would cost as much as the arithmetic
        self.decays = self.dt.new_empty(longest, batch, *self.rate.shape)
        self.each_decay = self.decays[:, None].unbind()
        if stack == 1:  # a state may take the place of its decay
            self.states = self.decays[:, None]
        else:
            self.states = self.dt.new_empty(longest, stack, batch, *self.rate.shape)
        self.each_state = self.states.unbind()
        # held, because to take keys and values token by token takes as long as some arithmetic
        width = 1 if self.key.dim() == 3 else self.heads
        self.keys = self.dt.new_empty(longest, 1, batch, len(self.rate), width)
        self.values = self.dt.new_empty(longest, stack, batch, 1, self.heads)
        self.each_key, self.each_value = self.keys.unbind(), self.values.unbind()
        self.carried = torch.zeros_like(self.states[0])

    def __call__(self, x: Tensor, part: slice, out: Tensor) -> None:
        """Vectors (S, B, T, H) of the tokens ``part`` to outputs of this size."""
        longest = len(self.decays)
        starts = range(0, x.shape[2], longest)
        for start in reversed(starts) if self.transposed else starts:
            stop = min(start + longest, x.shape[2])
            vectors, outputs = (y[:, :, start:stop].permute(2, 0, 1, 3) for y in (x, out))
            self._some(vectors, slice(part.start + start, part.start + stop), outputs)

    def _some(self, x: Tensor, part: slice, out: Tensor) -> None:
        """As many tokens as are held at a time, from and to (T, S, B, H)."""
        dt = self.dt[part].transpose(1, 2)  # (T, 1, B, H)
        self._set_decays(part)
        self._run(x if self.transposed else x * dt, self._time_first(self.key, part).mT)
        read = _read(self._time_first(self.read, part), self.states[: len(x)])
        if self.transposed:
            torch.mul(read, dt, out=out)
        else:
            out.copy_(read)

    def _run(self, x: Tensor, keys: Tensor) -> None:
        """Set the states of the tokens of ``x`` (T, S, B, H), given keys (T, 1, B, N, 1 or H)."""
        count, x = len(x), x[..., None, :]
        tokens = range(count)[::-1] if self.transposed else range(count)
        state = self.carried
        if x.stride(-1) == 0 and keys.shape[-1] == 1:  # the same for all channels
            written = (x[..., :1] * keys).unbind()
            for t in tokens:
                state = torch.mul(self.each_decay[t], state, out=self.each_state[t])
                state.add_(written[t])
        else:
            self.keys[:count], self.values[:count] = keys, x
            for t in tokens:
                state = torch.mul(self.each_decay[t], state, out=self.each_state[t])
                state.addcmul_(self.each_key[t], self.each_value[t])
        self.carried.copy_(state)  # the next tokens' states take its memory

    def _set_decays(self, part: slice) -> None:
        """Between each token's state and the one before it in the order of the steps."""
        after = 1 if self.transposed else 0
        steps = self.dt[part.start + after : part.stop + after]
        torch.mul(steps, self.rate, out=self.decays[: len(steps)]).exp_()
        self.decays[len(steps) : part.stop - part.start].zero_()  # after the last token

    def _time_first(self, x: Tensor, part: slice) -> Tensor:
        """Input or output vectors, (T, 1, B, 1 or H, N)."""
        return per_head(x[:, part], self.heads).transpose(0, 1)[:, None]


def _read(weights: Tensor, states: Tensor) -> Tensor:
    """States (T, S, B, N, H) contracted with weights (T, 1, B, 1 or H, N)."""
    if weights.shape[-2] == 1:
        return (weights @ states).squeeze(-2)
    return (weights.mT * states).sum(-2)


def per_head(x: Tensor, heads: int, part: slice | Tensor = slice(None)) -> Tensor:
    """Input or output vectors of some heads (B, L, heads, N); (B, L, 1, N) where all share them."""
    if x.dim() == 3:
        return x[:, :, None]
    each = heads // x.shape[2]
    return x[:, :, torch.arange(heads, device=x.device)[part] // each]
