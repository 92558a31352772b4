"""What the package computes, written again in float64 as plainly as possible.

Matrices over tokens have one matrix per channel: (B, C, L, L), with C = H * P and channel
h * P + p.  Nothing here calls the package.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COMPONENTS = {"conv", "activation", "scan", "skip", "gate", "norm"}
PRESETS = {"s6": {"scan"}, "unified": COMPONENTS - {"skip"}, "exact": COMPONENTS}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """max|a - b| / max|b|, computed in float64."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    found, wanted = found.detach().double(), wanted.detach().double()
    scale = wanted.abs().max().clamp_min(1e-300)
    return float((found - wanted).abs().max() / scale)


# --- matrices of the elementary maps -------------------------------------------------------


def diagonal_matrices(weight: Tensor, shape: Sequence[int]) -> Tensor:
    batch, tokens, heads, per_head = shape
    weight = weight.double().expand(batch, tokens, heads, per_head)
    out = torch.zeros(batch, heads * per_head, tokens, tokens, dtype=torch.float64)
    for t in range(tokens):
        out[:, :, t, t] = weight[:, t].flatten(1)
    return out


def conv_matrices(weight: Tensor, lags: Sequence[int], shape: Sequence[int]) -> Tensor:
    """``weight`` (H, P, K): output t reads weight[..., k] times token t - lags[k]."""
    batch, tokens, heads, per_head = shape
    out = torch.zeros(batch, heads * per_head, tokens, tokens, dtype=torch.float64)
    for k, lag in enumerate(lags):
        for t in range(tokens):
            if 0 <= t - lag < tokens:
                out[:, :, t, t - lag] += weight[..., k].double().flatten()
    return out


def map_conv_matrices(
    weight: Tensor, lags: Sequence[tuple[int, int]], width: int, shape: Sequence[int]
) -> Tensor:
    """Those of a convolution over a map whose taps read rows above and columns to the left."""
    batch, tokens, heads, per_head = shape
    out = torch.zeros(batch, heads * per_head, tokens, tokens, dtype=weight.dtype)
    for token in range(tokens):
        row, column = divmod(token, width)
        for (up, left), tap in zip(lags, weight.flatten(0, 1).unbind(-1), strict=True):
            if 0 <= row - up < tokens // width and 0 <= column - left < width:
                out[:, :, token, (row - up) * width + column - left] += tap
    return out


def scan_matrices(dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """alpha[i, j] = sum over n of C[i, n] exp(A[n] sum of dt[j+1..i]) dt[j] B[j, n], j <= i.

    ``dt`` (B, L, C), ``a`` (C, N), ``b`` and ``c`` (B, L, N).
    """
    dt, a, b, c = dt.double(), a.double(), b.double(), c.double()
    batch, tokens, channels = dt.shape
    out = torch.zeros(batch, channels, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i + 1):
            elapsed = dt[:, j + 1 : i + 1].sum(1)  # (B, C)
            decay = torch.exp(elapsed[:, :, None] * a)  # (B, C, N)
            out[:, :, i, j] = torch.einsum("bn,bcn,bn->bc", c[:, i], decay, b[:, j]) * dt[:, j]
    return out


def times(matrices: Tensor, v: Tensor) -> Tensor:
    """The matrices (B, C, L, L) applied to values (..., B, L, H, P)."""
    out = torch.einsum("bcij,...bjc->...bic", matrices, v.double().flatten(-2))
    return out.unflatten(-1, v.shape[-2:])


# --- a Mamba-1 mixer -----------------------------------------------------------------------


@dataclass
class Mamba1Parts:
    """Everything that is frozen at one input, in float64; D channels."""

    values: Tensor  # (B, L, D)
    mask: Tensor  # (B, L) of 0 and 1
    conv: Tensor  # (1, D, L, L)
    conv_bias: Tensor  # (D,)
    ratio: Tensor  # (B, L, D)
    dt: Tensor  # (B, L, D)
    a: Tensor  # (D, N)
    b: Tensor  # (B, L, N)
    c: Tensor  # (B, L, N)
    skip: Tensor  # (D,)
    gate: Tensor  # (B, L, D)
    before_projection: Tensor  # (B, L, D), by the recurrence
    output: Tensor  # (B, L, E)


def mamba1_parts(
    mixer: Any,
    hidden: Tensor,
    mask: Tensor | None = None,
    *,
    adapters: Collection[str] = ("in_proj", "x_proj", "out_proj"),
) -> Mamba1Parts:
    """The mixer's forward pass from its parameters, step by step in float64.

    Args:
        mixer: MambaMixer, FalconMambaMixer, JambaMambaMixer, or mamba_ssm's Mamba.
        hidden: its input (B, L, E).
        mask: 1 for tokens, 0 for padding.
        adapters: projections whose LoRA weights, if there are any, count.
    """
    hidden = hidden.detach().double()
    batch, tokens, _ = hidden.shape
    keep = torch.ones(batch, tokens) if mask is None else mask
    keep = keep.double()
    in_proj, x_proj, dt_proj, out_proj = (
        _weights(getattr(mixer, name), name in adapters)
        for name in ("in_proj", "x_proj", "dt_proj", "out_proj")
    )
    of_version_4 = hasattr(mixer, "slow_forward")  # there the mask silences x, not what enters
    if of_version_4:
        x, z = F.linear(hidden, *in_proj).chunk(2, dim=-1)
        x = x * keep[:, :, None]
    else:
        x, z = F.linear(hidden * keep[:, :, None], *in_proj).chunk(2, dim=-1)

    taps = mixer.conv1d.weight.detach().double()[:, 0]  # (D, K); the last tap reads token t
    width = taps.shape[1]
    lags = [width - 1 - k for k in range(width)]
    conv = conv_matrices(taps[:, None], lags, (1, tokens, len(taps), 1))
    conv_bias = torch.zeros(len(taps), dtype=torch.float64)
    if mixer.conv1d.bias is not None:
        conv_bias = mixer.conv1d.bias.detach().double()
    u = torch.einsum("xdij,bjd->bid", conv, x) + conv_bias
    is_silu = mixer.activation in ("silu", "swish")
    ratio = torch.sigmoid(u) if is_silu else mixer.act(u) / u
    v = keep[:, :, None] * ratio * u

    rank, state = dt_proj[0].shape[1], mixer.A_log.shape[1]
    t, b, c = F.linear(v, *x_proj).split([rank, state, state], dim=-1)
    if type(mixer).__name__ == "FalconMambaMixer":
        t, b, c = (
            s / (s.pow(2).mean(-1, keepdim=True) + mixer.config.mixer_rms_eps).sqrt()
            for s in (t, b, c)
        )
    elif hasattr(mixer, "dt_layernorm"):
        norms = (mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm)
        t, b, c = (
            s / (s.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight
            for s, norm in zip((t, b, c), norms, strict=True)
        )
    dt = torch.log1p(torch.exp(F.linear(t, *dt_proj)))
    a = -mixer.A_log.detach().double().exp()
    skip = mixer.D.detach().double()
    gate = mixer.act(z) if of_version_4 else z * torch.sigmoid(z)

    y = torch.zeros_like(v)
    h = torch.zeros(batch, *a.shape, dtype=torch.float64)
    for i in range(tokens):
        step = dt[:, i, :, None]
        h = torch.exp(step * a) * h + step * b[:, i, None] * v[:, i, :, None]
        y[:, i] = gate[:, i] * ((h * c[:, i, None]).sum(-1) + skip * v[:, i])
    output = F.linear(y, *out_proj)
    return Mamba1Parts(x, keep, conv, conv_bias, ratio, dt, a, b, c, skip, gate, y, output)


def alpha(parts: Mamba1Parts, components: str | Collection[str]) -> Tensor:
    """The implicit attention matrices (B, D, L, L) with some components only.

    ``components`` is a set of names, or a preset, from which names after ``-`` are removed.
    Without scan and skip, values pass through unchanged; the padding mask is always there.
    """
    if isinstance(components, str):
        preset, *removed = components.split("-")
        components = PRESETS[preset] - set(removed)
    batch, tokens, channels = parts.values.shape
    shape = (batch, tokens, channels, 1)
    eye = torch.eye(tokens, dtype=torch.float64).expand(batch, channels, tokens, tokens)
    core = eye
    if components & {"scan", "skip"}:
        core = torch.zeros_like(eye)
        if "scan" in components:
            core = core + scan_matrices(parts.dt, parts.a, parts.b, parts.c)
        if "skip" in components:
            core = core + parts.skip[:, None, None] * eye
    mask = diagonal_matrices(parts.mask[:, :, None, None], shape)
    ratio = diagonal_matrices(parts.ratio[..., None], shape) if "activation" in components else eye
    gate = diagonal_matrices(parts.gate[..., None], shape) if "gate" in components else eye
    conv = parts.conv if "conv" in components else eye
    return gate @ core @ mask @ ratio @ conv @ mask


def _weights(projection: Any, with_adapter: bool) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in float64, LoRA (W + scaling B A) included."""
    weight = projection.weight.detach().double()
    if with_adapter and hasattr(projection, "lora_A"):
        down = projection.lora_A["default"].weight.detach().double()
        up = projection.lora_B["default"].weight.detach().double()
        weight = weight + projection.scaling["default"] * up @ down
    bias = projection.bias
    return weight, None if bias is None else bias.detach().double()
