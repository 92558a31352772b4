"""Do the estimated effects of single edges agree with true knock-outs of them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.edges import Edge, EdgeEffects, Effects
from captum_ssm.edges.messages import is_attention
from captum_ssm.linear import FAMILY

from ...harness.experiment import Cell, Column
from ...harness.records import Rows
from ...harness.statistics import correlation, ratio
from ...training.text_recipes import TEXT_RECIPES
from ..causal.experiment import (
    CHOOSING,
    CHOOSING_IMAGES,
    CONFIRMING,
    CONFIRMING_IMAGES,
    Questioned,
)
from ..causal.questions import Question
from ..linked_texts import device_of
from .held import KINDS, Kind, PlainRun, along

#: Edges of each text or image; the first half of them is drawn in proportion to their effects.
EDGES = 10

#: The gradient against the model as it is.
AS_IT_IS = Cell("as it is")
#: The same with the norms that read a message as they are without it.
EXACT_NORMS = Cell("exact norms")
#: Other estimates of the same edges, by the rule that divides the products of the network.
RULES: Mapping[Cell, str] = MappingProxyType({Cell("by rule", rule): rule for rule in FAMILY})
#: What is held in the truth at its values in the run that nothing is cut in.
HELD: Mapping[Cell, tuple[Kind, ...]] = MappingProxyType(
    {
        Cell("mixers held"): ("mixers",),
        Cell("norms held"): ("norms",),
        Cell("mixers, norms held"): ("mixers", "norms"),
        Cell("gates held"): ("gates",),
        Cell("all held"): KINDS,
    }
)


class Knockout(Questioned):
    """Single edges of bundled models, their estimated effects against true knock-outs."""

    name = "knockout"
    title = "Estimated effects of edges against true knock-outs"
    examples = 20
    columns = (
        Column("r", ("n", "x", "y", "xx", "yy", "xy"), statistic=correlation),
        Column("signs", ("agreed", "counted"), statistic=ratio),
        Column("error", ("off", "size"), "low", ratio),
        Column("r, matched", ("n", "z", "y", "zz", "yy", "zy"), statistic=correlation),
        Column("signs, matched", ("agreed_matched", "counted_matched"), statistic=ratio),
        Column("error, matched", ("off_matched", "size_matched"), "low", ratio),
    )
    baselines = (AS_IT_IS.method,)
    groups = MappingProxyType(
        {
            "language models": tuple(n for n in (*CHOOSING, *CONFIRMING) if n not in TEXT_RECIPES),
            "image models": (*CHOOSING_IMAGES, *CONFIRMING_IMAGES),
        }
    )

    def __init__(self) -> None:
        #: Of the latest example, so that its edges are drawn once for all cells.
        self._latest: Drawn | None = None

    def cells(self) -> Sequence[Cell]:
        return [AS_IT_IS, EXACT_NORMS, *RULES, *HELD]

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        if self._latest is None or self._latest.question is not example:
            self._latest = Drawn(model, example)
        drawn = self._latest
        if cell == AS_IT_IS:
            rows = by_row(drawn, drawn.estimated, drawn.true, drawn.estimated)
            edges = [
                {f"layer {i}": e.layer, f"target {i}": e.target, f"source {i}": e.source}
                for i, e in enumerate(drawn.edges)
            ]
            for edge in edges:
                rows["all"] |= edge
            return rows
        if cell == EXACT_NORMS:
            return by_row(drawn, drawn.estimated_by(exact_norms=True), drawn.true)
        if cell in RULES:
            return by_row(drawn, drawn.estimated_by(rule=RULES[cell]), drawn.true)
        matched, true = drawn.plain.effects(drawn.edges, drawn.effects, HELD[cell])
        return by_row(drawn, drawn.estimated, true, matched)


class Drawn:
    """Edges that were drawn in one text or image, with their effects on its answer's logit.

    Args:
        model: the model.
        question: which of its outputs, at which input.

    Attributes:
        edges: the edges, first those that were drawn in proportion to their effects.
        estimated: what cutting each was estimated to do.
        true: what it did.
        rounding: the size below which that is rounding.
    """

    def __init__(self, model: nn.Module, question: Question) -> None:
        self.question, self._model = question, model
        self._inputs = question.inputs.to(device_of(model))
        method, seed = EdgeEffects(model, exact_norms=False), question.seed("edges")
        truth = method.validate(self._inputs, question.target, samples=EDGES, seed=seed)
        self.edges: list[Edge] = [edge for edge in truth.edges if isinstance(edge, Edge)]
        self.estimated, self.true, self.rounding = truth.estimated, truth.true, truth.rounding

    @cached_property
    def effects(self) -> Effects:
        """Those of all edges, by the model's own gradient."""
        return self._effects()

    @cached_property
    def plain(self) -> PlainRun:
        """What the model's layers go by, with a copy of the input for each edge."""
        copies = self._inputs.repeat(len(self.edges), *[1] * (self._inputs.dim() - 1))
        return PlainRun(self._model, copies, self.question.target)

    def estimated_by(self, **options: Any) -> Tensor:
        """What cutting each edge is estimated to do with options of EdgeEffects."""
        return along(self._effects(**options), self.edges)

    def _effects(self, **options: Any) -> Effects:
        method = EdgeEffects(self._model, **{"exact_norms": False, **options})
        return method.attribute(self._inputs, self.question.target)


def by_row(
    drawn: Drawn, estimated: Tensor, true: Tensor, matched: Tensor | None = None
) -> dict[str, dict[str, float]]:
    """The sums that columns are made of: of all edges, of both halves, and of each layer."""
    matched = torch.full_like(true, torch.nan) if matched is None else matched
    large = torch.arange(len(true)) < EDGES // 2
    which = {"all": torch.ones_like(large), "large": large, "even": ~large}
    for number, edge in enumerate(drawn.edges):
        layer = drawn.effects.layers[edge.layer]
        family = layer.mixer.architecture.family
        kind = "attention" if is_attention(layer.linear) else family
        name = f"layer {edge.layer}, {kind}"
        which.setdefault(name, torch.zeros_like(large))[number] = True
    rows = {
        name: sums_of(estimated[one], matched[one], true[one], drawn.rounding)
        for name, one in which.items()
    }
    each = zip(estimated.tolist(), matched.tolist(), true.tolist(), strict=True)
    for i, (x, z, y) in enumerate(each):
        rows["all"] |= {f"estimated {i}": x, f"matched {i}": z, f"true {i}": y}
    return rows


def sums_of(x: Tensor, z: Tensor, y: Tensor, rounding: float | Tensor) -> dict[str, float]:
    """The sums that columns are made of, over edges' estimated, matched and true effects."""
    counted = y.abs() > rounding
    sums = {
        "n": torch.ones_like(x),
        "x": x,
        "y": y,
        "z": z,
        "xx": x * x,
        "yy": y * y,
        "zz": z * z,
        "xy": x * y,
        "zy": z * y,
        "agreed": counted & (x.sign() == y.sign()),
        "agreed_matched": (counted & (z.sign() == y.sign())) + 0 * z,
        "counted": counted,
        "counted_matched": counted + 0 * z,
        "off": (x - y).abs(),
        "off_matched": (z - y).abs(),
        "size": y.abs(),
        "size_matched": y.abs() + 0 * z,
    }
    return {name: float(each.double().sum()) for name, each in sums.items()}
