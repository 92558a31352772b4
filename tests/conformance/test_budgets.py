"""What calls ask of a GPU is what the table says, and grows with nothing that it need not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from oracles import relative_error

from benchmarks import budgets
from benchmarks.counts import Counts
from benchmarks.stand_in import StandIn
from tools import speed_page

pytest.importorskip("transformers")

TABLE: dict[str, Any] = json.loads(budgets.FILE.read_text(encoding="utf-8"))
FEW, MANY = map(str, budgets.LENGTHS)
FAMILIES = list(budgets.FAMILIES)
#: Calls that wait for a device once for all that they check.
CHECKED_TOGETHER = ("ImplicitAttentionRollout", "LatimFlow, frozen", "LatimFlow, centred")
#: How often a call may wait for a device, beside the model itself.
WAITS = 4
#: Those of a model whose blocks add two mixers to one stream wait for each, to tell that it is one.
PARALLEL = ("softmax", "LatimALTI")
#: Launches for 64 tokens and a layer at most; gradients of coefficients take a scan three times.
FOR_A_CHUNK = {"LatimFlow, centred": 96}
#: Sums of logarithms of many tokens, in which errors would add up.
IN_DOUBLE = ("RWKV-4",)


def row(family: str, length: str, call: str) -> dict[str, float]:
    found: dict[str, float] = TABLE["families"][family][length][call]
    return found


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_the_table(family: str) -> None:
    """If they are fewer, ``python -m benchmarks.budgets`` writes the table anew."""
    found = budgets.of_family(family)
    assert {key: list(calls) for key, calls in found.items()} == {
        key: list(calls) for key, calls in TABLE["families"][family].items()
    }
    for length, calls in found.items():
        for call, counts in calls.items():
            wanted = row(family, length, call)
            assert not budgets.grown(counts, wanted), (family, length, call)
            assert not budgets.grown(wanted, counts), (family, length, call, "write it anew")


@pytest.mark.parametrize("name", ["launches", "synchronisations", "bytes"])
def test_a_twentieth_more_is_too_much(name: str) -> None:
    wanted = {"launches": 100.0, "synchronisations": 1.0, "bytes": 1e6, "flops": 1e6}
    assert budgets.grown({**wanted, name: 1.06 * wanted[name]}, wanted) == [name]
    assert not budgets.grown({**wanted, name: 1.04 * wanted[name]}, wanted)


def test_the_page_shows_the_table() -> None:
    page = (speed_page.DOCS / speed_page.PAGE).read_text(encoding="utf-8")
    assert speed_page.on_a_gpu(TABLE) in page


def test_time_is_of_work_and_of_launches() -> None:
    gpu = budgets.GPU("one", bandwidth=100.0, peak=10.0, launch=2.0)
    assert gpu.seconds({"bytes": 1000.0, "flops": 10.0, "launches": 3.0}) == 10 + 6
    assert gpu.seconds({"bytes": 10.0, "flops": 1000.0, "launches": 0.0}) == 100


# --- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_device_is_waited_for_a_few_times(family: str) -> None:
    for length in (FEW, MANY):
        own = row(family, length, "f+b")["synchronisations"]
        for call in TABLE["families"][family][length]:
            found = row(family, length, call)["synchronisations"] - own
            more = budgets.LAYERS if (family, call) == PARALLEL else 0
            assert found <= WAITS + more, (length, call)


@pytest.mark.parametrize("call", budgets.CALLS)
def test_more_layers_are_not_waited_for_more_often(call: str) -> None:
    few, many = (
        budgets.counted(budgets.FAMILIES["Mamba"](layers), 80, (call,))[call]["synchronisations"]
        for layers in (2, 4)
    )
    assert few == many


@pytest.mark.parametrize("family", FAMILIES)
def test_launches_grow_with_chunks_at_most(family: str) -> None:
    chunks = (int(MANY) - int(FEW)) / 64
    for call in CHECKED_TOGETHER:
        more = row(family, MANY, call)["launches"] - row(family, FEW, call)["launches"]
        assert more <= FOR_A_CHUNK.get(call, 32) * budgets.LAYERS * chunks, call


def test_mamba_takes_few_launches() -> None:
    """A layer of those of a deep model, in which what a call takes once counts for little."""
    layers = budgets.LARGE[1]
    most = {"ImplicitAttentionRollout": 50, "LatimFlow, frozen": 120}
    for call, launches in most.items():
        assert TABLE["large"][call]["launches"] <= launches * layers, call


@pytest.mark.parametrize(
    ("call", "most"), [("ImplicitAttentionRollout", 1.2), ("LatimFlow, frozen", 1.5)]
)
def test_a_large_mamba_takes_little_more_than_a_pass(call: str, most: float) -> None:
    large = TABLE["large"]
    assert budgets.H100.seconds(large[call]) <= most * budgets.H100.seconds(large["f+b"])


# --- without float64 ----------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_device_without_float64(family: str) -> None:
    """What needs it is computed on the host, and nothing else is."""
    model = budgets.FAMILIES[family](budgets.LAYERS)
    ids = torch.arange(80)[None] % budgets.VOCABULARY
    for name, call in list(budgets.CALLS.items())[1:]:
        wanted = call(model, ids)
        with StandIn(counted=False, kind="mps") as device:
            found = call(model.to("mps"), ids.to("mps"))
            model.to("cpu")
        assert not device.lacking, name
        assert relative_error(found.cpu(), wanted) <= 1e-5, name


# --- half precision ------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision(family: str, dtype: torch.dtype) -> None:
    """Nothing is computed in float64, and no more than a layer's weights are copied at a time."""
    layers = 4
    model = budgets.FAMILIES[family](layers).to(dtype)
    single = 4 * sum(x.numel() for x in model.parameters())
    for call in ("ImplicitAttentionRollout", "MambaAttribution", "LatimFlow, centred"):
        with StandIn() as device, budgets.fused(device):
            model.to("cuda")
            ids = torch.zeros(1, 20, dtype=torch.long, device="cuda")
            device.watch(model)
            device.counts = Counts()
            budgets.CALLS[call](model, ids)
        assert bool(device.counts.wide) == (family in IN_DOUBLE), call
        assert device.copied <= single / layers, call
