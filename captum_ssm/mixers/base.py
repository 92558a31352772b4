"""The input and the output of an adapter: a recorded call, and a linear mixer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CachedStateError, NonFiniteError
from ..operators import Diagonal, Operator
from ..operators.coefficients import live_coefficients
from ..operators.kernels.truths import all_finite, are_noted, finite_together
from .parts.token_map import TokenMap


@dataclass(frozen=True, eq=False)
class Call:
    """One recorded call of a mixer module, which an adapter receives beside the module.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        output: the module's output.
        block: the module around the mixer, which may scale its output. Default: None, it is used
            alone.
        around: the modules around the mixer that were called, innermost first, each with the shape
            of the first floating tensor it received. Default: empty.

    Example:
        >>> import torch
        >>> from captum_ssm.mixers import Call
        >>> x = torch.zeros(1, 4, 8)
        >>> call = Call(args=(x,), kwargs={"attention_mask": None}, output=(x, "a state"))
        >>> call.hidden_states is x, call.output_tensor is x, call.argument("attention_mask")
        (True, True, None)
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    block: nn.Module | None = None
    around: Mapping[nn.Module, torch.Size] = field(default_factory=dict)

    def argument(self, name: str, position: int | None = None) -> Any:
        """Return the argument called ``name``, also when it was passed by position; None if absent.

        Args:
            name: name of the argument.
            position: its place if it is passed by position. Default: None, by keyword only.
        """
        if name in self.kwargs:
            return self.kwargs[name]
        if position is not None and position < len(self.args):
            return self.args[position]
        return None

    @property
    def hidden_states(self) -> Tensor:
        """The sequence entering the mixer, (B, L, E): ``hidden_states``, or the first tensor.

        A sequence (L, E), such as the patches of all images end to end, becomes a batch of one.
        """
        value = self.argument("hidden_states", 0)
        if not isinstance(value, Tensor):
            value = next(v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor))
        return in_batch(value)

    @property
    def output_tensor(self) -> Tensor:
        """The sequence leaving the mixer, (B, L, E): the first tensor of its output."""
        return in_batch(first_tensor(self.output))

    def refuse_cache(self, name: str, position: int | None = None) -> None:
        """Raise if the argument ``name`` carries a state from an earlier call.

        Args:
            name: name of the argument.
            position: its place if it is passed by position. Default: None, by keyword only.

        Raises:
            CachedStateError: when it does; the tokens read in that call cannot be explained.
        """
        cache = self.argument(name, position)
        if cache is not None:
            raise refused_cache(name, cache)


@dataclass(frozen=True, eq=False)
class LinearMixer:
    """A mixer at one input, as a frozen linear map over tokens; an adapter returns it.

    ``project(operator.affine(values))`` equals the module's output; where a map is given, the
    output in the map's order.

    Attributes:
        values: the stream after the input projection, (B, L, H, P), with its graph: relevance goes
            back along it to the input (:class:`~captum_ssm.LatimFlow`).
        operator: the frozen map over tokens. It detaches its coefficients itself. Give it with
            their graph the ones that follow from the input: queries, keys, steps, and the weight of
            a :class:`~captum_ssm.operators.Diagonal` named ``"gate"``.
            :class:`~captum_ssm.MambaLRP` and some rules of :class:`~captum_ssm.LatimFlow` send
            relevance along this graph; see :attr:`made_of`.
        project: the output projection, (B, L, H, P) to (B, L, E).
        mask: True for real tokens (B, L), from an argument of the call. Default: None, no token is
            padding, or the call has no such argument.
        branch_scale: constant with which the block multiplies the mixer's output before it joins
            the residual stream. Default: 1.0.
        map: where the tokens lie, for a module that is called on the tokens of a map or on windows
            of one. Default: None, they are one sequence.
        passed_on: other outputs of the module that later mixers read, by their place in the output,
            with their graph; like the values they are linear in the stream. Default: none.
        end_to_end: whether the module was called on several sequences end to end without a batch,
            such as all images of one. Here each is an example, and ``mask`` marks the shorter ones'
            padding. Default: False.

    Example:
        >>> import torch
        >>> from captum_ssm.mixers import LinearMixer
        >>> from captum_ssm.operators import ElementwiseRecurrence
        >>> scan = ElementwiseRecurrence(torch.full((1, 3, 2), 0.5))  # B, L, H = 1, 3, 2
        >>> mixer = LinearMixer(torch.ones(1, 3, 2, 1), scan, project=lambda y: y.sum(2))
        >>> mixer.output().flatten().tolist()
        [2.0, 3.0, 3.5]
    """

    values: Tensor
    operator: Operator
    project: Callable[[Tensor], Tensor]
    mask: Tensor | None = None
    branch_scale: float = 1.0
    map: TokenMap | None = None
    passed_on: Mapping[int, Tensor] = field(default_factory=dict)
    end_to_end: bool = False

    def __repr__(self) -> str:
        return f"LinearMixer({self.operator!r})"

    @property
    def bias(self) -> Tensor:
        """The constant term of the output before projection, (B, L, H, P)."""
        offset = self.operator.offset()
        return torch.zeros_like(self.values) if offset is None else offset

    def restrict(self, components: Collection[str]) -> LinearMixer:
        """Keep only the named components of its operator.

        Args:
            components: names of components; the identity is left if the operator has none of them.
        """
        kept = self.operator.restrict(components)
        if kept is None:
            kept = Diagonal(self.values.new_ones(1, 1, 1, 1), self.operator.shape)
        return replace(self, operator=kept)

    @property
    def made_of(self) -> dict[str, list[Tensor]]:
        """The mixer's live tensors by role.

        Its values are the ``"content"``; coefficients that came with their graph are a ``"key"``,
        ``"query"``, ``"gate"`` or ``"step"``.
        """
        found: dict[str, list[Tensor]] = {"content": [self.values]}
        for (holder, name), coefficient in live_coefficients(self.operator).items():
            found.setdefault(holder.roles[name], []).append(coefficient)
        return found

    def output(self) -> Tensor:
        """Recompute the module's output from the operator, (B, L, E)."""
        out = self.project(self.operator.affine(self.values))
        return joined_end_to_end(out, self.mask) if self.end_to_end else out

    def check_finite(self, layer: str) -> None:
        """Raise if a coefficient is NaN or infinite.

        Args:
            layer: name of the mixer, for the error.

        Raises:
            NonFiniteError: naming the layer and the component in which it began.
        """
        named = [(leaf.component or "mask", leaf.tensors()) for leaf in self.operator.leaves()]
        if are_noted(self.values):
            finite_together([self.values, *(x for _, found in named for x in found.values())])
            return
        # in the order of computation, so that the first one found is the origin
        for component, tensors in [("values", {"x": self.values}), *reversed(named)]:
            for name, tensor in tensors.items():
                if not all_finite(tensor):
                    raise NonFiniteError(
                        f"Layer {layer!r}: the {component} component holds NaN or infinity (in "
                        f"{name}). Check the input for NaN and the model's half-precision range; "
                        "a model in float32 or bfloat16 usually helps."
                    )


def refused_cache(name: str, cache: Any) -> CachedStateError:
    """Return the error for a call that continues from a cache, by its argument's name."""
    return CachedStateError(
        f"{name}={type(cache).__name__} was passed: the call continues from a cache, and tokens "
        "read earlier cannot be attributed. Pass the whole sequence in one call, without a cache."
    )


#: An adapter: a module and one recorded :class:`Call` of it in, a :class:`LinearMixer` out.
Linearize = Callable[[nn.Module, Call], LinearMixer]


def in_batch(sequence: Tensor) -> Tensor:
    """Make a sequence without a batch, (L, E), a batch of one; (B, L, E) stays as it is."""
    return sequence[None] if sequence.dim() == 2 else sequence


def joined_end_to_end(sequences: Tensor, mask: Tensor | None) -> Tensor:
    """Join sequences (B, L, E) end to end, without their padding, to a batch of one."""
    return (sequences.flatten(0, 1) if mask is None else sequences[mask])[None]


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor in a module's output (tensor, tuple, list or mapping)."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    for value in values:
        if isinstance(value, Tensor):
            return value
    raise TypeError(f"no tensor in an output of type {type(output).__name__}")
