"""Softmax attention of flash-linear-attention, and its models as a whole."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers.contract import PADDING
from helpers.fla_checks import EPS, holds
from torch import nn
from zoo.fla_cpu import FLA, MODELS

from captum_ssm import LatimFlow
from captum_ssm.errors import UnsupportedMixerError
from captum_ssm.mixers import supported_architectures
from captum_ssm.mixers.registry import class_path
from captum_ssm.tracing import find_mixers

pytestmark = pytest.mark.slow

WIDTH = 24
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Attention", {"window_size": 3, "num_kv_heads": 2}),
    ("Attention", {"qk_norm": True, "rope_theta": 100.0}),
    ("Attention", {"qkv_bias": True, "num_kv_heads": 1, "window_size": 1}),
    ("ForgettingAttention", {"num_kv_heads": 2, "qkv_bias": True, "qk_norm": True}),
    ("ForgettingAttention", {"use_output_gate": True, "window_size": 3, "num_heads": 2}),
    ("PaTHAttention", {"num_kv_heads": 2, "use_forget_gate": True, "use_low_rank_w": False}),
    ("PaTHAttention", {"use_qk_norm": True, "conv_bias": True, "num_heads": 2}),
    ("PaTHAttention", {"use_w_shortconv": False}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_contract(fla: FLA, kind: str, options: dict[str, Any]) -> None:
    layer = fla.layer(kind, hidden_size=WIDTH, **{"num_heads": 4} | options)
    if options.get("qk_norm"):
        layer.q_norm.eps = layer.k_norm.eps = EPS
    # a kernel that takes no padding
    refuses = dict.fromkeys(PADDING, "TypeError") if kind == "PaTHAttention" else None
    holds(layer, WIDTH, compacted=True, refuses=refuses)


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
    found = LatimFlow(model).decompose(torch.randint(19, (2, 9)), (-1, 3), rule="centred")
    assert found.roles is not None
    silent = {role for role, relevance in found.roles.items() if not relevance.any()}
    assert silent == SILENT.get(family, set())
