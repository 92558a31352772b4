"""Mamba-1: transformers' mamba and falcon_mamba, mamba_ssm's Mamba.

    x, z = in_proj(mask h)             u = conv(x) + b            v = mask SiLU(u)
    t, B, C = x_proj(v)                dt = softplus(W t + b_dt)  A = -exp(A_log)
    y = SiLU(z) (alpha + D) v          output = out_proj(y)

Frozen: dt, B, C, the mask, and the ratios SiLU(u) / u and SiLU(z).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import Chain, Diagonal, SelectiveScan, Shape, Sum
from .base import Call, LinearMixer
from .common import (
    activation_ratio,
    as_heads,
    causal_conv,
    linear,
    masked,
    padding_mask,
    rms_norm,
    run,
    working_dtype,
)


def hf_mamba(module: Any, call: Call) -> LinearMixer:
    """transformers' MambaMixer and FalconMambaMixer."""
    call.refuse_cache("cache_params")
    hidden = call.hidden_states
    hidden = hidden.to(working_dtype(module, hidden))
    mask = padding_mask(call.argument("attention_mask", 2), hidden)
    if mask is not None:
        hidden = hidden * mask[:, :, None]
    projected = run(module.in_proj, hidden)
    return _linearize(module, projected, mask, run_x_proj=True, run_out_proj=True)


def mamba_ssm_mamba(module: Any, call: Call) -> LinearMixer:
    """mamba_ssm's Mamba, on its fused and its slow path.

    The module itself reads in_proj by its raw weight, and on the fused path every projection.
    """
    call.refuse_cache("inference_params")
    hidden = call.hidden_states
    hidden = hidden.to(working_dtype(module, hidden))
    projected = linear(hidden, module.in_proj.weight, module.in_proj.bias)
    kernels = sys.modules[type(module).__module__]
    fused = module.use_fast_path and getattr(kernels, "causal_conv1d_fn", None) is not None
    return _linearize(module, projected, None, run_x_proj=not fused, run_out_proj=not fused)


def _linearize(
    module: Any, projected: Tensor, mask: Tensor | None, *, run_x_proj: bool, run_out_proj: bool
) -> LinearMixer:
    x, z = projected.chunk(2, dim=-1)
    values = as_heads(x)  # (B, L, D, 1)
    shape = Shape(*values.shape)
    conv, u = causal_conv(module.conv1d, values, mask, shape)
    ratio = activation_ratio(module.act, module.activation, u)
    activated = (u * ratio).squeeze(-1)  # (B, L, D)
    if mask is not None:
        activated = activated * mask[:, :, None]
    dt, b, c = _selective_parameters(module, _call(module.x_proj, activated, run_x_proj))
    a = -torch.exp(module.A_log.to(values))
    skip = module.D.to(values).view(1, 1, -1, 1)
    operator = Chain(
        Diagonal(as_heads(F.silu(z)), shape, "gate"),
        Sum(SelectiveScan(dt, a, b, c), Diagonal(skip, shape, "skip")),
        *masked(mask, shape, values),
        Diagonal(ratio, shape, "activation"),
        conv,
        *masked(mask, shape, values),
    )

    def project(y: Tensor) -> Tensor:
        return _call(module.out_proj, y.flatten(2), run_out_proj)

    return LinearMixer(values, operator, project, mask)


def _selective_parameters(module: Any, selected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dt (B, L, D), B and C (B, L, N) from the output of x_proj."""
    rank, state = module.dt_proj.weight.shape[1], module.A_log.shape[1]
    t, b, c = torch.split(selected, [rank, state, state], dim=-1)
    if hasattr(module, "rms_eps"):  # falcon_mamba normalises all three
        t, b, c = (rms_norm(s, module.rms_eps) for s in (t, b, c))
    # the models read dt_proj by its weight too, so an adapter around it would change nothing
    dt = F.softplus(linear(t, module.dt_proj.weight, module.dt_proj.bias))
    return dt, b, c


def _call(projection: Any, x: Tensor, as_module: bool) -> Tensor:
    if as_module:
        return run(projection, x)
    return linear(x, projection.weight, projection.bias)
