"""Are the tokens that asked, were matched and were answered told apart by role?

Shapes: T answered tokens of one text, L tokens, D draws.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr import LatimFlow
from captum_ssm.linear import FAMILY
from captum_ssm.operators.base import Role
from captum_ssm.tracing import repaired_scans

from ..harness.experiment import Cell, Column, Subject
from ..harness.records import Rows
from ..tasks.linked import LinkedBatch
from ..tasks.pairs import PairsTask
from ..tasks.recall_task import RecallTask
from ..tasks.retrieval import OWNED, PasskeyTask
from .causal.interventions import DRAWS
from .causal.questions import LinkedQuestions, Question
from .finding_sources import of_text
from .linked_texts import LinkedTexts, device_of

#: By role, which tokens are right for each answered token, (T, L) of booleans.
Right = Mapping[Role, Tensor]

#: The roles that tasks say something of; nothing of them asks for gates or steps.
TOLD: tuple[Role, ...] = ("query", "key", "content")
#: Who names a token that the answered one can see, whichever it is.
CHANCE = Cell("any token")
#: How often the answer is another one if the right tokens of a role are exchanged for others of
#: their kinds: where it is not, the model does not go by them.
LOST = Cell("answer lost without them")
#: The rules that are compared, the first as a check: it leaves all to content.
RULES = ("frozen", "centered")


@dataclass(frozen=True)
class RolesExample:
    """One text.

    Attributes:
        ids: (1, L).
        targets: the position and token of each answered token.
        right: the tokens of each role.
        questions: of each answered token.
    """

    ids: Tensor
    targets: list[tuple[int, int]]
    right: Right
    questions: Sequence[Question]


class CountedRoles(LinkedTexts):
    """How often the first token by a role is one that a task gives this role."""

    columns = tuple(Column(role, (role,)) for role in TOLD)
    baselines: Collection[str] = (CHANCE.method, LOST.method)
    groups = MappingProxyType(
        {
            "recall": ("recall-mamba", "pairs-mamba", "pairs-mamba2", "pairs-gated-deltanet"),
            "passkey": ("passkey-mamba", "passkey-mamba2", "passkey-gated-deltanet"),
            "two passkeys": (
                "two-passkeys-mamba",
                "two-passkeys-mamba2",
                "two-passkeys-gated-deltanet",
            ),
        }
    )

    def cells(self) -> Sequence[Cell]:
        return [CHANCE, LOST, *(Cell(LatimFlow.__name__, rule) for rule in RULES)]

    def example(self, subject: Subject, index: int, seed: int) -> RolesExample:
        batch = self.text(subject, index, seed)
        ids, targets = batch.input_ids, of_text(batch).targets
        kinds = self._kinds(subject.name)
        questions = [kinds.asked(f"{seed}/{index}/{query}", ids, query, t) for query, t in targets]
        return RolesExample(ids, targets, right_tokens(batch), questions)

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        if cell == CHANCE:
            seen = torch.tensor([[position + 1] for position, _ in example.targets])
            return {"": {r: float((example.right[r] / seen).sum(-1).mean()) for r in TOLD}}
        if cell == LOST:
            return {"": {role: lost(model, example, role) for role in TOLD}}
        rule: Any = cell.formulation
        parts = LatimFlow(model).decompose_each(
            example.ids.to(device_of(model)), example.targets, rule=rule
        )
        by_target = [part.roles or {} for part in parts]
        found = {role: torch.cat([roles[role] for roles in by_target]).cpu() for role in TOLD}
        return {
            "": {
                role: first_is_right(found[role], example.right[role])
                if role in FAMILY[rule]
                else float("nan")
                for role in TOLD
            }
        }

    def _kinds(self, name: str) -> LinkedQuestions:
        if name not in self._made:
            self._made[name] = LinkedQuestions(self._tasks[name])
        return self._made[name]

    @cached_property
    def _made(self) -> dict[str, LinkedQuestions]:
        return {}


def lost(model: Any, example: RolesExample, role: Role) -> float:
    """How often answers become others if the right tokens of a role are exchanged."""
    found = []
    for question, right in zip(example.questions, example.right[role], strict=True):
        kept = ~right[: question.inputs.shape[1]]
        others = question.exchanged(question.references(role, DRAWS), kept.expand(DRAWS, -1))
        with torch.no_grad(), repaired_scans():
            logits = model(input_ids=others.to(device_of(model))).logits[:, -1]  # (D, words)
        _, token = question.target
        found.append((logits.argmax(-1) != token).double().mean())
    return float(torch.stack(found).mean())


def first_is_right(relevance: Tensor, right: Tensor) -> float:
    """The share of answered tokens whose most relevant token is right; both (T, L)."""
    first = relevance.argmax(-1, keepdim=True)
    return float(right.gather(-1, first).double().mean())


def right_tokens(batch: LinkedBatch) -> Right:
    """The right tokens of each role in a batch of one text.

    They follow from the form of the task alone, whatever a model may make of it.
    """
    queries = batch.targets.queries
    sure, possible = batch.gold()[0, queries], batch.possible()[0, queries]
    seen = torch.arange(batch.input_ids.shape[1]) <= queries[:, None]
    asking = seen & ~batch.context[0]
    key, query = _MATCHED[type(batch.task)](batch.input_ids[0], sure, possible, asking)
    return {"query": query, "key": key, "content": sure}


def _by_name(ids: Tensor, sure: Tensor, possible: Tensor, asking: Tensor) -> tuple[Tensor, Tensor]:
    """One word tells what is asked for: it stands beside the answer, and in the question."""
    key = possible & ~sure
    (name,) = ids[key[0]]
    return key, asking & (ids == name)


def _by_statement(
    ids: Tensor, sure: Tensor, possible: Tensor, asking: Tensor
) -> tuple[Tensor, Tensor]:
    """A statement is said again: what stands before a digit in the one, and in the other.

    A digit is told by whose it is, and by its place, which the words before it tell.
    """
    places = torch.arange(len(ids))
    owner = possible.int().argmax(-1, keepdim=True)
    digit = sure.int().argmax(-1, keepdim=True)
    return (owner - len(OWNED) <= places) & (places < digit), asking


_MATCHED: Mapping[type, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    RecallTask: _by_name,
    PairsTask: _by_name,
    PasskeyTask: _by_statement,
}
