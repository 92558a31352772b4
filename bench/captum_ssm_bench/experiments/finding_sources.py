"""Do methods find the known sources of texts?

Shapes: T answered tokens of one text, L tokens, S positions among which sources are looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from captum_ssm.metrics import (
    LinkCounts,
    alignment_rates,
    best_links,
    link_accuracy,
    link_counts,
    token_faithfulness,
)

from ..harness.experiment import Cell, Column, Subject
from ..harness.records import Numbers, Rows
from ..tasks.copying import CopyingTask
from ..tasks.linked import LinkedBatch
from .linked_texts import LinkedTexts, device_of
from .token_maps import TokenMap, token_maps


def error_rate(sums: Tensor, _: Tensor) -> Tensor:
    """The alignment error rate of summed link counts (..., 4)."""
    return alignment_rates(LinkCounts(*sums.unbind(-1))).error_rate[..., None]


RANKING = (
    Column("AUC", ("auc",)),
    Column("AP", ("ap",)),
    Column("R@K", ("recall",)),
)
LINKS = (
    Column("top 1", ("top1",)),
    Column("AER", ("predicted", "sure", "hit_sure", "hit_possible"), "low", error_rate),
)
#: LATIM's table 2 takes the three main diagonals of the block for gold.
DIAGONALS = 3


@dataclass(frozen=True)
class LinkedExample:
    """One text.

    Attributes:
        ids: (1, L).
        targets: the position and token of each answered token.
        context: where sources are looked for, (L,) of booleans.
        sure: sure links (T, L) of booleans.
        possible: possible ones, the sure ones among them.
        wide: the gold of rankings, (T, L).
    """

    ids: Tensor
    targets: list[tuple[int, int]]
    context: Tensor
    sure: Tensor
    possible: Tensor
    wide: Tensor


class FindingSources(LinkedTexts):
    """Maps of every method against the gold sources of a task."""

    columns = (*LINKS, *RANKING)

    def cells(self) -> Sequence[Cell]:
        return list(self._maps)

    def example(self, subject: Subject, index: int, seed: int) -> LinkedExample:
        return of_text(self.text(subject, index, seed))

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        maps = self._maps[cell](model, example.ids.to(device_of(model)), example.targets)
        return {row: source_scores(found.cpu(), example) for row, found in maps.items()}

    @cached_property
    def _maps(self) -> dict[Cell, TokenMap]:
        return token_maps()


def of_text(batch: LinkedBatch) -> LinkedExample:
    """A batch of one text as an example."""
    queries = batch.targets.queries
    sure = batch.gold()[0, queries]
    wide = batch.gold(DIAGONALS)[0, queries] if isinstance(batch.task, CopyingTask) else sure
    return LinkedExample(
        ids=batch.input_ids,
        targets=list(zip(queries.tolist(), batch.targets.tokens.tolist(), strict=True)),
        context=batch.context[0],
        sure=sure,
        possible=batch.possible()[0, queries],
        wide=wide,
    )


def source_scores(found: Tensor, example: LinkedExample) -> Numbers:
    """The numbers of one map (T, L)."""
    inside = found[:, example.context][None].double()
    sure, possible, wide = (
        gold[:, example.context][None] for gold in (example.sure, example.possible, example.wide)
    )
    ranked = token_faithfulness(inside, wide)
    counted = link_counts(best_links(inside), sure, possible)
    return {
        "auc": float(ranked.auc),
        "ap": float(ranked.ap),
        "recall": float(ranked.recall),
        "top1": float(link_accuracy(inside, possible)),
        **{name: float(count) for name, count in counted._asdict().items()},
    }
