"""Layers of flash-linear-attention whose states fade, if at all: the operator is the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.contract import check, record, record_one
from helpers.fla_checks import EPS, holds, side_mask
from oracles import relative_error
from torch import Tensor
from zoo.fla_cpu import FLA

from captum_ssm.errors import CachedStateError, InputError, UnsupportedMixerError

pytestmark = pytest.mark.slow

WIDTH = 24
SHORT = {"use_short_conv": True, "conv_size": 3}
BIASED = {"use_short_conv": True, "conv_bias": True}
OF_LIGHTNET = {"expand_ratio": 8, "gate_low_rank_dim": 3}
OF_GSA = {"num_heads": 4, "num_slots": 5}
OF_RETNET = {"num_heads": 4, "expand_k": 2.0, "norm_eps": EPS}
OF_GLA = {"num_heads": 4, "gate_low_rank_dim": 5, "norm_eps": EPS}
NORMED = {"do_feature_map_norm": True}
OF_LINEAR = {"num_heads": 4, "norm_eps": EPS}
OF_BASED = {"num_heads": 4, "num_key_value_heads": 4, "feature_dim": 3}
OF_RWKV6 = {"num_heads": 4, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5, "norm_eps": EPS}
#: Layers that leave padded tokens where they are.
OVER_PADDING = ("SimpleGatedLinearAttention", "HGRNAttention", "RWKV6Attention")
OF_HGRN2 = {"expand_ratio": 6, "norm_eps": 10.0}  # the layer's norm is not told this eps
#: Layers, with the options of one case each.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("MultiScaleRetention", {**OF_RETNET, **SHORT}),
    ("MultiScaleRetention", {**OF_RETNET, **BIASED, "num_kv_heads": 2}),
    ("MultiScaleRetention",
     {**OF_RETNET, "fuse_norm": False, "gate_fn": "gelu", "feature_map": "relu"}),
    ("MultiScaleRetention",
     {**OF_RETNET, "use_output_gate": False, "elementwise_affine": False, "num_heads": 1}),
    ("GatedLinearAttention", {**OF_GLA, **SHORT, "gate_logit_normalizer": 1}),
    ("GatedLinearAttention", {**OF_GLA, **BIASED, "num_kv_heads": 2, "clamp_min": -0.05}),
    ("GatedLinearAttention",
     {**OF_GLA, "gate_fn": "sigmoid", "feature_map": "relu", "expand_v": 2.0}),
    ("GatedLinearAttention",
     {**OF_GLA, "use_output_gate": False, "elementwise_affine": False, "num_heads": 1}),
    ("HGRN2Attention", OF_HGRN2),
    ("HGRN2Attention", {**OF_HGRN2, **SHORT, "elementwise_affine": False}),
    ("HGRN2Attention", {**OF_HGRN2, **BIASED, "expand_ratio": None, "num_heads": 2}),
    ("HGRNAttention", {"norm_eps": EPS, "expand_ratio": 2}),
    ("HGRNAttention", {"norm_eps": EPS, **SHORT, "elementwise_affine": False}),
    ("HGRNAttention", {"norm_eps": EPS, **BIASED}),
    ("RWKV6Attention", {**OF_RWKV6, "expand_k": 1.0, "expand_v": 2.0, "num_heads": 2}),
    ("RWKV6Attention", {**OF_RWKV6, "num_heads": 1, "gate_fn": "sigmoid"}),
    ("RWKV6Attention", {**OF_RWKV6, "elementwise_affine": False}),
    ("LinearAttention",
     {**OF_LINEAR, "feature_map": "elu", "do_feature_map_norm": True, "norm_q": True}),
    ("LinearAttention",
     {**OF_LINEAR, "num_kv_heads": 2, "feature_map": "relu", "expand_k": 2.0, "expand_v": 0.5}),
    ("LinearAttention", {**OF_LINEAR, "output_norm": "identity", "tie_feature_map_qk": True}),
    ("LinearAttention", {**OF_LINEAR, "feature_map": "hedgehog", "norm_k": True, **NORMED}),
    ("LinearAttention", {**OF_LINEAR, "feature_map": "dpfp", "elementwise_affine": False}),
    ("LinearAttention", {**OF_LINEAR, "feature_map": "identity"}),
    ("SimpleGatedLinearAttention", OF_LINEAR),
    ("SimpleGatedLinearAttention",
     {**OF_LINEAR, "num_kv_heads": 2, "conv_bias": True, "gate_logit_normalizer": 1}),
    ("SimpleGatedLinearAttention",
     {**OF_LINEAR, "use_short_conv": False, "gate_fn": "sigmoid", "feature_map": "relu"}),
    ("BasedLinearAttention", OF_BASED),
    ("BasedLinearAttention", {**OF_BASED, "mode": "chunk"}),
    # the norms are not told this eps
    ("GatedSlotAttention", {**OF_GSA, "norm_eps": 10.0}),
    ("GatedSlotAttention", {**OF_GSA, **BIASED, "num_kv_heads": 2, "scale": 0.5}),
    ("GatedSlotAttention", {**OF_GSA, "feature_map": "t2r", "gate_logit_normalizer": 1}),
    ("GatedSlotAttention", {**OF_GSA, "feature_map": "relu", "elementwise_affine": False}),
    ("LightNetAttention", {**OF_LIGHTNET, "norm_eps": 10.0}),
    ("LightNetAttention", {**OF_LIGHTNET, **SHORT, "elementwise_affine": False}),
    ("LightNetAttention", {**OF_LIGHTNET, **BIASED, "expand_ratio": None, "num_heads": 2}),
]  # fmt: skip


def make(fla: FLA, kind: str, **options: Any) -> Any:
    layer = fla.layer(kind, hidden_size=WIDTH, **options)
    layer.layer_idx = 1  # the first layer of HGRN and HGRN2 has no lower bound
    return layer


def bound(layer: Any) -> Tensor:
    width = getattr(layer, "forget_dim", None) or layer.input_dim
    return torch.linspace(0.01, 0.9, width)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_contract(fla: FLA, kind: str, options: dict[str, Any]) -> None:
    layer, compacted = make(fla, kind, **options), kind not in OVER_PADDING
    bounded = kind.startswith("HGRN") and "elementwise_affine" not in options
    holds(layer, WIDTH, compacted=compacted, **({"lower_bound": bound(layer)} if bounded else {}))


def test_the_first_layer_ignores_the_lower_bound(fla: FLA) -> None:
    layer = make(fla, "HGRNAttention", norm_eps=EPS)
    layer.layer_idx = 0
    hidden = torch.randn(2, 7, WIDTH)
    recorded = record_one(layer, hidden, lower_bound=bound(layer))
    check(recorded)
    assert torch.equal(recorded.operator.dense(), record_one(layer, hidden).operator.dense())
    first, second = record(fla.model("HGRN", norm_eps=EPS), torch.randint(19, (1, 5)))
    assert first.call.argument("lower_bound").abs().max() == 0
    assert second.call.argument("lower_bound").min() > 0


# --- RetNet alone ----------------------------------------------------------------------------


def test_positions_far_from_the_start(fla: FLA) -> None:
    """Only differences of positions count, however long the padding."""
    layer, hidden = make(fla, "MultiScaleRetention", **OF_RETNET), torch.randn(1, 300, WIDTH)
    with_mask_by_position = record_one(layer, hidden, side_mask([10], 300))
    check(with_mask_by_position)
    found = with_mask_by_position.operator.dense("heads")[..., -10:, -10:]
    alone = record_one(layer, hidden[:, -10:]).operator.dense("heads")
    assert relative_error(found, alone) <= 1e-5


def test_what_is_refused(fla: FLA) -> None:
    from fla.models.cache_utils import Cache

    layer, hidden = make(fla, "MultiScaleRetention", **OF_RETNET), torch.randn(1, 8, WIDTH)
    packed = record_one(layer, hidden, cu_seqlens=torch.tensor([0, 3, 8]))
    with pytest.raises(InputError, match="cu_seqlens"):
        _ = packed.operator
    cached = record_one(layer, hidden, past_key_values=Cache())
    with pytest.raises(CachedStateError, match="past_key_values"):
        _ = cached.operator
    both_ways = fla.layer("BasedLinearAttention", hidden_size=WIDTH, **OF_BASED, causal=False)
    with pytest.raises(UnsupportedMixerError, match="causal=False"):
        record_one(both_ways, hidden).verify()
