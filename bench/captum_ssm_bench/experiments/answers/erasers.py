"""Is it who states name as eraser that took away what they have lost?

The token that took most of a source's share is taken out of the text, or exchanged for another word
of it, and what the state then holds of the source at the end is held against what was predicted:
the steps of all other tokens as they were, that of the eraser undone, or the other word's in its
place.

Shapes: L tokens, S states.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr import StateMemory
from captum_ssm.attr.engine.memories import Memory, memories_of
from captum_ssm.attr.memory import LayerMemory

from ...harness.experiment import Cell, Column, Subject
from ...harness.records import Numbers, Rows
from ..linked_texts import LinkedTexts, device_of

#: What is done with the eraser.
TAKEN_OUT, EXCHANGED = Cell("taken out"), Cell("exchanged")


@dataclass(frozen=True)
class ErasedExample:
    """A text without its answer, and a token of it that wrote.

    Attributes:
        ids: (1, L).
        source: where the token stands.
        draw: which of the other words takes the eraser's place, a share of their number.
    """

    ids: Tensor
    source: int
    draw: float


def r_squared(sums: Tensor, counts: Tensor) -> Tensor:
    """How much of the spread of true numbers predictions explain, 1 being all of it.

    The sums (..., 3) are of the true numbers, their squares, and the squares of the errors.
    """
    true, squares, errors = sums.unbind(-1)
    return (1 - errors / (squares - true.square() / counts[..., 0]))[..., None]


class Erasers(LinkedTexts):
    """What the last state holds of a source without who erased it, true and predicted."""

    columns = (
        Column("R2", ("true", "true squared", "error squared"), "high", r_squared),
        Column("named first", ("first",)),
        Column("undone first", ("undone first",)),
        Column("blindly", ("blindly",), ""),
        Column("change", ("true",), ""),
        Column("predicted", ("predicted",), ""),
        Column("held", ("held",), ""),
    )
    examples = 150

    def cells(self) -> Sequence[Cell]:
        return [TAKEN_OUT, EXCHANGED]

    def example(self, subject: Subject, index: int, seed: int) -> ErasedExample:
        rng = random.Random(f"{seed}/{index}")
        task = self._tasks[subject.name]
        (text,) = task.draw(1, rng, task.longest)
        ids = task.batch([text]).input_ids[:, : text.answer]
        # what is asked for, where there is something behind it that can erase
        sources = [source for _, source in text.sure if source < ids.shape[1] - 1]
        return ErasedExample(ids, rng.choice(sources), rng.random())

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        memory, ids = StateMemory(model), example.ids.to(device_of(model))
        source, end = example.source, ids.shape[1] - 1
        rows: dict[str, Numbers] = {}
        for number, layer in enumerate(memory.of(ids)):
            written = layer.held(source)[0, source]
            held = layer.held(end)[0, source] / written
            eraser = int(layer.erased(source, end)[0].argmax())
            if cell == TAKEN_OUT:
                left = held_without(memory, ids, source, number) / written
                expected = layer.held_without(source, end)[0, source + 1 :] / written
                named = eraser - source - 1
                true, predicted = left[named], expected[named]
                most = int(left.argmax())
                choice = {
                    "first": float(named == most),
                    "undone first": float(int(expected.argmax()) == most),
                    "blindly": 1 / len(left),
                }
            else:
                other = _other(ids[0], source, eraser, example.draw)
                exchanged = ids.clone()
                exchanged[0, eraser] = ids[0, other]
                true = memory.of(exchanged)[number].held(end)[0, source] / written
                predicted = held_with(layer, source, end, eraser, other) / written
                choice = dict.fromkeys(("first", "undone first", "blindly"), float("nan"))
            rows[f"layer {number}"] = _numbers(held, true, predicted) | choice
        return rows


def held_without(memory: StateMemory, ids: Tensor, source: int, number: int) -> Tensor:
    """How much of a source the last state of a layer holds without each token behind it, (n,)."""
    texts = [
        torch.cat([ids[:, :at], ids[:, at + 1 :]], 1) for at in range(source + 1, ids.shape[1])
    ]
    return memory.of(torch.cat(texts))[number].held(-1)[:, source]


def held_with(
    layer: LayerMemory, source: int, end: int, eraser: int, step: int | None = None
) -> Tensor:
    """How much of a source a state holds, had a token done the step of another one, or none."""
    found = memories_of(layer.linear.operator, layer.linear.values)
    (memory,) = (each for each in found if isinstance(each, Memory))
    changed = memory._replace(
        log_decay=_exchanged(memory.log_decay, eraser, step), erasure=_erases(memory, eraser, step)
    )
    size: Tensor = changed.sizes(end)[0, :, source].norm()
    return size


def _erases(memory: Memory, eraser: int, step: int | None) -> tuple[Tensor, Tensor] | None:
    if memory.erasure is None:
        return None
    asked, taken = memory.erasure
    return _exchanged(asked, eraser, step), _exchanged(taken, eraser, step)


def _exchanged(steps: Tensor, eraser: int, step: int | None) -> Tensor:
    """Steps (1, L, ...), one of which is another's, or nothing."""
    found = steps.clone()
    found[:, eraser] = 0 if step is None else steps[:, step]
    return found


def _other(ids: Tensor, source: int, eraser: int, draw: float) -> int:
    """A token of the text that is another word than the eraser and the source.

    Not the first one: before it there is nothing, and its step may leave nothing.
    """
    words = ids.tolist()
    known = (words[eraser], words[source])
    places = [at for at, word in enumerate(words) if at and word not in known]
    return places[int(draw * len(places))]


def _numbers(held: Tensor, true: Tensor, predicted: Tensor) -> dict[str, float]:
    change, expected = float(true - held), float(predicted - held)
    return {
        "held": float(held),
        "true": change,
        "true squared": change**2,
        "error squared": (expected - change) ** 2,
        "predicted": expected,
    }
