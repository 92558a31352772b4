"""Path: a tool to write adapters step by step, in the order of the module's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..operators import Chain, Diagonal, HeadCentering, Operator, Shape, ShortConv, Sum
from ..operators.reorder import flip
from .base import LinearMixer
from .parts.common import activation_ratio, as_heads, causal_conv, frozen, mask_operators, run
from .parts.softmax import softmax_attention


class Path:
    """A mixer's values, and the operators applied to them so far.

    Every method computes one step of the forward pass, freezes the step at its input, and appends
    it as an operator.  The code of an adapter then has the same order as the module's code.

    Attributes:
        values: the values before all steps (B, L, H, P).
        mask: True for real tokens (B, L); None if all are real.
        shape: sizes of the values, a :class:`~captum_ssm.operators.Shape`.
        parts: the operators so far, outermost (last applied) first.

    Args:
        values: values (B, L, C), or by head (B, L, H, P).
        mask: True for real tokens (B, L). Default: None, all are real.
        heads: number of heads that the C channels form. Default: None, one head per channel.

    Example:
        >>> import torch
        >>> from captum_ssm.mixers import Path
        >>> from captum_ssm.operators import ElementwiseRecurrence
        >>> path = Path(torch.ones(1, 3, 2)).act(torch.relu)
        >>> path = path.scan(ElementwiseRecurrence(torch.full((1, 3, 2), 0.5)))
        >>> path.now.flatten(2).tolist()
        [[[1.0, 1.0], [1.5, 1.5], [1.75, 1.75]]]
        >>> mixer = path.gate(torch.zeros(1, 3, 2), torch.sigmoid).to(torch.nn.Identity())
        >>> [part.component for part in mixer.operator.parts]
        ['gate', 'scan', 'activation']
    """

    def __init__(self, values: Tensor, mask: Tensor | None = None, heads: int | None = None):
        self.values = as_heads(values, heads) if values.dim() == 3 else values
        self.mask = mask
        self.shape = Shape(*self.values.shape)
        self.parts: list[Operator] = []
        self._now = self.values
        #: Operators that :attr:`now` has yet to apply to ``_now``, the first one first.
        self._pending: list[Operator] = []
        #: Whether padded tokens are zero now.
        self._is_silent = mask is None

    @property
    def now(self) -> Tensor:
        """The values after all steps so far (B, L, H, P), computed at first access."""
        while self._pending:
            self._now = self._pending.pop(0).affine(self._now)
        return self._now

    def release(self) -> Path:
        """Free the memory of :attr:`now`; the next access computes the values again."""
        self._now, self._pending = self.values, self.parts[::-1]
        return self

    def then(self, *operators: Operator) -> Path:
        """Apply operators, the first one first."""
        for operator in operators:
            self.parts.insert(0, operator)
            self._pending.append(operator)
            self._is_silent &= isinstance(operator, Diagonal)  # others may move or add values
        return self

    def scale(self, factor: Tensor, component: str | None = None, **options: Any) -> Path:
        """Multiply by a frozen factor.

        Args:
            factor: factor (B, L, C), or broadcastable to (B, L, H, P).
            component: name of the mixer's part. Default: None, a structural part.
            **options: further arguments of :class:`~captum_ssm.operators.Diagonal`.
        """
        factor = as_heads(factor, self.shape.heads) if factor.dim() == 3 else factor
        return self.then(Diagonal(factor, self.shape, component, **options))

    def silence(self) -> Path:
        """Set padded tokens to zero, unless they are zero already."""
        if not self._is_silent:
            self.then(*mask_operators(self.mask, self.shape, self.values))
            self._is_silent = True
        return self

    def conv(self, module: nn.Conv1d) -> Path:
        """Apply a depthwise causal convolution; :func:`causal_conv` documents padded tokens."""
        mask = None if self._is_silent else self.mask
        operator, output = causal_conv(module, self.now, mask, self.shape)
        self.silence().then(operator)  # its constant includes the values silenced here
        self._now, self._pending = output, []  # computed already
        return self

    def act(self, function: Callable[[Tensor], Tensor] = F.silu, live: bool = False) -> Path:
        """Apply an activation, frozen as the ratio of :func:`activation_ratio`.

        Args:
            function: the activation function. Default: SiLU.
            live: whether gradients of :attr:`now` use ``function``, not the ratio. Default: False.
        """
        u, class_name = self.now, "silu" if function is F.silu else type(function).__name__
        name = class_name.removesuffix("Activation").lower()  # transformers has SiLUActivation
        self.scale(activation_ratio(function, name, u), "activation")
        if live:
            self._now, self._pending = function(u), []
        return self

    def scan(self, *operators: Operator, skip: Tensor | None = None) -> Path:
        """Mix tokens with the sum of operators.

        Args:
            *operators: operators that mix tokens, such as recurrences.
            skip: weights of an additional skip term, one for each head or channel. Default: None.
        """
        if skip is not None:
            weight = frozen(skip, self.values).view(1, 1, self.shape.heads, -1)
            operators = *operators, Diagonal(weight, self.shape, "skip")
        return self.then(operators[0] if len(operators) == 1 else Sum(*operators))

    def attend(self, query: Tensor, key: Tensor, scaling: float, pairs: Tensor | None) -> Path:
        """Mix tokens with softmax attention, and set :attr:`mask` to the tokens attended to.

        Args:
            query, key: queries and keys (B, L, H, N).
            scaling, pairs: factor and mask of the scores, as in :func:`softmax_attention`.
        """
        vectors = query.transpose(1, 2), key.transpose(1, 2)  # (B, H, L, N)
        operator, self.mask = softmax_attention(*vectors, self.values, scaling, pairs)
        return self.then(operator)

    def both_ways(
        self, ahead: Callable[[Path], Path], back: Callable[[Path], Path], share: float = 1.0
    ) -> Path:
        """Replace the values with the sum of a forward and a backward direction.

        Args:
            ahead: function that applies the steps from the first token to the last.
            back: function that applies the backward direction's steps, on reversed tokens.
            share: factor of each direction. Default: 1.0.
        """
        rev = flip(self.shape, self.values.device)
        forward, backward = ahead(Path(self.now)), back(Path(rev.apply(self.now)))
        # without a component, so that restricting components keeps the factor
        scale = Diagonal(self.values.new_full((1, 1, 1, 1), share), self.shape)
        return self.then(Sum(Chain(scale, *forward.parts), Chain(rev, scale, *backward.parts, rev)))

    def rms_norm(self, weight: Tensor | None, eps: float, groups: int | None = None) -> Path:
        """Apply an RMSNorm, frozen as a scale.

        Args:
            weight: weights of the channels of a head, or of all channels; None for no weights.
            eps: number added to the mean square.
            groups: number of groups normalized separately. Default: None, one per head.
        """
        x = as_heads(self.now.flatten(2), groups or self.shape.heads)  # by group
        factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        if factor.shape[2] not in (1, self.shape.heads):
            factor = factor.expand_as(x).reshape(self.shape)  # from groups to heads
        if weight is not None:  # of one head's channels, or of all
            sizes = self.shape[3:] if len(weight) == self.shape.per_head else self.shape[2:]
            factor = factor * weight.to(x).view(sizes)
        return self.scale(factor, "norm")

    def layer_norm(
        self, weight: Tensor | None, bias: Tensor | None, eps: float, across: bool = False
    ) -> Path:
        """Apply a LayerNorm to each head; the scale is frozen, and the centering stays linear.

        Args:
            weight, bias: weights and biases of all channels, or None.
            eps: number added to the variance.
            across: whether to apply one norm over all heads. Default: False.
        """
        dims = (-2, -1) if across else (-1,)
        scale = torch.rsqrt(self.now.var(dims, correction=0, keepdim=True) + eps)
        self.then(HeadCentering(self.shape, self.values, across=across)).scale(scale, "norm")
        if weight is None:
            return self
        taps = frozen(weight, self.values).view(*self.shape[2:], 1)
        constant = None if bias is None else frozen(bias, self.values).view(1, 1, *self.shape[2:])
        # one tap per channel: a Diagonal would have no place for the bias
        return self.then(ShortConv(taps, self.shape, constant, component="norm"))

    def gate(self, z: Tensor, act: Callable[[Tensor], Tensor] = F.silu) -> Path:
        """Multiply by the gate act(z), for ``z`` (B, L, C) or (B, L, H, P)."""
        is_torch = act in (F.silu, torch.sigmoid) or isinstance(act, nn.Module)
        # on the CPU float() does not wait for a GPU; custom kernels need z's device
        device = "cpu" if is_torch else z.device
        at_rest = float(act(torch.zeros(1, 1, dtype=z.dtype, device=device)))
        return self.scale(act(z), "gate", at_rest=at_rest)

    def narrow(self, start: int, length: int, heads: int) -> Path:
        """Return a new Path with some of the channels, viewed as heads; until now P = 1.

        Args:
            start: first channel; negative numbers count from the end.
            length: number of channels.
            heads: number of heads that these channels form.
        """
        first = start % self.shape.heads
        channels = slice(first, first + length)
        path = Path(self.values[:, :, channels, 0], self.mask, heads)
        path.parts = [_narrow(operator, channels, path.shape) for operator in self.parts]
        path._now, path._is_silent = as_heads(self.now[:, :, channels, 0], heads), self._is_silent
        return path

    def repeat(self, times: int) -> Path:
        """Return a new Path with ``times`` neighboring copies of every head."""
        if times == 1:
            return self
        path = Path(self.values.repeat_interleave(times, 2), self.mask)
        original_heads = [head for head in range(self.shape.heads) for _ in range(times)]
        path.parts = [operator.select(original_heads) for operator in self.parts]
        path._now, path._is_silent = self.now.repeat_interleave(times, 2), self._is_silent
        return path

    def to(self, project: nn.Module | Callable[[Tensor], Tensor], **options: Any) -> LinearMixer:
        """Return the :class:`LinearMixer` of this path.

        Args:
            project: module or function of the output projection, from (B, L, C) to (B, L, E).
            **options: further arguments of :class:`LinearMixer`.
        """
        operator = Chain(*self.parts) if len(self.parts) > 1 else self.parts[0]
        values = self.values
        if values.untyped_storage().nbytes() > values.nbytes and not values.requires_grad:
            values = values.clone()  # lets go of gates and steps from the same projection

        def project_heads(y: Tensor) -> Tensor:
            y = y.flatten(2)
            return run(project, y) if isinstance(project, nn.Module) else project(y)

        return LinearMixer(values, operator, project_heads, self.mask, **options)


def _narrow(operator: Operator, channels: slice, shape: Shape) -> Operator:
    """Restrict a diagonal or a short convolution to some channels, viewed as heads."""

    def cut(x: Tensor) -> Tensor:  # from (..., C, 1) to (..., H, P), or (..., 1, 1) unchanged
        return x[:, :, channels].reshape(*x.shape[:2], *shape[2:]) if x.shape[2] > 1 else x

    if isinstance(operator, Diagonal):
        return Diagonal(cut(operator.weight), shape, operator.component, operator.data_dependent)
    if not isinstance(operator, ShortConv):
        raise TypeError(
            f"narrow() cannot cut {type(operator).__name__}. Call narrow() before all steps except "
            "scale(), act(), gate() and conv()."
        )
    bias = None if operator.bias is None else cut(operator.bias)
    return ShortConv(operator.weight[channels].view(*shape[2:], -1), shape, bias, operator.lags)
