"""Linear attention of flash-linear-attention, and relatives: the operator is the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import fla_checks
from helpers.fla_checks import (
    EPS,
    Formula,
    conv_parts,
    convolved,
    decayed_scores,
    record_one,
    rms_factors,
)
from torch import Tensor
from zoo.fla_cpu import FLA

from captum_ssm.errors import UnsupportedMixerError

pytestmark = pytest.mark.slow

WIDTH = 24
LINEAR: dict[str, dict[str, Any]] = {
    "elu": {"feature_map": "elu"},
    "normalised": {"feature_map": "elu", "do_feature_map_norm": True, "norm_q": True},
    "grouped": {"num_kv_heads": 2, "feature_map": "relu", "expand_k": 2.0, "expand_v": 0.5},
    "product": {"output_norm": "identity", "tie_feature_map_qk": True},
    "softmax": {"feature_map": "hedgehog", "norm_k": True, "do_feature_map_norm": True},
    "dpfp": {"feature_map": "dpfp", "elementwise_affine": False},
    "t2r": {"feature_map": "t2r", "num_heads": 1},
    "identity": {"feature_map": "identity"},
}
SIMPLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "conv_bias": True, "conv_size": 3, "gate_logit_normalizer": 1},
    "unfused": {"use_short_conv": False, "gate_fn": "sigmoid", "feature_map": "relu"},
}
BASED: dict[str, dict[str, Any]] = {"parallel": {}, "in chunks": {"mode": "chunk"}}
CASES = [
    *(("LinearAttention", case) for case in LINEAR),
    *(("SimpleGatedLinearAttention", case) for case in SIMPLE),
    *(("BasedLinearAttention", case) for case in BASED),
]


def make(fla: FLA, kind: str, case: str) -> Any:
    options: dict[str, Any] = {"hidden_size": WIDTH, "num_heads": 4}
    if kind == "BasedLinearAttention":
        return fla.layer(kind, **options, num_key_value_heads=4, feature_dim=3, **BASED[case])
    cases = LINEAR if kind == "LinearAttention" else SIMPLE
    return fla.layer(kind, **options | {"norm_eps": EPS} | cases[case])


def _mapped(layer: Any, name: str, x: Tensor) -> Tensor:
    """The feature map of queries or keys (B, L, H, N), whose modules are called as they are."""
    found = getattr(layer, f"feature_map_{name}")
    if isinstance(found, torch.nn.Module):
        return found(x)
    return torch.where(x > 0, x + 1, x.exp())


@torch.no_grad()
def formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    kind = type(layer).__name__
    tokens, heads = hidden.shape[1], layer.num_heads
    q, k, v = (getattr(layer, f"{n}_proj")(hidden) for n in "qkv")
    groups = getattr(layer, "num_kv_groups", 1)
    q, k, v = (
        q.unflatten(-1, (heads, -1)),
        *(x.unflatten(-1, (heads // groups, -1)).repeat_interleave(groups, 2) for x in (k, v)),
    )
    conv, bias = conv_parts(None, heads, v.shape[-1], tokens)
    one = torch.ones_like(v)
    if kind == "LinearAttention":
        q, k = _mapped(layer, "q", q), _mapped(layer, "k", k)
        q = q / (q.sum(-1, keepdim=True) + 1e-4) if layer.norm_q else q
        k = k / (k.sum(-1, keepdim=True) + 1e-4) if layer.norm_k else k
        core = decayed_scores(q, k, torch.zeros_like(k)) / q.shape[-1] ** 0.5
        if layer.do_feature_map_norm:
            core = core / (core.sum(-1, keepdim=True) + 1e-10)
        if isinstance(layer.norm, torch.nn.Identity):
            return Formula(v, conv, bias, one, core, torch.ones_like, one, keep.double())
        factors = rms_factors(layer.norm.weight, layer.norm.eps, whole=False)
        return Formula(v, conv, bias, one, core, factors, one, keep.double())
    x = decayed_scores(q, k, torch.zeros_like(k)) / q.shape[-1] ** 0.5
    core = (1 + x + x.square() / 2).tril()
    core = core / (core.sum(-1, keepdim=True) + (1e-6 if layer.mode == "parallel" else 1e-10))
    return Formula(v, conv, bias, one, core, torch.ones_like, one, keep.double())


@torch.no_grad()
def simple_formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    """Padded tokens take part with a value of zero, and no decay."""
    tokens, heads, groups = hidden.shape[1], layer.num_heads, layer.num_kv_groups
    x: dict[str, Tensor] = {}
    for name, many in (("q", heads), ("k", heads // groups)):
        conv = getattr(layer, f"{name}_conv1d", None)
        projected = getattr(layer, f"{name}_proj")(hidden)
        projected = projected if conv is None else convolved(conv, projected * keep[..., None])
        if layer.feature_map_fn is not None:
            projected = projected.clamp_min(0)
        x[name] = projected.unflatten(-1, (many, -1)).repeat_interleave(heads // many, 2)
    logs = F.logsigmoid(layer.gk_proj(hidden)) / layer.gate_logit_normalizer * keep[..., None]
    core = decayed_scores(x["q"], x["k"], logs[..., None]) / layer.head_k_dim**0.5
    values = layer.v_proj(hidden).unflatten(-1, (heads // groups, -1)).repeat_interleave(groups, 2)
    v_conv = getattr(layer, "v_conv1d", None)
    conv, bias = conv_parts(v_conv, heads, values.shape[-1], tokens, groups)
    ratio = torch.ones_like(values)
    if v_conv is not None:
        silenced = values * keep[..., None, None]
        ratio = torch.sigmoid(fla_checks.oracles.times(conv, silenced) + bias)
    norm = layer.g_norm_swish_gate if layer.fuse_norm_and_gate else layer.g_norm
    g = layer.g_proj(hidden).view_as(values)
    gate = F.silu(g) if layer.fuse_norm_and_gate else torch.sigmoid(g)
    factors = rms_factors(norm.weight, norm.eps, whole=False)
    return Formula(values, conv, bias, ratio, core, factors, gate, keep.double())


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_contract(fla: FLA, kind: str, case: str) -> None:
    simple = kind == "SimpleGatedLinearAttention"
    fla_checks.holds(
        make(fla, kind, case), WIDTH, simple_formula if simple else formula, compacted=not simple
    )


def test_attention_to_what_follows_is_refused(fla: FLA) -> None:
    options = {"num_heads": 2, "num_key_value_heads": 2, "feature_dim": 3, "causal": False}
    layer = fla.layer("BasedLinearAttention", hidden_size=WIDTH, **options)
    with pytest.raises(UnsupportedMixerError, match="causal=False"):
        record_one(layer, torch.randn(1, 4, WIDTH)).verify()
