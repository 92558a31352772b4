"""What calls ask of a GPU is what the table says, and grows with nothing that it need not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from benchmarks import budgets
from captum_ssm import LatimLogit

TABLE = budgets.table()
FEW, MANY = map(str, budgets.LENGTHS)
FAMILIES = list(budgets.FAMILIES)
#: Calls that wait for a device once for all that they check.
CHECKED_TOGETHER = ("ImplicitAttentionRollout", "LatimFlow, frozen", "LatimFlow, centered")
#: How often a call may ask a device, beside the model itself; and wait for it at all, where it is
#: no method of vectors, which bring the places of a layer's tokens to the device.
WAITS, WAITS_AT_ALL = 4, 7
#: The same of a call that finds how layers hang together, which is about one more for each replay.
WAITS_WITH_REPLAYS = 16
#: A call that is in no table, but held to waiting no more often.
LOGIT: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "LatimLogit": lambda model, ids: LatimLogit(model).attribute(ids, budgets.TARGET)
}
#: Calls that make vectors of all pairs of tokens. They look for the stream behind each layer, and
#: ask a device about each tensor on the way.
OF_VECTORS = ("LatimLogit", "LatimALTI")
WAITS_FOR_A_LAYER = {"Mamba": 12, "softmax": 36}
#: Launches for 64 tokens and a layer at most; gradients of coefficients take a scan three times.
FOR_A_CHUNK = {"LatimFlow, centered": 80}


def row(family: str, length: str, call: str) -> dict[str, float]:
    return TABLE[family][length][call]


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mamba", "Gated DeltaNet"])
def test_counts_are_those_of_the_table(family: str) -> None:
    found = budgets.of_family(family)
    assert {key: list(calls) for key, calls in found.items()} == {
        key: list(calls) for key, calls in TABLE[family].items()
    }
    for length, calls in found.items():
        for call, counts in calls.items():
            wanted = row(family, length, call)
            assert not budgets.grown(counts, wanted), (family, length, call)
            assert not budgets.grown(wanted, counts), (family, length, call, "write it anew")


# --- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_device_is_waited_for_a_few_times(family: str) -> None:
    for length in (FEW, MANY):
        own = row(family, length, "f+b")
        for call in TABLE[family][length]:
            found = row(family, length, call)
            if call == "ImplicitAttentionRollout":  # the first to be asked of the model
                assert found["synchronisations"] - own["synchronisations"] <= WAITS_WITH_REPLAYS
                continue
            if call not in OF_VECTORS:
                assert questions(found) - questions(own) <= WAITS, (length, call)
                more = found["synchronisations"] - own["synchronisations"]
                assert more <= WAITS_AT_ALL, (length, call)


def questions(found: budgets.Row) -> float:
    """How often a call waits for an answer of the device."""
    return found["synchronisations"] - found["uploads"]


def waits(make: Callable[[int], nn.Module], layers: int, call: str) -> tuple[float, float]:
    """How often a call asks the device, or waits for it at all, and the model itself."""
    found = budgets.counted(make(layers), 80, ("f+b", call))
    count = questions if call in OF_VECTORS else (lambda row: row["synchronisations"])
    return count(found[call]), count(found["f+b"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "call"),
    [*(("Mamba", call) for call in budgets.CALLS), *(("softmax", call) for call in OF_VECTORS)],
)
def test_more_layers_are_not_waited_for_more_often(
    family: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "CALLS", budgets.CALLS | LOGIT)
    few, own = waits(budgets.FAMILIES[family], 2, call)
    many, _ = waits(budgets.FAMILIES[family], 4, call)
    if call in OF_VECTORS:
        assert many - few <= 2 * WAITS_FOR_A_LAYER[family]
        return
    replays = call in ("ImplicitAttentionRollout", "MambaAttribution")
    assert few == many <= own + (WAITS_WITH_REPLAYS if replays else WAITS_AT_ALL)


@pytest.mark.parametrize("family", FAMILIES)
def test_launches_grow_with_chunks_at_most(family: str) -> None:
    chunks = (int(MANY) - int(FEW)) / 64
    for call in CHECKED_TOGETHER:
        more = row(family, MANY, call)["launches"] - row(family, FEW, call)["launches"]
        assert more <= FOR_A_CHUNK.get(call, 32) * budgets.LAYERS * chunks, call
