"""Layers of flash-linear-attention: the operator is the layer."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers.contract import PADDING, check, record, record_one
from helpers.fla_checks import EPS, holds, side_mask
from oracles import relative_error
from torch import Tensor, nn
from zoo.fla_cpu import FLA, MODELS

from captum_ssm import LatimFlow
from captum_ssm.errors import UnsupportedMixerError
from captum_ssm.mixers import supported_architectures
from captum_ssm.mixers.registry import class_path
from captum_ssm.tracing import find_mixers

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
OF_HGRN2 = {"expand_ratio": 6, "norm_eps": 10.0}  # the layer's norm is not told this eps
OF_DELTA = {"num_heads": 4, "norm_eps": EPS}
OF_GATED = {"num_heads": 3, "head_dim": 6, "norm_eps": EPS}
OF_PRODUCT = {"num_heads": 2, "head_dim": 5, "expand_v": 2, "norm_eps": EPS}
OF_MESA = {"num_heads": 3, "head_dim": 5, "norm_eps": EPS}
OF_RWKV7 = {
    "norm_eps": EPS, "num_hidden_layers": 2, "decay_low_rank_dim": 4, "gate_low_rank_dim": 5,
    "a_low_rank_dim": 3, "v_low_rank_dim": 2,
}  # fmt: skip
#: Layers that leave padded tokens where they are.
OVER_PADDING = "SimpleGatedLinearAttention", "HGRNAttention", "RWKV6Attention", "RWKV7Attention"
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
    ("DeltaNet", OF_DELTA | {"conv_bias": True, "use_gate": True, "conv_size": 3, "expand_v": 2.0}),
    ("DeltaNet", OF_DELTA | {"qk_activation": "elu", "qk_norm": "sum", "expand_k": 2.0}),
    ("DeltaNet", OF_DELTA | {"qk_activation": "relu", "use_beta": False, "num_heads": 2}),
    ("DeltaNet", OF_DELTA | {"use_short_conv": False, "allow_neg_eigval": True}),
    ("DeltaNet", OF_DELTA | {"use_short_conv": False, "qk_activation": "identity"}),
    ("GatedDeltaNet",
     OF_GATED | {"num_v_heads": 6, "conv_bias": True, "output_gate_activation": "sigmoid"}),
    ("GatedDeltaNet", OF_GATED | {"use_gate": False, "conv_size": 3, "num_heads": 1}),
    ("GatedDeltaNet", OF_GATED | {"use_short_conv": False, "allow_neg_eigval": True}),
    ("KimiDeltaAttention", OF_GATED | {"safe_gate": True, "lower_bound": -3.0, "conv_bias": True}),
    ("KimiDeltaAttention", OF_GATED | {"num_v_heads": 6, "expand_v": 0.5}),
    ("KimiDeltaAttention", OF_GATED | {"use_short_conv": False, "allow_neg_eigval": True}),
    ("GatedDeltaProduct", OF_PRODUCT),
    ("GatedDeltaProduct",
     OF_PRODUCT | {"num_householder": 3, "num_v_heads": 4, "conv_bias": True, "head_dim": 4}),
    ("GatedDeltaProduct",
     OF_PRODUCT | {"num_householder": 1, "use_output_gate": False, "use_forget_gate": False}),
    ("GatedDeltaProduct", OF_PRODUCT | {"use_short_conv": False, "allow_neg_eigval": False}),
    ("Comba", OF_PRODUCT | {"num_v_heads": 4, "conv_bias": True, "use_output_gate": False}),
    ("Comba", OF_PRODUCT | {"use_output_correction": False, "use_inner_decay": False}),
    ("Comba", OF_PRODUCT | {"use_short_conv": False}),
    ("RWKV7Attention", OF_RWKV7 | {"head_dim": 8, "fuse_norm": False}),
    ("RWKV7Attention", OF_RWKV7 | {"head_dim": None, "num_heads": 2, "value_dim": 48}),
    ("RWKV7Attention", OF_RWKV7 | {"head_dim": WIDTH}),
    ("RWKV7Attention", OF_RWKV7 | {"head_dim": 8, "layer_idx": 1}),
    ("MesaNet", OF_MESA | {"use_output_gate": True, "conv_bias": True, "conv_size": 3}),
    ("MesaNet", OF_MESA | {"max_cg_step_training": 2, "lambda_lower_bound": 0.5}),
    ("Attention", {"num_heads": 4, "window_size": 3, "num_kv_heads": 2}),
    ("Attention", {"num_heads": 4, "qk_norm": True, "rope_theta": 100.0}),
    ("Attention", {"num_heads": 4, "qkv_bias": True, "num_kv_heads": 1, "window_size": 1}),
    ("ForgettingAttention", {"num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "qk_norm": True}),
    ("ForgettingAttention", {"use_output_gate": True, "window_size": 3, "num_heads": 2}),
    ("PaTHAttention",
     {"num_heads": 4, "num_kv_heads": 2, "use_forget_gate": True, "use_low_rank_w": False}),
    ("PaTHAttention", {"use_qk_norm": True, "conv_bias": True, "num_heads": 2}),
    ("PaTHAttention", {"num_heads": 4, "use_w_shortconv": False}),
]  # fmt: skip


def make(fla: FLA, kind: str, **options: Any) -> Any:
    layer = fla.layer(kind, hidden_size=WIDTH, **options)
    if kind.startswith("HGRN"):
        layer.layer_idx = 1  # the first layer has no lower bound
    return layer


def bound(layer: Any) -> Tensor:
    width = getattr(layer, "forget_dim", None) or layer.input_dim
    return torch.linspace(0.01, 0.9, width)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_contract(fla: FLA, kind: str, options: dict[str, Any]) -> None:
    layer, more = make(fla, kind, **options), dict[str, Any]()
    if options.get("qk_norm") is True:
        layer.q_norm.eps = layer.k_norm.eps = EPS
    if kind.startswith("HGRN") and "elementwise_affine" not in options:
        more["lower_bound"] = bound(layer)
    if options.get("layer_idx"):  # it takes from the first layer's values, here the input itself
        more["v_first"] = lambda hidden: hidden
    if kind == "PaTHAttention":  # a kernel that takes no padding
        more["refuses"] = dict.fromkeys(PADDING, "TypeError")
    holds(layer, WIDTH, compacted=kind not in OVER_PADDING, **more)


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


def test_positions_far_from_the_start(fla: FLA) -> None:
    """Only differences of positions count, however long the padding."""
    layer, hidden = make(fla, "MultiScaleRetention", **OF_RETNET), torch.randn(1, 300, WIDTH)
    with_mask_by_position = record_one(layer, hidden, side_mask([10], 300))
    check(with_mask_by_position)
    found = with_mask_by_position.operator.dense("heads")[..., -10:, -10:]
    alone = record_one(layer, hidden[:, -10:]).operator.dense("heads")
    assert relative_error(found, alone) <= 1e-5


def test_both_directions_are_refused(fla: FLA) -> None:
    both_ways = fla.layer("BasedLinearAttention", hidden_size=WIDTH, **OF_BASED, causal=False)
    with pytest.raises(UnsupportedMixerError, match="causal=False"):
        record_one(both_ways, torch.randn(1, 8, WIDTH)).verify()


# --- the package as a whole ------------------------------------------------------------------


def test_every_layer_is_served_or_refused(fla: FLA) -> None:
    served = {a.class_path for a in supported_architectures()}
    layers, refused = importlib.import_module("fla.layers"), []
    for kind in (getattr(layers, name) for name in layers.__all__):
        # neither answer depends on what is inside
        layer = kind.__new__(kind)
        nn.Module.__init__(layer)
        model = nn.Sequential(nn.Linear(4, 4), layer)
        if class_path(kind) in served:
            assert [mixer.module for mixer in find_mixers(model)] == [layer]
            continue
        refused.append(kind.__name__)
        with pytest.raises(UnsupportedMixerError, match=class_path(kind)):
            find_mixers(model)
    assert "MoBA" in refused and "Raven" in refused  # whose names do not say what they are


def test_models_of_refused_layers_and_parts_of_layers(fla: FLA) -> None:
    with pytest.raises(UnsupportedMixerError, match=r"fla\.layers\.abc\.ABCAttention"):
        find_mixers(fla.model("ABC", num_heads=2, num_slots=4))
    lerp = importlib.import_module("fla.layers.rwkv6").LerpLinear
    model = fla.model("RWKV6")  # which uses one beside its mixers
    assert any(isinstance(module, lerp) for module in model.model.layers[0].ffn.modules())
    assert len(find_mixers(model)) == 2


#: Roles that nothing plays in a family's models.
SILENT: dict[str, set[str]] = {
    "RetNet": {"step"}, "HGRN": {"query"}, "HGRN2": {"gate"}, "DeltaNet": {"gate"},
    "LinearAttention": {"gate", "step"}, "GSA": {"gate"}, "Transformer": {"gate", "step"},
}  # fmt: skip


@pytest.mark.parametrize("family", MODELS)
def test_roles_in_models(fla: FLA, family: str) -> None:
    model = fla.model(family, norm_eps=EPS)
    found = LatimFlow(model).decompose(torch.randint(19, (2, 9)), (-1, 3), rule="centered")
    assert found.roles is not None
    silent = {role for role, relevance in found.roles.items() if not relevance.any()}
    assert silent == SILENT.get(family, set())
