"""Short convolutions over tokens, one filter per channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import OptionError
from .base import Operator, Shape
from .chain import Chain
from .kernels.arithmetic import linear_map
from .kernels.bands import Band, convolve_band, overlap
from .kernels.rows import Strip

#: An index into a tensor, as a tuple of slices.
Places = tuple[Any, ...]
#: How many tokens back a tap reads, or how many rows and columns back if tokens form a 2-D map.
Lag: TypeAlias = int | tuple[int, int]


class ShortConv(Operator):
    """A convolution of a few taps: y[t] = sum over k of weight[..., k] x[t - lags[k]] + bias[t].

    Tokens beyond the ends are zero.  The tokens may also form a two-dimensional map, row by row.

    Args:
        weight: filters (H, P, K), one weight for each of the K taps.
        shape: sizes of the values to map.
        bias: constant term broadcastable to (B, L, H, P). Default: None, no constant.
        lags: how many tokens back each tap reads; negative lags read later tokens. In a map each
            lag is a pair: rows up, columns to the left. Default: None, causal: 0, 1, ..., K - 1.
        component: name of the mixer's part that it represents. Default: ``"conv"``.
        width: number of tokens in each row of the map; tokens beyond the ends of a row are zero.
            Default: None, the tokens form one sequence.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Shape, ShortConv
        >>> taps = torch.tensor([[[1.0, 10.0]]])  # this token, and the one before
        >>> ShortConv(taps, Shape(batch=1, tokens=3, heads=1, per_head=1)).dense().int()
        tensor([[[ 1,  0,  0],
                 [10,  1,  0],
                 [ 0, 10,  1]]], dtype=torch.int32)
        >>> left = ShortConv(taps, Shape(1, 4, 1, 1), lags=[(0, 0), (0, 1)], width=2)
        >>> left.dense().int()  # of a map of 2 x 2 tokens, this one and the one to its left
        tensor([[[ 1,  0,  0,  0],
                 [10,  1,  0,  0],
                 [ 0,  0,  1,  0],
                 [ 0,  0, 10,  1]]], dtype=torch.int32)
    """

    data_dependent = False

    def __init__(
        self,
        weight: Tensor,
        shape: Shape,
        bias: Tensor | None = None,
        lags: Sequence[int] | Sequence[tuple[int, int]] | None = None,
        component: str | None = "conv",
        width: int | None = None,
    ) -> None:
        self.weight = weight.detach()
        self.shape = shape
        self.bias = None if bias is None else bias.detach()
        self.lags: tuple[Any, ...] = tuple(range(weight.shape[-1]) if lags is None else lags)
        self.component = component
        self.width = width
        if any(isinstance(lag, tuple) == (width is None) for lag in self.lags):
            raise OptionError(
                f"lags={self.lags} do not fit width={width}. With a width, pass lags as pairs "
                "(rows, columns); without a width, pass lags as numbers of tokens."
            )

    @property
    def mixes_tokens(self) -> bool:
        return any(any(lag) if isinstance(lag, tuple) else lag for lag in self.lags)

    def apply(self, v: Tensor) -> Tensor:
        return linear_map(v, self._forward, self._adjoint)

    def transpose(self, u: Tensor) -> Tensor:
        return linear_map(u, self._adjoint, self._forward)

    def _forward(self, v: Tensor) -> Tensor:
        """Return the sum over lags of weight[lag] v[t - lag], for all tokens t."""
        out, delayed = self._split_off_lag_zero(v)
        read, written = self._as_map(v), self._as_map(out)  # views, so this writes to ``out``
        for lag, weight in delayed.items():
            earlier, later = self._tap_indices(lag)
            written[later].addcmul_(weight, read[earlier])
        return out

    def _adjoint(self, u: Tensor) -> Tensor:
        """Return the sum over lags of weight[lag] u[t + lag], for all tokens t."""
        out, delayed = self._split_off_lag_zero(u)
        read, written = self._as_map(u), self._as_map(out)  # views, so this writes to ``out``
        for lag, weight in delayed.items():
            earlier, later = self._tap_indices(lag)
            written[earlier].addcmul_(weight, read[later])
        return out

    def _split_off_lag_zero(self, x: Tensor) -> tuple[Tensor, dict[Lag, Tensor]]:
        """Return ``x`` times the weights at lag 0 (or zeros), and the weights at all other lags."""
        delayed = dict(self._weights())
        weight = delayed.pop((0, 0) if self.width is not None else 0, None)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return (out.zero_() if weight is None else torch.mul(x, weight, out=out)), delayed

    def _as_map(self, x: Tensor) -> Tensor:
        """View ``x`` (..., L, H, P) as (..., L / width, width, H, P) if the tokens form a map."""
        return x if self.width is None else torch.unflatten(x, -3, (-1, self.width))

    def _tap_indices(self, lag: Lag) -> tuple[Places, Places]:
        """Return indices of a tap's input and output tokens, for tensors from :meth:`_as_map`."""
        tokens = self.shape.tokens
        if isinstance(lag, tuple):
            assert self.width is not None
            slices_by_axis = [overlap(tokens // self.width, lag[0]), overlap(self.width, lag[1])]
        else:
            slices_by_axis = [overlap(tokens, lag)]
        earlier, later = zip(*slices_by_axis, strict=True)
        channels = slice(None), slice(None)
        return (..., *earlier, *channels), (..., *later, *channels)

    def offset(self) -> Tensor | None:
        return None if self.bias is None else self.bias.expand(self.shape)

    def tensors(self) -> dict[str, Tensor]:
        bias = {} if self.bias is None else {"bias": self.bias}
        return {"weight": self.weight, **bias}

    def select(self, heads: Sequence[int]) -> Operator:
        bias = self.bias
        if bias is not None and bias.shape[2] > 1:  # otherwise all heads share it
            bias = bias[:, :, list(heads)]
        shape, weight = self.shape._replace(heads=len(heads)), self.weight[list(heads)]
        return ShortConv(weight, shape, bias, self.lags, self.component, self.width)

    def after_band(self, band: Band) -> Band | None:
        return convolve_band(self.by_lag(), band, self.shape.tokens)

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        # a chain moves the taps into the band
        return Chain(self).entries(left, band, rows, by_head)

    def by_lag(self) -> dict[int, Tensor]:
        """Return a dict from lags, in tokens, to the taps' weights (H, P).

        If the tokens form a map, weights are per token, (L, H, P), and zero beyond a row's ends.
        """
        weights: dict[int, Tensor] = {}
        for lag, weight in self._weights().items():
            if isinstance(lag, tuple):
                assert self.width is not None
                token_lag = lag[0] * self.width + lag[1]
                column = torch.arange(self.shape.tokens, device=weight.device) % self.width
                inside = (column >= lag[1]) & (column < self.width + lag[1])  # in the same row
                weight = weight * inside[:, None, None]
            else:
                token_lag = lag
            # in a map, different lags may be the same number of tokens
            weights[token_lag] = weights[token_lag] + weight if token_lag in weights else weight
        return weights

    def _weights(self) -> dict[Lag, Tensor]:
        """Return the weights (H, P) by lag; taps with equal lags are added."""
        taps: dict[Lag, Tensor] = {}
        # channels side by side in memory, as in the values
        for lag, weight in zip(self.lags, self.weight.movedim(-1, 0).contiguous(), strict=True):
            taps[lag] = taps[lag] + weight if lag in taps else weight
        return taps
