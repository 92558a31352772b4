"""How what a mixer does is divided among all that it is made of.

A mixer's outer part is a function of its live factors: what is moved (content), what it is matched
by (key), what asks (query), what lets it through (gate), how far states move on (step).  A rule
says which of them get a share.  Its output keeps its value; its derivative with respect to a factor
is the average of the derivatives at nodes between the factor and a reference, times the rule's
share.  What belongs to the references is a constant of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..operators import Operator
from ..operators.base import Role
from ..operators.coefficients import Gradients, live_coefficients, pullback
from .constants import Ledger

#: ``"frozen"``: content alone. ``"half"``: content and gates alike. ``"equal"``: content, gates,
#: keys and queries alike. ``"centred"``: these, and steps, where keys, queries and steps count by
#: what they are more than the average so far.
Rule = Literal["frozen", "half", "equal", "centred"]


@dataclass(frozen=True)
class Share:
    """What a role gets.

    Attributes:
        reference: what its factors are compared with: nothing at all, or their mean over the tokens
            up to each.
        share: factor on the average derivative.
    """

    reference: Literal["zero", "mean"]
    share: float


_ALL, _ABOVE_MEAN = Share("zero", 1.0), Share("mean", 0.5)

#: The family: what each role gets, by rule; those that are not named get nothing.
FAMILY: Mapping[Rule, Mapping[Role, Share]] = {
    "frozen": {"content": _ALL},
    "half": {"content": _ALL, "gate": _ALL},
    "equal": {"content": _ALL, "gate": _ALL, "key": _ALL, "query": _ALL},
    "centred": {
        "content": _ALL,
        "gate": _ALL,
        "key": _ABOVE_MEAN,
        "query": _ABOVE_MEAN,
        "step": _ABOVE_MEAN,
    },
}

#: Between reference and factor: Gauss's two points, exact for products of up to four factors.
_NODES = tuple(0.5 + side / 12**0.5 for side in (-1, 1))


def is_shared(operator: Operator, rule: Rule) -> bool:
    """Whether coefficients of the operator get a share by the rule.

    Args:
        operator: chains and sums of any depth.
        rule: the rule.
    """
    return any(leaf.roles[name] in FAMILY[rule] for leaf, name in live_coefficients(operator))


def shared(
    operator: Operator, x: Tensor, rule: Rule, ledger: Ledger, mask: Tensor | None
) -> Tensor:
    """What an operator makes of values, its derivative divided among its factors by a rule.

    Args:
        operator: the operator, with live coefficients.
        x: the values, (B, L, H, P), live.
        rule: the rule.
        ledger: takes down what belongs to the references.
        mask: True for real tokens (B, L), or None.
    """
    chosen = [key for key in live_coefficients(operator) if key[0].roles[key[1]] in FAMILY[rule]]
    sources = [leaf.live[name] for leaf, name in chosen]
    return _Averaged.apply(_Outer(operator, rule, chosen, ledger, mask), x, *sources)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(frozen=True, eq=False)
class _Outer:
    """The outer part of a mixer.

    Attributes:
        operator: it.
        rule: the rule.
        chosen: its coefficients that get a share, by leaf and name.
        ledger: takes down what belongs to the references.
        mask: True for real tokens (B, L), or None.
    """

    operator: Operator
    rule: Rule
    chosen: Sequence[tuple[Operator, str]]
    ledger: Ledger
    mask: Tensor | None

    def averaged(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradients of values and factors."""
        shares = FAMILY[self.rule]
        references = [self._reference(leaf, name) for leaf, name in self.chosen]
        of_values, found = torch.zeros_like(x), list[Tensor | None]([None] * len(self.chosen))
        for node in _NODES:
            moved: dict[Operator, dict[str, Tensor]] = {}
            for (leaf, name), start in zip(self.chosen, references, strict=True):
                moved.setdefault(leaf, {})[name] = torch.lerp(start, leaf.tensors()[name], node)
            here = {leaf: leaf.at(coefficients) for leaf, coefficients in moved.items()}
            at_node: Gradients = {}
            of_values += pullback(self.operator, node * x, gradient, here, at_node, node)
            for i, (leaf, name) in enumerate(self.chosen):
                part, before = at_node[leaf][name], found[i]
                found[i] = part if before is None else before + part
        weights = [shares[leaf.roles[name]].share / len(_NODES) for leaf, name in self.chosen]
        gradients = [w * x for w, x in zip(weights, found, strict=True) if x is not None]
        return of_values * (shares["content"].share / len(_NODES)), gradients

    def _reference(self, leaf: Operator, name: str) -> Tensor:
        coefficient = leaf.tensors()[name]
        if FAMILY[self.rule][leaf.roles[name]].reference == "zero":
            return torch.zeros_like(coefficient)
        return running_mean(coefficient, self.mask)


class _Averaged(torch.autograd.Function):
    """An operator's output, with the averaged derivative."""

    @staticmethod
    def forward(ctx: Any, outer: _Outer, x: Tensor, *sources: Tensor) -> Tensor:
        ctx.outer = outer
        out = outer.operator.affine(x)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        outer: _Outer = ctx.outer
        x, out = ctx.saved_tensors
        of_values, of_sources = outer.averaged(x, gradient)
        rest = _by_example(gradient, out) - _by_example(of_values, x)
        for (leaf, name), found in zip(outer.chosen, of_sources, strict=True):
            rest = rest - _by_example(found, leaf.tensors()[name])
        outer.ledger.write_rest(rest)
        return None, of_values, *of_sources


def _by_example(gradient: Tensor, x: Tensor) -> Tensor:
    return (gradient * x).flatten(1).sum(1)


def running_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the tokens up to each, (B, L, ...).

    Args:
        x: (B, L, ...).
        mask: True for the tokens that count (B, L), or None for all.
    """
    keep = x.new_ones(x.shape[:2]) if mask is None else mask.to(x)
    keep = keep.view(*x.shape[:2], *(1,) * (x.dim() - 2))
    return (x * keep).cumsum(1) / keep.cumsum(1).clamp_min(1)
