"""Rules by which a mixer's relevance is divided among its factors.

A mixer's output is a function of factors that depend on the input. Each factor has a role: content
is the values that are moved between tokens, and the other roles are keys, queries, gates, and the
steps that update states. A rule gives shares to some roles. The output keeps its value. The
derivative with respect to a factor is the average of the derivatives at nodes between a reference
value and the factor, times the share. The contribution of the reference values is a constant.
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
from ..operators.coefficients import Back, Gradients, Moved, follow_mask, live_coefficients, vjp
from ..operators.heads import ScoredHeads, SoftmaxHeads
from ..operators.kernels.arithmetic import full_precision
from .carried import Before
from .constants import Ledger

#: The roles that get relevance. ``"frozen"``: content. ``"half"``: content and gates.
#: ``"centered"``: also keys, queries and steps; of keys and queries only the difference from their
#: mean so far counts. ``"balanced"``: the gradient, in full for content and half for the others;
#: of keys and queries of softmax attention, as for ``"centered"``.
Rule = Literal["frozen", "half", "centered", "balanced"]
Reference = Literal["rest", "mean", "own"]


@dataclass(frozen=True)
class Share:
    """The way in which a rule gives relevance to factors of one role, such as keys.

    Attributes:
        reference: the value with which the role's factors are compared. ``"rest"``: the value for
            an input of 0. ``"mean"``: the mean of all tokens so far. ``"own"``: the factor
            itself, so the derivative is local.
        share: the scalar that multiplies the average derivative.
        in_softmax: the reference of keys and queries in softmax attention, which depends on the
            differences of scores only. Default: None, ``reference``.
    """

    reference: Reference
    share: float
    in_softmax: Reference | None = None

    def compared_with(self, softmax: bool) -> Reference:
        """Return the reference in softmax attention, or in other operators."""
        return self.in_softmax or self.reference if softmax else self.reference


_ALL, _ABOVE_MEAN, _AS_IT_IS = Share("rest", 1.0), Share("mean", 0.5), Share("own", 0.5)
_MATCHED = Share("own", 0.5, in_softmax="mean")

#: The share of each role, by rule; roles that are not named get none.
FAMILY: Mapping[Rule, Mapping[Role, Share]] = {
    "frozen": {"content": _ALL},
    "half": {"content": _ALL, "gate": _ALL},
    "centered": {
        "content": _ALL,
        "gate": _ALL,
        "key": _ABOVE_MEAN,
        "query": _ABOVE_MEAN,
        "step": _AS_IT_IS,
    },
    "balanced": {
        "content": Share("own", 1.0),
        "gate": _AS_IT_IS,
        "key": _MATCHED,
        "query": _MATCHED,
        "step": _AS_IT_IS,
    },
}


def nodes_of(rule: Rule, softmax: bool) -> tuple[float, ...]:
    """Return the points between references (0) and factors (1) at which derivatives are taken.

    These are the two Gauss nodes, whose average is exact for derivatives of products of up to four
    factors. If every factor is its own reference, the only node is 1.

    Args:
        rule: the rule.
        softmax: whether there is softmax attention among the operators.
    """
    if all(share.compared_with(softmax) == "own" for share in FAMILY[rule].values()):
        return (1.0,)
    return tuple(0.5 + side / 12**0.5 for side in (-1, 1))


def is_softmax(operator: Operator) -> bool:
    """Return True if the operator is softmax attention."""
    return isinstance(operator, SoftmaxHeads | ScoredHeads)


class Labels:
    """The paths that a backward pass follows: all paths, or the paths with one label.

    The label of a path from the output to the input is the role of the path's first factor that
    is not content. If all factors are content, the label is ``"content"``.
    """

    def __init__(self, several: bool) -> None:
        self.several = several  # whether several passes follow one label each
        self.label: Role | None = None
        #: By role, then by key and factor, the gradients that reached factors through content only.
        #: The paths with that role as label continue from these gradients.
        self.path_starts: dict[Role, dict[tuple[object, object], Tensor]] = {}
        #: Index of the block that runs again, and number of keys returned for this block so far.
        self._block: tuple[int, int] | None = None

    def set_block(self, block: int | None) -> None:
        """Set the index of the block that runs again from now on; None for no block."""
        self._block = None if block is None else (block, 0)

    def new_key(self) -> object:
        """Return a key for the next object that divides relevance, for use in ``path_starts``.

        In blocks that run again in each backward pass, the same object gets the same key.
        """
        if self._block is None:
            return object()
        block, count = self._block
        self._block = block, count + 1
        return self._block

    @contextmanager
    def follow(self, label: Role) -> Iterator[None]:
        """Follow the paths of one label inside the ``with``; call it for content first.

        Paths with other labels begin at ``path_starts``: pass a gradient of 0 at the output.
        """
        self.label = label
        try:
            yield
        finally:
            self.label = None


def has_shares(operator: Operator, rule: Rule) -> bool:
    """Return True if the rule gives relevance to at least one coefficient of the operator."""
    return any(leaf.roles[name] in FAMILY[rule] for leaf, name in live_coefficients(operator))


def apply_with_shares(
    operator: Operator, x: Tensor, rule: Rule, ledger: Ledger, labels: Labels, mask: Tensor | None
) -> Tensor:
    """Apply an operator to ``x`` (B, L, H, P), with a gradient divided among factors by a rule."""
    live = live_coefficients(operator)
    factors = [(leaf, name) for leaf, name in live if leaf.roles[name] in FAMILY[rule]]
    sharing = _SharingOperator(operator, rule, factors, ledger, labels, mask, labels.new_key())
    sources = [leaf.live[name] for leaf, name in factors]
    out: Tensor = _Averaged.apply(sharing, x, *sources)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, eq=False)
class _SharingOperator:
    """An operator whose factors share relevance, with the data for its backward pass.

    Attributes:
        operator: the product of a mixer's last operators, from the first one with a share.
        rule: the rule.
        factors: the operator's coefficients that get a share, as pairs of operator and name.
        ledger: the ledger that records the contribution of reference values.
        labels: the paths that a backward pass follows.
        mask: True for real tokens (B, L), or None.
        key: a key that identifies this object among all that divide relevance.
    """

    operator: Operator
    rule: Rule
    factors: Sequence[tuple[Operator, str]]
    ledger: Ledger
    labels: Labels
    mask: Tensor | None
    key: object
    _cached: list[Back] = field(default_factory=list)

    def gradients_on_paths(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return gradients at values and factors along paths with this pass's label (None: all)."""
        label, path_starts = self.labels.label, self.labels.path_starts
        at_values, at_factors = self.averaged_gradients(x, gradient)
        if label == "content":  # gradients at factors are starts for later passes
            for i, (leaf, name) in enumerate(self.factors):
                path_starts.setdefault(leaf.roles[name], {})[self.key, i] = at_factors[i]
            return at_values, [torch.zeros_like(at_factor) for at_factor in at_factors]
        if label is not None:
            for i, at_factor in enumerate(at_factors):
                from_content = path_starts[label].pop((self.key, i), None)
                at_factors[i] = at_factor if from_content is None else at_factor + from_content
        return at_values, at_factors

    def averaged_gradients(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return gradients at values and factors: averages over nodes, multiplied by the shares."""
        # the call on all nodes at once also adds factors' gradients, summed, to ``gradients``
        shares, gradients, count = FAMILY[self.rule], Gradients(), len(self._nodes())
        at_nodes = (gradient / count).expand(count, *gradient.shape)
        at_values = self._backward_at_nodes(x)(at_nodes, gradients).sum(0)

        def scale(gradient: Tensor, role: Role) -> Tensor:
            return gradient if (share := shares[role].share) == 1 else share * gradient

        at_factors = [scale(gradients[leaf][name], leaf.roles[name]) for leaf, name in self.factors]
        return scale(at_values, "content"), at_factors

    def _nodes(self) -> tuple[float, ...]:
        return nodes_of(self.rule, any(is_softmax(leaf) for leaf, _ in self.factors))

    def _backward_at_nodes(self, x: Tensor) -> Back:
        """Return the backward function at all nodes, cached if several passes need it."""
        if self._cached:
            return self._cached[0]
        # made on the device, as a copy from the host would wait for the device
        points = self._nodes()
        line = torch.linspace(points[0], points[-1], len(points), dtype=x.dtype, device=x.device)
        nodes = line.view(-1, *(1,) * x.dim())
        is_own = FAMILY[self.rule]["content"].reference == "own"
        value_nodes = torch.ones_like(nodes) if is_own else nodes
        factors_at_nodes = self._factors_at(nodes.flatten())
        _, back = vjp(self.operator, value_nodes * x, factors_at_nodes, value_nodes)
        if self.labels.several:
            self._cached.append(back)
        return back

    def _factors_at(self, nodes: Tensor) -> Moved:
        """Return the factors' values (S, B, ...) at S nodes, by operator and name.

        Node 0 is a factor's reference, see :class:`Share`, and node 1 the factor. A factor with the
        reference "own" is the same at all nodes, and is left out.
        """
        masks: dict[Operator, Tensor | None] = {}
        follow_mask(self.operator, self.mask, masks)
        moved: dict[Operator, dict[str, Tensor]] = {}
        for leaf, name in self.factors:
            reference = FAMILY[self.rule][leaf.roles[name]].compared_with(is_softmax(leaf))
            if reference == "own":
                continue
            factor = leaf.live[name].detach()
            node = nodes.view(-1, *(1,) * factor.dim())
            if reference == "mean":
                value = torch.lerp(running_mean(factor, masks[leaf]), factor, node)
            elif isinstance(leaf.at_rest, Tensor):
                value = torch.lerp(leaf.at_rest.to(factor), factor, node)
            else:
                value = factor * node
                if leaf.at_rest:  # a number
                    value += leaf.at_rest * (1 - node)
            moved.setdefault(leaf, {})[name] = value
        return moved


class _Averaged(torch.autograd.Function):
    """Computes an operator's output; backward averages the derivatives at several nodes."""

    @staticmethod
    def forward(ctx: Any, sharing: _SharingOperator, x: Tensor, *sources: Tensor) -> Tensor:
        ctx.sharing = sharing
        out = sharing.operator.affine(x)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sharing: _SharingOperator = ctx.sharing
        x, out = ctx.saved_tensors
        with full_precision(x.device):  # whatever the caller's autocast, as in the forward pass
            at_values, at_factors = sharing.gradients_on_paths(x, gradient)
        if sharing.labels.label is not None:  # references are accounted for all paths at once
            return None, at_values, *at_factors
        # references contribute the part of the output that gradient times input does not explain
        batch = len(out)
        rest = sum_per_example(gradient * out, batch) - sum_per_example(at_values * x, batch)
        for (leaf, name), at_factor in zip(sharing.factors, at_factors, strict=True):
            rest = rest - sum_per_example(at_factor * leaf.live[name].detach(), batch)
        sharing.ledger.write_rest(rest)
        return None, at_values, *at_factors


def sum_per_example(x: Tensor, batch: int) -> Tensor:
    """Return one sum per example (B,), for ``x`` (B, ...) or (B L, ...).

    If the first size is no multiple of B, as for an expert's tokens, the examples are unknown. Then
    each gets an equal share; if it is wrong, the final check finds relevance unequal to the output.
    """
    if x.dim() and len(x) % batch == 0:
        return x.reshape(batch, -1).sum(1)
    return (x.sum() / batch).expand(batch)


def running_mean(x: Tensor, mask: Tensor | None, before: Before | None = None) -> Tensor:
    """Return for each token the mean over all tokens up to this token, (B, L, ...).

    Args:
        x: the tensor (B, L, ...).
        mask: True for the tokens that count (B, L), or None for all.
        before: the sum (B, ...) over further tokens before these, and their number; only without a
            mask. Default: None, there are none.
    """
    trailing, values = (1,) * (x.dim() - 2), x.to(torch.promote_types(x.dtype, torch.float32))
    if mask is None:
        sum_before, tokens_before = (0, 0) if before is None else before
        last = tokens_before + x.shape[1] + 1
        count = torch.arange(tokens_before + 1, last, dtype=values.dtype, device=x.device)
        earlier = sum_before[:, None].to(values) if isinstance(sum_before, Tensor) else sum_before
        return ((values.cumsum(1) + earlier) / count.view(1, -1, *trailing)).to(x)
    counted = mask.to(values).view(*x.shape[:2], *trailing)
    return ((values * counted).cumsum(1) / counted.cumsum(1).clamp_min(1)).to(x)
