"""Divide the relevance of a kernel and its gate by a rule, with the kernel's own derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..operators.base import Role
from ..operators.kernels.arithmetic import sum_tensors, unseen
from .carried import Before
from .shares import FAMILY, nodes_of, running_mean, sum_per_example

if TYPE_CHECKING:
    from .reading import Reading

_GATE = "gate"


@dataclass(frozen=True, eq=False)
class Core:
    """A kernel's result, with or without a gate, as a function of factors that share relevance.

    Attributes:
        reading: the mixer call, which runs under the rules.
        run: a function that calls the kernel with its factors as keyword arguments, and returns
            the result, or the result and a last state; if there is a gate, the result and tensors
            that are added to ``mapped``.
        roles: the role of each factor, and the factor's token dimension.
        factors: the factors by name.
        gate: the gate that multiplies a linear map of the result. Default: None.
        at_rest: the gate's value for an input of 0, or one value for each channel. Default: 0.
        result: the kernel's output, if there is a gate. Default: None.
        mapped: the kernel's output after a linear map, if there is a gate. Default: None.
        softmax: whether the kernel is softmax attention. Default: False.
        sums_before: by factor, the sum over the tokens before the factor's, and the number of these
            tokens. Default: none.
        at_nodes: by factor, its value at each point where derivatives are taken, in place of the
            values between reference and factor. Default: none.
        node_index: the index of the only point where derivatives are taken. Default: None, all.
        key: a key that identifies this object among all that divide relevance.
    """

    reading: Reading
    run: Callable[..., Tensor | tuple[Tensor, Tensor]]
    roles: Mapping[str, tuple[Role, int]]
    factors: Mapping[str, Tensor]
    gate: Tensor | None = None
    at_rest: float | Tensor = 0.0
    result: Tensor | None = None
    mapped: Tensor | None = None
    softmax: bool = False
    sums_before: Mapping[str, Before] = field(default_factory=dict)
    at_nodes: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    node_index: int | None = None
    key: object = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.reading.mode.labels.new_key())

    def times(self, result: Tensor, mapped: Tensor, gate: Tensor, at_rest: float | Tensor) -> Core:
        """Return the :class:`Core` of a gate times an affine map of the kernel's result."""
        return replace(self, gate=gate, at_rest=at_rest, result=result, mapped=mapped)

    def add_result(self, run: Callable[..., Tensor], name: str, factor: Tensor, role: Role) -> Core:
        """Return a :class:`Core` with two results: the kernel's result, and the result of ``run``.

        Args:
            run: a function of all factors (B, L, ...).
            name, factor, role: a further factor, which only ``run`` reads.
        """

        def both(**factors: Tensor) -> tuple[Tensor, Tensor]:
            second = run(**factors)
            del factors[name]  # the kernel does not take it
            return self.outputs(**factors)[0], second

        roles, factors = {**self.roles, name: (role, 1)}, {**self.factors, name: factor}
        return replace(self, run=both, roles=roles, factors=factors)

    @property
    def live(self) -> dict[str, Tensor]:
        """The factors that depend on the input and get a share of the relevance, by name."""
        family = FAMILY[self.reading.mode.rule]
        factors = dict(self.factors) if self.gate is None else {**self.factors, _GATE: self.gate}
        for name, values in self.at_nodes.items():
            # in place of a state, one factor for each node, such as "initial_state@0"
            del factors[name]
            factors |= {f"{name}@{i}": values[i] for i, _ in self._indexed_nodes()}
        in_family = {name: x for name, x in factors.items() if self.role_of(name) in family}
        return {name: x for name, x in in_family.items() if x.requires_grad}

    def role_of(self, name: str) -> Role:
        """Return a factor's role, such as ``"key"``."""
        return "gate" if name == _GATE else self.roles[name.split("@")[0]][0]

    def _indexed_nodes(self) -> list[tuple[int, float]]:
        """Return the points where derivatives are taken, with their indices."""
        nodes = list(enumerate(nodes_of(self.reading.mode.rule, self.softmax)))
        return nodes if self.node_index is None else [nodes[self.node_index]]

    def value_at_node(self) -> Tensor:
        """Return the kernel's result at the only point where derivatives are taken."""
        ((i, node),) = self._indexed_nodes()
        values = {name: x.detach() for name, x in self.factors.items()}
        for name in self.live.keys() & values.keys():  # without gate and states
            values[name] = self._value_between(name, values[name], node)
        with torch.no_grad(), unseen():
            states = {name: x[i].detach() for name, x in self.at_nodes.items()}
            (result,) = self.outputs(**values | states)
            return result

    def outputs(self, **factors: Tensor) -> tuple[Tensor, ...]:
        """Call the kernel, and return its results."""
        results = self.run(**factors)
        return results if isinstance(results, tuple) else (results,)

    def averaged_gradients(self, upstream: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Return gradients at the factors in ``live``: averages over nodes, times the shares.

        Args:
            upstream: the gradient at each of the results, or None for 0.
        """
        rule, live = self.reading.mode.rule, self.live
        family, nodes, total = FAMILY[rule], self._indexed_nodes(), dict[str, Tensor]()
        for index, node in nodes:
            for name, gradient in self._gradients_at_node(index, node, upstream, live).items():
                share = gradient * (family[self.role_of(name)].share / len(nodes))
                total[name] = total[name] + share if name in total else share
        return total

    def _gradients_at_node(
        self, index: int, node: float, upstream: Sequence[Tensor | None], live: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return gradients at ``live`` factors, taken at a node between references and factors.

        With a gate the results are (map(result) + added) gate; without one, the kernel's results.
        """
        values = {name: x.detach() for name, x in self.factors.items()}
        names = [name for name in live if name in values]
        for name in names:
            values[name] = self._value_between(name, values[name], node).detach().requires_grad_()
        for name, states in self.at_nodes.items():
            # the state: for the kernel by its name, for its gradient by the node's name
            values[name] = values[f"{name}@{index}"] = states[index].detach().requires_grad_()
            names.append(f"{name}@{index}")
        with torch.enable_grad(), unseen():
            results = self.outputs(**{name: x for name, x in values.items() if "@" not in name})
            if self.gate is None:
                return self._gradients_at_factors(results, values, names, upstream)
            (result, *added), (at_product,) = results, upstream
            assert at_product is not None and self.result is not None and self.mapped is not None
            gate = self.gate.detach()
            if FAMILY[self.reading.mode.rule]["gate"].reference == "rest":
                gate = self.at_rest + (gate - self.at_rest) * node
            at_result, apply_map, is_affine = self._linear_map(at_product * gate)
            at_results = [at_result, *(at_product * gate for _ in added)]
            gradients = self._gradients_at_factors(results, values, names, at_results)
            if _GATE in live:
                if is_affine:  # map(result) at the node: the map's constant is scaled as content is
                    mapped = apply_map(result.detach() - node * self.result.detach())
                    mapped = mapped + node * self.mapped.detach()
                else:
                    mapped = apply_map(result.detach())
                added = [x.detach().reshape(at_product.shape) for x in added]
                gradients[_GATE] = at_product * sum(added, mapped)
        return gradients

    def _gradients_at_factors(
        self,
        results: Sequence[Tensor],
        values: Mapping[str, Tensor],
        names: list[str],
        upstreams: Sequence[Tensor | None],
    ) -> dict[str, Tensor]:
        """Return the gradients of results at named values, 0 for a value that no result reads."""
        if not names:
            return {}
        pairs = [(x, g) for x, g in zip(results, upstreams, strict=True) if g is not None]
        seeds = [g.to(x.dtype).reshape(x.shape) for x, g in pairs]
        ends = [values[name] for name in names]
        gradients = torch.autograd.grad([x for x, _ in pairs], ends, seeds, allow_unused=True)
        return {
            name: torch.zeros_like(values[name]) if gradient is None else gradient
            for name, gradient in zip(names, gradients, strict=True)
        }

    def _linear_map(self, upstream: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor], bool]:
        """Return the gradient at the kernel's result, for ``upstream`` at the mapped result.

        Also return the linear map as a function, and True if the map adds a constant.
        """
        result, mapped = self.result, self.mapped
        assert result is not None and mapped is not None
        if mapped is result:  # the identity
            return upstream, lambda x: x, False
        constants: list[Tensor] = []
        upstream = upstream.to(mapped.dtype).requires_grad_()
        # note the map's constants here; their contribution is written by another pass
        with self.reading.mode.ledger.entries_to(lambda _, value, name: constants.append(value)):
            (at_result,) = torch.autograd.grad(mapped, result, upstream, create_graph=True)

        def apply_map(x: Tensor) -> Tensor:
            # the gradient is linear in ``upstream``, and its derivative there is the map
            return torch.autograd.grad(at_result, upstream, x.reshape(at_result.shape))[0]

        return at_result.detach(), apply_map, bool(constants)

    def _value_between(self, name: str, factor: Tensor, node: float) -> Tensor:
        """Return the point ``node`` from a factor's reference (0) to the factor (1)."""
        role, dim = self.roles[name]
        reference = FAMILY[self.reading.mode.rule][role].compared_with(self.softmax)
        if reference == "own":
            return factor
        if reference == "rest":
            return factor * node
        mask = self.reading.mask
        if mask is not None:  # with a cache it covers earlier keys; other factors lack them
            mask = mask[:, -factor.shape[dim] :]
        mean = running_mean(factor.movedim(dim, 1), mask, self.sums_before.get(name))
        return torch.lerp(mean.movedim(1, dim), factor, node)

    def gradients_on_paths(self, upstream: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Return gradients at factors in ``live`` along paths with this pass's label (None: all).

        The pass with label "content" stores where other labels' paths begin; see :class:`.Labels`.
        """
        labels = self.reading.mode.labels
        gradients, path_starts = self.averaged_gradients(upstream), labels.path_starts
        if labels.label == "content":
            for name in gradients:
                if self.role_of(name) != "content":
                    path_starts.setdefault(self.role_of(name), {})[self.key, name] = gradients[name]
                    gradients[name] = torch.zeros_like(gradients[name])
        elif labels.label is not None:
            for name in gradients:
                from_content = path_starts[labels.label].pop((self.key, name), None)
                if from_content is not None:
                    gradients[name] = gradients[name] + from_content
        return gradients


def divide(core: Core, value: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the results of a core as tensors whose gradients are divided among the core's factors.

    Args:
        core: the core.
        value: the only result. Default: None, the kernel is called.
    """
    with unseen():
        # drop the value's own graph: relevance goes to the core's factors instead
        value = None if value is None else value.detach()
        results: tuple[Tensor, ...] = _Divided.apply(core, value, *core.live.values())  # type: ignore[no-untyped-call]
    return results


class _Divided(torch.autograd.Function):
    """Computes a kernel's (gated) results; backward divides gradients among the factors."""

    @staticmethod
    def forward(ctx: Any, core: Core, value: Tensor | None, *live: Tensor) -> tuple[Tensor, ...]:
        if value is None:
            results = core.outputs(**{name: x.detach() for name, x in core.factors.items()})
        else:
            results = (value,)
        detached = [x.detach() for x in results]
        ctx.core = core
        ctx.save_for_backward(*detached)
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in detached)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        core: Core = ctx.core
        results = ctx.saved_tensors
        if all(gradient is None for gradient in upstream):  # averaged_gradients() needs one
            upstream = (torch.zeros_like(results[0]), *upstream[1:])
        gradients, live = core.gradients_on_paths(upstream), core.live
        if core.reading.mode.labels.label is None:  # references are accounted for all paths at once
            batch = len(results[0])
            pairs = [(g, x) for g, x in zip(upstream, results, strict=True) if g is not None]
            rest = sum_tensors(sum_per_example(g * x, batch) for g, x in pairs)
            for name, x in live.items():
                rest = rest - sum_per_example(gradients[name] * x.detach(), batch)
            core.reading.mode.ledger.write_rest(rest)
        return None, None, *(gradients[name].to(x.dtype) for name, x in live.items())
