"""RWKV-7 of flash-linear-attention: the operator is the layer, and values go on between layers."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import oracles
import pytest
import torch
from helpers import fla_checks
from helpers.fla_checks import EPS, Formula, conv_parts, record_one
from oracles import relative_error
from torch import Tensor, nn
from zoo.fla_cpu import FLA

from captum_ssm import LatimFlow
from captum_ssm.attr.call.components import parse_components

pytestmark = pytest.mark.slow

WIDTH = 24
RANKS = {
    "decay_low_rank_dim": 4,
    "gate_low_rank_dim": 5,
    "a_low_rank_dim": 3,
    "v_low_rank_dim": 2,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"head_dim": 8},
    "fused norms": {"head_dim": 8, "fuse_norm": True},
    "wide values": {"head_dim": None, "num_heads": 2, "value_dim": 48},
    "one head": {"head_dim": WIDTH},
}


def make(fla: FLA, case: str, layer_idx: int = 0) -> Any:
    options = {
        "hidden_size": WIDTH,
        "norm_eps": EPS,
        "num_hidden_layers": 2,
        "layer_idx": layer_idx,
        **RANKS,
    }
    return fla.layer("RWKV7Attention", **options | OPTIONS[case])


@dataclass
class Read(Formula):
    """What a token adds of its own past the norm, (B, L, H)."""

    own: Tensor = field(kw_only=True)

    def before_projection(self) -> Tensor:
        past = self.own[..., None] * self.values * self.keep[..., None, None]
        return super().before_projection() + self.gate * past

    def alpha(self, components: str | Collection[str]) -> Tensor:
        found, chosen = super().alpha(components), parse_components(components)
        if "scan" not in chosen:
            return found
        past = self.own[..., None] * self.keep[..., None, None]
        past = past * (self.gate if "gate" in chosen else 1)
        return found + oracles.diagonal_matrices(past.expand(self.values.shape), self.values.shape)


def mixed(layer: Any, hidden: Tensor, v_first: Tensor | None) -> dict[str, Tensor]:
    """r, w, k, v, a, g by name, each (B, L, H, .), and what is erased by, token after token."""
    before = torch.zeros_like(hidden)
    before[:, 1:] = hidden[:, :-1]

    def enters(name: str) -> Tensor:
        return hidden + (before - hidden) * getattr(layer, f"x_{name}")

    r, k, v = (getattr(layer, f"{n}_proj")(enters(n)) for n in "rkv")
    w, a, g = (getattr(layer, f"{n}_lora")(enters(n)) for n in "wag")
    if v_first is not None:
        share = torch.sigmoid(layer.v_lora(enters("v")).detach())
        v = (1 - share) * v + share * v_first
    named = {"r": r, "w": -math.exp(-0.5) * w.sigmoid(), "v": v}
    named |= {"a": a.sigmoid(), "g": g, "kk": k * layer.k_k}
    named["k"] = k * (1 + (named["a"] - 1) * layer.k_a)
    named = {n: x.unflatten(-1, (layer.num_heads, -1)) for n, x in named.items()}
    return named


def matrices(named: dict[str, Tensor]) -> Tensor:
    """What the states hold of each token, as it is read: (B, H, L, L)."""
    r, w, k, a = (named[n] for n in "rwka")
    e = named["kk"] / named["kk"].norm(dim=-1, keepdim=True).clamp_min(1e-12)
    batch, tokens, heads, width = r.shape
    state = torch.zeros(batch, heads, width, tokens, dtype=r.dtype)
    out = torch.zeros(batch, heads, tokens, tokens, dtype=r.dtype)
    for t in range(tokens):
        found = (e[:, t, :, :, None] * state).sum(2, keepdim=True)
        state = w[:, t].exp()[..., None] * state - (a * e)[:, t, :, :, None] * found
        state[..., t] += k[:, t]
        out[:, :, t] = (r[:, t, :, :, None] * state).sum(2)
    return out


@torch.no_grad()
def formula(layer: Any, hidden: Tensor, keep: Tensor, v_first: Tensor | None = None) -> Read:
    keep, tokens, heads = keep.double(), hidden.shape[1], layer.num_heads
    named = mixed(layer, hidden * keep[..., None], v_first)
    values, norm = named["v"], layer.g_norm
    conv, bias = conv_parts(None, heads, values.shape[-1], tokens)

    def factors(o: Tensor) -> Tensor:
        centered = o - o.mean(-1, keepdim=True)
        size = (centered.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
        return norm.weight.detach().view(o.shape[2:]) / size

    return Read(
        values, conv, bias, torch.ones_like(values), matrices(named), factors, named["g"], keep,
        norm.bias.detach().view(values.shape[2:]),
        own=(named["r"] * named["k"] * layer.r_k).sum(-1),
    )  # fmt: skip


@pytest.mark.parametrize("case", ["plain", "wide values", "one head"])
def test_contract(fla: FLA, case: str) -> None:
    fla_checks.holds(make(fla, case), WIDTH, formula, compacted=False)


def test_a_later_layer_takes_from_the_first_ones_values(fla: FLA) -> None:
    layer = make(fla, "plain", layer_idx=1).double()
    hidden, first = torch.randn(2, 2, 9, WIDTH, dtype=torch.float64)
    linear = record_one(layer, hidden, v_first=first).linear
    wanted = formula(layer, hidden, torch.ones(2, 9), first)
    found = linear.operator.affine(linear.values)
    assert relative_error(linear.values, wanted.values) <= 1e-12
    assert relative_error(found, wanted.before_projection()) <= 1e-10


class Layers(nn.Module):
    """Layers one after the other, and nothing else."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        first = None
        for layer in self.layers:
            x, _, _, first = layer(x, v_first=first)
        return x


def test_relevance_goes_back_along_the_first_layers_values(fla: FLA) -> None:
    """Against the network of frozen coefficients, which the first layer's values pass by."""
    model = Layers([make(fla, "plain", i) for i in (0, 1, 1)]).double()
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    flow = LatimFlow(model)
    found = flow.attribute(x, target=(-1, 5))

    def frozen(x: Tensor) -> Tensor:
        first = None
        for layer in model.layers:
            with torch.no_grad():
                of = formula(layer, x, torch.ones(2, 7), first)
                factor = of.norm(of.core_output())
            values = mixed(layer, x, first)["v"]
            o = torch.einsum("bhij,bjhp->bihp", of.core, values)
            o = factor * (o - o.mean(-1, keepdim=True)) + of.norm_bias
            y = of.gate * (o + of.own[..., None] * values)
            first = values.flatten(2) if first is None else first
            x = layer.o_proj(y.flatten(2))
        return x

    start = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(frozen(start)[:, -1, 5].sum(), start)
    assert relative_error(found, x * gradient) <= 1e-6
