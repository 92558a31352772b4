"""How much is looked at each time that a word occurs again (LATIM, figures 3 and 9)?

Shapes: L tokens, n occurrences of a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ..harness.experiment import Cell, Column, Subject
from ..harness.records import Rows
from .linked_texts import LinkedTexts, device_of
from .token_maps import TokenMap, token_maps

#: The methods whose maps are read, those of LATIM's figures among them.
CELLS = (
    Cell("LatimNorm l2", "silu"),
    Cell("LatimNorm l2", "linearized"),
    Cell("LatimALTI", "silu"),
    Cell("LatimALTI", "linearized"),
    Cell("ImplicitAttention", "s6"),
    Cell("ImplicitAttention", "unified"),
    Cell("LatimFlow", "frozen"),
    Cell("IntegratedGradients"),
    Cell("FeatureAblation"),
)
FIRST, LAST = "first third", "last third"
#: Occurrences with a row of their own; the word asked for occurs as often in every text.
OCCURRENCES = 8


@dataclass(frozen=True)
class Repeated:
    """A text.

    Attributes:
        ids: (1, L).
        target: the position and token of the answer.
        places: where the answer occurs before, in this order.
    """

    ids: Tensor
    target: tuple[int, int]
    places: list[int]


class RepeatedWords(LinkedTexts):
    """The size of the relevance of each occurrence, as a multiple of their mean.

    Without a decay every row is 1.  The rows are of the first occurrences, and of the first and the
    last third of all that a text has.
    """

    columns = (Column("multiple", ("multiple",)),)

    def cells(self) -> Sequence[Cell]:
        return CELLS

    def example(self, subject: Subject, index: int, seed: int) -> Repeated:
        batch = self.text(subject, index, seed)
        query, token = int(batch.targets.queries[0]), int(batch.targets.tokens[0])
        places = batch.gold()[0, query].nonzero().flatten().tolist()
        return Repeated(batch.input_ids, (query, token), places)

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        maps = self._maps[cell](model, example.ids.to(device_of(model)), [example.target])
        relevance = maps.get("mean", maps.get(""))
        assert relevance is not None
        return by_occurrence(relevance[0, example.places])

    @cached_property
    def _maps(self) -> dict[Cell, TokenMap]:
        return token_maps()


def by_occurrence(relevance: Tensor) -> Rows:
    """The rows of one text, from the relevance (n,) of a word's occurrences in their order."""
    sizes = relevance.double().abs().cpu()
    multiples = sizes / sizes.mean()  # NaN where none of them is relevant at all
    third = max(1, len(sizes) // 3)
    rows = {f"occurrence {i}": each for i, each in enumerate(multiples[:OCCURRENCES], 1)}
    rows |= {FIRST: multiples[:third].mean(), LAST: multiples[-third:].mean()}
    return {row: {"multiple": float(value)} for row, value in rows.items()}
