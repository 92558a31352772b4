"""What LATIM's decomposition misses of each mixer's output (LATIM, figure 4 and table 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from captum_ssm.attr import LatimNorm

from ..harness.experiment import Cell, Column, Subject
from ..harness.records import Rows
from .linked_texts import LinkedTexts, device_of
from .token_maps import ACTIVATIONS

#: All that have contribution vectors share them.
METHOD = "Latim"


class DecompositionErrors(LinkedTexts):
    """The error by layer and activation, with that of the mean over layers."""

    columns = (Column("error", ("error",), "low"),)

    def cells(self) -> Sequence[Cell]:
        return [Cell(METHOD, activation) for activation in ACTIVATIONS]

    def example(self, subject: Subject, index: int, seed: int) -> Tensor:
        return self.text(subject, index, seed).input_ids

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        explain = LatimNorm(model, activation=cell.formulation)
        errors = explain.decomposition_error(example.to(device_of(model)))
        layers = {f"layer {i}": {"error": error} for i, error in enumerate(errors)}
        return {**layers, "mean": {"error": sum(errors) / len(errors)}}
