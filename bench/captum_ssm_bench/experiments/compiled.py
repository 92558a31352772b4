"""Relevance in compiled circuits, against exact Shapley values.

Shapes: L tokens, U tokens that can be replaced, E width, N points.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from captum.attr import IntegratedGradients
from torch import Tensor, nn

from captum_ssm.attr import LatimFlow
from captum_ssm.linear import FAMILY
from captum_ssm.linear.norms import frozen_norms
from captum_ssm.metrics import pearson, spearman
from captum_ssm.tracing import repaired_scans

from ..circuits.games import Circuit, Example, left_out, shapley
from ..circuits.programs import HARDENED, SEEN, circuit
from ..harness.experiment import Cell, Column, Experiment, Subject
from ..harness.records import Rows

#: References of expected gradients.
EXPECTED = (8, 32)
#: The roles that have a column; the others count as others.
ROLES = ("content", "key", "second key", "link", "query", "gate", "mark", "eraser", "no eraser")
OTHERS = "others"
#: The baselines of gradients: none, the input's mean embedding, the mean of each token's kind.
OWN, KINDS = "own mean", "kinds"
#: Relevance is rounded to this part of the largest before it is ranked, so that rounding does not
#: rank equal tokens; below the other all of it is 0.
_ROUNDED, _NOTHING = 1e-4, 1e-7


class Asked:
    """An example of a circuit, the true values, and what methods need.

    Args:
        circuit: the circuit.
        example: one of its inputs.
        seed: of what is drawn.
    """

    def __init__(self, circuit: Circuit, example: Example, seed: str) -> None:
        self.circuit, self.example, self.seed = circuit, example, seed
        self.model, self.players = circuit.model, circuit.players
        self.ids = circuit.ids([example.letters])
        self.target = circuit.answer_id(example.answer)
        self.table: Tensor = self.model.get_input_embeddings().weight.detach()
        self.points: Tensor = self.table[self.ids]  # (1, L, E)

    @cached_property
    def value(self) -> np.ndarray[Any, Any]:
        """The value of each coalition."""
        return self.circuit.coalitions(self.example)

    @cached_property
    def shapley(self) -> np.ndarray[Any, Any]:
        """The Shapley values (U,)."""
        return shapley(self.value)

    @cached_property
    def kinds(self) -> Tensor:
        """The mean embedding of the words that each token can be, (1, L, E)."""
        words = self.circuit.words
        each = [self.table[list(words.ids(kind))].mean(0) for kind in self.circuit.kinds]
        return torch.stack(each)[None]

    def baseline(self, name: str) -> Tensor:
        """A baseline of the embeddings by its name, (1, L, E)."""
        if name == KINDS:
            return self.kinds
        mean = self.points.mean(1, keepdim=True)
        return (mean if name == OWN else torch.zeros_like(mean)).expand_as(self.points)

    def drawn(self, count: int) -> Tensor:
        """The embeddings of inputs drawn at random, (N, L, E)."""
        generator = self.generator("draws")
        sizes = self.circuit.sizes
        columns = [torch.randint(size, (count,), generator=generator) for size in sizes]
        return self.table[self.circuit.ids(torch.stack(columns, 1).numpy())]

    def generator(self, what: str) -> torch.Generator:
        """A generator of its own for each purpose."""
        digest = hashlib.sha256(f"{self.seed}/{what}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))

    def output(self, points: Tensor) -> Tensor:
        """The answer's logit at embeddings, (N,)."""
        with repaired_scans():
            logits = self.model(inputs_embeds=points, use_cache=False).logits
        answers: Tensor = logits[:, -1, self.target]
        return answers

    def gradients(self, points: Tensor) -> Tensor:
        """The gradient of the answer's logit at embeddings."""
        points = points.detach().clone().requires_grad_()
        with torch.enable_grad():
            (found,) = torch.autograd.grad(self.output(points).sum(), points)
        return found


# --- methods -------------------------------------------------------------------------------------


def _flow(asked: Asked, rule: Any, baseline: str) -> Tensor:
    given = asked.kinds if baseline == KINDS else None
    found: Tensor = LatimFlow(asked.model).attribute(
        asked.ids, target=(-1, asked.target), rule=rule, baselines=given
    )
    return found[0]


def _input_x_gradient(asked: Asked, held: bool, baseline: str = "") -> Tensor:
    with frozen_norms() if held else nullcontext():
        gradients = asked.gradients(asked.points)
    return ((asked.points - asked.baseline(baseline)) * gradients)[0].sum(-1)


def _integrated(asked: Asked, points: int, held: bool, baseline: str) -> Tensor:
    explain = IntegratedGradients(asked.output)
    keep = {"inputs_embeds": asked.points, "use_cache": False}
    with repaired_scans(), frozen_norms(asked.model, keep) if held else nullcontext():
        found: Tensor = explain.attribute(asked.points, asked.baseline(baseline), n_steps=points)
    return found[0].sum(-1)


def _expected(asked: Asked, count: int) -> Tensor:
    """One point between the input and each of some draws, in equal parts of the way."""
    references, generator = asked.drawn(count), asked.generator("places")
    part = torch.randperm(count, generator=generator)
    shares = ((part + torch.rand(count, generator=generator)) / count).view(-1, 1, 1)
    difference = asked.points - references
    return (difference * asked.gradients(references + shares * difference)).sum(-1).mean(0)


def _both(asked: Asked) -> Tensor:
    """Balanced and expected gradients, of one size each."""
    each = (_flow(asked, "balanced", OWN), _expected(asked, EXPECTED[0]))
    return torch.stack([x / x.abs().sum().clamp_min(_NOTHING) for x in each]).sum(0)


def _occlusion(asked: Asked) -> Tensor:
    places = asked.players
    changed = asked.points.repeat(1 + len(places), 1, 1)
    for row, place in enumerate(places, 1):
        changed[row, place] = asked.kinds[0, place]
    with torch.no_grad():
        outputs = asked.output(changed)
    found = torch.zeros(asked.ids.shape[1])
    found[places] = outputs[0] - outputs[1:]
    return found


def _of_players(asked: Asked, values: np.ndarray[Any, Any]) -> Tensor:
    found = torch.zeros(asked.ids.shape[1], dtype=torch.float64)
    found[asked.players] = torch.from_numpy(values)
    return found


class Method(NamedTuple):
    """A method, and what it costs.

    Attributes:
        explain: gives the relevance of the tokens, (L,).
        passes: runs forward and backward together.
        by_player: runs more for each token that can be replaced. Default: 0.
    """

    explain: Callable[[Asked], Tensor]
    passes: int
    by_player: int = 0


SHAPLEY = Cell("Shapley values")
#: Input x gradient with the statistics of norms held, less the input's mean.
BASELINE = Cell("InputXGradient", f"norms held, {OWN}")

#: All methods.
METHODS: Mapping[Cell, Method] = MappingProxyType(
    {
        **{
            Cell("LatimFlow", f"{rule}, {name}" if name else rule): Method(
                partial(_flow, rule=rule, baseline=name), 2
            )
            for rule in FAMILY
            for name in (("",) if rule in ("frozen", "half") else (OWN, KINDS))
        },
        Cell("LatimFlow", "balanced, with ExpectedGradients"): Method(_both, 2 + 2 * EXPECTED[0]),
        Cell("InputXGradient"): Method(partial(_input_x_gradient, held=False), 2),
        Cell("InputXGradient", "norms held"): Method(partial(_input_x_gradient, held=True), 2),
        **{
            Cell("InputXGradient", f"norms held, {name}"): Method(
                partial(_input_x_gradient, held=True, baseline=name), 2
            )
            for name in (OWN, KINDS)
        },
        **{
            Cell("IntegratedGradients", f"norms held, {n} point{'s' * (n > 1)}, {name}"): Method(
                partial(_integrated, points=n, held=True, baseline=name), 1 + 2 * n
            )
            for n in (1, 3)
            for name in (OWN, KINDS)
        },
        Cell("IntegratedGradients", f"8 points, {KINDS}"): Method(
            partial(_integrated, points=8, held=False, baseline=KINDS), 16
        ),
        **{
            Cell("ExpectedGradients", f"{n} references"): Method(partial(_expected, count=n), 2 * n)
            for n in EXPECTED
        },
        Cell("Occlusion", KINDS): Method(_occlusion, 1, 1),
        Cell("leave-one-out", "exact"): Method(
            lambda asked: _of_players(asked, left_out(asked.value)), 0
        ),
        Cell("random"): Method(
            lambda asked: torch.rand(asked.ids.shape[1], generator=asked.generator("random")) - 0.5,
            0,
        ),
        SHAPLEY: Method(lambda asked: _of_players(asked, asked.shapley), 0),
    }
)


# --- numbers -------------------------------------------------------------------------------------


def rounded(values: Tensor) -> Tensor:
    """Return values in parts of the largest, so that equal ones are equal."""
    largest = values.abs().max()
    return torch.round(values / largest / _ROUNDED) if largest > _NOTHING else values * 0


def source_first(relevance: Tensor, content: Tensor) -> float:
    """The share of content among the most relevant tokens; 0 where all relevance is 0."""
    first = rounded(relevance)
    if not first.any():
        return 0.0
    return float(content[first == first.max()].double().mean())


def shares(relevance: Tensor) -> Tensor:
    """Relevance in parts of the sum of its absolute values, (U,)."""
    return relevance / relevance.abs().sum().clamp_min(_NOTHING)


class Compiled(Experiment):
    """Rank, size and roles of relevance where the causes are known exactly."""

    name = "compiled"
    title = "Relevance in compiled circuits, against exact Shapley values"
    examples = 40
    columns = (
        Column("ρ", ("spearman",)),
        Column("r", ("pearson",)),
        Column("source first", ("first",)),
        Column("role error", ("roles",), "low"),
        Column("share error", ("shares",), "low"),
        Column("passes", ("passes",), "low"),
        *(Column(f"at {role}", (role,), "") for role in (*ROLES, OTHERS)),
    )
    baselines = ("random", SHAPLEY.method)
    groups = MappingProxyType({"hardened": tuple(HARDENED), "seen before": tuple(SEEN)})
    against = BASELINE

    def subjects(self) -> Sequence[Subject]:
        return [Subject(name, partial(_load, name), fingerprint(name)) for name in SEEN | HARDENED]

    def cells(self) -> Sequence[Cell]:
        return list(METHODS)

    def example(self, subject: Subject, index: int, seed: int) -> Asked:
        found = circuit(subject.name)
        return Asked(found, found.example(index, seed), f"{subject.name}/{seed}/{index}")

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        method, asked = METHODS[cell], example
        found = method.explain(asked).detach().double().cpu()[asked.players]
        true = torch.from_numpy(asked.shapley)
        roles = [asked.example.roles.get(place, OTHERS) for place in asked.players]
        content = torch.tensor([role == "content" for role in roles])
        wanted, parts = shares(true), shares(found)
        by_role = {
            role: torch.tensor([role == named(each) for each in roles]) for role in (*ROLES, OTHERS)
        }
        here = {role: of for role, of in by_role.items() if of.any()}
        off = [float((parts[of].sum() - wanted[of].sum()).abs()) for of in here.values()]
        numbers = {
            "spearman": _or_zero(spearman(rounded(found)[None], rounded(true)[None])),
            "pearson": _or_zero(pearson(found[None], true[None])),
            "first": source_first(found, content) if content.any() else float("nan"),
            "roles": sum(off) / 2,
            "shares": float((parts - wanted).abs().sum()) / 2,
            "passes": float(method.passes + method.by_player * len(asked.players)),
        }
        nothing = dict.fromkeys(by_role, float("nan"))
        return {"": {**numbers, **nothing, **{r: float(parts[of].sum()) for r, of in here.items()}}}


def named(role: str) -> str:
    """The column of a role."""
    return role if role in ROLES else OTHERS


def _or_zero(correlation: Tensor) -> float:
    """A correlation; 0 where all relevance is alike."""
    return float(correlation.nan_to_num(0.0))


def _load(name: str, _: torch.device) -> nn.Module:
    """A circuit's model, which is small enough for a processor."""
    model: nn.Module = circuit(name).model
    return model


def fingerprint(name: str) -> str:
    """Return a digest of a circuit's weights, which rounding does not change."""
    digest = hashlib.sha256()
    for key, weight in sorted(circuit(name).model.state_dict().items()):
        digest.update(key.encode())
        digest.update((weight.float() * 1e3).round().to(torch.int64).numpy().tobytes())
    return digest.hexdigest()
