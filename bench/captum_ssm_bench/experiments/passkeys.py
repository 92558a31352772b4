"""Do models find one of several passkeys, and does it matter which (LATIM, tables 5 and 6)?"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from captum_ssm.tracing import repaired_scans

from ..harness.experiment import Cell, Column, Subject
from ..harness.records import Rows
from ..tasks.linked import LinkedBatch
from ..tasks.retrieval import PasskeyTask
from .linked_texts import LinkedTexts, device_of

_ANSWER = "the model's answer"
ONE, TWO, FOUR = (Cell(_ANSWER, counted) for counted in ("1 passkey", "2 passkeys", "4 passkeys"))
FIRST_OF_TWO, FIRST_OF_FOUR = (Cell(_ANSWER, f"the first of {keys}") for keys in (2, 4))
LATER_OF_TWO, LATER_OF_FOUR = (Cell(_ANSWER, f"a later one of {keys}") for keys in (2, 4))

#: By row, how many passkeys a text states, and which of them it is about, in their order.
_ASKED = {
    ONE: (1, slice(None)),
    TWO: (2, slice(None)),
    FIRST_OF_TWO: (2, slice(1)),
    LATER_OF_TWO: (2, slice(1, None)),
    FOUR: (4, slice(None)),
    FIRST_OF_FOUR: (4, slice(1)),
    LATER_OF_FOUR: (4, slice(1, None)),
}


class Retrieval(LinkedTexts):
    """Answers of models that learned texts with one number of passkeys, on texts with others.

    Every passkey of a text is asked for, each in a text of its own.  An answer is right if all its
    digits are the most likely ones, each after the right ones before it: then a model that goes on
    from the question by itself says the same.
    """

    columns = (Column("accuracy", ("right",)),)
    note = (
        "Models called passkey have learned texts with one passkey, those called two-passkeys "
        "texts with two; none has seen four."
    )

    def cells(self) -> Sequence[Cell]:
        return list(_ASKED)

    def example(self, subject: Subject, index: int, seed: int) -> Mapping[int, LinkedBatch]:
        """By the number of passkeys, the questions about one text; all texts are equally long."""
        learned = cast(PasskeyTask, self._tasks[subject.name])
        rng = random.Random(f"{seed}/{index}")
        length = rng.randint(learned.shortest, learned.longest)
        tasks = [replace(learned, keys=keys) for keys in sorted({n for n, _ in _ASKED.values()})]
        return {task.keys: task.batch(task.questions(rng, length)) for task in tasks}

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        keys, places = _ASKED[cell]
        right = answered(model, example[keys])[places]
        return {"": {"right": sum(right) / len(right)}}


def answered(model: nn.Module, batch: LinkedBatch) -> list[bool]:
    """Whether each text of a batch is answered right."""
    ids, mask = (each.to(device_of(model)) for each in (batch.input_ids, batch.attention_mask))
    with torch.no_grad(), repaired_scans():
        logits = model(input_ids=ids, attention_mask=mask).logits
    rows, queries, tokens = batch.targets
    right = logits.argmax(-1).cpu()[rows, queries] == tokens
    return [bool(right[rows == row].all()) for row in range(len(ids))]
