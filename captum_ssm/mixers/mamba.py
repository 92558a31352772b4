"""Mamba-1: transformers' mamba, falcon_mamba, jamba and zamba, and mamba_ssm's Mamba.

    x, z = in_proj(mask h)             u = conv(x) + b            v = mask SiLU(u)
    t, B, C = x_proj(v)                dt = softplus(W t + b_dt)  A = -exp(A_log)
    y = SiLU(z) (alpha + D) v          output = out_proj(y)

Frozen: dt, B, C, the mask, and the ratios SiLU(u) / u and SiLU(z).  Falcon and Jamba normalize t, B
and C; Zamba splits v into a few heads, each with a separate W, t, B and C.  In transformers 4 the
mask is applied to x, not to h, and the gate uses the activation of the convolution.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import SelectiveScan
from ..operators.kernels.arithmetic import full_precision
from .base import Call, LinearMixer
from .parts.common import (
    activation_of,
    as_heads,
    hf_input_and_mask,
    mixer_input,
    projection,
    rms_norm,
    run,
    zeroed,
)
from .path import Path

#: The tensors t, B and C.
Selected = tuple[Tensor, ...]


def hf_mamba(module: Any, call: Call) -> LinearMixer:
    """Linearize transformers' MambaMixer, FalconMambaMixer or JambaMambaMixer."""
    # version 4 masks x, see convolve_and_activate
    hidden, mask = hf_input_and_mask(module, call, zero_padded=not _is_of_version_4(module))
    x, z = run(module.in_proj, hidden).chunk(2, -1)
    path = convolve_and_activate(module, x, mask)
    selective_scan(path, module, called_dt=calls_dt_proj(module, z), norm=_normalize)
    return path.gate(z, module.act if _is_of_version_4(module) else F.silu).to(module.out_proj)


def hf_zamba(module: Any, call: Call) -> LinearMixer:
    """Linearize ZambaMambaMixer, whose in_proj alternates channels of x and z."""
    hidden, mask = hf_input_and_mask(module, call, zero_padded=not _is_of_version_4(module))
    x, z = torch.unflatten(run(module.in_proj, hidden), -1, (-1, 2)).unbind(-1)
    path = convolve_and_activate(module, x, mask)
    path.scan(_zamba_scan(module, path.now), skip=module.D)
    return path.gate(z, module.act if _is_of_version_4(module) else F.silu).to(module.out_proj)


def mamba_ssm_mamba(module: Any, call: Call) -> LinearMixer:
    """Linearize mamba_ssm's Mamba, on the fused path or the slow path.

    The module uses raw weights of in_proj and dt_proj, and on the fused path of all projections.
    """
    if hasattr(module, "bimamba_type"):  # the fork published with Vision Mamba
        from .vim import published_fork

        return published_fork(module, call)
    call.refuse_cache("inference_params", position=1)
    x, z = projection(module.in_proj, called=False)(mixer_input(module, call)).chunk(2, -1)
    code = sys.modules[type(module).__module__]
    is_fused = module.use_fast_path and getattr(code, "causal_conv1d_fn", None) is not None
    path = Path(x).conv(module.conv1d).act(module.act)
    selective_scan(path, module, called=not is_fused, called_dt=False)
    return path.gate(z).to(projection(module.out_proj, called=not is_fused))


def convolve_and_activate(module: Any, x: Tensor, mask: Tensor | None) -> Path:
    """Return ``x`` (B, L, D) after convolution, activation and mask, as a :class:`.Path`."""
    path = Path(zeroed(x, mask) if _is_of_version_4(module) else x, mask)
    return path.conv(module.conv1d).act(activation_of(module)).silence()


def selective_scan(path: Path, module: Any, names: str = "{}", **options: Any) -> Path:
    """Apply the scan and the skip; the scan's parameters depend on the values ``path.now``.

    Args:
        path: the values after the activation, as a :class:`.Path`.
        module: the module with A_log, D, x_proj and dt_proj.
        names: format of these names, such as ``"{}_fwd"``. Default: ``"{}"``, unchanged.
        **options: options of :func:`selection`.
    """
    a_log, skip = (getattr(module, names.format(name)) for name in ("A_log", "D"))
    dt, b, c = selection(path, module, names, **options)
    # for long inputs the values take much memory, and the gate needs the same amount
    return path.scan(SelectiveScan(dt, -torch.exp(a_log.to(dt)), b, c), skip=skip).release()


def selection(
    path: Path,
    module: Any,
    names: str = "{}",
    *,
    called: bool = True,
    called_dt: bool = True,
    norm: Callable[[Any, Selected], Selected] | None = None,
) -> Selected:
    """Return step sizes (B, L, D), input vectors and output vectors (B, L, N) for ``path.now``.

    Args:
        path: the values after the activation, as a :class:`.Path`.
        module: the module with x_proj and dt_proj.
        names: format of these names, such as ``"{}_fwd"``. Default: ``"{}"``, unchanged.
        called, called_dt: whether the module calls x_proj, and dt_proj. Otherwise it uses the raw
            weight, without any LoRA adapter. Default: True.
        norm: function that normalizes t, B and C. Default: None.
    """
    x_proj, dt_proj = (getattr(module, names.format(name)) for name in ("x_proj", "dt_proj"))
    projected, rank = projection(x_proj, called)(path.now.squeeze(-1)), dt_proj.weight.shape[1]
    state_size = (projected.shape[-1] - rank) // 2
    slices: Selected = torch.split(projected, [rank, state_size, state_size], -1)
    t, b, c = slices if norm is None else norm(module, slices)
    return F.softplus(projection(dt_proj, called_dt)(t)), b, c


def _normalize(module: Any, selected: Selected) -> Selected:
    """Return t, B and C normalized as in falcon_mamba, or with weights as in jamba."""
    if hasattr(module, "rms_eps"):
        return tuple(rms_norm(x, module.rms_eps) for x in selected)
    if not hasattr(module, "dt_layernorm"):
        return selected
    norms = (module.dt_layernorm, module.b_layernorm, module.c_layernorm)
    pairs = zip(selected, norms, strict=True)
    return tuple(rms_norm(x, norm.variance_epsilon, norm.weight) for x, norm in pairs)


def _is_of_version_4(module: Any) -> bool:
    """Return True if the mixer is a class of transformers 4."""
    return hasattr(module, "slow_forward")


def calls_dt_proj(module: Any, x: Tensor) -> bool:
    """Return True if the module calls dt_proj; fused kernels on a GPU use only its raw weight."""
    if not _is_of_version_4(module):
        return False
    if x.device.type != "cuda" or hasattr(module, "dt_layernorm"):  # Jamba calls it on GPUs, too
        return True
    code = sys.modules[type(module).__module__]
    if not hasattr(code, "_lazy_load_causal_conv1d"):  # a class of fla
        return not code.is_fast_path_available
    kernels = (code.mamba_inner_fn, *code._lazy_load_causal_conv1d())
    return any(kernel is None for kernel in kernels)


def _zamba_scan(module: Any, activated: Tensor) -> SelectiveScan:
    """Return zamba's scan, from v (B, L, D, 1); zamba's heads are the scan's G groups."""
    heads = as_heads(activated.squeeze(-1), module.n_mamba_heads)
    weight, dt_weight, dt_bias = (
        w.to(heads) for w in (module.x_proj_weight, module.dt_proj_weight, module.dt_proj_bias)
    )
    with full_precision(heads.device):
        projected = torch.einsum("blgp,grp->blgr", heads, weight)
        state_size = module.ssm_state_size
        t, b, c = torch.split(projected, [dt_weight.shape[-1], state_size, state_size], dim=-1)
        dt = F.softplus(torch.einsum("blgr,gpr->blgp", t, dt_weight) + dt_bias)
    if module.n_mamba_heads == 1:
        b, c = b.squeeze(2), c.squeeze(2)  # (B, L, N), shared by all channels
    return SelectiveScan(dt.flatten(2), -torch.exp(module.A_log.to(dt)).flatten(0, -2), b, c)
