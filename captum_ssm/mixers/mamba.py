"""Mamba-1: transformers' mamba, falcon_mamba, jamba and zamba, mamba_ssm's Mamba.

    x, z = in_proj(mask h)             u = conv(x) + b            v = mask SiLU(u)
    t, B, C = x_proj(v)                dt = softplus(W t + b_dt)  A = -exp(A_log)
    y = SiLU(z) (alpha + D) v          output = out_proj(y)

Frozen: dt, B, C, the mask, and the ratios SiLU(u) / u and SiLU(z).  Falcon and Jamba normalize t, B
and C; Zamba cuts v into a few heads, each with W, t, B and C of its own.  In transformers 4 the
mask is applied to x, not to h, the gate has the activation of the convolution, and adapters (LoRA)
around W take part wherever W is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import Chain, Diagonal, SelectiveScan, Shape, ShortConv, Sum
from ..operators.kernels.arithmetic import full_precision
from .base import Call, LinearMixer
from .parts.common import (
    activation_ratio,
    as_heads,
    causal_conv,
    frozen,
    hf_entering,
    linear,
    masked,
    rms_norm,
    run,
    working_dtype,
)
from .vim import published_fork

#: dt, B and C.
Selected = tuple[Tensor, Tensor, Tensor]


def hf_mamba(module: Any, call: Call) -> LinearMixer:
    """transformers' MambaMixer, FalconMambaMixer and JambaMambaMixer."""
    x, z, mask = _hf_projected(module, call)
    select = selection(module, as_module=True)
    return linearize(module, (x, z), mask, select, run_out_proj=True)


def hf_zamba(module: Any, call: Call) -> LinearMixer:
    """transformers' ZambaMambaMixer, whose in_proj returns x and z channel by channel in turn."""
    x, z, mask = _hf_projected(module, call, interleaved=True)

    def select(activated: Tensor) -> Selected:
        return _zamba_parameters(module, activated)

    return linearize(module, (x, z), mask, select, run_out_proj=True)


def mamba_ssm_mamba(module: Any, call: Call) -> LinearMixer:
    """mamba_ssm's Mamba, on its fused and its slow path.

    The module itself reads in_proj by its raw weight, and on the fused path every projection.
    """
    if hasattr(module, "bimamba_type"):  # the fork published with Vision Mamba
        return published_fork(module, call)
    call.refuse_cache("inference_params", position=1)
    hidden = call.hidden_states
    hidden = hidden.to(working_dtype(module, hidden))
    projected = linear(hidden, module.in_proj.weight, module.in_proj.bias)
    kernels = sys.modules[type(module).__module__]
    fused = module.use_fast_path and getattr(kernels, "causal_conv1d_fn", None) is not None
    select = selection(module, as_module=not fused)
    x, z = projected.chunk(2, dim=-1)
    return linearize(module, (x, F.silu(z)), None, select, run_out_proj=not fused)


def _hf_projected(
    module: Any, call: Call, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run in_proj; return x and the gate (B, L, D), and the mask."""
    of_version_4 = hasattr(module, "slow_forward")
    hidden, mask = hf_entering(module, call, silent=not of_version_4)
    projected = run(module.in_proj, hidden)
    if interleaved:
        x, z = projected[..., 0::2], projected[..., 1::2]
    else:
        x, z = projected.chunk(2, dim=-1)
    if not of_version_4:
        return x, F.silu(z), mask
    return x if mask is None else x * mask[:, :, None], module.act(z), mask


def linearize(
    module: Any,
    projected: tuple[Tensor, Tensor],
    mask: Tensor | None,
    select: Callable[[Tensor], Selected],
    *,
    run_out_proj: bool,
) -> LinearMixer:
    """The mixer from x and the gate (B, L, D).

    Args:
        module: the mixer, for conv1d, act, activation, A_log, D and out_proj.
        projected: x and the gate.
        mask: True for real tokens (B, L), or None.
        select: computes dt, B and C from v.
        run_out_proj: whether the module calls out_proj; else it reads the weight.
    """
    x, gating = projected
    values = as_heads(x)  # (B, L, D, 1)
    shape = Shape(*values.shape)
    # first, while little else is held: tensors of long inputs take much memory
    gate = Diagonal(as_heads(gating), shape, "gate")
    conv, ratio, activated = _activated(module, values, mask, shape)
    dt, b, c = select(activated.pop())  # popped, so that select can free it
    a = -torch.exp(module.A_log.to(values)).flatten(0, -2)
    skip = frozen(module.D, values).view(1, 1, -1, 1)
    operator = Chain(
        gate,
        Sum(SelectiveScan(dt, a, b, c), Diagonal(skip, shape, "skip")),
        *masked(mask, shape, values),
        Diagonal(ratio, shape, "activation"),
        conv,
        *masked(mask, shape, values),
    )

    def project(y: Tensor) -> Tensor:
        return _call(module.out_proj, y.flatten(2), run_out_proj)

    return LinearMixer(values, operator, project, mask)


def _activated(
    module: Any, values: Tensor, mask: Tensor | None, shape: Shape
) -> tuple[ShortConv, Tensor, list[Tensor]]:
    """The convolution, the ratio SiLU(u) / u (B, L, D, 1), and v (B, L, D) in a list, to pop."""
    conv, u = causal_conv(module.conv1d, values, mask, shape)
    ratio = activation_ratio(module.act, module.activation, u)
    activated = (u * ratio).squeeze(-1)
    return conv, ratio, [activated if mask is None else activated * mask[:, :, None]]


def selection(module: Any, as_module: bool) -> Callable[[Tensor], Selected]:
    """Make the function from v (B, L, D) to the selected parameters dt, B and C."""

    def select(activated: Tensor) -> Selected:
        selected = _call(module.x_proj, activated, as_module)
        del activated  # the parameters need as much memory again
        return _selective_parameters(module, selected)

    return select


def _selective_parameters(module: Any, selected: Tensor) -> Selected:
    """dt (B, L, D), B and C (B, L, N) from the output of x_proj."""
    rank, state = module.dt_proj.weight.shape[1], module.A_log.shape[1]
    t, b, c = torch.split(selected, [rank, state, state], dim=-1)
    if hasattr(module, "rms_eps"):  # falcon_mamba normalizes all three
        t, b, c = (rms_norm(s, module.rms_eps) for s in (t, b, c))
    elif hasattr(module, "dt_layernorm"):  # so does jamba, with weights
        norms = (module.dt_layernorm, module.b_layernorm, module.c_layernorm)
        t, b, c = (
            rms_norm(s, norm.variance_epsilon) * norm.weight.to(s)
            for s, norm in zip((t, b, c), norms, strict=True)
        )
    return F.softplus(_call(module.dt_proj, t, _calls_dt_proj(module, t))), b, c


def _calls_dt_proj(module: Any, t: Tensor) -> bool:
    """Whether the model calls dt_proj; if not, it reads the weight, past an adapter around it."""
    if not hasattr(module, "slow_forward"):
        return False
    if t.device.type != "cuda" or hasattr(module, "dt_layernorm"):
        return True
    code = sys.modules[type(module).__module__]
    if not hasattr(code, "_lazy_load_causal_conv1d"):  # fla has this class, too
        return not code.is_fast_path_available
    kernels = (code.mamba_inner_fn, *code._lazy_load_causal_conv1d())
    return any(kernel is None for kernel in kernels)


def _zamba_parameters(module: Any, activated: Tensor) -> Selected:
    """dt (B, L, D), B and C (B, L, G, N) from v, for the G heads of zamba."""
    heads = as_heads(activated, module.n_mamba_heads)
    weight, dt_weight, dt_bias = (
        w.to(activated) for w in (module.x_proj_weight, module.dt_proj_weight, module.dt_proj_bias)
    )
    with full_precision(activated.device):
        selected = torch.einsum("blgp,grp->blgr", heads, weight)
        state = module.ssm_state_size
        t, b, c = torch.split(selected, [dt_weight.shape[-1], state, state], dim=-1)
        dt = F.softplus(torch.einsum("blgr,gpr->blgp", t, dt_weight) + dt_bias)
    if module.n_mamba_heads == 1:
        b, c = b.squeeze(2), c.squeeze(2)
    return dt.flatten(2), b, c


def _call(projection: Any, x: Tensor, as_module: bool) -> Tensor:
    if as_module:
        return run(projection, x)
    return linear(x, projection.weight, projection.bias)
