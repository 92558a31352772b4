"""One example of each experiment by one method, with the numbers that it gave before.

Every change runs these, since the core changes under the experiments. Where numbers are to change,
``python bench/tests/test_small.py`` measures them anew.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from captum_ssm_bench import EXPERIMENTS, Cell, Experiment

NUMBERS = Path(__file__).with_name("small.json")
#: What is asked of an experiment, where that is not the first model and the first method.
MODELS = {"causal": "pairs-mamba2"}
METHODS = ("LatimFlow", "LatimNorm")
CELLS = {
    "graphs": Cell("path", "centered"),
    "hybrid-parts": Cell("one head off", "attention"),
    "knockout": Cell("by rule", "centered"),
}


def measured(experiment: Experiment) -> dict[str, Any]:
    """The numbers of the first example, by row."""
    wanted = MODELS.get(experiment.name)
    subject = next(each for each in experiment.subjects() if wanted in (None, each.name))
    cells = experiment.cells()
    first = next((each for name in METHODS for each in cells if each.method == name), cells[0])
    cell = CELLS.get(experiment.name, first)
    torch.manual_seed(0)
    model, example = subject.load(torch.device("cpu")), experiment.example(subject, 0, 0)
    with experiment.together():
        rows = experiment.measure(model, example, cell)
    return {"model": subject.name, "row": " ".join(cell).strip(), "numbers": rows}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_numbers_are_those_of_before(name: str) -> None:
    found, before = measured(EXPERIMENTS[name]), json.loads(NUMBERS.read_text("utf-8"))[name]
    assert found["numbers"].keys() == before["numbers"].keys() != set()
    assert (found["model"], found["row"]) == (before["model"], before["row"])
    for row, numbers in before["numbers"].items():
        assert found["numbers"][row] == pytest.approx(numbers, rel=1e-2, abs=4e-6, nan_ok=True)
    assert any(
        math.isfinite(x) and x != 0 for row in before["numbers"].values() for x in row.values()
    )


def test_all_numbers_are_of_an_experiment() -> None:
    assert json.loads(NUMBERS.read_text("utf-8")).keys() == set(EXPERIMENTS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {name: measured(EXPERIMENTS[name]) for name in EXPERIMENTS}
    NUMBERS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
