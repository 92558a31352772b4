"""Mamba-2 in transformers, mamba_ssm and mambapy.

The models in transformers are mamba2, bamba, zamba2, falcon_h1, granitemoehybrid and nemotron_h.

    z, xBC, dt = in_proj(mask h)       x, B, C = mask SiLU(conv(xBC) + b)
    dt = clamp(softplus(dt + b_dt))    A = -exp(A_log)
    alpha[i, j] = C[i] . B[j] exp(A sum of dt over j+1..i) dt[j]
    s = SiLU(z) (alpha + D) x          y = w s / rms(s)             output = out_proj(y)

There is one decay per head.  The heads of a group share B and C, and the norm is per group.  Some
models apply the gate after the norm, or have no norm.  Frozen: dt, B, C, the mask, the ratios
SiLU(u) / u and SiLU(z), and 1 / rms.  The convolution has filters for x, B and C; the operator
contains only the filters for x.

mamba_ssm's Mamba2 may have extra channels with a gated MLP instead of the scan: SiLU(z0) x0 is
concatenated with the scan's output before out_proj.  These channels do not mix tokens, so they are
not in the operator, like the MLP of a block.  Mamba2Simple may learn the states before the first
token; these add a constant to the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError, UnsupportedMixerError
from ..operators import Operator, ScalarDecayHeads, Shape, ShortConv
from ..operators.kernels.arithmetic import doubled
from .base import Call, LinearMixer
from .parts.common import (
    activation_of,
    as_heads,
    hf_input_and_mask,
    mixer_input,
    projection,
    refuse_packed,
    run,
)
from .path import Path


def hf_mamba2(module: Any, call: Call) -> LinearMixer:
    """Linearize Mamba2Mixer, BambaMixer or NemotronHMamba2Mixer of transformers."""
    refuse_packed(call)
    hidden, mask = hf_input_and_mask(module, call)
    path, z = _hf_scan(module, run(module.in_proj, hidden), mask)
    norm, channels = module.norm, len(module.norm.weight)
    # in transformers 4 most norms have no groups
    groups = channels // getattr(norm, "group_size", channels)
    return gate_and_norm(path, z, norm, groups).to(module.out_proj)


def zamba2_mamba2(module: Any, call: Call) -> LinearMixer:
    """Linearize Zamba2MambaMixer; refuse inputs with wrong outputs in transformers 4.

    The CPU code of transformers 4 confuses the states of chunks, and does not mask padding.
    """
    mixer = hf_mamba2(module, call)
    runs_on_cpu = hasattr(module, "torch_forward") and mixer.values.device.type == "cpu"
    if runs_on_cpu and (mixer.mask is not None or mixer.values.shape[1] > module.chunk_size):
        raise UnsupportedMixerError(
            f"Zamba 2 on a CPU in transformers 4 got {mixer.values.shape[1]} tokens. For more "
            f"than {module.chunk_size} tokens, or a padded batch, outputs differ from GPU outputs. "
            "Use transformers 5, or pass shorter examples one by one."
        )
    return mixer


def granite_mamba2(module: Any, call: Call) -> LinearMixer:
    """Linearize GraniteMoeHybridMambaLayer, whose block scales the output."""
    scale = float(getattr(call.block, "residual_multiplier", 1.0))
    return replace(hf_mamba2(module, call), branch_scale=scale)


def falcon_h1_mamba2(module: Any, call: Call) -> LinearMixer:
    """Linearize FalconH1Mixer, with its three scales and its optional norm."""
    refuse_packed(call)
    hidden, mask = hf_input_and_mask(module, call)
    projected = run(module.in_proj, hidden * module.ssm_in_multiplier)
    path, z = _hf_scan(module, projected * module.mup_vector.to(projected), mask)
    norm = module.norm if module.mamba_rms_norm else None
    groups, norm_first = getattr(norm, "n_groups", 1), getattr(norm, "norm_before_gate", False)
    gate_and_norm(path, z, norm, groups, norm_first)
    scale = float(getattr(call.block, "ssm_out_multiplier", 1.0))
    return path.to(module.out_proj, branch_scale=scale)


def mamba_ssm_mamba2(module: Any, call: Call) -> LinearMixer:
    """Linearize mamba_ssm's Mamba2, fused or not: output = out_proj([SiLU(z0) x0, y])."""
    call.refuse_cache("inference_params", position=4)
    refuse_packed(call, seq_idx=2, cu_seqlens=3)
    if call.argument("seqlen", 1) is not None:
        raise InputError(
            f"The mixer was called with seqlen={call.argument('seqlen', 1)}, so its input is a "
            "flattened batch (B * L, E). Pass the input as (B, L, E), without seqlen."
        )
    projected = run(module.in_proj, mixer_input(module, call))
    scanned_width = 2 * module.d_ssm + 2 * module.ngroups * module.d_state + module.nheads
    mlp_width = (projected.shape[-1] - scanned_width) // 2
    widths = [mlp_width, mlp_width, scanned_width]
    mlp_gate, mlp_value, projected = torch.split(projected, widths, -1)  # z0, x0, [z, xBC, dt]
    path, z = convolve_and_scan(module, projected, None, module.ngroups, module.dt_limit)
    norm = module.norm if module.rmsnorm else None
    gate_and_norm(path, z, norm, module.ngroups, module.norm_before_gate)
    out_proj = projection(module.out_proj, called=not module.use_mem_eff_path)
    mlp_output = F.silu(mlp_gate) * mlp_value
    return path.to(lambda y: out_proj(torch.cat([mlp_output, y], -1)))


def mamba_ssm_mamba2_simple(module: Any, call: Call) -> LinearMixer:
    """Linearize mamba_ssm's Mamba2Simple, which may have learned initial states."""
    groups, learns_states = module.ngroups, module.learnable_init_states
    is_fused = module.use_mem_eff_path
    return _linearize_simple(module, call, groups, module.dt_limit, learns_states, is_fused)


def mambapy_mamba2_block(module: Any, call: Call) -> LinearMixer:
    """Linearize mambapy's Mamba2Block, which uses mamba_ssm's functions."""
    config = module.config
    groups, learns_states = config.n_groups, config.learnable_init_states
    is_fused = config.use_mem_eff_path
    return _linearize_simple(module, call, groups, config.dt_limit, learns_states, is_fused)


def _linearize_simple(
    module: Any,
    call: Call,
    groups: int,
    dt_limit: tuple[float, float],
    learns_states: bool,
    is_fused: bool,
) -> LinearMixer:
    """Linearize Mamba2Simple or Mamba2Block, whose norm has groups only in its fused kernel."""
    refuse_packed(call, seq_idx=1)
    projected, initial = run(module.in_proj, mixer_input(module, call)), None
    if learns_states:
        initial = module.init_states
    path, z = convolve_and_scan(module, projected, None, groups, dt_limit, initial=initial)
    gate_and_norm(path, z, module.norm, groups if is_fused else 1)
    return path.to(projection(module.out_proj, called=not is_fused))


def _hf_scan(module: Any, projected: Tensor, mask: Tensor | None) -> tuple[Path, Tensor]:
    dt_limit = module.time_step_limit or (module.time_step_min, math.inf)
    return convolve_and_scan(module, projected, mask, module.n_groups, dt_limit)


def convolve_and_scan(
    module: Any,
    projected: Tensor,
    mask: Tensor | None,
    groups: int,
    dt_limit: tuple[float, float],
    *,
    initial: Tensor | None = None,
    recurrence: Callable[..., Operator] = ScalarDecayHeads,
) -> tuple[Path, Tensor]:
    """Return the :class:`.Path` after convolution, activation, scan and skip, and the gate input z.

    Args:
        module: the mixer; its conv1d, act, dt_bias, A_log and D are used.
        projected: output of in_proj (B, L, 2 D + 2 G N + H): z, x, vectors B and C, and dt.
        mask: True for real tokens (B, L), or None.
        groups: number of groups of heads that share B and C, G.
        dt_limit: smallest and largest dt.
        initial: states before the first token (H, P, N). Default: None, zeros.
        recurrence: function of the coefficients that returns the scan. Default: ScalarDecayHeads.
    """
    heads, conv_width = len(module.dt_bias), module.conv1d.in_channels
    width = projected.shape[-1] - conv_width - heads
    z, xbc, dt = torch.split(projected, [width, conv_width, heads], -1)
    path = Path(xbc, mask).conv(module.conv1d).act(activation_of(module)).silence()
    # x, and vectors B and C of equal width, which are keys and queries
    _, key, query = path.now.squeeze(-1).tensor_split([width, (width + conv_width) // 2], -1)
    dt = F.softplus(dt + module.dt_bias.to(dt))
    if tuple(dt_limit) != (0.0, math.inf):  # these limits change no dt
        dt = dt.clamp(*dt_limit)
    rate = -torch.exp(module.A_log.to(dt))
    log_decay = rate * dt
    path, query, key = path.narrow(0, width, heads), as_heads(query, groups), as_heads(key, groups)
    scan = recurrence(query, key, log_decay, dt, path.shape.per_head, rate=rate)
    path.scan(scan, skip=module.D)
    if initial is not None:
        path.then(_initial_constant(initial, query, log_decay, path.shape))
    return path, z


def gate_and_norm(path: Path, z: Tensor, norm: Any, groups: int, norm_first: bool = False) -> Path:
    """Apply the gate and an RMSNorm to the path.

    Args:
        path: the values after the scan, as a :class:`.Path`.
        z: input of the gate (B, L, D).
        norm: module of the norm, or None.
        groups: number of groups of channels that are normalized separately.
        norm_first: whether the norm comes before the gate. Default: False.
    """
    if norm is None:
        return path.gate(z)
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    if norm_first:
        return path.rms_norm(norm.weight, eps, groups).gate(z)
    return path.gate(z).rms_norm(norm.weight, eps, groups)


def _initial_constant(initial: Tensor, query: Tensor, log_decay: Tensor, shape: Shape) -> ShortConv:
    """Return x + (all decays up to t) query[t] . initial, the constant that initial states add."""
    query = query.repeat_interleave(shape.heads // query.shape[2], 2)
    from_initial = torch.einsum("blhn,hpn->blhp", query, initial.to(query))
    constant = doubled(log_decay).cumsum(1).exp().to(from_initial)[..., None] * from_initial
    # the identity as a convolution, which has a place for the constant
    one_tap = torch.ones_like(constant[0, 0, :, :, None])
    return ShortConv(one_tap, shape, constant, component="scan")
