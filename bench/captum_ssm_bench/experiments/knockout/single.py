"""Do estimated effects of single messages agree with true cuts, over many models?

Messages are drawn evenly, whatever their effect.  A model is one sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.edges import Edge, EdgeEffects, Effects
from captum_ssm.edges.truth import Interventions

from ...harness.experiment import Cell, Column, Experiment, Subject
from ...harness.records import Rows
from ...harness.statistics import correlation, ratio
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
        Column("r", ("n", "x", "y", "xx", "yy", "xy"), statistic=correlation),
        Column("signs", ("agreed", "counted"), statistic=ratio),
        Column("error", ("off", "size"), "low", ratio),
        Column("largest found", ("found",)),
    )
    over_models = (BUNDLED, FRESH, CIRCUITS)

    @cached_property
    def _from(self) -> Mapping[str, Experiment]:
        """By group, the experiment that has its models and texts."""
        return {BUNDLED: Knockout(), FRESH: Fresh(), CIRCUITS: Compiled()}

    @cached_property
    def _subjects(self) -> Mapping[str, Sequence[Subject]]:
        language = Knockout.groups["language models"]
        found = {group: each.subjects() for group, each in self._from.items()}
        return {**found, BUNDLED: [each for each in found[BUNDLED] if each.name in language]}

    @property
    def groups(self) -> Mapping[str, Sequence[str]]:  # type: ignore[override]
        """The models by where they come from."""
        names = {group: tuple(s.name for s in each) for group, each in self._subjects.items()}
        return MappingProxyType(names)

    def subjects(self) -> Sequence[Subject]:
        return [subject for each in self._subjects.values() for subject in each]

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
        largest = x.abs().topk(LARGEST).indices
        true = y.abs().topk(LARGEST).indices
        rows = {}
        for name, part in (("all", slice(None)), ("largest", largest)):
            nothing = torch.full_like(x[part], math.nan)
            rows[name] = sums_of(x[part], nothing, y[part], rounding[part])
            rows[name] = {k: v for k, v in rows[name].items() if not math.isnan(v)}
        rows["largest"]["found"] = float(torch.isin(largest, true).double().mean())
        rows["all"]["found"] = math.nan
        for i, (estimated, cut) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
            rows["all"] |= {f"estimated {i}": estimated, f"true {i}": cut}
        return rows


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
