"""The Mamba-2 mixers of transformers' hybrids, alone and in their models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.contract import CORE, LEAKS
from helpers.versions import VERSION_4, not_in_4, transformers5
from oracles import relative_error
from oracles.mamba2_formula import alpha, form_of, mamba2_parts
from torch import Tensor
from zoo.mamba import padded_batch
from zoo.mamba2 import HYBRIDS, OPTIONS, close_to, first_mixer, make_model, mixer_names

from captum_ssm import trace
from captum_ssm.errors import CachedStateError, UnsupportedMixerError
from captum_ssm.testing.adapters import check_adapter
from captum_ssm.tracing import Layer

pytestmark = pytest.mark.slow

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


@transformers5
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


@transformers5
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


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    groups = {"zamba2": "mamba_ngroups", "nemotron_h": "n_groups"}
    for family in HYBRIDS:
        bias, conv_bias, kernel, _ = OPTIONS[family]
        yield family, {}
        yield family, {bias: True, kernel: 3} | ({conv_bias: False} if conv_bias else {})
        for number in (1, 6):
            yield family, {groups.get(family, "mamba_n_groups"): number}
    for norm, first, channels in ((True, False, 16), (True, True, 24), (False, True, 32)):
        own = {"mamba_rms_norm": norm, "mamba_norm_before_gate": first}
        yield "falcon_h1", {**own, "mamba_d_ssm": channels, "mamba_n_heads": channels // 4}


@pytest.mark.parametrize(("family", "options"), rows())
def test_contract(family: str, options: dict[str, Any]) -> None:
    not_in_4(family, "zamba2")  # padded
    model = make_model(family, **options)

    def formula(module: Any, hidden: Tensor, kwargs: Any) -> dict[str, Tensor] | None:
        if not hasattr(module, "A_log"):
            return None
        mask = kwargs.get("attention_mask")
        parts = mamba2_parts(module, hidden, form_of(module, model.config), mask)
        names = ["s6", "unified", "exact", "exact-norm", "exact-gate"]
        return {name: alpha(parts, name) for name in (names if not options else names[2:3])}

    ids, leaks = torch.randint(19, (2, 9)), LEAKS if OPTIONS[family][0] in options else {}
    check_adapter(lambda: model, ids, formula, leaks, CORE)
