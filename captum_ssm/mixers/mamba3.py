"""Mamba-3 with single input and single output: mamba_ssm's Mamba3.

    z, x, B, C, s, a, l, r = in_proj(h)
    dt = softplus(s + b_dt)    A = -max(softplus(a), A_floor)    lambda = sigmoid(l)
    q = R (RMSNorm(C) + b_C)   k = R (RMSNorm(B) + b_B)
    alpha[i, j] = q[i] . k[j] exp(A dt summed over j+1..i) scale[j],    j < i
    scale[j] = lambda[j] dt[j] + (1 - lambda[j+1]) dt[j+1]
    alpha[i, i] = q[i] . k[i] lambda[i] dt[i]
    y = SiLU(z) (alpha + D) x                             output = out_proj(y)

Every head has a separate decay, D and biases; the heads of a group share B and C before the biases.
R[i] rotates each pair of neighboring channels (2m, 2m+1) by the angle pi tanh(r[m]) dt summed over
0..i; the channels after the last pair are unchanged.  The scale is the trapezoidal rule: each step
weighs the integrand at its end by lambda, and at its beginning, the token before, by 1 - lambda.
With ``is_outproj_norm`` an RMSNorm per head comes before the gate.

Frozen: q, k, dt, A, lambda, 1 / rms and SiLU(z).  The module's kernel rounds its operands and its
result to bfloat16 for every dtype of the model; the operator does not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedMixerError
from ..operators import Chain, Diagonal, Operator, ScalarDecayHeads, ShortConv, Sum
from ..operators.kernels.arithmetic import doubled
from .base import Call, LinearMixer
from .parts.common import as_heads, mixer_input, refuse_packed, rms_norm, run, zeroed
from .path import Path


def mamba_ssm_mamba3(module: Any, call: Call) -> LinearMixer:
    """Linearize mamba_ssm's Mamba3 with ``is_mimo=False``."""
    refuse_mimo(module)
    call.refuse_cache("inference_params", position=3)
    refuse_packed(call, seq_idx=1, cu_seqlens=2)
    sizes = module.nheads, module.num_bc_heads, module.d_state
    return linearize(module, run(module.in_proj, mixer_input(module, call)), None, *sizes)


def refuse_mimo(module: Any) -> None:
    """Refuse a Mamba-3 mixer with multiple inputs and outputs (``is_mimo=True``)."""
    if module.is_mimo:
        raise UnsupportedMixerError(
            f"The Mamba3 mixer has is_mimo=True (mimo_rank={module.mimo_rank}), which has no "
            "adapter. Use a model with is_mimo=False (single input and single output)."
        )


def linearize(
    module: Any, projected: Tensor, mask: Tensor | None, heads: int, groups: int, state_size: int
) -> LinearMixer:
    """Return the mixer from the output of in_proj (B, L, 2 D + 2 G N + 3 H + angles).

    Args:
        module: the mixer.
        projected: output of in_proj.
        mask: True for real tokens (B, L), or None.
        heads: number of heads, H.
        groups: number of groups of heads that share B and C, G.
        state_size: state size, N.
    """
    bc_width, angles = groups * state_size, module.num_rope_angles
    width = (projected.shape[-1] - 2 * bc_width - 3 * heads - angles) // 2
    widths = [width, width, bc_width, bc_width, heads, heads, heads, angles]
    z, x, *scan_inputs = torch.split(projected, widths, -1)
    path = Path(x, mask, heads).silence()
    path.scan(_scan(module, *scan_inputs, path=path, groups=groups), skip=module.D)
    if module.is_outproj_norm:
        path.rms_norm(module.norm.weight, module.norm.eps)

    def project(y: Tensor) -> Tensor:
        """Project the output, but without the bias at padded tokens."""
        output = run(module.out_proj, y)
        if mask is None:
            return output
        bias = run(module.out_proj, torch.zeros_like(y[:1, :1]))
        return output - bias * ~mask[:, :, None]

    return path.gate(z).silence().to(project)


def _scan(
    module: Any,
    b: Tensor,
    c: Tensor,
    step: Tensor,
    decay: Tensor,
    end_weight: Tensor,
    angle_rate: Tensor,
    *,
    path: Path,
    groups: int,
) -> Operator:
    """Return the operator alpha of the module's docstring, given slices of in_proj's output.

    A token's scale includes the next step in entries below the diagonal, but not on the diagonal.
    So each query reads the scan after the previous token, and the diagonal is a separate term.  The
    slices are B, C, s, a, l and r of that docstring.
    """
    dt = zeroed(F.softplus(step + module.dt_bias.to(step)), path.mask)  # (B, L, H)
    log_decay = torch.clamp(-F.softplus(decay), max=-module.A_floor) * dt
    at_end = torch.sigmoid(end_weight) * dt
    at_beginning = torch.sigmoid(-end_weight) * dt
    angle = doubled(torch.tanh(angle_rate)[:, :, None] * math.pi * dt[..., None]).cumsum(1)
    query = _rotate(_normalize_and_bias(c, module.C_norm, module.C_bias, groups), angle)
    key = _rotate(_normalize_and_bias(b, module.B_norm, module.B_bias, groups), angle)
    diagonal = at_end * (query * key).sum(-1)
    # the query of the next token, with its decay; `shift` moves the result there
    scan = ScalarDecayHeads(
        _next(query * log_decay.exp()[..., None]),
        key,
        log_decay,
        at_end + _next(at_beginning),
        path.shape.per_head,
    )
    shift = ShortConv(dt.new_ones(dt.shape[-1], 1, 1), scan.shape, lags=(1,), component="scan")
    return Sum(Chain(shift, scan), Diagonal(diagonal[..., None], scan.shape, "scan"))


def _next(x: Tensor) -> Tensor:
    """Return y[t] = x[t + 1] for the tokens t of ``x`` (B, L, ...), with zeros for the last one."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)


def _normalize_and_bias(x: Tensor, norm: Any, bias: Tensor, groups: int) -> Tensor:
    """Return queries or keys before rotation (B, L, H, N), from ``x`` (B, L, G N)."""
    x = rms_norm(as_heads(x, groups), norm.eps, norm.weight)
    return x.repeat_interleave(len(bias) // groups, 2) + bias.squeeze(1).to(x)


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate channels 2m and 2m+1 of ``x`` (B, L, H, N) by angle[..., m]; keep later channels."""
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    end = 2 * angle.shape[-1]
    even, odd = x[..., 0:end:2], x[..., 1:end:2]
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return torch.cat([pairs.flatten(-2), x[..., end:]], -1)
