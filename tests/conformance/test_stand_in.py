"""The paths taken on a CUDA device or on Apple's MPS, on a device that stands in for one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.counts import Counts
from helpers.every_method import INSIDE, METHODS, call, reported
from helpers.stand_in import MixedDevicesError, StandIn
from oracles import relative_error
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from zoo import architectures
from zoo.language import word_tokenizer

from captum_ssm import EdgeEffects, LatimFlow, LatimLogit, SSMLLMAttribution
from captum_ssm.operators import SelectiveScan

pytestmark = pytest.mark.slow

#: The page of a report is text, and ``compare`` calls the methods one by one.
NAMES = [*(method.__name__ for method in METHODS), "matrices", "norms", *INSIDE]
#: What is found there and given back on the host.
ON_HOST = ("graph",)
#: Mixers that differ in what they do on a device: scans, attention, images, delta rules, windows.
KINDS = ("mamba", "jamba", "vim", "qwen3_next", "recurrent_gemma")
#: Of 243 operators that any method asks for on any mixer, they do not ask for two alone.
ON_MPS = ("MambaAttribution", "LatimALTI")


def moved(case: architectures.Case, kind: str = "cuda") -> architectures.Case:
    return architectures.Case(copy.deepcopy(case.model).to(kind), case.inputs.to(kind))


def found_or_refused(name: str, case: architectures.Case) -> list[Tensor] | str:
    try:
        return call(name, case.model, case.inputs, case.target["target"])
    except Exception as refused:
        return type(refused).__name__


def same(found: list[Tensor] | str, wanted: list[Tensor] | str) -> bool:
    if isinstance(found, str) or isinstance(wanted, str):
        return found == wanted
    return all(relative_error(a.cpu(), b) <= 1e-5 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("key", KINDS)
def test_every_method(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = architectures.ZOO[key](monkeypatch)
    wanted = {name: found_or_refused(name, case) for name in NAMES}
    with StandIn(counted=False) as device:
        there = moved(case)
        for name in NAMES:
            found = found_or_refused(name, there)
            assert not device.mixed, (name, device.mixed)
            assert same(found, wanted[name]), (name, found, wanted[name])
            is_there = isinstance(found, str) or {x.is_cuda for x in found} <= {name not in ON_HOST}
            assert is_there, name


@pytest.mark.parametrize("key", [key for key in KINDS if key != "jamba"])  # which is in float64
def test_mps_has_what_it_is_asked_for(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = architectures.ZOO[key](monkeypatch)
    with sdpa_kernel(SDPBackend.MATH):  # as there: some relevance is 0, and found as its rounding
        wanted = {name: found_or_refused(name, case) for name in ON_MPS}
    with StandIn(counted=False, kind="mps") as device:
        there = moved(case, "mps")
        for name in ON_MPS:
            found = found_or_refused(name, there)
            assert not device.lacking + device.mixed, (name, device.lacking, device.mixed)
            assert same(found, wanted[name]), (name, found, wanted[name])
            assert isinstance(found, str) or all(x.is_mps for x in found), name


def over_spans(model: nn.Module, ids: Tensor) -> Tensor:
    explain = SSMLLMAttribution(LatimFlow(model), word_tokenizer())
    options = {"spans": "token", "prompt_spans": "token", "hops": 2}
    return explain.attribute("anna owns the lamp", target="owns the", **options).seq_attr


#: What is asked of a device beside what :data:`NAMES` name.
ELSE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "compare": lambda model, ids: torch.cat(call("compare", model, ids, (-1, 3))),
    "report": lambda model, ids: reported(model, ids, (-1, 3), methods=[LatimFlow])[-1],
    "cuts": lambda model, ids: EdgeEffects(model).validate(ids, (-1, 3), samples=4).true,
    "spans": over_spans,
}


@pytest.mark.parametrize("name", ELSE)
def test_mps_has_what_else_it_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = architectures.mamba(monkeypatch)
    wanted = ELSE[name](case.model, case.inputs)
    with StandIn(counted=False, kind="mps") as device:
        there = moved(case, "mps")
        found = ELSE[name](there.model, there.inputs)
        assert not device.lacking + device.mixed
    assert relative_error(found, wanted) <= 1e-4


def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where one call on a small Mamba waits for the device."""
    case = architectures.mamba(monkeypatch)
    with StandIn() as device:
        there = moved(case)
        device.counts = Counts()
        LatimFlow(there.model).attribute(there.inputs, (-1, 3))
    return device.counts.waits


def broken(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Tensor]) -> None:
    """Put another function in the place of the scan of Mamba-1."""
    right = SelectiveScan._run
    monkeypatch.setattr(
        SelectiveScan, "_run", lambda scan, x, transposed: run(right(scan, x, transposed))
    )


def test_a_tensor_left_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda out: out * torch.ones(out.shape[1])[:, None, None])
    with pytest.raises(MixedDevicesError, match=r"aten.mul.Tensor with \[\(\d+, 1, 1\)\]"):
        waits(monkeypatch)


@pytest.mark.parametrize("mixing", ["alti", "projection"])
def test_two_devices(mixing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    case = architectures.mamba(monkeypatch)
    wanted = LatimLogit(case.model).attribute(case.inputs, (-1, 3), mixing=mixing)
    places = {"backbone.layers.1": "cuda:1", "backbone.embeddings": "cuda:0", "lm_head": "cuda:0"}
    places |= {"backbone.layers.0": "cuda:0", "backbone.norm_f": "cuda:0"}
    with StandIn() as device:
        accelerate.dispatch_model(case.model, places, main_device="cuda:0")
        found = LatimLogit(case.model).attribute(case.inputs.to("cuda"), (-1, 3), mixing=mixing)
        assert not device.mixed
    assert relative_error(found.cpu(), wanted) <= 1e-5
