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
from .shares import FAMILY, by_example, nodes_of, running_mean

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
        before: by factor, the sum over the tokens before the factor's, and the number of these
            tokens. Default: none.
        at_nodes: by factor, its value at each point where derivatives are taken, in place of the
            values between reference and factor. Default: none.
        node: the index of the only point where derivatives are taken. Default: None, all.
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
    before: Mapping[str, Before] = field(default_factory=dict)
    at_nodes: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    node: int | None = None
    key: object = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.reading.mode.labels.new_key())

    def gated(self, result: Tensor, mapped: Tensor, gate: Tensor, at_rest: float | Tensor) -> Core:
        """Return the :class:`Core` of a gate times an affine map of the kernel's result."""
        return replace(self, gate=gate, at_rest=at_rest, result=result, mapped=mapped)

    def beside(self, run: Callable[..., Tensor], name: str, factor: Tensor, role: Role) -> Core:
        """Return a :class:`Core` with two results: the kernel's result, and the result of ``run``.

        Args:
            run: a function of all factors (B, L, ...).
            name, factor, role: a further factor, which only ``run`` reads.
        """

        def both(**factors: Tensor) -> tuple[Tensor, Tensor]:
            added = run(**factors)
            del factors[name]
            return self.outputs(**factors)[0], added

        roles, factors = {**self.roles, name: (role, 1)}, {**self.factors, name: factor}
        return replace(self, run=both, roles=roles, factors=factors)

    @property
    def live(self) -> dict[str, Tensor]:
        """The factors that depend on the input and get a share of the relevance, by name."""
        family = FAMILY[self.reading.mode.rule]
        every = dict(self.factors) if self.gate is None else {**self.factors, _GATE: self.gate}
        for name, values in self.at_nodes.items():
            del every[name]
            every |= {f"{name}@{i}": values[i] for i, _ in self._nodes()}
        return {
            name: x for name, x in every.items() if x.requires_grad and self.role(name) in family
        }

    def role(self, name: str) -> Role:
        """Return a factor's role, such as ``"key"``."""
        return "gate" if name == _GATE else self.roles[name.split("@")[0]][0]

    def _nodes(self) -> list[tuple[int, float]]:
        """Return the points where derivatives are taken, with their indices."""
        nodes = list(enumerate(nodes_of(self.reading.mode.rule, self.softmax)))
        return nodes if self.node is None else [nodes[self.node]]

    def value_at_node(self) -> Tensor:
        """Return the kernel's result at the only point where derivatives are taken."""
        ((i, node),) = self._nodes()
        at = {name: x.detach() for name, x in self.factors.items()}
        for name in self.live.keys() & at.keys():
            at[name] = self._between(name, at[name], node)
        with torch.no_grad(), unseen():
            (out,) = self.outputs(**at | {name: x[i].detach() for name, x in self.at_nodes.items()})
            return out

    def outputs(self, **factors: Tensor) -> tuple[Tensor, ...]:
        """Call the kernel, and return its results."""
        found = self.run(**factors)
        return found if isinstance(found, tuple) else (found,)

    def averaged(self, ups: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Return gradients at the factors in ``live``: averages over nodes, times the shares.

        Args:
            ups: the gradient at each of the results, or None for 0.
        """
        rule, live = self.reading.mode.rule, self.live
        family, nodes, found = FAMILY[rule], self._nodes(), dict[str, Tensor]()
        for i, node in nodes:
            for name, gradient in self._at(i, node, ups, live).items():
                part = gradient * (family[self.role(name)].share / len(nodes))
                found[name] = found[name] + part if name in found else part
        return found

    def _at(
        self, number: int, node: float, ups: Sequence[Tensor | None], live: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the gradients at the point ``node`` between references (0) and factors (1)."""
        at = {name: x.detach() for name, x in self.factors.items()}
        names = [name for name in live if name in at]
        for name in names:
            at[name] = self._between(name, at[name], node).detach().requires_grad_()
        for name, values in self.at_nodes.items():
            at[name] = at[f"{name}@{number}"] = values[number].detach().requires_grad_()
            names.append(f"{name}@{number}")
        with torch.enable_grad(), unseen():
            outs = self.outputs(**{name: x for name, x in at.items() if "@" not in name})
            if self.gate is None:
                return self._back(outs, at, names, ups)
            (out, *added), (up,) = outs, ups
            assert up is not None and self.result is not None and self.mapped is not None
            gate = self.gate.detach()
            if FAMILY[self.reading.mode.rule]["gate"].reference == "rest":
                gate = self.at_rest + (gate - self.at_rest) * node
            to_result, map_back, is_affine = self._map(up * gate)
            found = self._back(outs, at, names, [to_result, *(up * gate for _ in added)])
            if _GATE in live:
                if is_affine:  # the map's constant, such as a norm's bias, counts as content
                    mapped = map_back(out.detach() - node * self.result.detach())
                    mapped = mapped + node * self.mapped.detach()
                else:
                    mapped = map_back(out.detach())
                found[_GATE] = up * sum((x.detach().reshape(up.shape) for x in added), mapped)
        return found

    def _back(
        self,
        outs: Sequence[Tensor],
        at: Mapping[str, Tensor],
        names: list[str],
        ups: Sequence[Tensor | None],
    ) -> dict[str, Tensor]:
        if not names:
            return {}
        pairs = [
            (out, up.to(out.dtype).reshape(out.shape))
            for out, up in zip(outs, ups, strict=True)
            if up is not None
        ]
        outs, ups = zip(*pairs, strict=True)
        found = torch.autograd.grad(outs, [at[name] for name in names], ups, allow_unused=True)
        return {
            name: torch.zeros_like(at[name]) if gradient is None else gradient
            for name, gradient in zip(names, found, strict=True)
        }

    def _map(self, up: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor], bool]:
        """Return the gradient at the kernel's result, and the linear map after it as a function.

        The third result is True if the map adds a constant.
        """
        result, mapped = self.result, self.mapped
        assert result is not None and mapped is not None
        if mapped is result:
            return up, lambda out: out, False
        constants: list[Tensor] = []
        up = up.to(mapped.dtype).requires_grad_()
        # constants are met elsewhere
        with self.reading.mode.ledger.entries_to(lambda _, value, where: constants.append(value)):
            (back,) = torch.autograd.grad(mapped, result, up, create_graph=True)

        def forward(out: Tensor) -> Tensor:
            # the derivative of the gradient with respect to ``up``
            return torch.autograd.grad(back, up, out.reshape(back.shape))[0]

        return back.detach(), forward, bool(constants)

    def _between(self, name: str, factor: Tensor, node: float) -> Tensor:
        role, dim = self.roles[name]
        reference = FAMILY[self.reading.mode.rule][role].compared_with(self.softmax)
        if reference == "own":
            return factor
        if reference == "rest":
            return factor * node
        mask = self.reading.mask
        if mask is not None:  # with a cache, of keys; queries and steps are of the last tokens
            mask = mask[:, -factor.shape[dim] :]
        mean = running_mean(factor.movedim(dim, 1), mask, self.before.get(name)).movedim(1, dim)
        return torch.lerp(mean, factor, node)

    def followed(self, ups: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Return gradients at the factors in ``live``, only along paths that the pass follows."""
        labels = self.reading.mode.labels
        found, begun = self.averaged(ups), labels.begun
        if labels.label == "content":
            for name in found:
                if self.role(name) != "content":
                    begun.setdefault(self.role(name), {})[self.key, name] = found[name]
                    found[name] = torch.zeros_like(found[name])
        elif labels.label is not None:
            for name in found:
                before = begun[labels.label].pop((self.key, name), None)
                found[name] = found[name] if before is None else found[name] + before
        return found


def divided(core: Core, value: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the results of a core as tensors whose gradients are divided among the core's factors.

    Args:
        core: the core.
        value: the only result. Default: None, the kernel is called.
    """
    with unseen():
        # without the value's own graph, which no relevance passes
        value = None if value is None else value.detach()
        found: tuple[Tensor, ...] = _Divided.apply(core, value, *core.live.values())  # type: ignore[no-untyped-call]
    return found


class _Divided(torch.autograd.Function):
    """Computes a kernel's (gated) results; backward divides gradients among the factors."""

    @staticmethod
    def forward(ctx: Any, core: Core, value: Tensor | None, *live: Tensor) -> tuple[Tensor, ...]:
        if value is None:
            found = core.outputs(**{name: x.detach() for name, x in core.factors.items()})
        else:
            found = (value,)
        outs = [x.detach() for x in found]
        ctx.core = core
        ctx.save_for_backward(*outs)
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in outs)

    @staticmethod
    def backward(ctx: Any, *ups: Tensor | None) -> tuple[Tensor | None, ...]:
        core: Core = ctx.core
        outs = ctx.saved_tensors
        if all(up is None for up in ups):
            ups = (torch.zeros_like(outs[0]), *ups[1:])
        found, live = core.followed(ups), core.live
        if core.reading.mode.labels.label is None:  # the account is of all paths
            count = len(outs[0])
            rest = sum_tensors(
                by_example(up * x, count) for up, x in zip(ups, outs, strict=True) if up is not None
            )
            for name, x in live.items():
                rest = rest - by_example(found[name] * x.detach(), count)
            core.reading.mode.ledger.write_rest(rest)
        return None, None, *(found[name].to(x.dtype) for name, x in live.items())
