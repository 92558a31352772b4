"""Softmax attention of flash-linear-attention's hybrids: the operator is the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import fla_checks
from helpers.fla_checks import Formula, conv_parts, rms_factors
from torch import Tensor
from zoo.fla_cpu import FLA, MODELS

from captum_ssm.testing.adapters import check_adapter

pytestmark = pytest.mark.slow

WIDTH = 24
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": 3, "num_kv_heads": 2},
    "norm": {"qk_norm": True, "rope_theta": 100.0},
    "bias": {"qkv_bias": True, "num_kv_heads": 1, "window_size": 1},
}
#: Families whose models may hold attention in some layers; those of RWKV-7 then do not run.
_OTHERS = ("Mamba", "Mamba2", "Mamba3", "Transformer", "Samba", "RWKV7")
FADED = ("HGRN", "RWKV6")  # whose states fade over padded tokens
HYBRIDS = [name for name in MODELS if name not in _OTHERS]


def make(fla: FLA, case: str) -> Any:
    layer = fla.layer("Attention", hidden_size=WIDTH, **{"num_heads": 4, **CASES[case]})
    if layer.qk_norm:
        layer.q_norm.eps = layer.k_norm.eps = fla_checks.EPS
    return layer


@torch.no_grad()
def formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    tokens, heads, many = hidden.shape[1], layer.num_heads, layer.num_kv_heads
    q, k, values = (getattr(layer, f"{n}_proj")(hidden) for n in "qkv")
    q, k, values = (x.unflatten(-1, (h, -1)) for x, h in ((q, heads), (k, many), (values, many)))
    if layer.qk_norm:
        q = q * rms_factors(layer.q_norm.weight, layer.q_norm.eps, whole=False)(q)
        k = k * rms_factors(layer.k_norm.weight, layer.k_norm.eps, whole=False)(k)
    k, values = (x.repeat_interleave(heads // many, 2) for x in (k, values))
    half = q.shape[-1] // 2
    turns = layer.rotary.base ** (-torch.arange(half).double() / half)

    def turned(x: Tensor, t: int) -> Tensor:
        pairs = torch.complex(x[..., :half], x[..., half:])
        pairs = pairs * torch.polar(torch.ones_like(turns), t * turns)
        return torch.cat([pairs.real, pairs.imag], -1)

    scores = torch.full((len(hidden), heads, tokens, tokens), -torch.inf, dtype=torch.float64)
    for i in range(tokens):
        first = 0 if layer.window_size is None else max(0, i - layer.window_size + 1)
        for j in range(first, i + 1):
            # only the distance counts
            product = (turned(q[:, i], i - j) * k[:, j]).sum(-1)
            scores[:, :, i, j] = product / layer.head_dim**0.5
    conv, bias = conv_parts(None, heads, values.shape[-1], tokens)
    one = torch.ones_like(values)
    core = scores.softmax(-1)
    return Formula(values, conv, bias, one, core, torch.ones_like, one, keep.double())


@pytest.mark.parametrize("case", CASES)
def test_contract(fla: FLA, case: str) -> None:
    # rotations have the accuracy of float32 angles
    fla_checks.holds(make(fla, case), WIDTH, formula, compacted=True, exact=False)


@pytest.mark.parametrize("family", HYBRIDS[::2])
def test_hybrids(fla: FLA, family: str) -> None:
    spec = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 3}
    model = fla.model(family, norm_eps=fla_checks.EPS, attn=spec)
    padding = () if family in FADED else ("left padding",)  # which fades their states
    clauses = ("float32", "batches", *padding, "sums")
    check_adapter(lambda: model, torch.randint(19, (2, 9)), None, {}, clauses)
