"""The methods whose relevance is held against interventions, and how many passes each takes.

A method is a function of a model and a question, and one line of :data:`METHODS`.

Shapes: N points, U units, L tokens, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from captum.attr import GradientShap, IntegratedGradients
from torch import Tensor

from captum_ssm.attr import LatimFlow
from captum_ssm.attr.catalogue import METHODS as CATALOGUE
from captum_ssm.attr.catalogue import Entry
from captum_ssm.linear import FAMILY
from captum_ssm.linear.norms import frozen_norms

from ...harness.experiment import Cell
from ..linked_texts import device_of
from ..token_maps import STEPS
from .interventions import DRAWS, PERMUTATIONS, Answers

#: References of expected gradients, and samples of GradientShap.
EXPECTED, SHAP = (8, 16, 32), 20
#: Points of integrated gradients on whose way the input's own norms are held.
HELD_POINTS = (1, 3)
#: Texts of the task that a mean embedding is made of.
_MEAN_OF = 32


class Method(NamedTuple):
    """A method, and what it costs.

    Attributes:
        explain: gives the relevance of the units, (U,).
        forward: how many times it runs the model.
        backward: how many times it goes back through it. Default: 0.
        by_unit: how many runs more it takes for each unit that can be replaced. Default: 0.
    """

    explain: Callable[[Answers], Tensor]
    forward: int
    backward: int = 0
    by_unit: int = 0

    def passes(self, answers: Answers) -> int:
        """Runs forward and backward together."""
        units = int(answers.question.movable.sum())
        return self.forward + self.backward + self.by_unit * units


def _ours(answers: Answers, kind: Any, *, targeted: bool = True, **options: Any) -> Tensor:
    """What a method of the package says of tokens or patches, (U,)."""
    question = answers.question
    if targeted:
        options["target"] = question.target
    inputs = question.inputs.to(device_of(answers.model))
    found: Tensor = kind(answers.model).attribute(inputs, per_token=True, **options)
    return question.by_word(found.flatten(1))[0]


def _by_catalogue(entry: Entry) -> Method:
    targeted = "a target" in entry.needs
    explain = partial(_ours, kind=entry.method, targeted=targeted)
    return Method(explain, 1, entry.cost.backward)


def _input_x_gradient(answers: Answers) -> Tensor:
    points = answers.points(answers.question.inputs)
    return _summed(answers, points * _gradients(answers, points))


def _held_norms(answers: Answers, *, less_mean: bool) -> Tensor:
    """Input x gradient with the statistics of norms held, of the input or less its own mean."""
    points = answers.points(answers.question.inputs)
    places = (1,) if answers.question.grid is None else (2, 3)
    inputs = points - points.mean(places, keepdim=True) if less_mean else points
    with frozen_norms():
        return _summed(answers, inputs * _gradients(answers, points))


def _integrated_gradients(
    answers: Answers,
    baseline: Callable[[Answers, Tensor], Tensor],
    steps: int = STEPS,
    held: bool = False,
) -> Tensor:
    """Captum's, along a straight line; perhaps with the norms of the input."""
    points = answers.points(answers.question.inputs)
    explain = IntegratedGradients(answers.output)
    keep: Any = points
    if answers.question.grid is None:
        keep = {"inputs_embeds": points, "use_cache": False}
    with frozen_norms(answers.model, keep) if held else nullcontext():
        found = explain.attribute(points, baseline(answers, points), n_steps=steps)
    return _summed(answers, found)


def _expected_gradients(answers: Answers, count: int) -> Tensor:
    """One point between the input and each reference of the task (Erion et al. 2021).

    The points lie in equal parts of the way, one in each: so few of them do better than if each
    were drawn by itself.
    """
    points, references = answers.points(answers.question.inputs), _references(answers, count)
    generator = torch.Generator().manual_seed(answers.question.seed("places"))
    part = torch.randperm(count, generator=generator)
    shares = ((part + torch.rand(count, generator=generator)) / count).to(points)
    between = references + shares.view(-1, *[1] * (points.dim() - 1)) * (points - references)
    gradients = _gradients(answers, between)
    return _summed(answers, (points - references) * gradients) / count


def _gradient_shap(answers: Answers) -> Tensor:
    """Captum's."""
    points, references = answers.points(answers.question.inputs), _references(answers, SHAP)
    with _seeded(answers.question.seed("GradientShap")):
        found = GradientShap(answers.output).attribute(points, references, n_samples=SHAP)
    return _summed(answers, found)


def _occlusion(answers: Answers) -> Tensor:
    """What the output loses if one unit after the other is what :func:`_mean` says."""
    question = answers.question
    points = answers.points(question.inputs)
    units = question.movable.nonzero().flatten()
    kept = torch.ones(len(units), len(question.movable), dtype=torch.bool)
    kept[range(len(units)), units] = False
    places = question.spread(kept).to(points.device)
    places = places[..., None] if question.grid is None else places
    with torch.no_grad():
        changed = torch.where(places, points, _mean(answers, points))
        outputs = answers.output(torch.cat([points, changed])).cpu()
    found = torch.zeros(len(question.movable))
    found[units] = (outputs[:1] - outputs[1:]).to(found)
    return found


def _random(answers: Answers) -> Tensor:
    generator = torch.Generator().manual_seed(answers.question.seed("random"))
    return torch.rand(len(answers.question.movable), generator=generator)


def _zero(_: Answers, points: Tensor) -> Tensor:
    return torch.zeros_like(points)


def _mean(answers: Answers, points: Tensor) -> Tensor:
    """Points whose movable tokens have the mean embedding of the task, or whose colour is one."""
    question = answers.question
    if question.grid is not None:
        return points.mean((2, 3), keepdim=True).expand_as(points)
    movable = question.places.to(points.device)
    others = _references(answers, _MEAN_OF)[:, movable]
    return torch.where(movable[:, None], others.mean((0, 1)), points)


def _references(answers: Answers, count: int) -> Tensor:
    return answers.points(answers.question.references("methods", count))


def _gradients(answers: Answers, points: Tensor) -> Tensor:
    """The gradient of the output at each of some points."""
    points = points.detach().clone().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(answers.output(points).sum(), points)
    return found


def _summed(answers: Answers, values: Tensor) -> Tensor:
    """Sums over points and over the features of each unit, (U,)."""
    return answers.question.by_unit(values.detach()).sum(0)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Captum draws by the generators that all share."""
    before = np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(before)


#: The truth in a method's place: its agreement with the truth is that of one half with the other.
SHAPLEY = Cell("Shapley values")

#: All methods.
METHODS: Mapping[Cell, Method] = {
    **{Cell(entry.name): _by_catalogue(entry) for entry in CATALOGUE if entry.name != "LatimFlow"},
    **{
        Cell("LatimFlow", rule): Method(partial(_ours, kind=LatimFlow, rule=rule), 1, 1)
        for rule in FAMILY
    },
    Cell("InputXGradient"): Method(_input_x_gradient, 1, 1),
    Cell("InputXGradient", "norms held"): Method(partial(_held_norms, less_mean=False), 1, 1),
    Cell("InputXGradient", "norms held, less the mean"): Method(
        partial(_held_norms, less_mean=True), 1, 1
    ),
    **{
        Cell(
            "IntegratedGradients", f"from the mean, norms held, {n} point" + "s" * (n > 1)
        ): Method(partial(_integrated_gradients, baseline=_mean, steps=n, held=True), 1 + n, n)
        for n in HELD_POINTS
    },
    Cell("IntegratedGradients", "from zero"): Method(
        partial(_integrated_gradients, baseline=_zero), STEPS, STEPS
    ),
    Cell("IntegratedGradients", "from the mean"): Method(
        partial(_integrated_gradients, baseline=_mean), STEPS, STEPS
    ),
    **{
        Cell("ExpectedGradients", f"{count} references"): Method(
            partial(_expected_gradients, count=count), count, count
        )
        for count in EXPECTED
    },
    Cell("GradientShap", f"{SHAP} samples"): Method(_gradient_shap, SHAP, SHAP),
    Cell("Occlusion", "by the mean"): Method(_occlusion, 1, by_unit=1),
    Cell("random"): Method(_random, 0),
    Cell("leave-one-out", f"{DRAWS} draws"): Method(
        lambda answers: answers.left_out, DRAWS, by_unit=DRAWS
    ),
    SHAPLEY: Method(
        lambda answers: answers.shapley.mean(0), PERMUTATIONS, by_unit=2 * PERMUTATIONS
    ),
}
