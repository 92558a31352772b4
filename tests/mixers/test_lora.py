"""Mixers with LoRA adapters from peft, whose weights are not zero."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.versions import VERSION_4
from oracles import alpha, mamba1_parts, relative_error
from torch import Tensor, nn
from zoo.mamba import randomise, transformers_model

from captum_ssm import trace
from captum_ssm.mixers.mamba import _calls_dt_proj
from captum_ssm.tracing import Layer

pytestmark = pytest.mark.slow

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

TARGETS = ["in_proj", "x_proj", "out_proj"]


def with_lora(layers: nn.Module, targets: list[str], dtype: torch.dtype | None = None) -> None:
    """Adapters of rank 2 with random weights, put in place.

    peft refuses some projections of models whose configuration says mamba; as a list of layers
    without a configuration it takes them.
    """
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=targets, lora_dropout=0.0)
    peft.inject_adapter_in_model(config, layers)
    found = 0
    for name, parameter in layers.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=dtype or parameter.dtype) * 0.5
            found += 1
    assert found == 2 * len(targets) * sum(hasattr(m, "A_log") for m in layers.modules())


def record(model: Any, *args: Any, **kwargs: Any) -> list[Layer]:
    with torch.no_grad(), trace(model) as t:
        model(*args, **kwargs)
    return t.layers


def check(layer: Layer, hidden: Tensor, mask: Tensor | None, adapters: list[str]) -> None:
    mixer = layer.mixer.module
    parts = mamba1_parts(mixer, hidden, mask, adapters=adapters)
    assert relative_error(layer.output, parts.output) <= 5e-6, "the oracle is not the module"
    linear = layer.linear
    rebuilt = linear.project(linear.operator.affine(linear.values))
    assert relative_error(rebuilt, layer.output) <= 5e-6
    assert layer.reconstruction_error() <= 5e-6
    assert relative_error(linear.operator.dense(None), alpha(parts, "exact")) <= 5e-6


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
def test_adapters_around_dt_proj_count_where_it_is_called(family: str) -> None:
    """Version 5 reads its weight, past the adapter."""
    model = transformers_model(family)
    ids = torch.randint(19, (2, 7))
    plain = record(model, ids)
    with_lora(model.backbone.layers, ["dt_proj"])
    for before, layer in zip(plain, record(model, ids), strict=True):
        changed = relative_error(before.output, layer.output)
        assert changed > 1e-4 if VERSION_4 else changed <= 5e-6
        check(layer, layer.call.hidden_states, None, ["dt_proj"] if VERSION_4 else [])


@pytest.mark.parametrize("found", [False, True])
def test_kernels_of_version_4_read_dt_proj_by_its_weight(
    found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    code: Any = ModuleType("code_of_version_4")
    code.mamba_inner_fn = print
    code._lazy_load_causal_conv1d = lambda: (print, print if found else None)
    monkeypatch.setitem(sys.modules, code.__name__, code)
    mixer = type("MambaMixer", (), {"slow_forward": None, "__module__": code.__name__})()
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    assert _calls_dt_proj(mixer, on_gpu) != found


@pytest.mark.parametrize("fused", [False, True])
def test_adapters_in_mamba_ssm(request: pytest.FixtureRequest, fused: bool) -> None:
    """The module reads in_proj by its weight, and on the fused path every projection."""
    package = request.getfixturevalue("mamba_ssm_fused" if fused else "mamba_ssm")
    mixer = randomise(package.make_mamba(5))
    hidden = torch.randn(2, 8, 5)
    with_lora(nn.ModuleList([mixer]), TARGETS)
    (layer,) = record(mixer, hidden)
    check(layer, hidden, None, [] if fused else ["x_proj", "out_proj"])


def test_a_peft_model() -> None:
    model = transformers_model("mamba")
    config = peft.LoraConfig(r=2, target_modules=["in_proj", "x_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).eval()
    layers = record(wrapped, input_ids=torch.randint(19, (2, 6)))
    assert len(layers) == 2
    for layer in layers:
        check(layer, layer.call.hidden_states, None, ["in_proj", "x_proj"])


def test_float32_adapters_on_a_bfloat16_model() -> None:
    model = transformers_model("mamba").to(torch.bfloat16)
    with_lora(model.backbone.layers, ["in_proj", "x_proj"], torch.float32)
    for layer in record(model, torch.randint(19, (2, 6))):
        assert layer.linear.values.dtype == torch.float32
        assert layer.reconstruction_error() <= 8e-2
        parts = mamba1_parts(layer.mixer.module, layer.call.hidden_states)
        assert relative_error(layer.operator.dense(None), alpha(parts, "exact")) <= 5e-6
