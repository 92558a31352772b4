"""mamba_ssm's Mamba2 and Mamba2Simple; the equations are those of :mod:`.mamba2`.

Mamba2 may keep channels that pass a gated MLP instead of the scan: SiLU(z0) x0 is computed beside
the scan and joins it in out_proj.  Those channels mix no tokens and are, like the MLP of a block,
no part of the operator.  Mamba2Simple may learn the states before the first token, whose
contribution is a constant.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from .base import Call, LinearMixer
from .mamba2 import OutputNorm, linearize
from .parts.common import linear, refuse_packed, run, working_dtype


def mamba_ssm_mamba2(module: Any, call: Call) -> LinearMixer:
    """mamba_ssm's Mamba2, on its fused and its slow path."""
    call.refuse_cache("inference_params", position=4)
    refuse_packed(call, seq_idx=2, cu_seqlens=3)
    if call.argument("seqlen", 1) is not None:
        raise InputError(
            "The mixer was called with seqlen: its input is a flattened batch (B * L, E). Pass "
            "(B, L, E) and no seqlen."
        )
    projected = _projected(module, call)
    scanned = 2 * module.d_ssm + 2 * module.ngroups * module.d_state + module.nheads
    beside = (projected.shape[-1] - scanned) // 2
    z0, x0, projected = torch.split(projected, [beside, beside, scanned], -1)
    unmixed = F.silu(z0) * x0
    norm = None
    if module.rmsnorm:
        norm = OutputNorm(
            module.norm.weight, module.norm.eps, module.ngroups, module.norm_before_gate
        )

    def project(y: Tensor) -> Tensor:
        return _out_proj(module, torch.cat([unmixed, y.flatten(2)], -1))

    return linearize(
        module,
        projected,
        None,
        groups=module.ngroups,
        dt_limit=module.dt_limit,
        norm=norm,
        project=project,
    )


def mamba_ssm_mamba2_simple(module: Any, call: Call) -> LinearMixer:
    """mamba_ssm's Mamba2Simple, whose norm has groups on the fused path only."""
    refuse_packed(call, seq_idx=1)
    groups = module.ngroups if module.use_mem_eff_path else 1
    return linearize(
        module,
        _projected(module, call),
        None,
        groups=module.ngroups,
        dt_limit=module.dt_limit,
        norm=OutputNorm(module.norm.weight, module.norm.eps, groups),
        project=lambda y: _out_proj(module, y.flatten(2)),
        initial=module.init_states if module.learnable_init_states else None,
    )


def _projected(module: Any, call: Call) -> Tensor:
    hidden = call.hidden_states
    return run(module.in_proj, hidden.to(working_dtype(module, hidden)))


def _out_proj(module: Any, y: Tensor) -> Tensor:
    """out_proj, which the fused path reads by its raw weight."""
    if module.use_mem_eff_path:
        return linear(y, module.out_proj.weight, module.out_proj.bias)
    return run(module.out_proj, y)
