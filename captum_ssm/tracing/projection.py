"""Output projections as they were while the model ran.

A projection is a closure over the module, whose weights and adapters ``forward_func`` may have
set up for the time of the call.  What is left of it afterwards is the affine map that it was.
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
from ..mixers.base import LinearMixer
from ..operators import Chain, Diagonal

#: Size of the unit vectors that find a weight, which keeps constants from rounding it.
_PROBE = 2.0**10


@dataclass(frozen=True, eq=False)
class Projection:
    """y W + rest, from (B, L, H, P) to (B, L, E).

    Attributes:
        weight: W (C, E).
        rest: what the projection makes of zeros, broadcastable to (B, L, E).
        check: raises for what the operator cannot have returned. Default: None, anything goes.
    """

    weight: Tensor
    rest: Tensor
    check: Callable[[Tensor], None] | None = None

    def __call__(self, y: Tensor) -> Tensor:
        """What the mixer returns.

        Args:
            y: what leaves its operator, (B, L, H, P).
        """
        if self.check is not None:
            self.check(y)
        return y.flatten(-2) @ self.weight + self.rest


def projection_of(linear: LinearMixer) -> Projection:
    """The affine map that a mixer's ``project`` is at this moment.

    Most projections are one call of torch's ``linear``, whose weight is read off.  Any other is
    found by projecting unit vectors: it may be any module, adapters included, and may add
    constants that differ between tokens.

    Args:
        linear: the mixer.
    """
    if isinstance(linear.project, Projection):
        return linear.project
    values = linear.values
    zeros = torch.zeros_like(values, memory_format=torch.contiguous_format)
    heard = _Overheard(zeros)
    # also where the functions that are called go unseen otherwise
    with torch._C._EnableTorchFunction(), heard:
        at_rest = linear.project(zeros)
    found = heard.weight_before(at_rest)
    if found is not None:
        weight, bias = found
        rest = values.new_zeros(1) if bias is None else bias.to(values)
        return Projection(weight.T.to(values), rest)
    channels, places = values[0, 0].numel(), values[..., 0, 0].numel()
    parts = []
    for start in range(0, channels, places):
        count = min(places, channels - start)
        probe = values.new_zeros(places, channels)
        probe[range(count), range(start, start + count)] = _PROBE
        found_here = linear.project(probe.view(values.shape)) - at_rest
        parts.append(found_here.flatten(0, 1)[:count] / _PROBE)
    return Projection(torch.cat(parts), at_rest)


def scaled_output(linear: LinearMixer, factor: Tensor) -> LinearMixer:
    """A mixer whose output is multiplied with a factor behind its projection.

    Args:
        linear: the mixer.
        factor: for each token (B, L, 1), or for each feature, alike for all tokens (B, L, E).
    """
    projection = projection_of(linear)
    if factor.shape[-1] == 1:
        tokens = Diagonal(factor[..., None].to(linear.values), linear.operator.shape)
        rest = projection.rest * factor.to(projection.rest)
        scaled = replace(projection, rest=rest)
        return replace(linear, operator=Chain(tokens, linear.operator), project=scaled)
    features = factor[0, 0].to(projection.weight)
    if not bool((factor == features).all()):
        raise InputError(
            "A forward hook drops other features of a mixer's output at each token. Use LatimFlow, "
            "which explains the hook as well, or leave the hook out."
        )
    weight, rest = projection.weight * features, projection.rest * features
    return replace(linear, project=replace(projection, weight=weight, rest=rest))


class _Overheard(TorchFunctionMode):
    """Keeps the calls of torch's ``linear``: input, weight, bias and result.

    Args:
        zeros: of these no product is computed.
    """

    def __init__(self, zeros: Tensor) -> None:
        super().__init__()
        self._zeros = zeros
        self._calls: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] = []

    def weight_before(self, output: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Weight (E, C) and bias, if one call is all between zeros and output, else None."""
        if len(self._calls) != 1:
            return None
        x, weight, bias, result = self._calls[0]
        unchanged = result is output and result._version == 0
        if not (unchanged and self._are_zeros(x)):
            return None
        return weight.detach(), None if bias is None else bias.detach()

    def _are_zeros(self, x: Tensor) -> bool:
        """Whether ``x`` is the zeros themselves, (B, L, C)."""
        same = x.data_ptr() == self._zeros.data_ptr() and x.is_contiguous()
        return same and x.shape == self._zeros.flatten(2).shape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # a quantised weight, say, may know no more than how to be multiplied with
        plain = len(args) > 1 and type(args[1]) in (Tensor, nn.Parameter)
        if func is not F.linear or kwargs or not plain:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        if self._are_zeros(x):
            out = x.new_zeros(*x.shape[:-1], len(weight))
            out = out if bias is None else out + bias
        else:
            out = func(*args)
        self._calls.append((x, weight, bias, out))
        return out
