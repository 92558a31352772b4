"""Where the motifs of DNA lie, and what other bases would do: found by methods, and by trying.

Shapes: L bases; of each of them A, C, G and T.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from captum.attr import FeatureAblation, IntegratedGradients
from torch import Tensor, nn

from captum_ssm.edges import mutagenesis, variant_effects
from captum_ssm.metrics import average_precision, spearman
from captum_ssm.models import OneHot

from ..harness.experiment import Cell, Column, Experiment, Subject
from ..harness.records import Rows
from ..harness.subjects import bundled
from ..tasks.motifs import MotifBatch, MotifTask
from ..training.dna_recipes import DNA_RECIPES
from .linked_texts import device_of

#: The row of the truth.
TRUTH = "mutagenesis"
RULES = ("frozen", "half", "equal", "centred")
#: What a base is held against: each as likely.
_ANY = 0.25
_STEPS = 32
_BOTH = len(MotifTask.classes) - 1


class Motifs(Experiment):
    """Maps of sequences that hold both motifs, for the class that says so.

    A position's score is what the target would lose, on average, with another base there.
    """

    name = "motifs"
    title = "Motifs in DNA, and what other bases would do"
    columns = (
        Column("AP", ("ap",)),
        Column("pointing", ("pointing",)),
        Column("positions", ("positions",)),
        Column("variants", ("variants",)),
    )
    baselines = (TRUTH,)
    examples = 30
    note = (
        "AP and pointing say whether the positions of both motifs have the greatest scores, and "
        "the greatest one. The others are rank correlations with mutagenesis: of the scores of "
        "positions, and of the effects of all single-base variants."
    )

    def __init__(self, tasks: Mapping[str, MotifTask] | None = None) -> None:
        self.tasks = {name: recipe.task for name, recipe in DNA_RECIPES.items()}
        self.tasks = dict(tasks) if tasks is not None else self.tasks
        self._truths: dict[int, Tensor] | None = None

    def subjects(self) -> Sequence[Subject]:
        return [bundled(name) for name in self.tasks]

    def cells(self) -> Sequence[Cell]:
        others = ("Gradient", "IntegratedGradients", "FeatureAblation", TRUTH)
        return [*(Cell("LatimFlow", rule) for rule in RULES), *map(Cell, others)]

    def example(self, subject: Subject, index: int, seed: int) -> Any:
        """A :class:`~captum_ssm_bench.tasks.MotifBatch` of one sequence with both motifs."""
        drawn = random.Random(f"{seed}/{index}").getrandbits(31)
        return self.tasks[subject.name].draw(1, drawn, label=_BOTH)

    @contextmanager
    def together(self) -> Iterator[None]:
        self._truths = {}
        try:
            yield
        finally:
            self._truths = None

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        x = example.one_hot.to(device_of(model))
        reader = OneHot(model)
        truth = self._truth(reader, example, x)
        effects = truth if cell.method == TRUTH else _effects(reader, x, cell)
        scores = _ablated(reader, x) if effects is None else position_scores(effects)
        gold = example.gold.to(scores.device)
        found = {
            "ap": float(average_precision(scores, gold)),
            "pointing": float(gold[0, scores[0].argmax()]),
            "positions": float(spearman(scores, position_scores(truth))),
            "variants": float("nan"),
        }
        if effects is not None:
            others = (x == 0).flatten(1)
            found["variants"] = float(spearman(effects.flatten(1), truth.flatten(1), others))
        return {"": found}

    def _truth(self, reader: nn.Module, example: MotifBatch, x: Tensor) -> Tensor:
        """By trying, (1, 4, L); once for all cells that are measured together."""
        held = {} if self._truths is None else self._truths
        if id(example) not in held:
            held[id(example)] = mutagenesis(reader, x, _BOTH)
        return held[id(example)]


def position_scores(effects: Tensor) -> Tensor:
    """What a target loses on average with another base at each position, (B, 4, L) to (B, L)."""
    return -effects.sum(1) / 3


def _effects(reader: nn.Module, x: Tensor, cell: Cell) -> Tensor | None:
    """What a method says of variants, (1, 4, L); None where it says something of positions only."""
    if cell.method == "FeatureAblation":
        return None
    if cell.method == "IntegratedGradients":
        baseline = torch.full_like(x, _ANY)
        found = IntegratedGradients(reader).attribute(
            x, baseline, _BOTH, n_steps=_STEPS, internal_batch_size=_STEPS
        )
        gradient = found / (x - baseline)
        there = (gradient * x).sum(1, keepdim=True)
        effects: Tensor = ((gradient - there) * (1 - x)).to(x)
        return effects
    rule = cell.formulation if cell.method == "LatimFlow" else None
    return variant_effects(reader, x, _BOTH, rule=rule)


def _ablated(reader: nn.Module, x: Tensor) -> Tensor:
    """What the target loses where all bases are as likely at a position, (1, L)."""
    positions = torch.arange(x.shape[2], device=x.device).expand_as(x)
    with torch.no_grad():
        found = FeatureAblation(reader).attribute(
            x, _ANY, _BOTH, feature_mask=positions, perturbations_per_eval=x.shape[2]
        )
    scores: Tensor = found[:, 0]
    return scores
