"""Caduceus: captum_ssm's BiMamba, and StrandsMixer around it.

x, z = in_proj(h)           y = SiLU(z) (f + P r P) x           output = out_proj(y)

with f and r as in vim.py, of which r has weights of its own, and P the flip of tokens.  On two
strands a and b, b being read as its reverse complement R b (tokens and channels flipped), the
output is [m(a), R m(R b)]: a mixer of twice the heads.  From the first token to the last read f of
strand a and r of strand b; from the last to the first read r of a and f of b.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import Chain, Diagonal, Shape, ShortConv
from .base import Call, LinearMixer
from .parts.common import as_heads, run, working_dtype
from .vim import Direction, both_ways, direction


def bi_mamba(module: Any, call: Call) -> LinearMixer:
    """captum_ssm.models.dna's BiMamba."""
    hidden = call.hidden_states
    x, z = _projected(module, hidden.to(working_dtype(module, hidden)))
    values = as_heads(x)
    both = both_ways(
        direction(module.mamba_fwd, values), direction(module.mamba_rev, values.flip(1))
    )
    operator = Chain(Diagonal(as_heads(F.silu(z)), Shape(*values.shape), "gate"), both)
    return LinearMixer(values, operator, lambda y: _out(module, y))


def both_strands(module: Any, call: Call) -> LinearMixer:
    """captum_ssm.models.dna's StrandsMixer."""
    hidden = call.hidden_states
    hidden = hidden.to(working_dtype(module, hidden))
    mixer = module.submodule
    width = hidden.shape[-1] // 2
    one, other = hidden[..., :width], hidden[..., width:].flip(1, 2)
    (x_a, z_a), (x_b, z_b) = _projected(mixer, one), _projected(mixer, other)
    a, b = as_heads(x_a), as_heads(x_b)  # each in the order of its own strand
    fwd, rev = mixer.mamba_fwd, mixer.mamba_rev
    both = both_ways(
        _joined(direction(fwd, a), direction(rev, b.flip(1))),
        _joined(direction(rev, a.flip(1)), direction(fwd, b)),
    )
    values = torch.cat([a, b.flip(1)], 2)  # (B, L, 2 D, 1)
    gate = torch.cat([as_heads(F.silu(z_a)), as_heads(F.silu(z_b)).flip(1)], 2)
    operator = Chain(Diagonal(gate, Shape(*values.shape), "gate"), both)

    def project(y: Tensor) -> Tensor:
        one, other = y.chunk(2, 2)
        return torch.cat([_out(mixer, one), _out(mixer, other).flip(-1)], -1)

    return LinearMixer(values, operator, project)


def _projected(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """x and z, (B, L, D); both directions share the projection."""
    x, z = run(module.mamba_fwd.in_proj, hidden).chunk(2, dim=-1)
    return x, z


def _out(module: Any, y: Tensor) -> Tensor:
    """The output projection of the sum of both directions: its bias counts twice."""
    out_proj = module.mamba_fwd.out_proj
    out = run(out_proj, y.flatten(2))
    return out if out_proj.bias is None else out + out_proj.bias.to(out)


def _joined(one: Direction, other: Direction) -> Direction:
    """Join two directions that read in the same order to one of twice the heads."""

    def cat(name: str, dim: int) -> Tensor:
        return torch.cat([getattr(one, name), getattr(other, name)], dim)

    def groups(name: str) -> Tensor:
        return torch.stack([getattr(one, name), getattr(other, name)], 2)  # (B, L, 2, N)

    first, second = one.conv, other.conv
    bias = None
    if first.bias is not None and second.bias is not None:
        bias = torch.cat([first.bias, second.bias], 2)
    shape = first.shape._replace(heads=2 * first.shape.heads)
    conv = ShortConv(torch.cat([first.weight, second.weight]), shape, bias)
    return Direction(
        cat("dt", 2), cat("a", 0), groups("b"), groups("c"), cat("skip", 2), cat("ratio", 2), conv
    )
