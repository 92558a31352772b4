"""RetNet of flash-linear-attention: the operator is the layer."""

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
    record_one,
    rms_factors,
    side_mask,
)
from oracles import relative_error
from torch import Tensor
from zoo.fla_cpu import FLA

from captum_ssm.errors import CachedStateError, InputError

pytestmark = pytest.mark.slow

WIDTH = 24
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "conv": {"use_short_conv": True, "conv_size": 3},
    "grouped": {"num_kv_heads": 2, "use_short_conv": True, "conv_bias": True},
    "unfused": {"fuse_norm": False, "gate_fn": "gelu", "feature_map": "relu", "expand_v": 1.0},
    "no gate": {"use_output_gate": False, "elementwise_affine": False, "num_heads": 1},
}


def make(fla: FLA, case: str, **options: Any) -> Any:
    options = {"hidden_size": WIDTH, "num_heads": 4, "expand_k": 2.0, "norm_eps": EPS} | options
    return fla.layer("MultiScaleRetention", **options | OPTIONS[case])


@torch.no_grad()
def formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    tokens, heads, groups = hidden.shape[1], layer.num_heads, layer.num_kv_groups
    q_conv, k_conv, v_conv = (getattr(layer, f"{n}_conv1d", None) for n in "qkv")
    q = convolved(q_conv, layer.q_proj(hidden)).unflatten(-1, (heads, -1))
    k = convolved(k_conv, layer.k_proj(hidden)).unflatten(-1, (heads // groups, -1))
    if layer.feature_map_fn is not None:
        q, k = layer.feature_map_fn(q), layer.feature_map_fn(k)
    k = k.repeat_interleave(groups, 2)
    # a rotation of pairs is a product of complex numbers; the layer's angles are float32
    q, k = (torch.complex(*x.chunk(2, -1)) for x in (q, k))
    half = q.shape[-1]
    frequency = 1.0 / 10000.0 ** (torch.arange(half).float() / half)
    angle = torch.arange(tokens).float()[:, None, None] * frequency
    turn = torch.complex(angle.cos(), angle.sin()).to(q)
    scores = torch.einsum("bihn,bjhn->bhij", q * turn, (k * turn).conj()).real / (2 * half) ** 0.5
    core = torch.zeros_like(scores)
    for i in range(tokens):
        for j in range(i + 1):
            for h in range(heads):
                core[:, h, i, j] = (1 - 2.0 ** (-5 - h)) ** (i - j) * scores[:, h, i, j]
    values = layer.v_proj(hidden).unflatten(-1, (heads // groups, -1)).repeat_interleave(groups, 2)
    conv, bias = conv_parts(v_conv, heads, values.shape[-1], tokens, groups)
    ratio = torch.ones_like(values)
    if v_conv is not None:
        u = fla_checks.oracles.times(conv, values) + bias
        ratio = torch.sigmoid(u)
    gate = torch.ones_like(values)
    if layer.use_output_gate:
        g = layer.g_proj(hidden)
        gate = (F.silu(g) if layer.fuse_norm_and_gate else F.gelu(g)).view_as(values)
    norm = layer.g_norm_swish_gate if layer.fuse_norm_and_gate else layer.g_norm
    factors = rms_factors(norm.weight, norm.eps, whole=False)
    return Formula(values, conv, bias, ratio, core, factors, gate, keep.double())


@pytest.mark.parametrize("case", OPTIONS)
def test_contract(fla: FLA, case: str) -> None:
    fla_checks.holds(make(fla, case), WIDTH, formula, compacted=True)


def test_positions_far_from_the_start(fla: FLA) -> None:
    """Only differences of positions count, however long the padding."""
    layer = make(fla, "plain")
    hidden = torch.randn(1, 300, WIDTH)
    mask = side_mask([10], 300)
    padded = record_one(layer, hidden, attention_mask=mask)
    alone = record_one(layer, hidden[:, -10:])
    assert padded.reconstruction_error() <= fla_checks.FLOAT32
    found = padded.operator.dense("heads")[..., -10:, -10:]
    assert relative_error(found, alone.operator.dense("heads")) <= fla_checks.FLOAT32


@pytest.mark.parametrize("case", ["plain", "conv"])
def test_padding_between_tokens(fla: FLA, case: str) -> None:
    """The layer closes the gap; over a gap a convolution has other taps."""
    layer = make(fla, case)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0]])
    recorded = record_one(layer, torch.randn(1, 8, WIDTH), attention_mask=mask)
    if case == "plain":
        assert recorded.reconstruction_error() <= fla_checks.FLOAT32
    else:
        with pytest.raises(InputError, match="between tokens"):
            _ = recorded.operator


def test_mask_by_position(fla: FLA) -> None:
    layer = make(fla, "conv")
    with torch.no_grad(), fla_checks.trace(layer) as t:
        layer(torch.randn(2, 6, WIDTH), side_mask([6, 3], 6))
    assert t.layers[0].linear.mask is not None
    assert t.layers[0].reconstruction_error() <= fla_checks.FLOAT32


def test_packed_sequences_are_refused(fla: FLA) -> None:
    packed = {"cu_seqlens": torch.tensor([0, 3, 8])}
    recorded = record_one(make(fla, "plain"), torch.randn(1, 8, WIDTH), **packed)
    with pytest.raises(InputError, match="cu_seqlens"):
        _ = recorded.operator


def test_a_cache_is_refused(fla: FLA) -> None:
    from fla.models.cache_utils import Cache

    recorded = record_one(make(fla, "plain"), torch.randn(1, 8, WIDTH), past_key_values=Cache())
    with pytest.raises(CachedStateError, match="past_key_values"):
        _ = recorded.operator
