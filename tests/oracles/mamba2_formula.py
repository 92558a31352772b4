"""What a Mamba-2 mixer computes, in float64.

Written from the papers and the modules' code; nothing here calls the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from zoo.mamba2 import EPS, INFINITY

from oracles import Parts, convolved, keep_of, linear, scanned


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


@torch.no_grad()
def mamba2_parts(
    mixer: Any, hidden: Tensor, form: Form, mask: Tensor | None = None,
    initial: Tensor | None = None,
) -> Parts:  # fmt: skip
    """The mixer's forward pass from its parameters in float64, of D = H P channels."""
    keep, heads = keep_of(mask, hidden), len(mixer.A_log)
    entering = hidden.double() * keep[..., None] * form.before_in_proj
    projected = linear(mixer.in_proj, entering) * form.after_in_proj
    mixed_width, shared = len(mixer.conv1d.weight), form.groups * form.state
    width = mixed_width - 2 * shared
    beside = (projected.shape[-1] - 2 * width - 2 * shared - heads) // 2
    z0, x0, z, mixed, dt = projected.split([beside, beside, width, mixed_width, heads], -1)

    conv, conv_bias, u = convolved(mixer.conv1d, mixed)
    act = mixer.act if hasattr(mixer, "act") else F.silu
    x, b, c = (act(u) * keep[..., None]).split([width, shared, shared], -1)
    in_group, per_head = width // form.groups, width // heads
    b, c = (s.unflatten(-1, (form.groups, -1)).repeat_interleave(in_group, 2) for s in (b, c))
    step = (dt + mixer.dt_bias.double()).repeat_interleave(per_head, -1)
    dt = F.softplus(step).clamp(*form.dt_limit)
    a = -mixer.A_log.double().exp().repeat_interleave(per_head)[:, None].expand(-1, form.state)
    skip = mixer.D.double()
    skip = skip if len(skip) == width else skip.repeat_interleave(per_head)
    s = scanned(dt, a, b, c, x) + skip * x
    if initial is not None:
        faded = (dt[..., None] * a).cumsum(1).exp()
        s = s + (c * faded * initial.double().flatten(0, 1)).sum(-1)

    gate, norm = F.silu(z), torch.ones_like(s)
    if form.norm_groups:
        grouped = (s if form.norm_first else s * gate).unflatten(-1, (form.norm_groups, -1))
        mean = grouped.pow(2).mean(-1).repeat_interleave(width // form.norm_groups, -1)
        norm = mixer.norm.weight.double() / (mean + form.norm_eps).sqrt()
    y = s * gate * norm
    output = linear(mixer.out_proj, torch.cat([F.silu(z0) * x0, y], -1))
    front = mixed[..., :width], keep, conv[:, :width], conv_bias[:width], (act(u) / u)[..., :width]
    return Parts(*front, step, dt, a, b, c, skip, gate, norm, y, output)
