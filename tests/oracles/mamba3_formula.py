"""What a Mamba-3 mixer computes, in float64, entry by entry.

Written from the module's code and its kernel's; nothing here calls the package.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from oracles import Formula, linear


@torch.no_grad()
def mamba3_parts(mixer: Any, hidden: Tensor) -> Formula:
    """The mixer's parts from its parameters, entry by entry in float64."""
    hidden, heads, state = hidden.detach().double(), len(mixer.dt_bias), mixer.d_state
    batch, tokens, _ = hidden.shape
    groups, width = mixer.num_bc_heads, mixer.d_inner
    projected = linear(mixer.in_proj, hidden)
    angles = projected.shape[-1] - 2 * width - 2 * groups * state - 3 * heads
    sizes = [width, width, groups * state, groups * state, heads, heads, heads, angles]
    z, x, b, c, step, decay, end, rate = projected.split(sizes, -1)
    values = x.unflatten(-1, (heads, -1))
    dt = torch.log1p(torch.exp(step + mixer.dt_bias.double()))
    a = -torch.log1p(torch.exp(decay)).clamp_min(mixer.A_floor)
    end = 1 / (1 + torch.exp(-end))

    def vectors(x: Tensor, norm: Any, bias: Tensor, h: int) -> list[Tensor]:
        """Each token's query or key of one head, turned: L tensors (B, N)."""
        group = h // (heads // groups)
        x = x[..., group * state : (group + 1) * state]
        rms = (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
        x = x / rms * norm.weight.double() + bias[h, 0].double()
        turned = x.clone()
        for t in range(tokens):
            elapsed = (torch.tanh(rate[:, : t + 1]) * dt[:, : t + 1, h, None]).sum(1)
            angle = elapsed * torch.pi
            for m in range(angles):
                one, two = x[:, t, 2 * m], x[:, t, 2 * m + 1]
                cos, sin = angle[:, m].cos(), angle[:, m].sin()
                turned[:, t, 2 * m] = one * cos - two * sin
                turned[:, t, 2 * m + 1] = one * sin + two * cos
        return list(turned.unbind(1))

    scan = torch.zeros(batch, heads, tokens, tokens, dtype=torch.float64)
    for h in range(heads):
        q = vectors(c, mixer.C_norm, mixer.C_bias, h)
        k = vectors(b, mixer.B_norm, mixer.B_bias, h)
        for i in range(tokens):
            for j in range(i + 1):
                scale = end[:, j, h] * dt[:, j, h]
                if j < i:
                    scale = scale + (1 - end[:, j + 1, h]) * dt[:, j + 1, h]
                kept = torch.exp((a * dt)[:, j + 1 : i + 1, h].sum(1))
                scan[:, h, i, j] = (q[i] * k[j]).sum(-1) * kept * scale

    skip = mixer.D.double()
    gate = (z / (1 + torch.exp(-z))).view_as(values)
    mixed = torch.einsum("bhij,bjhp->bihp", scan, values) + skip[:, None] * values
    norm = torch.ones_like(mixed)
    if mixer.is_outproj_norm:
        rms = (mixed.pow(2).mean(-1, keepdim=True) + mixer.norm.eps).sqrt()
        norm = mixer.norm.weight.double().view(heads, -1) / rms
    keep = torch.ones(batch, tokens)
    return Formula(values, scan, keep, norm=lambda _: norm, gate=gate, skip=skip)


def matrices(mixer: Any, hidden: Tensor, components: Collection[str]) -> Tensor:
    """The implicit attention matrices (B, D, L, L) with some components only."""
    return mamba3_parts(mixer, hidden).alpha(components)
