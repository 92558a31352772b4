"""Recurrences of heads token by token in float64, as plainly as possible; no package code.

Values are (..., B, L, H, P), a state (..., B, H, N, P).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Loop = Callable[[Any, Tensor], Tensor]


def scalar_decay(operator: Any, v: Tensor) -> Tensor:
    """S[t] = decay[t] S[t-1] + k[t] (scale[t] v[t]),   y[t] = q[t] . S[t]"""
    each = operator.shape.heads // operator.query.shape[2]
    q, k = (x.double().repeat_interleave(each, 2) for x in (operator.query, operator.key))
    decay, v = operator.log_decay.double().exp(), v.double()
    if operator.scale is not None:
        v = v * operator.scale.double()[..., None]
    out, state = torch.empty_like(v), 0.0
    for t in range(v.shape[-3]):
        state = decay[:, t, :, None, None] * state + k[:, t, :, :, None] * v[..., t, :, None, :]
        out[..., t, :, :] = (q[:, t, :, :, None] * state).sum(-2)
    return out


def vector_decay(operator: Any, v: Tensor) -> Tensor:
    """The same with a decay per key channel; with a bonus, read before the token's own step."""
    q, k, decay = operator.query.double(), operator.key.double(), operator.log_decay.double().exp()
    v = v.double()
    out, state = torch.empty_like(v), torch.zeros((), dtype=torch.float64)
    for t in range(v.shape[-3]):
        written = k[:, t, :, :, None] * v[..., t, :, None, :]
        after = decay[:, t, :, :, None] * state + written
        read = after
        if operator.bonus is not None:
            read = state + operator.bonus.double()[..., None] * written
        out[..., t, :, :] = (q[:, t, :, :, None] * read).sum(-2)
        state = after
    return out


def delta_rule(operator: Any, v: Tensor) -> Tensor:
    """S[t] = decay[t] S[t-1],   S[t] += beta[t] k[t] (v[t] - k[t] . S[t]),   y[t] = q[t] . S[t]

    With a key e to erase by, which asks before the decay, and f = a e for steps a of channels, else
    f = beta k, S[t] = decay[t] S[t-1] + beta[t] k[t] v[t] - f[t] (e[t] . S[t-1]).
    """
    q, k, beta = operator.query.double(), operator.key.double(), operator.beta.double()
    v = v.double()
    out = torch.empty_like(v)
    state = v.new_zeros(*v.shape[:-3], v.shape[-2], k.shape[-1], v.shape[-1])
    erase, step = (getattr(operator, name, None) for name in ("erase", "erase_step"))
    for t in range(v.shape[-3]):
        before = state
        if operator.log_decay is not None:
            decay = operator.log_decay[:, t].double().exp()
            state = state * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
        key, size = k[:, t, :, :, None], beta[:, t, :, None, None]
        found, taken = (key * state).sum(-2, keepdim=True), size * key
        if erase is not None:
            own = erase[:, t, :, :, None].double()
            found = (own * before).sum(-2, keepdim=True)
            taken = taken if step is None else step[:, t, :, :, None].double() * own
        state = state + size * key * v[..., t, :, None, :] - taken * found
        out[..., t, :, :] = (q[:, t, :, :, None] * state).sum(-2)
    return out


def delta_product(operator: Any, v: Tensor) -> Tensor:
    """S = decay[t] S,   then for each m   S += beta[t, m] k[t, m] (v[t, m] - k[t, m] . S)

    y[t] = q[t] . S; v[t, m] is v[t] for heads that write in step m, and else 0.
    """
    q, k, beta, v = (x.double() for x in (operator.query, operator.key, operator.beta, v))
    out, state = torch.empty_like(v), 0 * (k[:, 0, 0, :, :, None] * v[..., 0, :, None, :])
    for t in range(v.shape[-3]):
        if operator.log_decay is not None:
            state = state * operator.log_decay[:, t, :, None, None].double().exp()
        for m in range(k.shape[2]):
            own = torch.tensor([float(step == m) for step in operator.writes]).double()
            key, given = k[:, t, m, :, :, None], (v[..., t, :, :] * own[:, None])[..., None, :]
            missing = given - (key * state).sum(-2, keepdim=True)
            state = state + beta[:, t, m, :, None, None] * key * missing
        out[..., t, :, :] = (q[:, t, :, :, None] * state).sum(-2)
    return out


def matrices(loop: Loop, operator: Any) -> Tensor:
    """The matrix of every head (B, H, L, L): what the loop makes of unit tokens."""
    batch, tokens, heads, _ = operator.shape
    unit = torch.eye(tokens, dtype=torch.float64)[:, None, :].expand(batch, tokens, heads, tokens)
    return loop(operator, unit).transpose(1, 2)
