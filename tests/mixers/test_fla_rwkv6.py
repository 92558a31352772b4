"""RWKV-6 of flash-linear-attention: the operator is the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import fla_checks
from helpers.fla_checks import EPS, Formula, conv_parts, record_one
from torch import Tensor
from zoo.fla_cpu import FLA

pytestmark = pytest.mark.slow

WIDTH = 24
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide": {"expand_k": 1.0, "expand_v": 2.0, "num_heads": 2},
    "one head": {"num_heads": 1, "gate_fn": "sigmoid"},
    "no weights": {"elementwise_affine": False},
}


def make(fla: FLA, case: str) -> Any:
    options = {
        "hidden_size": WIDTH,
        "num_heads": 4,
        "proj_low_rank_dim": 3,
        "gate_low_rank_dim": 5,
        "norm_eps": EPS,
    }
    return fla.layer("RWKV6Attention", **options | OPTIONS[case])


@torch.no_grad()
def formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    keep, tokens, heads = keep.double(), hidden.shape[1], layer.num_heads
    hidden = hidden * keep[..., None]
    before = torch.zeros_like(hidden)
    before[:, 1:] = hidden[:, :-1]
    low = layer.x_proj[0]
    x = torch.tanh(low.linear(hidden + (before - hidden) * low.mu))
    rank = layer.proj_low_rank_dim
    up = layer.x_proj[2].weight.view(-1, 5, rank)
    mixed = {}
    for n, name in enumerate("rwkvg"):
        mu = x[..., n * rank : (n + 1) * rank] @ up[:, n].T + layer.x_bias[n]
        here = (1 - mu) * hidden + mu * before
        mixed[name] = getattr(layer, f"{name}_proj").linear(here).unflatten(-1, (heads, -1))
    r, k, log_decay = mixed["r"], mixed["k"], -mixed["w"].exp()
    core = torch.zeros(len(hidden), heads, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        core[:, :, i, i] = (r[:, i] * layer.bonus * k[:, i]).sum(-1)
        for j in range(i):
            decay = log_decay[:, j + 1 : i].sum(1).exp()
            core[:, :, i, j] = (r[:, i] * decay * k[:, j]).sum(-1)
    values = mixed["v"]
    conv, bias = conv_parts(None, heads, values.shape[-1], tokens)
    norm = layer.g_norm
    affine = norm.weight is not None
    norm_weight = norm.weight if affine else torch.ones_like(values[0, 0]).flatten()
    norm_bias = norm.bias if affine else torch.zeros_like(values[0, 0]).flatten()

    def factors(o: Tensor) -> Tensor:
        centered = o - o.mean(-1, keepdim=True)
        size = (centered.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
        return norm_weight.detach().view(o.shape[2:]) / size

    gate = F.silu(mixed["g"]) if layer.gate_fn is F.silu else torch.sigmoid(mixed["g"])
    return Formula(
        values,
        conv,
        bias,
        torch.ones_like(values),
        core,
        factors,
        gate,
        keep,
        norm_bias.detach().view(values.shape[2:]),
    )


@pytest.mark.parametrize("case", OPTIONS)
def test_contract(fla: FLA, case: str) -> None:
    fla_checks.holds(make(fla, case), WIDTH, formula, compacted=False)


def test_the_norms_bias_is_the_bias(fla: FLA) -> None:
    """Without it the operator is linear: silent values give the bias alone."""
    layer = make(fla, "plain")
    linear = record_one(layer, torch.randn(2, 5, WIDTH)).linear
    nothing = linear.operator.affine(torch.zeros_like(linear.values))
    assert torch.equal(nothing, linear.bias)
    assert linear.bias.abs().max() > 0
    assert not linear.restrict({"scan", "gate"}).bias.any()
