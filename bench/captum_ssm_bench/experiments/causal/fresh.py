"""The rules on the fresh models, as ``bench/REGISTERED.md`` says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr import LatimFlow
from captum_ssm.linear import FAMILY
from captum_ssm.linear.norms import frozen_norms

from ...harness.experiment import Cell, Subject
from ...training.fresh import ENOUGH, FOLDER, FRESH, load_fresh, stored
from . import methods
from .experiment import Causal
from .interventions import Answers
from .methods import Method
from .questions import LinkedQuestions, Question

#: The baselines: the mean embedding of the input; the mean of what a token may be replaced by.
OWN, KINDS = "own mean", "kinds"
#: Texts that the mean of a kind is made of.
_KINDS_OF = 64


def _baseline(answers: Answers, points: Tensor, name: str) -> Tensor:
    if name == OWN:
        return points.mean(1, keepdim=True).expand_as(points)
    movable = answers.question.places.to(points.device)[:, None]
    others = answers.points(answers.question.references("kinds", _KINDS_OF))
    return torch.where(movable, others.mean(0), points)


def _flow(answers: Answers, rule: str, name: str) -> Tensor:
    points = answers.points(answers.question.inputs)
    given: Any = {"baselines": _baseline(answers, points, KINDS)} if name == KINDS else {}
    return methods._ours(answers, LatimFlow, rule=rule, **given)


def _calibrated(answers: Answers) -> Tensor:
    """Balanced, times one factor: the sum is the output's difference from that at the own mean."""
    found, points = _flow(answers, "balanced", OWN), answers.points(answers.question.inputs)
    with torch.no_grad():
        output, base = answers.output(torch.cat([points, _baseline(answers, points, OWN)]))
    factor = float(output - base) / float(found.sum())
    return found * factor if factor > 0 else found


def _both(answers: Answers) -> Tensor:
    """Balanced and expected gradients, of one size each."""
    each = (_flow(answers, "balanced", OWN), methods._expected_gradients(answers, 8))
    return sum((x / x.abs().sum().clamp_min(1e-12) for x in each), torch.zeros(()))


def _integrated(name: str, steps: int, *, held: bool = True) -> Method:
    explain = partial(
        methods._integrated_gradients,
        baseline=partial(_baseline, name=name),
        steps=steps,
        held=held,
    )
    return Method(explain, steps + held, steps)


def _held(name: str) -> Method:
    def explain(answers: Answers) -> Tensor:
        points = answers.points(answers.question.inputs)
        with frozen_norms():
            gradients = methods._gradients(answers, points)
        return methods._summed(answers, (points - _baseline(answers, points, name)) * gradients)

    return Method(explain, 1, 1)


#: The row that exactness is held against: it knows nothing of mixers.
BASELINE = Cell("InputXGradient", f"norms held, {OWN}")
_KNOWN = ("InputXGradient", "ExpectedGradients", "random", methods.SHAPLEY.method)
ROWS: Mapping[Cell, Method] = MappingProxyType(
    {
        **{
            Cell("LatimFlow", f"{rule}, {name}" if name else rule): Method(
                partial(_flow, rule=rule, name=name), 1, 1
            )
            for rule in FAMILY
            for name in (("",) if rule in ("frozen", "half") else (OWN, KINDS))
        },
        Cell("LatimFlow", "balanced, calibrated"): Method(_calibrated, 2, 1),
        Cell("LatimFlow", "balanced, with ExpectedGradients"): Method(_both, 9, 9),
        **{
            cell: method
            for cell, method in methods.METHODS.items()
            if cell.method in _KNOWN
            and cell.formulation not in ("norms held, less the mean", "16 references")
        },
        BASELINE: _held(OWN),
        Cell("InputXGradient", f"norms held, {KINDS}"): _held(KINDS),
        **{
            Cell("IntegratedGradients", f"norms held, {n} point{'s' * (n > 1)}, {name}"): (
                _integrated(name, n)
            )
            for n in methods.HELD_POINTS
            for name in (OWN, KINDS)
        },
        Cell("IntegratedGradients", f"8 points, {KINDS}"): _integrated(KINDS, 8, held=False),
        Cell("Occlusion", "by the mean"): methods.METHODS[Cell("Occlusion", "by the mean")],
    }
)


class Fresh(Causal):
    """Relevance of tokens against Shapley values, on models that nobody chose a rule by."""

    name = "fresh"
    title = "Agreement of relevance with true interventions, on fresh models"
    examples = 12
    against = BASELINE

    methods = ROWS

    def __init__(self) -> None:
        super().__init__()
        names = tuple(name for name, answered in stored().items() if answered >= ENOUGH)
        hybrids = tuple(name for name in names if "bamba" in name or "qwen3-next" in name)
        self.groups = MappingProxyType({"fresh": names, "softmax hybrids": hybrids})

    def subjects(self) -> Sequence[Subject]:
        return [_subject(name) for name in self.groups["fresh"]]

    def example(self, subject: Subject, index: int, seed: int) -> Question:
        return _questions(FRESH[subject.name][0].task).question(f"{seed}/{index}")


def _subject(name: str) -> Subject:
    def load(device: torch.device) -> nn.Module:
        return load_fresh(name).to(device)

    weights = (FOLDER / f"{name}.safetensors").read_bytes()
    return Subject(name, load, hashlib.sha256(weights).hexdigest())


#: The questions of a task; its texts are drawn once.
_questions = cache(LinkedQuestions)
