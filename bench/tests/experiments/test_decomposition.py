"""Decomposition errors by layer."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from captum_ssm import LatimNorm
from captum_ssm_bench import EXPERIMENTS, Cell

ERRORS = EXPERIMENTS["decomposition-error"]


def test_the_errors_of_an_example() -> None:
    (subject,) = (each for each in ERRORS.subjects() if each.name == "translation-mamba2")
    model, given = subject.load(torch.device("cpu")), ERRORS.example(subject, 5, 3)
    for cell in ERRORS.cells():
        found = {
            row: numbers["error"] for row, numbers in ERRORS.measure(model, given, cell).items()
        }
        wanted = LatimNorm(model, activation=cell.formulation).decomposition_error(given)
        assert found == {"layer 0": wanted[0], "layer 1": wanted[1], "mean": sum(wanted) / 2}
        exact = cell == Cell("Latim", "linearized")
        assert (max(found.values()) <= 1e-5) if exact else (min(found.values()) >= 0.01)


def test_all_language_models_are_measured() -> None:
    names = {subject.name for subject in ERRORS.subjects()}
    assert {"copying-mamba", "recall-mamba", "frequent-word-mamba2"} <= names
