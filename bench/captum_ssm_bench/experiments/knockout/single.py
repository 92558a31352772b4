"""Do estimated effects of single messages agree with true cuts, over many models?

Messages are drawn evenly, whatever their effect.  A model is one sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.edges import Edge, EdgeEffects, Effects
from captum_ssm.edges.truth import Interventions

from ...circuits.programs import HARDENED, SEEN
from ...harness.experiment import Cell, Column, Experiment, Subject
from ...harness.records import Rows
from ..causal.fresh import Fresh
from ..compiled import Asked, Compiled
from ..linked_texts import device_of
from .experiment import Knockout, sums_of

#: Texts of each model, messages drawn in each, and how many of all of them are the largest.
TEXTS, MESSAGES, LARGEST = 20, 10, 20
BUNDLED, FRESH, CIRCUITS = "bundled models", "fresh models", "compiled circuits"


class SingleMessages(Experiment):
    """Effects of 200 messages of each model, estimated and true."""

    name = "edges"
    title = "Estimated effects of single messages against true cuts"
    examples = 1
    columns = (
        *(column for column in Knockout.columns if column.name in ("r", "signs", "error")),
        Column("largest found", ("found",)),
    )
    over_models = (BUNDLED, FRESH, CIRCUITS)

    def __init__(self) -> None:
        #: By group, the experiment that has its models and texts.
        self._from = {BUNDLED: Knockout(), FRESH: Fresh(), CIRCUITS: Compiled()}
        language = Knockout.groups["language models"]
        fresh = self._from[FRESH].groups["fresh"]
        circuits = tuple(SEEN | HARDENED)
        self.groups = MappingProxyType({BUNDLED: language, FRESH: fresh, CIRCUITS: circuits})

    def subjects(self) -> Sequence[Subject]:
        subjects = {s.name: s for each in self._from.values() for s in each.subjects()}
        return [subjects[name] for names in self.groups.values() for name in names]

    def cells(self) -> Sequence[Cell]:
        return [Cell("EdgeEffects")]

    def example(self, subject: Subject, index: int, seed: int) -> Any:
        """The texts of a model."""
        (group,) = (name for name, own in self.groups.items() if subject.name in own)
        first = index * TEXTS
        return [self._from[group].example(subject, first + i, seed) for i in range(TEXTS)]

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        generator = torch.Generator().manual_seed(0)
        found = [of_text(model, *asked(text), generator) for text in example]
        x, y, rounding = (torch.cat(each) for each in zip(*found, strict=True))
        largest, true = (effects.abs().topk(LARGEST).indices for effects in (x, y))
        share = float(torch.isin(largest, true).double().mean())
        rows = {"all": (torch.arange(len(x)), math.nan), "largest": (largest, share)}
        return {
            name: {**sums_of(x[part], x[part], y[part], rounding[part]), "found": of_true}
            for name, (part, of_true) in rows.items()
        }


def asked(text: Any) -> tuple[Tensor, Any]:
    """The input and the target of a text of a circuit or of a trained model."""
    is_circuit = isinstance(text, Asked)
    return (text.ids, (-1, text.target)) if is_circuit else (text.inputs, text.target)


def of_text(
    model: nn.Module, inputs: Tensor, target: Any, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Effects of messages of one text, estimated and true, and the size of rounding, (n,) each."""
    inputs = inputs.to(device_of(model))
    effects = EdgeEffects(model).attribute(inputs, target)
    edges = evenly(effects, generator)
    run = Interventions(
        model, model, inputs, (), target, at_a_time=len(edges), tokens=effects.tokens
    )
    before = run.numbers().cpu().double()
    true = before - run.of_single([(0, edge) for edge in edges])
    rounding = 4 * torch.finfo(effects.output.dtype).eps * before.abs()
    estimated = torch.tensor([edge.effect for edge in edges], dtype=torch.float64)
    return estimated, true, rounding.expand_as(true)


def evenly(effects: Effects, generator: torch.Generator) -> list[Edge]:
    """Messages drawn evenly over layers, and over pairs of a token and an earlier one or itself."""
    tokens = effects.tokens
    places = [
        (layer, target, source)
        for layer in range(len(effects.layers))
        for target in range(tokens)
        for source in range(target + 1)
    ]
    chosen = torch.randperm(len(places), generator=generator)[:MESSAGES].tolist()
    found = []
    for layer, target, source in (places[i] for i in chosen):
        effect = float(effects.rows([target], layer)[0, 0, source])
        edge = effects.edge(0, layer, target, source, effect)
        assert edge is not None  # all tokens of a text are the model's own
        found.append(edge)
    return found
