"""Compute how norms change when a message is cut.

A mixer's output is added to the residual stream, which later layers and the head read through
norms. For a residual stream x, a norm returns

    N(x) = s(x) A x + constant ,   s(x) = (mean of c(x)^2 + eps) ** -0.5 ,

A is linear; c(x) is x or, in LayerNorm, x minus its mean. Without a message m the norm's
denominator changes, which a gradient ignores. With g, the output's gradient at N(x),

    effect of m = sum over norms of <g, N(x) - N(x - m)>

needs three scalars per message and norm: <x, m>, <m, m> and <A'g, m>. The effect is exact if only
one norm and linear maps are between a message and the output. Otherwise only the norms that read
the message directly are exact, and all later modules are approximated to first order.

Shapes: B batch, L tokens, E width of the stream; q targets and s sources of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attr.vectors.contributions import Contributions, tiles
from ..mixers.base import first_tensor
from ..operators.kernels.arithmetic import sum_tensors
from ..tracing import Layer, Mixer
from ..tracing.find import registered_mixers
from ..tracing.hooks import hooked
from ..tracing.verification import relative_error, tolerance_for

#: Names of the constant that norms add to a mean square.
_EPS = ("eps", "variance_epsilon", "epsilon")


class NormReader(NamedTuple):
    """A norm's statistics for an input x in a run, to compute effects of messages in x.

    Attributes:
        stream: the norm's input, centered in LayerNorm: c(x), (B, L, E).
        scale: the factor of the normalization: s(x), (B, L, 1).
        toward: the target's gradient at the norm's output, times the norm's weight: A'g, (B, L, E).
        explained: the gradient times the norm's output: <g, N(x) - constant>, (B, L).
        eps: the constant added to the mean square.
        centered: whether the mean is subtracted.
    """

    stream: Tensor
    scale: Tensor
    toward: Tensor
    explained: Tensor
    eps: float
    centered: bool

    def map(self, change: Callable[[Tensor], Tensor]) -> NormReader:
        """Apply a function to all tensors, for example to move them to a different device."""
        tensors = (change(x) for x in (self.stream, self.scale, self.toward, self.explained))
        stream, scale, toward, explained = tensors
        return NormReader(stream, scale, toward, explained, self.eps, self.centered)

    def input_gradient(self) -> Tensor:
        """Return the gradient at x, s(x) A'g - s(x)^2 <g, N(x) - constant> c(x) / E, (B, L, E)."""
        along_stream = self.scale.square() * self.explained[..., None] / self.stream.shape[-1]
        return self.scale * self.toward - along_stream * self.stream

    def effects(self, messages: Tensor, square: Tensor, index: Tensor) -> Tensor:
        """Return the effects <g, N(x) - N(x - m)> of messages m on the output, (B, q, s).

        With f = s(x) <A'g, m> and r = s(x - m) / s(x), they are r f - (r - 1) <g, N(x) - constant>.

        Args:
            messages: the messages m, (B, q, s, E).
            square: the mean squares of c(m) for each message m, (B, q, s).
            index: the positions of the target tokens, (B, q).
        """
        example = torch.arange(len(index), device=index.device)[:, None]
        at_targets = self.map(lambda x: x[example, index])
        along = (messages @ at_targets.stream[..., None])[..., 0] / messages.shape[-1]
        # growth + 1 = s(x)^2 / s(x - m)^2, as c(x) has mean 0 if c(m) is centered
        growth = at_targets.scale.square() * (square - 2 * along)
        # no message takes away more than all of the mean square; rounding seems to
        least = at_targets.scale.square() * self.eps - 1 + torch.finfo(growth.dtype).eps
        # r - 1, with full precision near 0
        change = torch.expm1(-torch.log1p(growth.clamp_min(least)) / 2)
        first_order = at_targets.scale * (messages @ at_targets.toward[..., None])[..., 0]
        return first_order + change * (first_order - at_targets.explained[..., None])


class Readers:
    """Computes effects of one layer's messages through the norms that read the layer's output."""

    def __init__(self, layer: Layer, norms: Sequence[NormReader]) -> None:
        self._layer = layer
        self.norms = [norm.map(lambda x: x.to(layer.linear.values)) for norm in norms]

    def rows(self, index: Tensor) -> Tensor:
        """Return the effects (B, q, L) of all messages to the tokens at ``index`` (B, q)."""
        messages = Contributions(self._layer)  # not kept: it copies weights in half precision
        out = self.norms[0].stream.new_zeros(*index.shape, messages.shape.tokens)
        for tile in tiles([messages], index):
            out[:, tile.queries, tile.sources] = self.effects(tile.vectors, index[:, tile.queries])
        return out

    def effects(self, messages: Tensor, index: Tensor) -> Tensor:
        """Return the effects (B, q, s) of messages (B, q, s, E) to tokens ``index`` (B, q)."""
        mean_squares = messages.square().mean(-1)
        variances = mean_squares
        if any(norm.centered for norm in self.norms):
            variances = mean_squares - messages.mean(-1).square()
        total = torch.zeros_like(mean_squares)
        for norm in self.norms:
            total += norm.effects(messages, variances if norm.centered else mean_squares, index)
        return total


class NormCalls:
    """Records the norms outside of mixers in a run, and the gradients at their outputs."""

    def __init__(self, model: nn.Module, mixers: Sequence[Mixer], stack: ExitStack) -> None:
        self._returned = 0
        self._calls: list[_NormCall] = []
        # a norm inside a mixer is a part of the mixer's operator
        all_mixers = (*mixers, *registered_mixers(model))
        inside = {part for mixer in all_mixers for part in mixer.module.modules()}
        for mixer in mixers:
            stack.enter_context(hooked(mixer.module.register_forward_hook, self._count_mixer))
        for module in model.modules():
            if module not in inside and "norm" in type(module).__name__.lower():
                register = module.register_forward_hook
                stack.enter_context(hooked(register, self._record_norm, with_kwargs=True))

    def _count_mixer(self, mixer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._returned += 1

    def _record_norm(
        self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Record a call of a norm, and the gradient at its output."""
        # a fused norm is given the stream in two parts, and returns the sum as well
        parts = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        returned = first_tensor(output)
        if parts and returned.requires_grad and all(x.shape == returned.shape for x in parts):
            stream = sum_tensors(x.detach() for x in parts)
            call = _NormCall(norm, stream, returned.detach(), self._returned)
            returned.register_hook(call.gradients.append)  # type: ignore[no-untyped-call]
            self._calls.append(call)

    def of_layers(
        self, layers: Sequence[Layer], gradients: Sequence[Tensor]
    ) -> list[Sequence[NormReader]]:
        """Return the norms that read each layer's output; for unknown norms, an empty list.

        A layer's norms are known if the gradients through them sum to the gradient at the layer.

        Args:
            layers: the layers of the run.
            gradients: gradients at the layers' outputs, (B, L, E) each.
        """
        norms = [(call.after, call.statistics()) for call in self._calls]
        norms_by_layer: list[Sequence[NormReader]] = []
        for index, (layer, gradient) in enumerate(zip(layers, gradients, strict=True)):
            candidates = [norm for after, norm in norms if after > index and norm is not None]
            candidates = [norm for norm in candidates if norm.stream.shape == gradient.shape]
            if layer.map is not None:  # an image: its norms may read other layouts of tokens
                candidates = []
            readers = _last_norms_adding_up_to(gradient, candidates, layer.tolerance)
            norms_by_layer.append([norm.map(layer.in_order) for norm in readers])
        return norms_by_layer


def _last_norms_adding_up_to(
    gradient: Tensor, norms: Sequence[NormReader], tolerance: float
) -> Sequence[NormReader]:
    """Return the last norms whose gradients sum to ``gradient`` (B, L, E); empty if no sum fits.

    The first norms may belong to modules parallel to a mixer, which do not read its output.
    """
    gradients = [norm.input_gradient() for norm in norms]
    for first in range(len(norms)):
        through = sum_tensors(x.to(gradient.device) for x in gradients[first:])
        if relative_error(through, gradient.to(through)) <= tolerance:
            return norms[first:]
    return ()


class _NormCall:
    """A call of a norm; ``after`` is the number of mixers that returned before the call."""

    def __init__(self, module: nn.Module, x: Tensor, output: Tensor, after: int) -> None:
        self.module, self.x, self.output, self.after = module, x, output, after
        self.gradients: list[Tensor] = []

    def statistics(self) -> NormReader | None:
        """Return the norm's statistics; None without a gradient, or for an unsupported form.

        The form A c(x) s(x) + constant, with or without centering, is checked against the output.
        """
        eps = next((getattr(self.module, name) for name in _EPS if hasattr(self.module, name)), 0.0)
        eps = torch.finfo(self.x.dtype).eps if eps is None else eps  # as in nn.RMSNorm
        if len(self.gradients) != 1 or not isinstance(eps, float | int):
            return None
        # LayerNorm returns the same for a shifted input
        x, shifted = self.x, self.x + self.x.abs().mean()
        centered = self._matches_output(self._norm_of(shifted))

        def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
            """Return c(x) and s(x)."""
            centered_x = x.to(torch.promote_types(x.dtype, torch.float32))
            centered_x = centered_x - centered_x.mean(-1, keepdim=True) if centered else centered_x
            return centered_x, torch.rsqrt(centered_x.square().mean(-1, keepdim=True) + eps)

        # A x from two halves of x, whose scales are not s(x): else the check would always succeed
        constant, (stream, scale) = self._norm_of(x * 0), scaled(x)
        first_half = torch.arange(x.shape[-1], device=x.device) < x.shape[-1] // 2
        parts = (x * first_half, x * ~first_half)
        linear = sum_tensors((self._norm_of(part) - constant) / scaled(part)[1] for part in parts)
        if not self._matches_output(linear * scale + constant):
            return None
        gradient = self.gradients[0].to(scale)
        explained = ((self.output - constant) * gradient).sum(-1)
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            (input_gradient,) = torch.autograd.grad(
                first_tensor(self.module(leaf)), leaf, self.gradients[0]
            )
        along_stream = scale.square() * explained[..., None] / x.shape[-1]
        toward = (input_gradient + along_stream * stream) / scale  # solves input_gradient() for it
        return NormReader(stream, scale, toward, explained, float(eps), centered)

    @torch.no_grad()
    def _norm_of(self, x: Tensor) -> Tensor:
        output = first_tensor(self.module(x))
        return output.to(torch.promote_types(output.dtype, torch.float32))

    def _matches_output(self, candidate: Tensor) -> bool:
        return relative_error(candidate, self.output.to(candidate)) <= tolerance_for(self.output)
