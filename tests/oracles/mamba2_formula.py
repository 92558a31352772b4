"""What a Mamba-2 mixer computes, in float64, one token after the other.

Written from the papers and the modules' code; nothing here calls the package.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from helpers.versions import VERSION_4
from torch import Tensor
from zoo.mamba2 import EPS, INFINITY

from oracles import PRESETS, conv_matrices, diagonal_matrices


@dataclass
class Form:
    """What differs between the models."""

    groups: int
    state: int
    dt_limit: tuple[float, float] = (0.0, INFINITY)
    norm_groups: int = 0  # no norm
    norm_eps: float = EPS
    norm_first: bool = False
    before_in_proj: float = 1.0
    after_in_proj: Tensor | float = 1.0


def form_of(mixer: Any, config: Any) -> Form:
    """The form of a mixer of transformers, from the model's configuration."""
    form = _newest_form(mixer, config)
    if VERSION_4 and type(mixer).__name__ not in ("Zamba2MambaMixer", "FalconH1Mixer"):
        form.norm_groups = 1
    return form


def _newest_form(mixer: Any, config: Any) -> Form:
    kind = type(mixer).__name__
    if kind == "Mamba2Mixer":
        eps, limit = config.layer_norm_epsilon, config.time_step_limit
        return Form(config.n_groups, config.state_size, limit, config.n_groups, eps)
    if kind == "Zamba2MambaMixer":
        limit = config.time_step_min, INFINITY
        return Form(config.mamba_ngroups, config.mamba_d_state, limit, config.mamba_ngroups, EPS)
    if kind == "NemotronHMamba2Mixer":
        eps, limit = config.layer_norm_epsilon, (config.time_step_min, INFINITY)
        return Form(config.n_groups, config.ssm_state_size, limit, config.n_groups, eps)
    groups, state = config.mamba_n_groups, config.mamba_d_state
    limit = getattr(config, "time_step_limit", (0.0, INFINITY))
    form = Form(groups, state, limit, groups, config.rms_norm_eps)
    if kind == "FalconH1Mixer":
        channels = config.mamba_d_ssm
        sizes = [channels, channels, groups * state, groups * state, config.mamba_n_heads]
        multipliers = torch.tensor(config.ssm_multipliers).double()
        form.after_in_proj = multipliers.repeat_interleave(torch.tensor(sizes))
        form.before_in_proj = config.ssm_in_multiplier
        form.norm_first = config.mamba_norm_before_gate
        if not config.mamba_rms_norm:
            form.norm_groups = 0
    return form


@dataclass
class Parts:
    """Everything that is frozen at one input, in float64; D = H P channels."""

    values: Tensor  # (B, L, D)
    mask: Tensor  # (B, L) of 0 and 1
    conv: Tensor  # (1, D, L, L)
    ratio: Tensor  # (B, L, D)
    scan: Tensor  # (B, D, L, L)
    skip: Tensor  # (D,)
    gate: Tensor  # (B, L, D)
    norm: Tensor  # (B, L, D)
    before_projection: Tensor  # (B, L, D), by the recurrence
    output: Tensor  # (B, L, E)


@torch.no_grad()
def mamba2_parts(
    mixer: Any,
    hidden: Tensor,
    form: Form,
    mask: Tensor | None = None,
    initial: Tensor | None = None,
) -> Parts:
    """The mixer's forward pass from its parameters, step by step in float64."""
    hidden = hidden.detach().double()
    batch, tokens, _ = hidden.shape
    keep = torch.ones(batch, tokens).double() if mask is None else mask.double()
    heads = len(mixer.A_log)
    projected = F.linear(hidden * keep[..., None] * form.before_in_proj, *_weights(mixer.in_proj))
    projected = projected * form.after_in_proj
    shared = form.groups * form.state
    taps = mixer.conv1d.weight.double()[:, 0]
    width = len(taps) - 2 * shared
    beside = (projected.shape[-1] - 2 * width - 2 * shared - heads) // 2
    z0, x0, z, mixed, dt = projected.split([beside, beside, width, len(taps), heads], -1)

    lags = [taps.shape[1] - 1 - k for k in range(taps.shape[1])]
    conv = conv_matrices(taps[:, None], lags, (1, tokens, len(taps), 1))
    u = torch.einsum("xdij,bjd->bid", conv, mixed)
    if mixer.conv1d.bias is not None:
        u = u + mixer.conv1d.bias.double()
    act = mixer.act if hasattr(mixer, "act") else F.silu
    x, b, c = (act(u) * keep[..., None]).split([width, shared, shared], -1)
    ratio = (act(u) / u)[..., :width]
    dt = F.softplus(dt + mixer.dt_bias.double()).clamp(*form.dt_limit)
    a = -mixer.A_log.double().exp()
    per_head, in_group = width // heads, heads // form.groups
    skip = mixer.D.double()
    skip = skip if len(skip) == width else skip.repeat_interleave(per_head)
    gate = z / (1 + torch.exp(-z))

    scan = torch.zeros(batch, width, tokens, tokens).double()
    s = torch.zeros(batch, tokens, width).double()
    for h in range(heads):
        own = slice(h * per_head, (h + 1) * per_head)
        group = slice(h // in_group * form.state, (h // in_group + 1) * form.state)
        state = torch.zeros(batch, per_head, form.state).double()
        if initial is not None:
            state = state + initial[h].double()
        for i in range(tokens):
            step = dt[:, i, h]
            state = torch.exp(a[h] * step)[:, None, None] * state
            state = state + (step[:, None] * x[:, i, own])[..., None] * b[:, i, None, group]
            s[:, i, own] = (state * c[:, i, None, group]).sum(-1)
            for j in range(i + 1):
                decay = torch.exp(a[h] * dt[:, j + 1 : i + 1, h].sum(1))
                entry = (c[:, i, group] * b[:, j, group]).sum(-1) * decay * dt[:, j, h]
                scan[:, own, i, j] = entry[:, None]
    s = s + skip * x
    norm = torch.ones_like(s)
    if form.norm_groups:
        entering = s if form.norm_first else s * gate
        size = width // form.norm_groups
        for g in range(form.norm_groups):
            own = slice(g * size, (g + 1) * size)
            mean = entering[..., own].pow(2).mean(-1, keepdim=True)
            norm[..., own] = mixer.norm.weight.double()[own] / (mean + form.norm_eps).sqrt()
    y = s * gate * norm
    output = torch.cat([z0 / (1 + torch.exp(-z0)) * x0, y], -1)
    output = F.linear(output, *_weights(mixer.out_proj))
    values = mixed[..., :width]
    return Parts(values, keep, conv[:, :width], ratio, scan, skip, gate, norm, y, output)


def alpha(parts: Parts, components: str | Collection[str]) -> Tensor:
    """The implicit attention matrices (B, D, L, L) with some components only."""
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
            core = core + parts.scan
        if "skip" in components:
            core = core + parts.skip[:, None, None] * eye
    mask = diagonal_matrices(parts.mask[:, :, None, None], shape)
    out = core @ mask
    if "activation" in components:
        out = out @ diagonal_matrices(parts.ratio[..., None], shape)
    if "conv" in components:
        out = out @ parts.conv
    out = out @ mask
    for name, weight in (("gate", parts.gate), ("norm", parts.norm)):
        if name in components:
            out = diagonal_matrices(weight[..., None], shape) @ out
    return out


def _weights(projection: Any) -> tuple[Tensor, Tensor | None]:
    bias = projection.bias
    return projection.weight.double(), None if bias is None else bias.double()
