"""Store output projections as affine maps, with the weights that were used during the run.

An adapter's projection is a function that reads the module's weights, and ``forward_func`` may
set these up for one call only. The stored map stays valid after the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import InputError
from ..mixers import linear as product
from ..mixers.base import LinearMixer
from ..operators import Chain, Diagonal
from ..operators.kernels import wide_products
from .find import Mixer

#: Scale of the unit vectors that measure a weight. It is large, so that the rounding of added
#: constants is small in comparison.
_PROBE = 2.0**10


@dataclass(frozen=True, eq=False)
class Projection:
    """The affine map y W + rest, from (B, L, H, P) to (B, L, E).

    Attributes:
        stored: W (C, E) in the precision of the module's weight.
        dtype: the precision of the computation.
        rest: the projection of zeros, broadcastable to (B, L, E); None for 0.
        check: a function that raises for an argument of a wrong shape. Default: None, no check.
    """

    stored: Tensor
    dtype: torch.dtype
    rest: Tensor | None
    check: Callable[[Tensor], None] | None = None

    @property
    def weight(self) -> Tensor:
        """W (C, E) in the precision of the computation. Do not store it: it may be a copy."""
        return self.stored.to(self.dtype)

    def product(self, y: Tensor) -> Tensor:
        """Return y W without the bias (..., E)."""
        return product(y, self.stored.T)

    def __call__(self, y: Tensor) -> Tensor:
        """Project the operator's output ``y`` (B, L, H, P)."""
        if self.check is not None:
            self.check(y)
        out = self.product(y.flatten(-2))
        return out if self.rest is None else out + self.rest


def projection_of(linear: LinearMixer) -> Projection:
    """Return a mixer's ``project`` as an affine map with the module's present weights.

    If the projection is one call of torch's ``linear``, the map uses the weight of this call. Any
    other projection is measured with unit vectors. It may be any module, with or without PEFT
    adapters, and may add constants that differ between tokens.
    """
    if isinstance(linear.project, Projection):
        return linear.project
    values = linear.values
    weight_and_bias = _weight_and_bias(linear)
    if weight_and_bias is not None:
        weight, bias = weight_and_bias
        bias = None if bias is None else bias.to(values)
        return Projection(weight.T.to(values.device), values.dtype, bias)
    at_zero = linear.project(torch.zeros_like(values, memory_format=torch.contiguous_format))
    channels, tokens = values[0, 0].numel(), values[..., 0, 0].numel()  # H P, and B L
    blocks = []
    for start in range(0, channels, tokens):
        count = min(tokens, channels - start)
        probe = values.new_zeros(tokens, channels)
        probe[range(count), range(start, start + count)] = _PROBE  # one unit vector per token
        block = linear.project(probe.view(values.shape)) - at_zero
        blocks.append(block.flatten(0, 1)[:count] / _PROBE)
    return Projection(torch.cat(blocks), values.dtype, at_zero)


def refused_by_example(mixer: Mixer, linear: LinearMixer) -> Callable[[Tensor], Tensor] | None:
    """Return a projection that raises if PEFT gives examples different projections; else None.

    The error is raised on use, since an error during the run would leave PEFT's hooks on the model.
    """
    # PEFT's hooks are partials with this argument
    hooks = (x for module in mixer.module.modules() for x in module._forward_pre_hooks.values())
    adapter_names = (getattr(hook, "keywords", {}).get("adapter_names") for hook in hooks)
    names = next(filter(None, adapter_names), None)
    if names is None or _weight_and_bias(linear) is not None:
        return None

    def refuse(y: Tensor) -> Tensor:
        raise InputError(
            f"Layer {mixer.name!r}: PEFT's adapter_names={names} gives examples different output "
            "projections, but this method needs one for all. Call model.set_adapter(), leave "
            "adapter_names out, and explain the examples of each adapter separately. "
            "LatimFlow and MambaLRP explain the batch as it is."
        )

    return refuse


def _weight_and_bias(linear: LinearMixer) -> tuple[Tensor, Tensor | None] | None:
    """Return weight (E, C) and bias of a projection that is one ``linear`` call; else None."""
    empty = torch.empty_like(linear.values, memory_format=torch.contiguous_format)
    calls = _LinearCalls(argument=empty)
    # enabled: the mode also sees calls where torch's functions are hidden from modes
    with torch._C._EnableTorchFunction(), calls:
        output = linear.project(empty)
    return calls.weight_of_only_call(output)


def scaled_output(linear: LinearMixer, factor: Tensor) -> LinearMixer:
    """Multiply a mixer's output by one factor per token (B, L, 1), or per feature (B, L, E)."""
    projection = projection_of(linear)
    if factor.shape[-1] == 1:  # scale the operator, for the projection treats tokens alike
        token_factors = Diagonal(factor[..., None].to(linear.values), linear.operator.shape)
        rest = None if projection.rest is None else projection.rest * factor.to(projection.rest)
        scaled = replace(projection, rest=rest)
        return replace(linear, operator=Chain(token_factors, linear.operator), project=scaled)
    features = factor[0, 0].to(linear.values)
    if not bool((factor == features).all()):
        raise InputError(
            "A forward hook drops different features of a mixer's output at different tokens. Use "
            "LatimFlow, which explains the hook as well, or remove the hook."
        )
    stored = projection.weight * features
    rest = None if projection.rest is None else projection.rest * features
    return replace(linear, project=replace(projection, stored=stored, rest=rest))


class _LinearCalls(TorchFunctionMode):
    """Records the calls of torch's ``linear``: input, weight, bias and result.

    A call on ``argument``, the projection's input, computes nothing: the weight suffices.
    """

    def __init__(self, argument: Tensor) -> None:
        super().__init__()
        self._argument = argument
        self._calls: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] = []

    def weight_of_only_call(self, output: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Return weight (E, C) and bias if a single call computed the output; else None."""
        if len(self._calls) != 1:
            return None
        x, weight, bias, result = self._calls[0]
        unchanged = result is output and result._version == 0
        if not (unchanged and self._is_argument(x)):
            return None
        return weight.detach(), None if bias is None else bias.detach()

    def _is_argument(self, x: Tensor) -> bool:
        """Return True if ``x`` is the projection's own argument, (B, L, C)."""
        same = x.data_ptr() == self._argument.data_ptr() and x.is_contiguous()
        return same and x.shape == self._argument.flatten(2).shape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # a quantized weight, say, may have no other operation than its product
        is_plain = len(args) > 1 and type(args[1]) in (Tensor, nn.Parameter)
        if func not in (F.linear, wide_products.linear) or kwargs or not is_plain:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]  # the bias may be missing
        out = x.new_empty(*x.shape[:-1], len(weight)) if self._is_argument(x) else func(*args)
        self._calls.append((x, weight, bias, out))
        return out
