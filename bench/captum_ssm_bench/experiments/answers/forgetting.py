"""Does what the last state holds of a passkey tell whether the model still answers it?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr import StateMemory
from captum_ssm.tracing import repaired_scans

from ...harness.experiment import Cell, Column, Subject
from ...harness.records import Numbers, Rows
from ..linked_texts import LinkedTexts, device_of

MEMORY = Cell("StateMemory")
#: Steps that a token reaches through the convolution in front of the recurrence, its own the first.
REACH = 4
#: Sums over thousands of tokens round further off than those of common texts.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class DigitExample:
    """A text up to where one digit of its passkey is to be answered.

    Attributes:
        ids: (1, L).
        digit: the right one.
        source: where it was stated.
    """

    ids: Tensor
    digit: int
    source: int


def correlation(sums: Tensor, counts: Tensor) -> Tensor:
    """Pearson's correlation of a number with one that is 0 or 1, of the sums (..., 4).

    They are of the one, the other, their product, and the square of the one.
    """
    share, right, both, squared = (sums / counts).unbind(-1)
    spread = (squared - share.square()) * (right - right.square())
    return ((both - share * right) / spread.sqrt())[..., None]


def share_of(sums: Tensor, _: Tensor) -> Tensor:
    """The mean over some of the examples: the sum of numbers by how many count (..., 2)."""
    return sums[..., :1] / sums[..., 1:]


class ForgottenPasskeys(LinkedTexts):
    """Shares of a digit in the state that answers, where it is answered right and where wrong.

    Texts are longer than those that were learned, as long as some answers need to go wrong.
    """

    columns = (
        Column("correlation", ("share", "right", "both", "share squared"), "", correlation),
        Column("where right", ("both", "right"), "", share_of),
        Column("where wrong", ("lost", "wrong"), "", share_of),
        Column("answered right", ("right",), ""),
    )
    examples = 200

    def cells(self) -> Sequence[Cell]:
        return [MEMORY]

    def example(self, subject: Subject, index: int, seed: int) -> DigitExample:
        rng = random.Random(f"{seed}/{index}")
        task = self._tasks[subject.name]
        batch = task.batch(task.draw(1, rng, task.longest))
        digit = rng.randrange(len(batch.links.sources))
        query, source, token = (int(each[digit]) for each in batch.links[1:])
        return DigitExample(batch.input_ids[:, : query + 1], token, source)

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        ids, source = example.ids.to(device_of(model)), example.source
        with torch.no_grad(), repaired_scans():
            right = int(model(input_ids=ids).logits[0, -1].argmax()) == example.digit
        rows: dict[str, Numbers] = {}
        for number, layer in enumerate(StateMemory(model).of(ids, verify=_TOLERANCE)):
            held = layer.held(-1)[0]
            shares = {
                "read": float(layer.read(-1)[0, source]),
                "held": float(held[source : source + REACH].sum() / held.sum()),
                "distance": 1 - source / ids.shape[1],
            }
            rows |= {f"{row}, layer {number}": _numbers(x, right) for row, x in shares.items()}
        return rows


def _numbers(share: float, right: bool) -> Numbers:
    return {
        "share": share,
        "right": float(right),
        "wrong": float(not right),
        "both": share * right,
        "lost": share * (not right),
        "share squared": share**2,
    }
