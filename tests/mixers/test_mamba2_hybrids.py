"""The Mamba-2 mixers of transformers' hybrids, alone and in their models."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from helpers.versions import VERSION_4, not_in_4
from oracles import relative_error
from oracles.mamba2_formula import alpha, form_of, mamba2_parts
from torch import Tensor
from zoo.mamba import padded_batch
from zoo.mamba2 import HYBRIDS, OPTIONS, close_to, first_mixer, make_model, mixer_names

from captum_ssm import trace
from captum_ssm.attr.call.components import parse_components
from captum_ssm.errors import CachedStateError, UnsupportedMixerError
from captum_ssm.tracing import Layer

# float32 against float32 or float64, for any draw of the parameters; typical is 3e-7
FLOAT32 = 1e-5


def record(model: Any, ids: Tensor, **kwargs: Any) -> list[Layer]:
    with torch.no_grad(), trace(model, layers=mixer_names(model), operators=False) as t:
        model(ids, **kwargs)
    assert t.layers
    return t.layers


def check(model: Any, ids: Tensor, mask: Tensor | None = None, *, matrices: bool = True) -> None:
    """Every mixer's operator is the module, and both are the formula."""
    for layer in record(model, ids, attention_mask=mask):
        assert layer.reconstruction_error() <= FLOAT32
        mixer = layer.mixer.module
        form = form_of(mixer, model.config)
        parts = mamba2_parts(mixer, layer.call.hidden_states, form, mask)
        assert relative_error(layer.output, parts.output) <= FLOAT32
        assert relative_error(layer.linear.output(), parts.output) <= FLOAT32
        if matrices:
            found = layer.operator.dense(None)
            assert relative_error(found, alpha(parts, "exact")) <= FLOAT32


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 11])
@pytest.mark.parametrize("family", HYBRIDS)
def test_reproduces_the_module(family: str, tokens: int, batch: int) -> None:
    if tokens == 1:
        not_in_4(family, "falcon_h1")  # examples are multiplied
    check(make_model(family), torch.randint(19, (batch, tokens)))


@pytest.mark.parametrize("family", HYBRIDS)
def test_long_sequence(family: str) -> None:
    """Past the chunks of the modules and of the operator."""
    for layer in record(make_model(family), torch.randint(19, (2, 71))):
        assert layer.reconstruction_error() <= FLOAT32


@pytest.mark.parametrize("family", HYBRIDS)
def test_typical_error(family: str) -> None:
    errors = []
    for _ in range(6):
        for layer in record(make_model(family), torch.randint(19, (2, 16))):
            errors.append(layer.reconstruction_error())
    assert statistics.median(errors) <= 6e-7


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", HYBRIDS)
def test_left_padding(family: str, bias: bool) -> None:
    not_in_4(family, "zamba2")
    model = make_model(family, **{OPTIONS[family][0]: bias})
    ids, mask = padded_batch([9, 4, 6])
    check(model, ids, mask)
    for layer in record(model, ids, attention_mask=mask):
        assert layer.linear.mask is not None and torch.equal(layer.linear.mask, mask.bool())
        assert not layer.operator.dense()[1, :, :5].any()


@pytest.mark.parametrize("family", HYBRIDS)
def test_biases_and_kernels(family: str) -> None:
    bias, conv_bias, kernel, _ = OPTIONS[family]
    options = {bias: True, kernel: 3} | ({conv_bias: False} if conv_bias else {})
    for tokens in (2, 7):
        check(make_model(family, **options), torch.randint(19, (2, tokens)))


@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("family", HYBRIDS)
def test_groups(family: str, groups: int) -> None:
    name = {"zamba2": "mamba_ngroups", "nemotron_h": "n_groups"}.get(family, "mamba_n_groups")
    model = make_model(family, **{name: groups})
    check(model, torch.randint(19, (2, 7)))


@pytest.mark.transformers5
@pytest.mark.parametrize("family", HYBRIDS)
def test_limits_of_dt(family: str) -> None:
    name = OPTIONS[family][3]
    if name is None:
        options, low, high = {"time_step_min": 0.5, "time_step_max": 0.6}, 0.5, float("inf")
    else:
        options, low, high = {name: (0.5, 1.0)}, 0.5, 1.0
    model = make_model(family, **options)
    for mixer in [model.get_submodule(mixer_name) for mixer_name in mixer_names(model)]:
        with torch.no_grad():
            mixer.dt_bias.fill_(close_to(0.75))
            mixer.in_proj.weight[-6:] *= 4
    ids = torch.randint(19, (2, 9))
    check(model, ids)
    for layer in record(model, ids):
        scan = next(leaf for leaf in layer.operator.leaves() if leaf.component == "scan")
        dt = scan.tensors()["scale"]
        assert (dt == low).any() and ((dt > low) & (dt < high)).any()
        assert (dt == high).any() if name else (dt > 1).any()


@pytest.mark.parametrize("components", ["s6", "unified", "exact-norm", "exact-gate"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_ablations(family: str, components: str) -> None:
    not_in_4(family, "zamba2")  # padded
    model = make_model(family)
    ids, mask = padded_batch([7, 3])
    for layer in record(model, ids, attention_mask=mask):
        mixer = layer.mixer.module
        parts = mamba2_parts(mixer, layer.call.hidden_states, form_of(mixer, model.config), mask)
        operator = layer.linear.restrict(parse_components(components)).operator
        assert relative_error(operator.dense(None), alpha(parts, components)) <= FLOAT32


@pytest.mark.parametrize("family", HYBRIDS)
def test_float64(family: str) -> None:
    """Against the formula; the modules themselves round inside to float32."""
    model = make_model(family).double()
    for layer in record(model, torch.randint(19, (2, 9))):
        mixer = layer.mixer.module
        parts = mamba2_parts(mixer, layer.call.hidden_states, form_of(mixer, model.config))
        assert relative_error(layer.linear.output(), parts.output) <= 1e-12
        layer.verify()


@pytest.mark.parametrize("family", HYBRIDS)
def test_half_precision(family: str) -> None:
    not_in_4(family, "zamba2")  # padded
    model = make_model(family).to(torch.bfloat16)
    ids, mask = padded_batch([9, 5])
    for layer in record(model, ids, attention_mask=mask):
        assert layer.output.dtype == torch.bfloat16
        assert layer.linear.values.dtype == layer.linear.output().dtype == torch.float32
        assert layer.reconstruction_error() <= 5e-2
        mixer = layer.mixer.module
        parts = mamba2_parts(mixer, layer.call.hidden_states, form_of(mixer, model.config), mask)
        assert relative_error(layer.linear.output(), parts.output) <= FLOAT32


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("channels", [16, 24, 32])
def test_forms_of_falcon_h1(norm: bool, first: bool, channels: int) -> None:
    model = make_model(
        "falcon_h1",
        mamba_rms_norm=norm,
        mamba_norm_before_gate=first,
        mamba_d_ssm=channels,
        mamba_n_heads=channels // 4,
    )
    ids, mask = padded_batch([7, 4])
    check(model, ids, mask)


@pytest.mark.transformers5
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_cache_is_refused(family: str) -> None:
    model = make_model(family)
    ids = torch.randint(19, (1, 5))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    assert cache is not None
    mixer = first_mixer(model)
    for args, kwargs in (((cache,), {}), ((), {"cache_params": cache})):
        with torch.no_grad(), trace(mixer, operators=False) as t:
            mixer(torch.randn(1, 1, 12), *args, **kwargs)
        with pytest.raises(CachedStateError, match="cache_params"):
            _ = t.layers[0].operator


def test_zamba2_of_version_4_is_refused_if_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("zamba2")
    ids, mask = padded_batch([6, 4])
    kind = type(first_mixer(model))
    if not VERSION_4:
        monkeypatch.setattr(kind, "torch_forward", kind.forward, raising=False)
    layer, *_ = record(model, ids, attention_mask=mask)
    with pytest.raises(UnsupportedMixerError, match="Zamba 2 on a CPU in transformers 4"):
        _ = layer.linear
