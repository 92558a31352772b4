"""Models spread by accelerate: the numbers of those that stay where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from captum_ssm.errors import OptionError
from captum_ssm_bench import EXPERIMENTS, Cell
from captum_ssm_bench.harness.placing import placed

accelerate = pytest.importorskip("accelerate")

PASSKEYS = EXPERIMENTS["passkey"]
CELLS = [
    Cell("LatimFlow", "frozen"),
    Cell("LatimALTI rollout", "silu"),
    Cell("MambaAttribution", "unified"),
    Cell("TransformerAttribution", "lrp"),
    Cell("IntegratedGradients"),
    Cell("FeatureAblation"),
]


def loaded() -> Any:
    return PASSKEYS.subjects()[0].load(torch.device("cpu"))


def numbers(model: Any, seed: int) -> dict[Cell, Any]:
    given = PASSKEYS.example(PASSKEYS.subjects()[0], 0, seed)
    return {cell: PASSKEYS.measure(model, given, cell) for cell in CELLS}


@pytest.mark.parametrize("device_map", ["cpu", "auto", "balanced", "sequential"])
def test_placed_models_give_the_same_numbers(device_map: str, seed: int) -> None:
    model = placed(loaded(), device_map)
    assert set(model.hf_device_map.values()) == {"cpu"}
    assert hasattr(model, "_hf_hook")
    assert_same(numbers(model, seed), numbers(loaded(), seed))


def test_models_on_a_disk_give_the_same_numbers(tmp_path: Path, seed: int) -> None:
    model = accelerate.disk_offload(loaded(), str(tmp_path), execution_device=torch.device("cpu"))
    assert all(weight.is_meta for weight in model.parameters())
    assert_same(numbers(model, seed), numbers(loaded(), seed))


def assert_same(one: dict[Cell, Any], other: dict[Cell, Any]) -> None:
    for cell, rows in one.items():
        for name, value in rows[""].items():
            assert value == pytest.approx(other[cell][""][name], abs=1e-9), (cell, name)


def test_a_place_that_is_none() -> None:
    with pytest.raises(OptionError, match="'everywhere' is neither a device nor one of"):
        placed(loaded(), "everywhere")
