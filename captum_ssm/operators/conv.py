"""Short convolutions over tokens, one filter per channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Operator, Shape
from .chain import Chain
from .kernels.arithmetic import linear_map
from .kernels.bands import Band, convolve_band, overlap
from .kernels.portions import LARGE, Portion, Stream
from .kernels.rows import Strip


class ShortConv(Operator):
    """A convolution of a few taps: y[t] = sum over k of weight[..., k] x[t - lags[k]] + bias[t].

    Tokens beyond the ends are zero.

    Args:
        weight: filters (H, P, K), by tap.
        shape: the sizes acted on.
        bias: constant term broadcastable to (B, L, H, P). Default: None, no constant.
        lags: how many tokens back each tap reads; negative ones read ahead. Default: None, that is
            0, 1, ..., K - 1 (causal).
        component: name of the part it stands for. Default: ``"conv"``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Shape, ShortConv
        >>> taps = torch.tensor([[[1.0, 10.0]]])  # this token, and the one before
        >>> ShortConv(taps, Shape(batch=1, tokens=3, heads=1, per_head=1)).dense().int()
        tensor([[[ 1,  0,  0],
                 [10,  1,  0],
                 [ 0, 10,  1]]], dtype=torch.int32)
    """

    def __init__(
        self,
        weight: Tensor,
        shape: Shape,
        bias: Tensor | None = None,
        lags: Sequence[int] | None = None,
        component: str | None = "conv",
    ) -> None:
        self.weight = weight.detach()
        self.shape = shape
        self.bias = None if bias is None else bias.detach()
        self.lags = tuple(range(weight.shape[-1]) if lags is None else lags)
        self.component = component

    @property
    def mixes_tokens(self) -> bool:
        return any(self.lags)

    @property
    def data_dependent(self) -> bool:
        return False

    def apply(self, v: Tensor) -> Tensor:
        return linear_map(v, self._forward, self._adjoint)

    def transpose(self, u: Tensor) -> Tensor:
        return linear_map(u, self._adjoint, self._forward)

    def _forward(self, v: Tensor) -> Tensor:
        out = torch.zeros_like(v, memory_format=torch.contiguous_format)
        for lag, weight in self.taps().items():
            earlier, later = overlap(self.shape.tokens, lag)
            out[..., later, :, :].addcmul_(weight, v[..., earlier, :, :])
        return out

    def _adjoint(self, u: Tensor) -> Tensor:
        out = torch.zeros_like(u, memory_format=torch.contiguous_format)
        for lag, weight in self.taps().items():
            earlier, later = overlap(self.shape.tokens, lag)
            out[..., earlier, :, :].addcmul_(weight, u[..., later, :, :])
        return out

    def stream(self, transposed: bool, longest: int) -> Stream | None:
        return _Stream(self, transposed) if min(self.lags) >= 0 else None

    @property
    def portion(self) -> Portion:
        return LARGE

    def offset(self) -> Tensor | None:
        return None if self.bias is None else self.bias.expand(self.shape)

    def tensors(self) -> dict[str, Tensor]:
        bias = {} if self.bias is None else {"bias": self.bias}
        return {"weight": self.weight, **bias}

    def select(self, heads: Sequence[int]) -> Operator:
        bias = self.bias
        if bias is not None and bias.shape[2] > 1:
            bias = bias[:, :, list(heads)]
        shape = self.shape._replace(heads=len(heads))
        return ShortConv(self.weight[list(heads)], shape, bias, self.lags, self.component)

    def after_band(self, band: Band) -> Band | None:
        return convolve_band(self.taps(), band, self.shape.tokens)

    def contract(self, left: Tensor, right: Tensor) -> Tensor:
        return Chain(self).contract(left, right)

    def contract_heads(self, left: Tensor, right: Tensor) -> Tensor:
        return Chain(self).contract_heads(left, right)

    def strip(self, left: Tensor, right: Tensor, rows: range) -> Strip:
        return Chain(self).strip(left, right, rows)

    def taps(self) -> dict[int, Tensor]:
        """The weights (H, P) of every lag."""
        taps: dict[int, Tensor] = {}
        for lag, weight in zip(self.lags, self.weight.unbind(-1), strict=True):
            # side by side in memory, as what they multiply
            taps[lag] = taps[lag] + weight if lag in taps else weight.contiguous()
        return taps


class _Stream:
    """A causal convolution, or its adjoint, which keeps as many tokens as it looks back."""

    def __init__(self, conv: ShortConv, transposed: bool) -> None:
        self.transposed = transposed
        self.taps = conv.taps()
        self.reach = max(self.taps)
        self.is_delay = len(self.taps) == 1 and bool((self.taps[self.reach] == 1).all())
        batch, _, heads, per_head = conv.shape
        self.kept = conv.weight.new_zeros(batch, self.reach, heads, per_head)

    def __call__(self, x: Tensor, part: slice) -> Tensor:
        if self.transposed:
            held = torch.cat([x, self.kept], 1)
            self.kept = held[:, : self.reach]
        else:
            held = torch.cat([self.kept, x], 1)
            self.kept = held[:, held.shape[1] - self.reach :]
        read = []
        for lag, weight in self.taps.items():
            first = lag if self.transposed else self.reach - lag
            read.append((weight, held[:, first : first + x.shape[1]]))
        if self.is_delay:
            return read[0][1]
        out = torch.mul(*read[0])
        for weight, values in read[1:]:
            out.addcmul_(weight, values)
        return out
