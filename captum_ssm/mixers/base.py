"""The input and the output of an adapter: a recorded call, and a linear mixer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CachedStateError, NonFiniteError
from ..operators import Diagonal, Operator
from ..operators.kernels.truths import all_finite, are_noted, finite_together
from .parts.token_map import TokenMap


@dataclass(frozen=True, eq=False)
class Call:
    """One recorded call of a mixer module; an adapter receives the module and this call.

    Attributes:
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        output: the module's output.
        block: the module that contains the mixer and may scale the mixer's output. Default: None,
            the mixer was called without a block.
        around: the modules that contain the mixer and were called, innermost first, with the shape
            of each module's first floating-point input. Default: empty.

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
        """Return the argument ``name``, passed by keyword or by position; None if it is absent.

        Args:
            name: name of the argument.
            position: index of the argument if it is passed by position. Default: None, by keyword.
        """
        if name in self.kwargs:
            return self.kwargs[name]
        if position is not None and position < len(self.args):
            return self.args[position]
        return None

    @property
    def hidden_states(self) -> Tensor:
        """The mixer's input (B, L, E): the argument ``hidden_states``, or the first tensor.

        A sequence (L, E), such as the concatenated patches of all images, becomes a batch of one.
        """
        value = self.argument("hidden_states", 0)
        if not isinstance(value, Tensor):
            value = next(v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor))
        return in_batch(value)

    @property
    def output_tensor(self) -> Tensor:
        """The mixer's output (B, L, E): the first tensor that the module returned."""
        return in_batch(first_tensor(self.output))

    def refuse_cache(self, name: str, position: int | None = None) -> None:
        """Raise CachedStateError if the argument ``name`` is a cache, that is, not None.

        Args:
            name: name of the argument.
            position: index of the argument if it is passed by position. Default: None, by keyword.

        Raises:
            CachedStateError: if there is a cache, because tokens of earlier calls are not recorded.
        """
        cache = self.argument(name, position)
        if cache is not None:
            raise refused_cache(name, cache)


@dataclass(frozen=True, eq=False)
class LinearMixer:
    """A mixer at one input as a frozen linear map over tokens: the result of an adapter.

    ``project(operator.affine(values))`` equals the module's output; if there is a ``map``, tokens
    are in the map's order.

    Attributes:
        values: output of the input projection (B, L, H, P), with its autograd graph, along which
            :class:`~captum_ssm.LatimFlow` propagates relevance to the input.
        operator: the frozen map over tokens. The operator detaches its coefficients, so pass
            coefficients that depend on the input with their graph: queries, keys, steps, and the
            weight of a :class:`~captum_ssm.operators.Diagonal` named ``"gate"``.
            :class:`~captum_ssm.MambaLRP` and some rules of :class:`~captum_ssm.LatimFlow` propagate
            relevance along this graph.
        project: function of the output projection, from (B, L, H, P) to (B, L, E).
        mask: True for real tokens (B, L), from an argument of the call. Default: None, no token is
            padding, or the call has no mask.
        branch_scale: constant that the block multiplies with the mixer's output before adding it to
            the residual stream. Default: 1.0.
        map: layout of the tokens, for a module that is called on a two-dimensional map or on its
            windows. Default: None, the tokens are one sequence.
        passed_on: further outputs of the module that later mixers use, by index in the output, with
            their graph; like the values they are linear in the residual stream. Default: none.
        end_to_end: whether the module was called on several concatenated sequences without a batch
            dimension, such as several images. Here each sequence is an example, and ``mask`` marks
            the padding of shorter sequences. Default: False.

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
        """The constant term of the output before the output projection, (B, L, H, P)."""
        offset = self.operator.offset()
        return torch.zeros_like(self.values) if offset is None else offset

    def restrict(self, components: Collection[str]) -> LinearMixer:
        """Return the mixer with only the named components of its operator.

        Args:
            components: names of components to keep, such as ``{"scan"}``. Without any of these
                components, the operator becomes the identity.
        """
        operator = self.operator.restrict(components)
        if operator is None:
            operator = Diagonal(self.values.new_ones(1, 1, 1, 1), self.operator.shape)
        return replace(self, operator=operator)

    def output(self) -> Tensor:
        """Compute the module's output (B, L, E) from the operator."""
        out = self.project(self.operator.affine(self.values))
        return joined_end_to_end(out, self.mask) if self.end_to_end else out

    def check_finite(self, layer: str) -> None:
        """Raise NonFiniteError if a value or a coefficient is NaN or infinite.

        Args:
            layer: name of the mixer, for the error message.

        Raises:
            NonFiniteError: with the names of the layer and of the first such component.
        """
        parts = [(leaf.component or "mask", leaf.tensors()) for leaf in self.operator.leaves()]
        if are_noted(self.values):  # on a GPU, read later; a repeated call then names the tensor
            finite_together([self.values, *(x for _, tensors in parts for x in tensors.values())])
            return
        # in the order of computation: leaves are outermost first, so the first one is the origin
        for component, tensors in [("values", {"x": self.values}), *reversed(parts)]:
            for name, tensor in tensors.items():
                if not all_finite(tensor):
                    raise NonFiniteError(
                        f"Layer {layer!r}: the {component} component contains NaN or infinity (in "
                        f"{name}). Check the input for NaN. If the model is in float16, load it in "
                        "float32 or bfloat16."
                    )


def refused_cache(name: str, cache: Any) -> CachedStateError:
    """Return the error to raise if the argument ``name`` of a call is a cache."""
    return CachedStateError(
        f"{name}={type(cache).__name__} was passed: the call continues from a cache, so earlier "
        "tokens cannot be attributed. Pass the whole sequence in one call, without a cache."
    )


#: An adapter: a function from a module and a recorded :class:`Call` to a :class:`LinearMixer`.
Linearize = Callable[[nn.Module, Call], LinearMixer]


def in_batch(sequence: Tensor) -> Tensor:
    """Return a sequence (L, E) as a batch of one (1, L, E); return (B, L, E) unchanged."""
    return sequence[None] if sequence.dim() == 2 else sequence


def joined_end_to_end(sequences: Tensor, mask: Tensor | None) -> Tensor:
    """Drop the padding of sequences (B, L, E), and concatenate them to a batch of one sequence."""
    return (sequences.flatten(0, 1) if mask is None else sequences[mask])[None]


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor in a module's output: a tensor, tuple, list or mapping."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    for value in values:
        if isinstance(value, Tensor):
            return value
    kind = type(output).__name__
    raise TypeError(
        f"An output of type {kind} contains no tensor. Change the module to return a tensor, or a "
        "tuple, list or mapping with a tensor."
    )
