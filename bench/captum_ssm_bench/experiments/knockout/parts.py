"""What of a hybrid do its answers hang on: attention, the recurrence, single heads, one message?

The published finding is that retrieval in hybrids hangs on their attention alone, and on few heads
of it (arXiv 2510.19861).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.edges import Edges, knock_out
from captum_ssm.edges.messages import is_attention
from captum_ssm.tracing import find_mixers, trace

from ...harness.experiment import Cell, Column
from ...harness.records import Numbers, Rows
from ...tasks.linked import LinkedBatch
from ..linked_texts import LinkedTexts, device_of

#: The kinds of mixers, as edges name them.
KINDS = ("attention", "ssm")
WHOLE = Cell("nothing off")
#: Who answers with any word of the right kind.
CHANCE = Cell("any answer")
OFF, HEAD_OFF, HEADS_ALONE = "off", "one head off", "one head alone"
#: Messages of one kind of mixer from where the answer stands to the token that asks, cut, or those
#: that are left of all between tokens.
ANSWER_CUT, ANSWER_ALONE = "answer to asking token cut", "answer to asking token alone"
#: Messages from before the previous token, cut.
FAR_CUT = "far messages cut"


class HybridParts(LinkedTexts):
    """How often a hybrid answers right without some of its parts."""

    columns = (Column("accuracy", ("right",)), Column("probability", ("probability",)))
    examples = 200
    baselines = (WHOLE.method, CHANCE.method)

    def cells(self) -> Sequence[Cell]:
        named = (OFF, HEAD_OFF, HEADS_ALONE, ANSWER_CUT, ANSWER_ALONE, FAR_CUT)
        return [WHOLE, CHANCE, *(Cell(name, kind) for name in named for kind in KINDS)]

    def example(self, subject: Any, index: int, seed: int) -> LinkedBatch:
        return self.text(subject, index, seed)

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        if cell == CHANCE:
            share = 1 / example.task.symbols
            return {"": {"right": share, "probability": share}}
        return {row: answered(model, example, *edges) for row, edges in cuts(model, example, cell)}


def cuts(
    model: nn.Module, batch: LinkedBatch, cell: Cell
) -> Iterator[tuple[str, tuple[Edges, ...]]]:
    """By row of a table, what is cut."""
    kind = cell.formulation
    if cell == WHOLE:
        yield "", ()
    elif cell.method == OFF:
        yield "", (Edges(kind),)
    elif cell.method in (HEAD_OFF, HEADS_ALONE):
        for layer, heads in heads_of(model, batch.input_ids, kind):
            for head in range(heads):
                others = [other for other in range(heads) if other != head]
                meant = [head] if cell.method == HEAD_OFF else others
                yield f"layer {layer}, head {head:02}", (Edges(layer, heads=meant),)
    else:
        gold = batch.gold()[0].cpu()

        def from_answer(target: Tensor, source: Tensor) -> Tensor:
            return gold[target, source]

        def from_others(target: Tensor, source: Tensor) -> Tensor:
            return ~gold[target, source] & (target != source)

        def from_afar(target: Tensor, source: Tensor) -> Tensor:
            return target - source > 1

        of = {ANSWER_CUT: from_answer, ANSWER_ALONE: from_others, FAR_CUT: from_afar}
        yield "", (Edges(kind, targets=of[cell.method]),)


def heads_of(model: nn.Module, ids: Tensor, kind: str) -> list[tuple[int, int]]:
    """The number and the heads of each mixer of a kind."""
    with torch.no_grad(), trace(model) as record:
        model(ids.to(device_of(model)))
    order = [mixer.module for mixer in find_mixers(model)]
    return [
        (order.index(layer.mixer.module), layer.linear.operator.shape.heads)
        for layer in record.layers
        if is_attention(layer.linear) == (kind == "attention")
    ]


def answered(model: nn.Module, batch: LinkedBatch, *edges: Edges) -> Numbers:
    """How often the answered words of one text are right, and their probability."""
    ids = batch.input_ids.to(device_of(model))
    with torch.no_grad(), knock_out(model, *edges):
        logits = model(ids).logits[0].cpu()
    queries, tokens = batch.targets.queries, batch.targets.tokens
    asked = logits[queries]
    right = (asked.argmax(-1) == tokens).double().mean()
    found = asked.double().softmax(-1).gather(-1, tokens[:, None]).mean()
    return {"right": float(right), "probability": float(found)}
