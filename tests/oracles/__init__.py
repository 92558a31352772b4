"""What the package computes, written again in float64 as plainly as possible.

Matrices over tokens have one matrix per channel: (B, C, L, L), with C = H * P and channel
h * P + p.  Nothing here calls the package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oracles.kernels import recurrence, selective_scan

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

    ``dt`` (B, L, C), ``a`` (C, N), ``b`` and ``c`` (B, L, N), or (B, L, C, N).
    """
    return selective_scan(dt.double(), a.double(), b.double(), c.double())


def times(matrices: Tensor, v: Tensor) -> Tensor:
    """The matrices (B, C, L, L) applied to values (..., B, L, H, P)."""
    out = torch.einsum("bcij,...bjc->...bic", matrices, v.double().flatten(-2))
    return out.unflatten(-1, v.shape[-2:])


# --- pieces of formulas ----------------------------------------------------------------------


def linear(projection: Any, x: Tensor) -> Tensor:
    """A projection in float64."""
    out = x @ projection.weight.detach().double().T
    return out if projection.bias is None else out + projection.bias.detach().double()


def causal_taps(conv: Any, tokens: int) -> Tensor:
    """Matrices (1, C, L, L) of a depthwise convolution whose last tap reads token t."""
    taps = conv.weight.detach().double()[:, 0]
    apart = getattr(conv, "dilation", (1,))[0]
    lags = [apart * lag for lag in reversed(range(taps.shape[1]))]
    return conv_matrices(taps[:, None], lags, (1, tokens, len(taps), 1))


def keep_of(mask: Tensor | None, hidden: Tensor) -> Tensor:
    """1 for tokens and 0 for padding, (B, L)."""
    return torch.ones(hidden.shape[:2]).double() if mask is None else mask.double()


# --- a Mamba mixer ---------------------------------------------------------------------------


@dataclass
class Parts:
    """Everything that is frozen at one input of a Mamba or a Mamba-2, in float64; D channels."""

    values: Tensor  # (B, L, D)
    mask: Tensor  # (B, L) of 0 and 1
    conv: Tensor  # (1, D, L, L)
    conv_bias: Tensor  # (D,)
    ratio: Tensor  # (B, L, D)
    step: Tensor  # (B, L, D), before softplus
    dt: Tensor  # (B, L, D)
    a: Tensor  # (D, N)
    b: Tensor  # (B, L, D, N)
    c: Tensor  # (B, L, D, N)
    skip: Tensor  # (D,)
    gate: Tensor  # (B, L, D)
    norm: Tensor  # (B, L, D)
    before_projection: Tensor  # (B, L, D), by the recurrence
    output: Tensor  # (B, L, E)
    backwards: bool = False  # whether the scan runs from the last token to the first

    @cached_property
    def scan(self) -> Tensor:
        """Its matrices (B, D, L, L)."""
        if not self.backwards:
            return scan_matrices(self.dt, self.a, self.b, self.c)
        dt, b, c = (x.flip(1) for x in (self.dt, self.b, self.c))
        return scan_matrices(dt, self.a, b, c).flip(-1, -2)


def convolved(conv: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The matrices and the bias of a causal convolution, and what it makes of x (B, L, D)."""
    matrices = causal_taps(conv, x.shape[1])
    bias = torch.zeros(x.shape[-1]).double() if conv.bias is None else conv.bias.detach().double()
    return matrices, bias, torch.einsum("xdij,bjd->bid", matrices, x) + bias


def scanned(dt: Tensor, a: Tensor, b: Tensor, c: Tensor, v: Tensor) -> Tensor:
    """The recurrence, token by token, of values v (B, L, D)."""
    decay, written = (dt[..., None] * a).exp(), (dt * v)[..., None] * b
    states = recurrence(decay.flatten(2), written.flatten(2)[None], transposed=False)[0]
    return (states.view_as(written) * c).sum(-1)


@torch.no_grad()
def mamba1_parts(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> Parts:
    """The mixer's forward pass from its parameters in float64.

    Of transformers and mamba_ssm, for ``hidden`` (B, L, E) and a mask of 1 for tokens.
    """

    keep = keep_of(mask, hidden)
    x, z = linear(mixer.in_proj, hidden.double() * keep[..., None]).chunk(2, dim=-1)
    conv, conv_bias, u = convolved(mixer.conv1d, x)
    ratio = torch.sigmoid(u) if mixer.activation in ("silu", "swish") else mixer.act(u) / u
    v = keep[..., None] * ratio * u

    rank, state = mixer.dt_proj.weight.shape[1], mixer.A_log.shape[1]
    selected = linear(mixer.x_proj, v).split([rank, state, state], dim=-1)
    if type(mixer).__name__ == "FalconMambaMixer":
        norms = [(1.0, mixer.config.mixer_rms_eps)] * 3
    elif hasattr(mixer, "dt_layernorm"):
        each = (mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm)
        norms = [(norm.weight, norm.variance_epsilon) for norm in each]
    else:
        norms = []
    for i, (weight, eps) in enumerate(norms):
        mean = selected[i].pow(2).mean(-1, keepdim=True)
        selected = (*selected[:i], selected[i] / (mean + eps).sqrt() * weight, *selected[i + 1 :])
    t, b, c = selected
    b, c = (s[:, :, None].expand(-1, -1, x.shape[-1], -1) for s in (b, c))
    step, a, skip = linear(mixer.dt_proj, t), -mixer.A_log.double().exp(), mixer.D.double()
    dt, gate = F.softplus(step), F.silu(z)
    y = gate * (scanned(dt, a, b, c, v) + skip * v)
    select = step, dt, a, b, c, skip
    output = linear(mixer.out_proj, y)
    return Parts(x, keep, conv, conv_bias, ratio, *select, gate, torch.ones_like(y), y, output)


def scanned_backwards(parts: Parts) -> Parts:
    """The same, but for a scan that runs from the last token to the first."""
    u = torch.einsum("xdij,bjd->bid", parts.conv, parts.values) + parts.conv_bias
    v = parts.mask[..., None] * parts.ratio * u
    dt, b, c, flipped = (x.flip(1) for x in (parts.dt, parts.b, parts.c, v))
    y = parts.gate * (scanned(dt, parts.a, b, c, flipped).flip(1) + parts.skip * v)
    return replace(parts, before_projection=y, backwards=True)


def chosen(components: str | Collection[str]) -> set[str]:
    """A set of names, or a preset, from which names after ``-`` are removed."""
    if not isinstance(components, str):
        return set(components)
    preset, *removed = components.split("-")
    return PRESETS[preset] - set(removed)


@dataclass
class Formula:
    """A mixer at one input, in float64; a part that is None is the identity."""

    values: Tensor  # (B, L, H, P)
    core: Tensor  # (B, H, L, L)
    keep: Tensor  # (B, L) of 0 and 1; silences values around the convolution
    conv: Tensor | None = None  # (1, C, L, L)
    conv_bias: Tensor | float = 0.0  # (H, P)
    ratio: Tensor | None = None  # (B, L, H, P)
    norm: Callable[[Tensor], Tensor] = torch.ones_like  # the core's output to its factors
    gate: Tensor | None = None  # (B, L, H, P)
    norm_bias: Tensor | None = None  # (H, P); a norm with a bias also subtracts the head's mean
    skip: Tensor | None = None  # (H,), of what passes the core by
    activated: bool = False  # whether SiLU stands between the core and the norm
    past: Tensor | None = None  # (B, L, H), of a token's own value that passes core and norm by

    def __post_init__(self) -> None:
        self.keep = self.keep.double()
        if self.conv is None:
            self.conv = torch.eye(self.values.shape[1], dtype=torch.float64)[None, None]
        one = torch.ones_like(self.values)
        self.ratio = one if self.ratio is None else self.ratio
        self.gate = one if self.gate is None else self.gate.reshape(one.shape)

    def core_output(self) -> Tensor:
        keep = self.keep[..., None, None]
        x = (times(self.conv, self.values * keep) + self.conv_bias) * self.ratio * keep
        out = torch.einsum("bhij,bjhp->bihp", self.core, x)
        return out if self.skip is None else out + self.skip[:, None] * x

    def alpha(self, components: str | Collection[str]) -> Tensor:
        """The implicit attention matrices (B, C, L, L) with some components only.

        Without scan and skip, values pass through unchanged; the padding mask is always there. Of
        centering, each channel has its own share.
        """
        kept, shape = chosen(components), self.values.shape
        eye = torch.eye(shape[1], dtype=torch.float64)
        keep = diagonal_matrices(self.keep[:, :, None, None], shape)
        out = self.conv @ keep if "conv" in kept else keep
        if "activation" in kept:
            out = diagonal_matrices(self.ratio, shape) @ out
        core = self.core if "scan" in kept else torch.zeros_like(self.core)
        if self.skip is not None and "skip" in kept:
            core = core + self.skip[:, None, None] * eye
        elif "scan" not in kept:
            core = core + eye
        out = core.repeat_interleave(shape[3], 1) @ keep @ out
        o = self.core_output()
        if self.activated:
            if "activation" in kept:
                out = diagonal_matrices(torch.sigmoid(o), shape) @ out
            o = F.silu(o)
        if "norm" in kept:
            share = 1.0 if self.norm_bias is None else 1 - 1 / shape[3]
            out = diagonal_matrices(share * self.norm(o), shape) @ out
        if self.past is not None and "scan" in kept:
            out = out + diagonal_matrices((self.past * self.keep[..., None])[..., None], shape)
        return diagonal_matrices(self.gate, shape) @ out if "gate" in kept else out


def alpha(parts: Parts, components: str | Collection[str]) -> Tensor:
    """The matrices (B, D, L, L) of a Mamba or a Mamba-2, as :meth:`Formula.alpha` has them."""
    values, ratio, gate, norm = (
        x[..., None] for x in (parts.values, parts.ratio, parts.gate, parts.norm)
    )
    formula = Formula(values, parts.scan, parts.mask, parts.conv, ratio=ratio, gate=gate)
    formula.norm, formula.skip = (lambda _: norm), parts.skip
    return formula.alpha(components)
