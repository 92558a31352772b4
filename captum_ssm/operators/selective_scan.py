"""The selective scan of Mamba-1: its own decay for every channel and state.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t],      y[t] = C[t] . h[t]

so that alpha[i, j] = sum over n of C[i, n] exp(A[n] sum of dt[j+1..i]) dt[j] B[j, n]
(hidden-attention paper, eqs. 14 and 17).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .base import Operator, Recurrent, Shape, full_precision
from .semiseparable import Factors, semiseparable_sum

#: Tokens and elements whose decays are held at a time by the scans.
_SCAN_TOKENS = 32
_SCAN_ELEMENTS = 2**22
#: Elements of one factor, and channels, of a block of the matrix tree.
_TREE_ELEMENTS = 2**20
_TREE_CHANNELS = 128


class SelectiveScan(Recurrent):
    """A diagonal state-space recurrence with input-dependent steps.

    Args:
        dt: step sizes (B, L, H), not negative.
        a: continuous-time decay rates (H, N), not positive.
        b: input vectors, common to all heads (B, L, N), or (B, L, G, N); G divides H, and each
            group serves H / G heads in a row.
        c: output vectors, of the same shape.
        component: name of the part it stands for.
    """

    def __init__(
        self, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, component: str | None = "scan"
    ) -> None:
        self.dt, self.a, self.b, self.c = (t.detach() for t in (dt, a, b, c))
        self.component = component
        self.shape = Shape(dt.shape[0], dt.shape[1], dt.shape[2], 1)

    def tensors(self) -> dict[str, Tensor]:
        return {"dt": self.dt, "A": self.a, "B": self.b, "C": self.c}

    def select(self, heads: Sequence[int]) -> Operator:
        chosen = list(heads)
        b, c = self.b, self.c
        if b.dim() == 4:
            b, c = (_per_head(x, self.shape.heads)[:, :, chosen] for x in (b, c))
        return SelectiveScan(self.dt[:, :, chosen], self.a[chosen], b, c, self.component)

    def contract(self, left: Tensor, right: Tensor) -> Tensor:
        batch, tokens = self.shape.batch, self.shape.tokens
        with full_precision(self.device):
            return semiseparable_sum(self._tree_blocks(left, right), batch, tokens)

    def _forward(self, v: Tensor) -> Tensor:
        return _recurrence(self, v, transposed=False)

    def _adjoint(self, u: Tensor) -> Tensor:
        return _recurrence(self, u, transposed=True)

    def _tree_blocks(self, left: Tensor, right: Tensor) -> Iterator[Factors]:
        batch, tokens, heads, _ = self.shape
        state = self.a.shape[-1]
        row = left.expand(self.shape).squeeze(-1)  # (B, L, H)
        column = right.expand(self.shape).squeeze(-1) * self.dt
        size = max(1, min(_TREE_CHANNELS, _TREE_ELEMENTS // (batch * tokens * state)))
        for start in range(0, heads, size):
            part = slice(start, start + size)
            decay = (self.dt[:, :, part, None] * self.a[part]).exp_()  # (B, L, size, N)
            b, c = (_per_head(x, heads, part) for x in (self.b, self.c))
            u = row[:, :, part, None] * c
            v = column[:, :, part, None] * b
            yield decay.flatten(2), u.flatten(2), v.flatten(2)


def _recurrence(operator: SelectiveScan, x: Tensor, transposed: bool) -> Tensor:
    """alpha x, or alpha-transposed x, for x (..., B, L, H, 1), one step at a time.

    Forward, token t adds dt[t] B[t] x[t] to the state and reads it with C[t].  The adjoint runs
    from the last token to the first, adds C[t] x[t], reads with dt[t] B[t], and the state decays
    by the step of the token it comes from.  Decays are exponentials of single steps, all at
    most 1.
    """
    dt, key, read = operator.dt, operator.b, operator.c
    if transposed:
        key, read = read, key
    tokens, heads, state = dt.shape[1], dt.shape[2], operator.a.shape[-1]
    lead = x.shape[:-4]
    x = x.squeeze(-1).reshape(-1, dt.shape[0], tokens, heads)  # (S, B, L, H): S stacked vectors
    scaled = x if transposed else x * dt
    rate = operator.a.T.contiguous()  # (N, H)
    out = torch.empty_like(x)
    size = max(1, min(_SCAN_TOKENS, _SCAN_ELEMENTS // (x.shape[0] * x.shape[1] * heads * state)))
    carried = x.new_zeros(x.shape[0], x.shape[1], state, heads)
    for start in _starts(tokens, size, transposed):
        part = slice(start, min(start + size, tokens))
        # (tokens of the chunk, [S,] B, N, H)
        steps = (dt[:, part, None, :] * rate).exp_().transpose(0, 1)
        keys = _per_head(key[:, part], heads).mT  # (B, tokens, N, 1 or H)
        states = (scaled[:, :, part, None, :] * keys).movedim(2, 0).contiguous()
        decays, chunk = steps.unbind(), states.unbind()
        order = range(len(chunk))
        for t in reversed(order) if transposed else order:
            if transposed:
                chunk[t].add_(carried)
                carried = chunk[t] * decays[t]
            else:
                carried = chunk[t].addcmul_(decays[t], carried)
        # (tokens, S, B, N, H) contracted over N
        weights = _per_head(read[:, part], heads).transpose(0, 1)[:, None]  # (.., 1 or H, N)
        if read.dim() == 3:
            out[:, :, part] = (weights @ states).squeeze(-2).movedim(0, 2)
        else:
            out[:, :, part] = (weights.mT * states).sum(-2).movedim(0, 2)
    if transposed:
        out = out * dt
    return out.reshape(*lead, *dt.shape, 1)


def _per_head(x: Tensor, heads: int, part: slice = slice(None)) -> Tensor:
    """Input or output vectors of some heads (B, L, heads, N); (B, L, 1, N) where all share them."""
    if x.dim() == 3:
        return x[:, :, None]
    return x.repeat_interleave(heads // x.shape[2], 2)[:, :, part]


def _starts(tokens: int, size: int, backwards: bool) -> Sequence[int]:
    starts = range(0, tokens, size)
    return starts[::-1] if backwards else starts
