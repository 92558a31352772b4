"""Recurrences with one decay per token and channel: RG-LRU, HGRN, and WKV built from them.

    y[t] = a[t] y[t-1] + x[t],   so that   alpha[i, j] = product of a[j+1..i]

(unified paper, eq. 16).  A decay of exactly zero is a hard reset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .base import Operator, Recurrent, Shape
from .compose import Chain, Sum
from .conv import ShortConv
from .diagonal import Diagonal
from .semiseparable import Factors, semiseparable_sum

#: Elements of one factor of a block of the matrix tree.
_TREE_ELEMENTS = 2**20


class ElementwiseRecurrence(Recurrent):
    """y[t] = decay[t] y[t-1] + x[t], per channel.

    Args:
        decay: factors (B, L, H) between 0 and 1; every channel is a head of its own (P = 1).
        component: name of the part it stands for.
    """

    def __init__(self, decay: Tensor, component: str | None = "scan") -> None:
        self.decay = decay.detach()
        self.component = component
        self.shape = Shape(decay.shape[0], decay.shape[1], decay.shape[2], 1)

    def _forward(self, v: Tensor) -> Tensor:
        return _run(self.decay, v)

    def _adjoint(self, u: Tensor) -> Tensor:
        return _run_back(self.decay, u)

    def tensors(self) -> dict[str, Tensor]:
        return {"decay": self.decay}

    def select(self, heads: Sequence[int]) -> Operator:
        return ElementwiseRecurrence(self.decay[:, :, list(heads)], self.component)

    def contract(self, left: Tensor, right: Tensor) -> Tensor:
        batch, tokens = self.shape.batch, self.shape.tokens
        return semiseparable_sum(self._tree_blocks(left, right), batch, tokens)

    def _tree_blocks(self, left: Tensor, right: Tensor) -> Iterator[Factors]:
        batch, tokens, heads, _ = self.shape
        u = left.expand(self.shape).squeeze(-1)
        v = right.expand(self.shape).squeeze(-1)
        size = max(1, _TREE_ELEMENTS // (batch * tokens))
        for start in range(0, heads, size):
            part = slice(start, start + size)
            yield self.decay[:, :, part].clone(), u[:, :, part].clone(), v[:, :, part].clone()


def wkv(key: Tensor, log_decay: Tensor, bonus: Tensor) -> Operator:
    """RWKV-4's time mixing (unified paper, eqs. 19-20), whose rows are a softmax.

    alpha[i, j] is the softmax over j <= i of (i - 1 - j) log_decay + key[j] for j < i and
    bonus + key[i] for j = i.  Carried relative to the running log-sum-exp of the past, every
    exponent is at most zero.

    Args:
        key: k (B, L, H).
        log_decay: w, negative (H,).
        bonus: u (H,).
    """
    past = torch.empty_like(key)  # log-sum-exp over j < i
    after = torch.empty_like(key)  # the same over j <= i, of the next token's past
    running = torch.full_like(key[:, 0], -torch.inf)
    for t in range(key.shape[1]):
        past[:, t] = running
        running = torch.logaddexp(running + log_decay, key[:, t])
        after[:, t] = running
    total = torch.logaddexp(past, bonus + key)
    shape = Shape(key.shape[0], key.shape[1], key.shape[2], 1)
    shift = ShortConv(key.new_ones(shape.heads, 1, 1), shape, lags=(1,), component="scan")
    earlier = Chain(
        Diagonal((past - total).exp()[..., None], shape, "scan"),
        shift,
        ElementwiseRecurrence((past + log_decay - after).exp()),
        Diagonal((key - after).exp()[..., None], shape, "scan"),
    )
    return Sum(earlier, Diagonal((bonus + key - total).exp()[..., None], shape, "scan"))


def _run(decay: Tensor, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    state = torch.zeros_like(x[..., 0, :, :])
    for t, factor in enumerate(decay[..., None].unbind(1)):
        state = x[..., t, :, :] + factor * state
        out[..., t, :, :] = state
    return out


def _run_back(decay: Tensor, u: Tensor) -> Tensor:
    out = torch.empty_like(u)
    state = torch.zeros_like(u[..., 0, :, :])
    factors = decay[..., None].unbind(1)
    for t in reversed(range(len(factors))):
        state = u[..., t, :, :] + state
        out[..., t, :, :] = state
        state = factors[t] * state
    return out
