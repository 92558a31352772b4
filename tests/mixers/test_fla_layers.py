"""All of flash-linear-attention: its layers are served or refused, served models explained."""

from __future__ import annotations

import importlib

import pytest
import torch
from helpers import fla_checks
from oracles import relative_error
from torch import nn
from zoo.fla_cpu import FLA, MODELS

from captum_ssm import LatimFlow
from captum_ssm.errors import UnsupportedMixerError
from captum_ssm.mixers import supported_architectures
from captum_ssm.mixers.registry import class_path
from captum_ssm.tracing import find_mixers

pytestmark = pytest.mark.slow


def exported() -> list[type[nn.Module]]:
    layers = importlib.import_module("fla.layers")
    return [getattr(layers, name) for name in layers.__all__]


def test_every_layer_is_served_or_refused(fla: FLA) -> None:
    served = {a.class_path for a in supported_architectures()}
    refused = []
    for kind in exported():
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


def test_a_model_of_a_refused_layer(fla: FLA) -> None:
    model = fla.model("ABC", num_heads=2, num_slots=4)
    with pytest.raises(UnsupportedMixerError, match=r"fla\.layers\.abc\.ABCAttention"):
        find_mixers(model)


def test_parts_of_layers_mix_nothing_by_themselves(fla: FLA) -> None:
    """RWKV-6 uses one beside its mixers."""
    lerp = importlib.import_module("fla.layers.rwkv6").LerpLinear
    model = fla.model("RWKV6")
    assert any(isinstance(module, lerp) for module in model.model.layers[0].ffn.modules())
    assert len(find_mixers(model)) == 2


#: Roles that nothing plays in a family's models.
SILENT: dict[str, set[str]] = {
    "RetNet": {"step"},
    "HGRN": {"query"},
    "HGRN2": {"gate"},
    "DeltaNet": {"gate"},
    "LinearAttention": {"gate", "step"},
    "GSA": {"gate"},
    "Transformer": {"gate", "step"},
}


@pytest.mark.parametrize("family", MODELS)
def test_roles_in_models(fla: FLA, family: str) -> None:
    model = fla.model(family, norm_eps=fla_checks.EPS)
    found = LatimFlow(model).decompose(torch.randint(19, (2, 9)), (-1, 3), rule="centred")
    assert found.roles is not None
    total = torch.stack(list(found.roles.values())).sum(0)
    assert relative_error(total, found.tokens) <= 1e-5
    silent = {role for role, relevance in found.roles.items() if not relevance.any()}
    assert silent == SILENT.get(family, set())
