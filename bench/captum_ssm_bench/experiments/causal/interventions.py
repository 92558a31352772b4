"""What a model makes of inputs some units of which are exchanged: the truth, and curves.

Shapes: N inputs, U units, n of them movable, P permutations, K classes, F shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from captum_ssm.metrics.classes import class_logits
from captum_ssm.metrics.curve import WHOLE, Curve, change_order, changed_at_shares

from ..linked_texts import device_of
from .questions import Question

#: Permutations, each taken with its reverse and a reference of its own; and draws for each unit
#: that is left out.
PERMUTATIONS, DRAWS = 16, 8
#: References that units are put into, or that take their place.
CURVE_REFERENCES = 2
#: The share of the units that is to suffice, among those of the curves.
SUFFICIENT = WHOLE.index(0.3)
#: Inputs that go through the model at once.
_AT_ONCE = 128


@dataclass(frozen=True, eq=False)
class Answers:
    """What a model answers to a question when units of the input are exchanged.

    Attributes:
        model: of transformers, or a classifier of images.
        question: what is asked.
    """

    model: Any
    question: Question

    def points(self, inputs: Tensor) -> Tensor:
        """What gradients are taken of: embeddings (N, L, E), or the images."""
        inputs = inputs.to(device_of(self.model))
        if inputs.is_floating_point():
            return inputs
        embedded: Tensor = self.model.get_input_embeddings()(inputs)
        return embedded.detach()

    def output(self, points: Tensor) -> Tensor:
        """The target's output at points, (N,)."""
        target = self.question.target
        output = self._run(points)
        where = (slice(None), *target) if isinstance(target, tuple) else (slice(None), target)
        found: Tensor = output[where]
        return found

    def _run(self, points: Tensor) -> Tensor:
        if self.question.grid is not None:
            images: Tensor = getattr(out := self.model(points), "logits", out)
            return images
        logits: Tensor = self.model(inputs_embeds=points, use_cache=False).logits
        return logits

    def logits(self, references: Tensor, kept: Tensor) -> Tensor:
        """The logits of the competing classes, (N, K), where units of references are put in.

        Units that are kept (N, U) stay those of the input.
        """
        found = []
        for start in range(0, len(kept), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            inputs = self.question.exchanged(references[some], kept[some])
            found.append(class_logits(self._run, self.points(inputs)).cpu())
        logits, classes = torch.cat(found), self.question.classes
        return logits if classes is None else logits[:, list(classes)]

    @property
    def own(self) -> int:
        """The target's place among the competing classes."""
        target = self.question.target
        index: int = target[-1] if isinstance(target, tuple) else target
        return index if self.question.classes is None else self.question.classes.index(index)

    def _values(self, references: Tensor, kept: Tensor) -> Tensor:
        return self.logits(references, kept)[:, self.own].double()

    # --- the truth ---------------------------------------------------------------------------

    @cached_property
    def shapley(self) -> Tensor:
        """Estimates of the units' Shapley values, one of each permutation and its reverse, (P, U).

        The game's value is the target's logit where the units outside a coalition are those of a
        reference.
        """
        question, units = self.question, self.question.movable.nonzero().flatten()
        n = len(units)
        references = question.references("shapley", PERMUTATIONS)
        generator = torch.Generator().manual_seed(question.seed("permutations"))
        orders = torch.rand(PERMUTATIONS, n, generator=generator).argsort(-1)
        kept = torch.ones(PERMUTATIONS, 2 * n, len(question.movable), dtype=torch.bool)
        kept[..., units] = torch.stack([coalitions(order) for order in orders])
        values = self._values(references.repeat_interleave(2 * n, 0), kept.flatten(0, 1)).view(
            PERMUTATIONS, 2 * n
        )
        found = torch.zeros(PERMUTATIONS, len(question.movable), dtype=torch.float64)
        for row, order in enumerate(orders):
            found[row, units] = marginal(values[row], order)
        return found

    @cached_property
    def left_out(self) -> Tensor:
        """What the logit loses if one unit is drawn anew, the mean over draws, (U,)."""
        question, units = self.question, self.question.movable.nonzero().flatten()
        references = question.references("left out", DRAWS).repeat_interleave(len(units) + 1, 0)
        kept = torch.ones(len(units) + 1, len(question.movable), dtype=torch.bool)
        kept[range(len(units)), units] = False  # the last leaves nothing out
        values = self._values(references, kept.repeat(DRAWS, 1)).view(DRAWS, -1)
        found = torch.zeros(len(question.movable), dtype=torch.float64)
        found[units] = (values[:, -1:] - values[:, :-1]).mean(0)
        return found

    # --- what the order of relevance does --------------------------------------------------------

    def probabilities(self, relevance: Tensor) -> tuple[Curve, Curve]:
        """The probability of the target as units are put in, the highest first, and taken out."""
        question, shares = self.question, torch.tensor(WHOLE, dtype=torch.float64)
        generator = torch.Generator().manual_seed(question.seed("ties"))
        movable = question.movable[None]
        order = change_order(relevance[None], most_first=True, mask=movable, generator=generator)
        first = changed_at_shares(order, shares, movable)[0]  # (F, U)
        kept = torch.cat([first, ~first])
        references = question.references("curves", CURVE_REFERENCES)
        logits = self.logits(
            references.repeat_interleave(len(kept), 0), kept.repeat(CURVE_REFERENCES, 1)
        )
        chances = logits.double().softmax(-1)[:, self.own].view(CURVE_REFERENCES, -1).mean(0)
        inserted, deleted = chances[None].chunk(2, -1)
        return Curve(shares, inserted), Curve(shares, deleted)


def coalitions(order: Tensor) -> Tensor:
    """Which units are in, let in one by one in an order and then in its reverse, (2 n, n).

    The first k of the order for k from 0 to n, then the last k for k from 1 to n - 1.
    """
    n = len(order)
    place = order.argsort()
    first = place < torch.arange(n + 1)[:, None]
    return torch.cat([first, ~first[1:-1].flip(0)])


def marginal(values: Tensor, order: Tensor) -> Tensor:
    """The gain by each unit when it is let in, the mean of an order and of its reverse, (n,)."""
    n = len(order)
    forwards = values[: n + 1].diff()
    none, everyone = values[:1], values[n : n + 1]
    backwards = torch.cat([none, values[n + 1 :], everyone]).diff()
    found = torch.empty(n, dtype=values.dtype)
    found[order] = forwards / 2
    found[order.flip(0)] += backwards / 2
    return found
