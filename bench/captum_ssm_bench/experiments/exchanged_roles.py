"""Roles of relevance against true exchanges of queries, keys, contents, gates and steps.

A run reads a text or another one (content), and each mixer in it uses the queries, keys, gates and
steps that it has in a run on the text or on the other one.  These are 32 coalitions of roles.

Shapes: N other texts, S coalitions, R roles, L tokens, K draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_ssm.attr import LatimFlow
from captum_ssm.mixers.base import Call
from captum_ssm.operators import Chain, Operator, Sum
from captum_ssm.operators.base import Role
from captum_ssm.operators.coefficients import ROLES, live_coefficients
from captum_ssm.operators.kernels.arithmetic import sum_tensors
from captum_ssm.tracing import Mixer, find_mixers
from captum_ssm.tracing.observe import Watcher, observe
from captum_ssm.tracing.offload import linearize

from ..circuits.games import shapley
from ..harness.experiment import Cell, Column, Subject
from ..harness.records import Rows
from ..harness.subjects import bundled
from ..training.fresh import FRESH
from ..training.language_recipes import LANGUAGE_RECIPES
from .causal.fresh import Fresh
from .causal.questions import Question
from .knockout.held import scale_of
from .linked_texts import device_of
from .roles import TOLD, CountedRoles, RolesExample

#: Draws of each token alone, and of all tokens together.
DRAWS, WHOLE = 2, 8
#: Runs that go through the model at once.
_AT_ONCE = 256
#: The coalitions, (S, R), and the map from their values to Shapley values, (S, R).
MEMBERS = torch.tensor(list(np.ndindex((2,) * len(ROLES))), dtype=torch.bool)
_SHAPLEY = torch.from_numpy(
    np.stack([shapley(one.reshape((2,) * len(ROLES))) for one in np.eye(len(MEMBERS))])
)
EXCHANGE = Cell("exchange")
RULES = ("balanced", "centered")
#: By role and mixer call, factors of all runs: (role, factor (1 + N, ...)).
Factors = list[list[tuple[Role, Tensor]]]


class _Mixed(Watcher):
    """Notes the factors of mixers, or puts those of other rows in their place.

    Args:
        factors: the factors of the runs on the text and on others. Default: None, they are noted.
        rows: by role, the run that each row takes factors from.
    """

    def __init__(
        self, factors: Factors | None = None, rows: Mapping[Role, Tensor] = MappingProxyType({})
    ) -> None:
        self.noted: Factors = []
        self._factors, self._rows = iter(factors or ()), rows

    def returned(self, mixer: Mixer, call: Call) -> Tensor | None:
        linear = linearize(mixer, call, running=True)
        live = live_coefficients(linear.operator)
        own = [(holder.roles[name], x.detach()) for (holder, name), x in live.items()]
        if not self._rows:
            self.noted.append(own)
            return None
        moved: dict[Operator, dict[str, Tensor]] = {}
        for (holder, name), (role, x) in zip(live, next(self._factors), strict=True):
            moved.setdefault(holder, {})[name] = x[self._rows[role]]
        norm = getattr(mixer.module, "norm", None)
        with torch.no_grad():
            out = _through(linear.operator, linear.values.detach(), moved, norm)
            return linear.project(out)


def _through(
    operator: Operator,
    values: Tensor,
    moved: Mapping[Operator, Mapping[str, Tensor]],
    norm: Any,
) -> Tensor:
    """Map values by an operator with other factors, whose norm is computed anew."""
    if operator in moved:
        return operator.at(moved[operator]).affine(values)
    if isinstance(operator, Chain):
        for part in reversed(operator.parts):
            values = _through(part, values, moved, norm)
        return values
    if isinstance(operator, Sum):
        return sum_tensors(_through(part, values, moved, norm) for part in operator.parts)
    if operator.component == "norm":
        by_head = len(norm.weight) == values.shape[-1]
        x = values if by_head else values.flatten(2)
        normed: Tensor = x * scale_of(norm, x) * norm.weight
        return normed.view_as(values)
    return operator.affine(values)


def _run(model: Any, ids: Tensor, watcher: Watcher) -> Tensor:
    """The logits at the last token, (N, words)."""
    with ExitStack() as stack:
        observe(model, find_mixers(model), (watcher,), stack, gradients=True, vouched=False)
        with torch.enable_grad():  # else factors have no graph, by which adapters tell them
            logits = model(input_ids=ids.to(device_of(model)), use_cache=False).logits
    last: Tensor = logits[:, -1].detach().cpu()
    return last


class Exchange:
    """Shapley values by role of the answer's logit, between a text and others.

    Args:
        model: of transformers.
        question: the text and its answer.

    Attributes:
        present: the roles that the model's mixers have.
    """

    def __init__(self, model: nn.Module, question: Question) -> None:
        self.model, self.question = model, question
        self.present: set[Role] = {"content"}

    def values(self, others: Tensor) -> Tensor:
        """The answer's logit in each coalition with others (N, L), (N, S)."""
        ids = torch.cat([self.question.inputs, others])
        plain = _Mixed()
        _run(self.model, ids, plain)
        self.present |= {role for call in plain.noted for role, _ in call}
        other = torch.arange(1, len(ids)).repeat_interleave(len(MEMBERS))
        rows = torch.where(MEMBERS.repeat(len(others), 1), 0, other[:, None])  # (N S, R)
        if len(plain.noted) == 1:  # one block: of the last token alone, queries and gates are read
            for place, role in enumerate(ROLES):
                read = [x[:, -1] for name, x in plain.noted[0] if name == role]
                if role in ("query", "gate") and read:
                    near = [torch.isclose(x, x[:1], atol=1e-6).flatten(1).all(1) for x in read]
                    same = torch.stack(near).all(0)
                    rows[:, place] = torch.where(same[rows[:, place]], 0, rows[:, place])
        each, which = rows.unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
        found = []
        for some in each.split(_AT_ONCE):
            of = dict(zip(ROLES, some.mT, strict=True))
            logits = _run(self.model, ids[of["content"]], _Mixed(plain.noted, of))
            found.append(logits[:, self.question.target[-1]].double())
        return torch.cat(found)[which].view(len(others), -1)

    @cached_property
    def whole(self) -> Tensor:
        """By draw, Shapley values where all tokens are drawn anew, (K, R)."""
        return self.values(self.question.references("whole", WHOLE)) @ _SHAPLEY

    @cached_property
    def by_token(self) -> Tensor:
        """By draw, Shapley values where a token alone is drawn anew, (K, R, L)."""
        question = self.question
        drawn, length = question.references("roles", DRAWS), question.inputs.shape[1]
        alone = torch.eye(length, dtype=torch.bool)
        others = torch.where(alone, drawn[:, None], question.inputs).flatten(0, 1)  # (K L, L)
        found = torch.zeros(len(others), len(ROLES), dtype=torch.float64)
        changed = (others != question.inputs).any(-1)
        found[changed] = self.values(others[changed]) @ _SHAPLEY
        return found.view(DRAWS, length, -1).mT


class ExchangedRoles(CountedRoles):
    """Whether relevance by role is that of exchanges: its first token, and its sum."""

    columns = (
        *(Column(role, (role,)) for role in TOLD),
        Column("role error", ("error",), "low"),
        *(Column(f"{role}, by the task", (f"right {role}",)) for role in TOLD),
        *(Column(f"at {role}", (f"at {role}",), "") for role in ROLES),
    )
    baselines = (EXCHANGE.method,)
    examples = 40

    def __init__(self) -> None:
        fresh = tuple(n for n in Fresh().groups["fresh"] if n.startswith("pairs-"))
        pairs = ("mamba", "mamba2", "gated-deltanet", "bamba", "griffin", "rwkv")
        self.groups = MappingProxyType(
            {
                "recall": ("recall-mamba",),
                "two passkeys": CountedRoles.groups["two passkeys"],
                "pairs": tuple(f"pairs-{mixer}" for mixer in pairs),
                "fresh pairs": fresh,
            }
        )
        self.over_models = ("fresh pairs",)
        recipes = {**LANGUAGE_RECIPES, **{name: FRESH[name][0] for name in fresh}}
        names = [name for group in self.groups.values() for name in group]
        title = "Roles of relevance against exchanges of factors between two runs"
        super().__init__("exchanged-roles", title, {name: recipes[name].task for name in names})
        self._latest: tuple[Any, Exchange] | None = None

    def subjects(self) -> Sequence[Subject]:
        fresh = {subject.name: subject for subject in Fresh().subjects()}
        return [fresh.get(name) or bundled(name) for name in self._tasks]

    def cells(self) -> Sequence[Cell]:
        return [EXCHANGE, *(Cell(LatimFlow.__name__, rule) for rule in RULES)]

    def example(self, subject: Subject, index: int, seed: int) -> RolesExample:
        """One answer of a text, in turn."""
        text = super().example(subject, index, seed)
        one = index % len(text.targets)
        right = {role: told[one : one + 1] for role, told in text.right.items()}
        return RolesExample(text.ids, [text.targets[one]], right, [text.questions[one]])

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        if self._latest is None or self._latest[0] is not example:
            self._latest = example, Exchange(model, example.questions[0])
        exchange = self._latest[1]
        question, whole, each = exchange.question, exchange.whole, exchange.by_token
        if cell == EXCHANGE:  # one half of the draws against the other
            firsts, sums = each[::2].mean(0), whole[::2].mean(0)
            each, whole = each[1::2], whole[1::2]
        else:
            rule: Any = cell.formulation
            inputs = question.inputs.to(device_of(model))
            found = LatimFlow(model).decompose(inputs, question.target, rule=rule).roles
            assert found is not None
            firsts = torch.stack([found[role][0].detach().cpu().double() for role in ROLES])
            sums = firsts[:, question.movable].sum(-1)
        true, own = (first_of(x, question.movable) for x in (each.mean(0), firsts))
        here = [role in exchange.present for role in ROLES]
        shares = [x / x.abs().sum() for x in (whole.mean(0), sums)]
        numbers = {"error": float((shares[0] - shares[1]).abs().sum()) / 2}
        for place, role in enumerate(ROLES):
            numbers[f"at {role}"] = float(shares[1][place])
            if role in TOLD:
                first, told = int(own[place]), example.right[role][0]
                nothing = math.nan if not here[place] else 0.0
                numbers[role] = nothing + float(first == int(true[place]))
                numbers[f"right {role}"] = nothing + float(told[first])
        return {"": numbers}


def first_of(values: Tensor, movable: Tensor) -> Tensor:
    """The first token by each role, (R, L) to (R,)."""
    return values.masked_fill(~movable, -math.inf).argmax(-1)
