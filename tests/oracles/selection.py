"""The hidden-attention paper's eqs. 16-20 as float64 loops over tokens, for real mixers.

S_Delta, S_B and S_C come from each mixer's own projections; nothing here calls the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oracles import Parts, mamba1_parts
from oracles import vim as vim_oracle
from oracles.mamba2_formula import Form, mamba2_parts


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
    limits: tuple[float, float] = (0.0, math.inf)

    def between(self, i: int, j: int) -> range:
        """The tokens read after j, up to and with i."""
        return range(i, j) if self.backward else range(j + 1, i + 1)

    def sees(self, i: int, j: int) -> bool:
        return i <= j if self.backward else j <= i


#: A mixer, its input and a mask to what its scans select.
Select = Callable[[Any, Tensor, Tensor | None], list[Selection]]


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


def of_parts(
    parts: Sequence[Parts], limits: tuple[float, float] = (0.0, math.inf)
) -> list[Selection]:
    """What one scan selects, of which each part has some channels."""
    s, b, c = (torch.cat([getattr(p, name) for p in parts], 2) for name in ("step", "b", "c"))
    a = torch.cat([p.a for p in parts])
    return [Selection(s, b, c, a, parts[0].mask, limits=limits)]


def mamba(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> list[Selection]:
    """MambaMixer, FalconMambaMixer, JambaMambaMixer, and mamba_ssm's Mamba."""
    return of_parts([mamba1_parts(mixer, hidden, mask)])


def zamba(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> list[Selection]:
    """ZambaMambaMixer, head by head."""
    return of_parts([mamba1_parts(head, hidden, mask) for head in zamba_heads(mixer)])


def zamba_heads(mixer: Any) -> Iterator[Any]:
    """The heads of Zamba's mixer, whose input projection alternates between values and gates."""
    size = mixer.intermediate_size // mixer.n_mamba_heads

    def part(weight: Tensor, bias: Tensor | None = None, at: Any = slice(None)) -> SimpleNamespace:
        return SimpleNamespace(weight=weight[at], bias=None if bias is None else bias[at])

    for g in range(mixer.n_mamba_heads):
        mine = torch.arange(g * size, (g + 1) * size)
        rows = torch.cat([2 * mine, 2 * mine + 1])
        yield SimpleNamespace(
            in_proj=part(mixer.in_proj.weight, mixer.in_proj.bias, rows),
            conv1d=part(mixer.conv1d.weight, mixer.conv1d.bias, mine),
            x_proj=part(mixer.x_proj_weight[g]),
            dt_proj=part(mixer.dt_proj_weight[g], mixer.dt_proj_bias[g]),
            out_proj=part(mixer.out_proj.weight[:, mine]),
            **{"A_log": mixer.A_log[g], "D": mixer.D[g], "activation": "silu"},
        )


def mamba2(form: Form) -> Select:
    """Mamba2Mixer and its kin in transformers, of that form: heads of P channels."""
    return lambda mixer, hidden, mask: of_parts(
        [mamba2_parts(mixer, hidden, form, mask)], form.dt_limit
    )


def vim(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> list[Selection]:
    """captum_ssm's VimMixer: the forward direction, then the backward one."""
    kind, w = mixer.bimamba_type, vim_oracle.double_weights(mixer)
    scans = of_parts([vim_oracle.parts(w, hidden)])
    if kind == "v1":
        scans += of_parts([vim_oracle.parts(w, hidden, "", "A_b_log")])
    if kind == "v2":
        (back,) = of_parts([vim_oracle.parts(w, hidden.flip(1), "_b", "A_b_log")])
        own = {name: getattr(back, name).flip(1) for name in ("s_delta", "s_b", "s_c")}
        scans.append(replace(back, **own))
    weight = 0.5 if kind == "v2" and mixer.if_divide_out else 1.0
    return [replace(x, backward=i > 0, weight=weight) for i, x in enumerate(scans)]
