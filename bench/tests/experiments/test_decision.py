"""The registered decision, on numbers whose answer is known."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor

from captum_ssm_bench.experiments.causal import decision
from captum_ssm_bench.experiments.causal.fresh import BASELINE, ROWS
from captum_ssm_bench.harness.experiment import Cell
from captum_ssm_bench.harness.records import Key, Records

FROZEN, CENTERED, BALANCED = (
    Cell("LatimFlow", name) for name in ("frozen", "centered, own mean", "balanced, own mean")
)
#: So many models, whose numbers differ by their noise.
MODELS = 40


def spread(mean: float, noise: float) -> Tensor:
    """Return a number per model, with that mean."""
    return mean + noise * torch.linspace(-1, 1, MODELS, dtype=torch.float64)


def numbers(first: dict[Cell, float], rho: dict[Cell, float], noise: float = 0.0) -> dict:
    columns = {name: {row: spread(0.1, 0) for row in ROWS} for name in decision.COLUMNS}
    columns["top1"] |= {row: spread(x, 0) for row, x in first.items()}
    columns["spearman"] |= {
        row: spread(x, noise * (k % 2)) for k, (row, x) in enumerate(rho.items())
    }
    return columns


@pytest.mark.parametrize(
    ("first", "noise", "chosen"),
    [
        ((0.9, 0.5, 0.85), 0.0, BALANCED),  # centered names too few sources
        ((0.9, 0.85, 0.85), 0.0, CENTERED),  # the highest ρ
        ((0.9, 0.85, 0.87), 1.0, FROZEN),  # none is better in ρ, so the best source first
    ],
)
def test_the_default_follows_the_registered_rule(first, noise, chosen):
    rows = (FROZEN, CENTERED, BALANCED)
    rho = dict(zip(rows, (0.5, 0.52, 0.51), strict=True))
    found = numbers(dict(zip(rows, first, strict=True)), rho, noise)
    assert decision.default_rule(found) == chosen


def test_rows_with_kinds_or_more_passes_are_no_default():
    best = {Cell("LatimFlow", "centered, kinds"): 1.0, BASELINE: 1.0}
    best[Cell("LatimFlow", "balanced, with ExpectedGradients")] = 1.0
    found = numbers({FROZEN: 0.5} | best, {FROZEN: 0.5} | best)
    assert decision.default_rule(found) == FROZEN


def test_the_model_of_bytes_is_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decision, "stored", lambda: {"a": 1.0, "lacks a row": 1.0})
    rho = {("fresh", "a"): (0.1, 0.3), ("bytes", "x"): (0.4,), ("bytes", "y"): (0.5, 0.6)}
    for (experiment, model), values in rho.items():
        records = Records(tmp_path / experiment)
        for row in ROWS:
            for index, value in enumerate(values):
                numbers = {**dict.fromkeys(decision.COLUMNS, 0.0), "spearman": value}
                numbers |= {"off_the_sum": 2 * value, "size_of_the_sum": 4 * value}
                records.append(Key(experiment, model, *row, 0, index), {"": numbers})
    for with_bytes, expected in ((False, [0.2]), (True, [0.2, 0.5])):
        found = decision.read(tmp_path, with_bytes=with_bytes)
        assert found["spearman"][FROZEN].tolist() == pytest.approx(expected)
        assert found["off_the_sum"][FROZEN].tolist() == pytest.approx([0.5] * len(expected))


def test_claims_are_differences_with_bounds(tmp_path: Path):
    found = numbers({FROZEN: 0.9}, {FROZEN: 0.6, BASELINE: 0.5})
    better, *not_below, source = decision.claims(found, FROZEN)
    assert float(better.found.value) == pytest.approx(0.1) and better.holds
    assert [claim.needed for claim in not_below] == [-0.02] * 3
    assert source.holds and float(source.found.value) == pytest.approx(0.8)
    worse = decision.claims(numbers({}, {FROZEN: 0.4, BASELINE: 0.5}), FROZEN)
    assert not worse[0].holds
    decision.write(found, tmp_path)
    for name, expected in (("fresh-models", 0.6), ("fresh-models-against", 0.1)):
        with (tmp_path / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            rows = {(row["method"], row["formulation"]): row for row in csv.DictReader(file)}
        assert len(rows) == len(ROWS)
        assert float(rows[FROZEN]["ρ"]) == pytest.approx(expected)
        assert rows[FROZEN]["model"] == f"fresh ({MODELS} models)"
