"""The kernels of operators from their definitions, in float64 and without regard to time.

Shapes: B examples, L or T tokens, H heads, N states, K channels, P value channels, S a stack.
Nothing here calls the package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# --- recurrences whose states fade independently of each other ---------------------------------


def decays_between(decay: Tensor) -> Tensor:
    """The product of decays (..., T) over j < t <= i for j <= i, else 0: (..., T, T)."""
    row, rows = torch.zeros_like(decay.double()), []
    for i, unit in enumerate(torch.eye(decay.shape[-1], dtype=torch.float64)):
        row = row * decay[..., i, None].double() + unit
        rows.append(row)
    return torch.stack(rows, -2)


def semiseparable(decay: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Sum over k of rows[i, k] (product of decay[t, k] over j < t <= i) columns[j, k], j <= i.

    All three are (..., T, K), the sum is (..., T, T).
    """
    between = decays_between(decay.mT)  # (..., K, T, T)
    rows, columns = rows.double().mT[..., None], columns.double().mT[..., None, :]
    return (rows * between * columns).sum(-3)


def banded_semiseparable(
    decay: Tensor, rows: Tensor, columns: Sequence[Tensor], first_lag: int
) -> Tensor:
    """The same times a band: token t receives columns[lag] from token t - lag.  (B, T, K) each.

    Token by token: every column's state fades, gains what is written to it, and is read.
    """
    batch, tokens, width = decay.shape
    states = torch.zeros(batch, tokens, width, dtype=torch.float64)  # of each column
    out = torch.zeros(batch, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        states *= decay[:, i, None]
        for lag, column in enumerate(columns, first_lag):
            if 0 <= i - lag < tokens:
                states[:, i - lag] += column[:, i]
        out[:, i] = (states * rows[:, i, None]).sum(-1)
    return out


def recurrence(decay: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """y[t] = decay[t] y[t-1] + x[t], or its adjoint, for x (S, B, T, H) and decays (B, T, H)."""
    tokens = x.shape[2]
    out, state = torch.empty_like(x), torch.zeros_like(x[:, :, 0])
    for t in reversed(range(tokens)) if transposed else range(tokens):
        came_from = t + 1 if transposed else t
        factor = decay[:, came_from] if came_from < tokens else 0
        state = out[:, :, t] = factor * state + x[:, :, t]
    return out


def selective_scan(dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Matrices (B, H, L, L) of h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t], y[t] = C[t] . h[t].

    dt (B, L, H), A (H, N), B and C (B, L, N) or by group of heads (B, L, G, N).
    """
    heads = dt.shape[2]
    b, c = (x[:, :, None] if x.dim() == 3 else x for x in (b, c))
    b, c = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (b, c))
    steps = dt.transpose(1, 2)[..., None]  # (B, H, L, 1)
    return semiseparable((steps * a[:, None]).exp(), c, steps * b)


# --- the rest ----------------------------------------------------------------------------------


def fading_log_sums(scores: Tensor, log_decay: Tensor) -> Tensor:
    """log of the sum over j <= t of exp(scores[j] + (t - j) log_decay), token by token."""
    running = torch.full_like(scores[:, 0], -torch.inf)
    sums = []
    for new in scores.unbind(1):
        running = torch.logaddexp(running + log_decay, new)
        sums.append(running)
    return torch.stack(sums, 1)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """The sum over k of weight[n, k] x[..., k], in float64."""
    return (x.double()[..., None, :] * weight.double()).sum(-1)
