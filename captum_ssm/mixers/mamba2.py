"""Mamba-2: transformers' mamba2, bamba, zamba2, falcon_h1, granitemoehybrid and nemotron_h.

    z, xBC, dt = in_proj(mask h)       x, B, C = mask SiLU(conv(xBC) + b)
    dt = clamp(softplus(dt + b_dt))    A = -exp(A_log)
    alpha[i, j] = C[i] . B[j] exp(A sum of dt over j+1..i) dt[j]
    s = SiLU(z) (alpha + D) x          y = w s / rms(s)             output = out_proj(y)

with one decay per head, B and C shared by the heads of a group, and the norm per group of heads;
some put the gate behind the norm, or have no norm.  Frozen: dt, B, C, the mask, the ratios
SiLU(u) / u and SiLU(z), and 1 / rms.  B and C pass through the same convolution as x; only the
part of x belongs to the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedMixerError
from ..operators import Chain, Diagonal, Operator, ScalarDecayHeads, Shape, ShortConv, Sum
from ..operators.kernels.arithmetic import doubled
from .base import Call, LinearMixer
from .parts.common import (
    activation_ratio,
    as_heads,
    causal_conv,
    frozen,
    hf_entering,
    masked,
    refuse_packed,
    run,
)


@dataclass(frozen=True, eq=False)
class OutputNorm:
    """The RMSNorm at the end.

    Attributes:
        weight: its weight (D,).
        eps: added to the mean square.
        groups: how many groups of channels are normalized separately.
        before_gate: whether it acts before the gate.
    """

    weight: Tensor
    eps: float
    groups: int
    before_gate: bool = False


def hf_mamba2(module: Any, call: Call) -> LinearMixer:
    """The Mamba-2 mixers of transformers without options of their own."""
    refuse_packed(call)
    hidden, mask = hf_entering(module, call)
    norm = module.norm
    channels = norm.weight.shape[0]
    # in transformers 4 most norms have no groups
    groups = channels // getattr(norm, "group_size", channels)
    norm = OutputNorm(norm.weight, norm.variance_epsilon, groups)
    return _hf_linearize(module, run(module.in_proj, hidden), mask, norm)


def zamba2_mamba2(module: Any, call: Call) -> LinearMixer:
    """Zamba2MambaMixer, refused where transformers 4 computes something else on a CPU.

    Its code for CPUs mixes up the states of chunks, and lets padding into the scan.
    """
    linear = hf_mamba2(module, call)
    slow = hasattr(module, "torch_forward") and linear.values.device.type == "cpu"
    if slow and (linear.mask is not None or linear.values.shape[1] > module.chunk_size):
        raise UnsupportedMixerError(
            f"Zamba 2 on a CPU in transformers 4: beyond {module.chunk_size} tokens, and where a "
            "batch is padded, the model computes something else than on a GPU, which has no "
            "adapter. Use transformers 5, or shorter examples one by one."
        )
    return linear


def granite_mamba2(module: Any, call: Call) -> LinearMixer:
    """GraniteMoeHybridMambaLayer, whose block scales its output."""
    scale = float(getattr(call.block, "residual_multiplier", 1.0))
    return replace(hf_mamba2(module, call), branch_scale=scale)


def falcon_h1_mamba2(module: Any, call: Call) -> LinearMixer:
    """FalconH1Mixer: scaled before and after in_proj, and by its block; the norm is optional."""
    refuse_packed(call)
    hidden, mask = hf_entering(module, call)
    projected = run(module.in_proj, hidden * module.ssm_in_multiplier)
    projected = projected * module.mup_vector.to(projected)
    norm = None
    if module.mamba_rms_norm:
        own = module.norm
        norm = OutputNorm(own.weight, own.variance_epsilon, own.n_groups, own.norm_before_gate)
    linear = _hf_linearize(module, projected, mask, norm)
    scale = float(getattr(call.block, "ssm_out_multiplier", 1.0))
    return replace(linear, branch_scale=scale)


def _hf_linearize(
    module: Any, projected: Tensor, mask: Tensor | None, norm: OutputNorm | None
) -> LinearMixer:
    """:func:`linearize` with the names and options of transformers' modules."""
    return linearize(
        module,
        projected,
        mask,
        groups=module.n_groups,
        dt_limit=module.time_step_limit or (module.time_step_min, math.inf),
        norm=norm,
        project=lambda y: run(module.out_proj, y.flatten(2)),
    )


def linearize(
    module: Any,
    projected: Tensor,
    mask: Tensor | None,
    *,
    groups: int,
    dt_limit: tuple[float, float],
    norm: OutputNorm | None,
    project: Callable[[Tensor], Tensor],
    initial: Tensor | None = None,
    recurrence: Callable[..., Operator] = ScalarDecayHeads,
) -> LinearMixer:
    """The mixer from the output of in_proj.

    Args:
        module: the mixer, for conv1d, act, activation, dt_bias, A_log and D.
        projected: z, x, B, C and dt (B, L, 2 D + 2 G N + H).
        mask: True for real tokens (B, L), or None.
        groups: groups of heads that share B and C, G.
        dt_limit: smallest and largest dt.
        norm: the norm at the end, or None.
        project: the output projection.
        initial: the states before the first token (H, P, N), or None for zeros.
        recurrence: makes the scan of its coefficients.
    """
    heads, mixed = len(module.dt_bias), module.conv1d.in_channels
    width = projected.shape[-1] - mixed - heads
    z, stream, dt = torch.split(projected, [width, mixed, heads], -1)
    shape = Shape(projected.shape[0], projected.shape[1], heads, width // heads)
    channels = as_heads(stream)  # (B, L, D + 2 G N, 1)
    conv, u = causal_conv(module.conv1d, channels, mask, Shape(*channels.shape))
    ratio = activation_ratio(module.act, module.activation, u)
    activated = u * ratio if mask is None else u * ratio * mask[:, :, None, None]
    x, key, query = activated.squeeze(-1).tensor_split([width, (width + mixed) // 2], -1)
    dt = F.softplus(dt + module.dt_bias.to(dt))
    if tuple(dt_limit) != (0.0, math.inf):  # a limit that every dt keeps
        dt = dt.clamp(*dt_limit)
    rate = -torch.exp(module.A_log.to(dt))
    log_decay = rate * dt
    query, key = as_heads(query, groups), as_heads(key, groups)
    scan = recurrence(query, key, log_decay, dt, shape.per_head, rate=rate)
    skip = frozen(module.D, dt).view(1, 1, heads, -1)
    core: Operator = Sum(scan, Diagonal(skip, shape, "skip"))
    if initial is not None:
        core = Chain(_initial_constant(initial, query, log_decay, shape), core)
    gate = Diagonal(as_heads(F.silu(z), heads), shape, "gate")
    operator = Chain(
        *_gate_and_norm(gate, norm, core.affine(x.view(shape))),
        core,
        *masked(mask, shape, x),
        Diagonal(ratio[:, :, :width].view(shape), shape, "activation"),
        _first_channels(conv, shape),
        *masked(mask, shape, x),
    )
    return LinearMixer(stream[:, :, :width].reshape(shape), operator, project, mask)


def _first_channels(conv: ShortConv, shape: Shape) -> ShortConv:
    """Restrict a convolution to its first channels, those of the values, and cut it into heads."""
    width = shape.heads * shape.per_head
    bias = conv.bias
    if bias is not None:
        bias = bias[:, :, :width].reshape(*bias.shape[:2], *shape[2:])
    return ShortConv(conv.weight[:width].view(*shape[2:], -1), shape, bias)


def _initial_constant(initial: Tensor, query: Tensor, log_decay: Tensor, shape: Shape) -> ShortConv:
    """The identity plus a constant: the share of states before the first token in the output."""
    query = query.repeat_interleave(shape.heads // query.shape[2], 2)
    read = torch.einsum("blhn,hpn->blhp", query, initial.to(query))
    constant = doubled(log_decay).cumsum(1).exp().to(read)[..., None] * read
    one_tap = torch.ones_like(constant[0, 0, :, :, None])
    return ShortConv(one_tap, shape, constant, component="scan")


def _gate_and_norm(gate: Diagonal, norm: OutputNorm | None, mixed: Tensor) -> list[Operator]:
    """The gate and the frozen norm of the scan's and skip's output ``mixed``, outermost first."""
    if norm is None:
        return [gate]
    entering = mixed if norm.before_gate else gate.apply(mixed)
    grouped = as_heads(entering.flatten(2), norm.groups)
    rms = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + norm.eps).expand_as(grouped)
    weight = rms.flatten(2) * norm.weight.to(rms)
    scaling = Diagonal(weight.view(mixed.shape), gate.shape, "norm")
    return [gate, scaling] if norm.before_gate else [scaling, gate]
