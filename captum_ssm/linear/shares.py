"""How what a mixer does is divided among all that it is made of.

A mixer's outer part is a function of its live factors: what is moved (content), what it is matched
by (key), what asks (query), what lets it through (gate), how far states move on (step).  A rule
says which of them get a share.  Its output keeps its value; its derivative with respect to a factor
is the average of the derivatives at nodes between the factor and a reference, times the rule's
share.  What belongs to the references is a constant of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..operators import Operator
from ..operators.base import Role
from ..operators.kernels.arithmetic import full_precision
from ..operators.readings.coefficients import (
    Back,
    Gradients,
    Moved,
    follow_mask,
    live_coefficients,
    vjp,
)
from .constants import Ledger

#: ``"frozen"``: content alone. ``"half"``: content and gates alike. ``"equal"``: content, gates,
#: keys and queries alike. ``"centred"``: these, and steps, where keys and queries count by what
#: they are more than the average so far.
Rule = Literal["frozen", "half", "equal", "centred"]


@dataclass(frozen=True)
class Share:
    """What a role gets.

    Attributes:
        reference: what its factors are compared with: what they are at rest, where what they
            follow from is nothing; their mean over the tokens up to each; or themselves, so that
            their derivative is that where they are.
        share: factor on the average derivative.
    """

    reference: Literal["rest", "mean", "own"]
    share: float


_ALL, _ABOVE_MEAN, _AS_IT_IS = Share("rest", 1.0), Share("mean", 0.5), Share("own", 0.5)

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
        "step": _AS_IT_IS,
    },
}

#: Between reference and factor: Gauss's two points, exact for products of up to four factors.
_NODES = tuple(0.5 + side / 12**0.5 for side in (-1, 1))


class Labels:
    """Which paths a backward pass follows: all of them, or those of one label.

    A path from the output to the input is labelled by the first factor other than content that it
    takes; one that takes none is content.  What passes no mixer is content, too.
    """

    def __init__(self, several: bool) -> None:
        self.several = several
        self.label: Role | None = None
        #: By label, the gradients of factors at which paths take it, having come by content alone.
        self.begun: dict[Role, dict[tuple[Operator, str], Tensor]] = {}

    @contextmanager
    def only(self, label: Role) -> Iterator[None]:
        """Follow the paths of one label inside the ``with``: content first, then the others.

        Those of another label than content begin at mixers: the gradient of the output is to be 0.
        """
        self.label = label
        try:
            yield
        finally:
            self.label = None


def is_shared(operator: Operator, rule: Rule) -> bool:
    """Whether coefficients of the operator get a share by the rule."""
    return any(leaf.roles[name] in FAMILY[rule] for leaf, name in live_coefficients(operator))


def shared(
    operator: Operator,
    x: Tensor,
    rule: Rule,
    ledger: Ledger,
    labels: Labels,
    mask: Tensor | None,
) -> Tensor:
    """What an operator makes of values, its derivative divided among its factors by a rule."""
    chosen = [key for key in live_coefficients(operator) if key[0].roles[key[1]] in FAMILY[rule]]
    sources = [leaf.live[name] for leaf, name in chosen]
    outer = _Outer(operator, rule, chosen, ledger, labels, mask)
    out: Tensor = _Averaged.apply(outer, x, *sources)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, eq=False)
class _Outer:
    """The outer part of a mixer.

    Attributes:
        operator: it.
        rule: the rule.
        chosen: its coefficients that get a share, by leaf and name.
        ledger: takes down what belongs to the references.
        labels: says which paths a backward pass follows.
        mask: True for real tokens (B, L), or None.
    """

    operator: Operator
    rule: Rule
    chosen: Sequence[tuple[Operator, str]]
    ledger: Ledger
    labels: Labels
    mask: Tensor | None
    _known: list[Back] = field(default_factory=list)

    def followed(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradients of values and factors along the paths of the present label."""
        label, begun = self.labels.label, self.labels.begun
        of_values, found = self.averaged(x, gradient)
        if label == "content":
            for (leaf, name), of_factor in zip(self.chosen, found, strict=True):
                begun.setdefault(leaf.roles[name], {})[leaf, name] = of_factor
            return of_values, [torch.zeros_like(of_factor) for of_factor in found]
        if label is not None:
            for i, key in enumerate(self.chosen):
                if key in begun[label]:
                    found[i] = found[i] + begun[label].pop(key)
        return of_values, found

    def averaged(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradients of values and factors."""
        shares, found = FAMILY[self.rule], Gradients()
        stack = (gradient / len(_NODES)).expand(len(_NODES), *gradient.shape)
        of_values = self._back(x)(stack, found).sum(0)

        def shared(of: Tensor, role: Role) -> Tensor:
            return of if (share := shares[role].share) == 1 else share * of

        of_factors = [shared(found[leaf][name], leaf.roles[name]) for leaf, name in self.chosen]
        return shared(of_values, "content"), of_factors

    def _back(self, x: Tensor) -> Back:
        """How gradients go back at the nodes, found once for several passes."""
        if self._known:
            return self._known[0]
        # made on the device: numbers of the host would be waited for
        first, last = _NODES
        both = torch.linspace(first, last, len(_NODES), dtype=x.dtype, device=x.device)
        nodes = both.view(-1, *(1,) * x.dim())
        _, back = vjp(self.operator, nodes * x, self._moved(nodes.flatten()), nodes)
        if self.labels.several:
            self._known.append(back)
        return back

    def _moved(self, nodes: Tensor) -> Moved:
        """The factors at the nodes; those that are their own reference stay where they are."""
        masks: dict[Operator, Tensor | None] = {}
        follow_mask(self.operator, self.mask, masks)
        moved: dict[Operator, dict[str, Tensor]] = {}
        for leaf, name in self.chosen:
            reference = FAMILY[self.rule][leaf.roles[name]].reference
            if reference == "own":
                continue
            factor = leaf.live[name].detach()
            at = nodes.view(-1, *(1,) * factor.dim())
            if reference == "mean":
                between = torch.lerp(running_mean(factor, masks[leaf]), factor, at)
            elif isinstance(leaf.at_rest, Tensor):
                between = torch.lerp(leaf.at_rest.to(factor), factor, at)
            else:
                between = factor * at
                if leaf.at_rest:
                    between += leaf.at_rest * (1 - at)
            moved.setdefault(leaf, {})[name] = between
        return moved


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
        with full_precision(x.device):  # whatever the caller's autocast, as in the forward pass
            of_values, of_sources = outer.followed(x, gradient)
        if outer.labels.label is not None:  # the account is of all paths
            return None, of_values, *of_sources
        batch = len(out)
        rest = _by_example(gradient * out, batch) - _by_example(of_values * x, batch)
        for (leaf, name), found in zip(outer.chosen, of_sources, strict=True):
            rest = rest - _by_example(found * leaf.live[name].detach(), batch)
        outer.ledger.write_rest(rest)
        return None, of_values, *of_sources


def _by_example(x: Tensor, batch: int) -> Tensor:
    """Sums (B,) of what has examples, or their windows, in front; what all share is spread."""
    return x.reshape(batch, -1).sum(1) if len(x) % batch == 0 else x.sum().expand(batch) / batch


def running_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the tokens up to each, (B, L, ...).

    Args:
        x: (B, L, ...).
        mask: True for the tokens that count (B, L), or None for all.
    """
    ones = (1,) * (x.dim() - 2)
    if mask is None:
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)
        return x.cumsum(1) / count.view(1, -1, *ones)
    keep = mask.to(x).view(*x.shape[:2], *ones)
    return (x * keep).cumsum(1) / keep.cumsum(1).clamp_min(1)
