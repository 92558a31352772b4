"""The hidden-attention paper's eqs. 16-20 as float64 loops over tokens, for real mixers.

S_Delta, S_B and S_C come from each mixer's own projections; nothing here calls the package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Selection:
    """What one scan selects at every token, whatever the order in which it reads them."""

    s_delta: Tensor  # (B, L, D)
    s_b: Tensor  # (B, L, D, N)
    s_c: Tensor  # (B, L, D, N)
    a: Tensor  # (D, N)
    mask: Tensor  # (B, L) of 0 and 1
    backward: bool = False
    weight: float = 1.0  # the share with which the mixer takes this direction
    limits: tuple[float, float] = (0.0, float("inf"))

    def between(self, i: int, j: int) -> range:
        """The tokens read after j, up to and with i."""
        return range(i, j) if self.backward else range(j + 1, i + 1)

    def sees(self, i: int, j: int) -> bool:
        return i <= j if self.backward else j <= i


@dataclass
class Wanted:
    """States of all scans, one after the other."""

    query: Tensor  # (B, L, C, N)
    key: Tensor  # (B, L, C, N)
    history: Tensor  # (B, C, N, L, L)
    states: Tensor  # (B, C, N, L, L)


def by_loops(scans: Sequence[Selection], channels: Sequence[int], simplified: bool) -> Wanted:
    """Eqs. 16 and 17, or with softplus replaced by relu eqs. 18-20, scan by scan."""
    parts = [_by_loops(scan, list(channels), simplified) for scan in scans]
    return Wanted(
        torch.cat([p.query for p in parts], -1),
        torch.cat([p.key for p in parts], -1),
        torch.cat([p.history for p in parts], 2),
        torch.cat([p.states for p in parts], 2),
    )


def _by_loops(scan: Selection, channels: list[int], simplified: bool) -> Wanted:
    s, b, c = scan.s_delta[:, :, channels], scan.s_b[:, :, channels], scan.s_c[:, :, channels]
    a = scan.a[channels]  # (C, N)
    batch, tokens = s.shape[:2]
    dt = F.relu(s) if simplified else F.softplus(s).clamp(*scan.limits)
    query = scan.weight * c
    key = scan.mask[:, :, None, None] * dt[..., None] * b
    history = torch.zeros(batch, *a.shape, tokens, tokens).double()
    states = torch.zeros_like(history)
    for i in range(tokens):
        for j in range(tokens):
            if not scan.sees(i, j):
                continue
            elapsed = torch.zeros(batch, len(channels)).double()
            decays = torch.ones(batch, *a.shape).double()
            for k in scan.between(i, j):
                if simplified:  # eq. 18: the sum over positive S_Delta
                    elapsed += torch.where(s[:, k] > 0, s[:, k], torch.zeros_like(s[:, k]))
                else:
                    elapsed += dt[:, k]
                decays *= torch.exp(dt[:, k, :, None] * a)  # eq. 16: A-bar of token k
            history[..., i, j] = torch.exp(elapsed[..., None] * a)
            states[..., i, j] = query[:, i] * decays * key[:, j]
    return Wanted(query, key, history, states)


# --- what real mixers select --------------------------------------------------------------------


def _double(mixer: Any, hidden: Tensor, mask: Tensor | None) -> tuple[Any, Tensor, Tensor]:
    hidden = hidden.detach().double()
    keep = torch.ones(hidden.shape[:2]) if mask is None else mask
    return copy.deepcopy(mixer).double(), hidden, keep.double()


def _conv(conv: Any, x: Tensor) -> Tensor:
    return conv(x.mT)[..., : x.shape[1]].mT


def _rms(x: Tensor, norm: Any) -> Tensor:
    """An RMSNorm, which the modules themselves compute in float32."""
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    normed = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return normed * dict(norm.named_parameters()).get("weight", 1)


def _shared(x: Tensor, channels: int) -> Tensor:
    """(B, L, N) for every one of the channels, (B, L, D, N)."""
    return x[:, :, None].expand(-1, -1, channels, -1)


@torch.no_grad()
def mamba(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> list[Selection]:
    """MambaMixer, FalconMambaMixer, JambaMambaMixer, and mamba_ssm's Mamba."""
    mixer, hidden, keep = _double(mixer, hidden, mask)
    x = mixer.in_proj(hidden * keep[..., None]).chunk(2, -1)[0]
    v = F.silu(_conv(mixer.conv1d, x)) * keep[..., None]
    rank, state = mixer.dt_proj.weight.shape[1], mixer.A_log.shape[1]
    t, b, c = mixer.x_proj(v).split([rank, state, state], -1)
    if hasattr(mixer, "dt_layernorm"):
        norms = mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm
        t, b, c = (_rms(x, norm) for x, norm in zip((t, b, c), norms, strict=True))
    elif hasattr(mixer, "rms_eps"):  # falcon_mamba of version 4
        t, b, c = (s / (s.pow(2).mean(-1, keepdim=True) + mixer.rms_eps).sqrt() for s in (t, b, c))
    b, c = _shared(b, x.shape[-1]), _shared(c, x.shape[-1])
    return [Selection(mixer.dt_proj(t), b, c, -mixer.A_log.exp(), keep)]


@torch.no_grad()
def zamba(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> list[Selection]:
    """ZambaMambaMixer, head by head."""
    mixer, hidden, keep = _double(mixer, hidden, mask)
    x = mixer.in_proj(hidden * keep[..., None])[..., 0::2]
    v = F.silu(_conv(mixer.conv1d, x)) * keep[..., None]
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    found = []
    for head, mine in enumerate(v.chunk(mixer.n_mamba_heads, -1)):
        t, b, c = F.linear(mine, mixer.x_proj_weight[head]).split(sizes, -1)
        s = F.linear(t, mixer.dt_proj_weight[head], mixer.dt_proj_bias[head])
        found.append((s, _shared(b, s.shape[-1]), _shared(c, s.shape[-1])))
    s, b, c = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    return [Selection(s, b, c, -mixer.A_log.exp().flatten(0, 1), keep)]


@torch.no_grad()
def mamba2(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> list[Selection]:
    """Mamba2Mixer and its kin in transformers, and mamba_ssm's Mamba2: heads of P channels."""
    mixer, hidden, keep = _double(mixer, hidden, mask)
    heads, groups = len(mixer.A_log), getattr(mixer, "n_groups", getattr(mixer, "ngroups", None))
    projected = mixer.in_proj(hidden * keep[..., None])
    mixed = mixer.conv1d.in_channels
    width = projected.shape[-1] - mixed - heads
    _, stream, s = projected.split([width, mixed, heads], -1)
    v = F.silu(_conv(mixer.conv1d, stream)) * keep[..., None]
    shared = (mixed - width) // 2
    _, b, c = v.split([width, shared, shared], -1)
    s, per_head = s + mixer.dt_bias, width // heads
    b, c = (x.unflatten(-1, (groups, -1)).repeat_interleave(width // groups, 2) for x in (b, c))
    a = -mixer.A_log.exp().repeat_interleave(per_head)[:, None].expand(-1, b.shape[-1])
    limits = getattr(mixer, "time_step_limit", getattr(mixer, "dt_limit", None))
    return [Selection(s.repeat_interleave(per_head, -1), b, c, a, keep, limits=limits)]


@torch.no_grad()
def vim(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> list[Selection]:
    """captum_ssm's VimMixer: the forward direction, then the backward one."""
    mixer, hidden, keep = _double(mixer, hidden, mask)
    x = mixer.in_proj(hidden).chunk(2, -1)[0]
    kind = mixer.bimamba_type
    weight = 0.5 if kind == "v2" and mixer.if_divide_out else 1.0

    def direction(end: str, a_log: str, backward: bool, flips: bool) -> Selection:
        v = F.silu(_conv(getattr(mixer, f"conv1d{end}"), x.flip(1) if flips else x))
        widen, state = getattr(mixer, f"dt_proj{end}"), mixer.A_log.shape[1]
        selected = getattr(mixer, f"x_proj{end}")(v.flip(1) if flips else v)  # token by token
        t, b, c = selected.split([widen.weight.shape[1], state, state], -1)
        b, c = _shared(b, x.shape[-1]), _shared(c, x.shape[-1])
        return Selection(widen(t), b, c, -getattr(mixer, a_log).exp(), keep, backward, weight)

    ahead = direction("", "A_log", backward=False, flips=False)
    if kind == "v1":
        return [ahead, direction("", "A_b_log", backward=True, flips=False)]
    if kind == "v2":
        return [ahead, direction("_b", "A_b_log", backward=True, flips=True)]
    return [ahead]


#: A mixer, its input and a mask to what its scans select.
Select = Callable[[Any, Tensor, Tensor | None], list[Selection]]
