"""Convolutions over the whole sequence, as in S4D and DSS, and between gates in GSS and Hyena."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import OptionError
from .base import Operator, Shape
from .kernels.arithmetic import full_precision, linear_map
from .kernels.bands import Band
from .kernels.rows import Strip, sum_of_lags

#: Largest number of elements of padded signals transformed together (8 MiB as complex64).
_SIGNAL_ELEMENTS = 2**20


class LongConv(Operator):
    """A causal convolution with a kernel of any length, one per channel or per head.

    alpha[i, j] = kernel[i - j] for j <= i, the same for every input (S4, DSS, Hyena's filters;
    hidden-attention paper, appendix C).  It is computed with fast Fourier transforms.

    For a convolution in both directions, add a second one on reversed tokens:
    ``Sum(LongConv(ahead, shape), Chain(flip, LongConv(back, shape), flip))``.

    Args:
        kernel: real kernel (H, P, K), or (H, 1, K) if the channels of a head share one; entry k is
            the weight of the token k steps back.  Entries beyond the sequence are ignored; missing
            entries count as zero.
        shape: sizes of the values to map.
        component: name of the mixer's part that it represents. Default: ``"scan"``.

    Raises:
        OptionError: for a complex kernel, or a kernel whose sizes do not fit ``shape``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import LongConv, Shape
        >>> kernel = torch.tensor([[[1.0, 2.0, 3.0]]])
        >>> LongConv(kernel, Shape(batch=1, tokens=3, heads=1, per_head=1)).dense().int()
        tensor([[[1, 0, 0],
                 [2, 1, 0],
                 [3, 2, 1]]], dtype=torch.int32)
    """

    data_dependent = False

    def __init__(self, kernel: Tensor, shape: Shape, component: str | None = "scan") -> None:
        _check(kernel, shape)
        kernel = kernel.detach()[..., : shape.tokens]
        self.kernel = kernel.to(torch.promote_types(kernel.dtype, torch.float32))
        self.shape = shape
        self.component = component

    def apply(self, v: Tensor) -> Tensor:
        return linear_map(v, self._forward, self._adjoint)

    def transpose(self, u: Tensor) -> Tensor:
        return linear_map(u, self._adjoint, self._forward)

    def tensors(self) -> dict[str, Tensor]:
        return {"kernel": self.kernel}

    def select(self, heads: Sequence[int]) -> Operator:
        shape = self.shape._replace(heads=len(heads))
        return LongConv(self.kernel[list(heads)], shape, self.component)

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        strip = self._strip_by_head if by_head else self._strip_over_heads
        left, tokens = _as_constant(left), self.shape.tokens
        with full_precision(self.device):
            return sum_of_lags(lambda x: strip(left, _as_constant(x), rows), band, rows, tokens)

    def _strip_over_heads(self, left: Tensor, right: Tensor, rows: range) -> Strip:
        """Return ``rows`` of left[i, c] alpha_c[i, j] right[j, c], summed over channels c."""
        # no column is further back than the kernel reaches
        columns = range(max(0, rows.start - self.kernel.shape[-1] + 1), rows.stop)
        if right.shape[1] == 1:  # all columns share their factors
            entries = self._toeplitz(left * right, rows, columns)
        elif left.shape[1] == 1:  # all rows do
            entries = self._toeplitz(left * right, rows, columns, by_column=True)
        else:
            factors = left.expand(self.shape), right.expand(self.shape)
            entries = self._lag_by_lag(*factors, rows, columns)
        return Strip(entries, rows, columns)

    def _strip_by_head(self, left: Tensor, right: Tensor, rows: range) -> Strip:
        """Return ``rows`` of left[i, c] alpha_c[i, j] right[j, c], summed over each head's c."""
        left, right = (x.expand(self.shape).transpose(1, 2) for x in (left, right))  # (B, H, L, P)
        left, columns = left[:, :, rows.start : rows.stop], range(self.shape.tokens)  # (B, H, R, P)
        row, column = (torch.arange(x.start, x.stop, device=self.device) for x in (rows, columns))
        lag = row[:, None] - column  # (R, L)
        # lags beyond the kernel's end, and negative ones, index the zero that is padded to it
        kernel = torch.nn.functional.pad(self.kernel, (0, 1))
        lag = torch.where(lag < 0, -1, lag).clamp_max(self.kernel.shape[-1])
        if kernel.shape[1] == 1:
            return Strip((left @ right.mT).mul_(kernel[:, 0, lag]), rows, columns)
        channels = zip(kernel.unbind(1), left.unbind(-1), right.unbind(-1), strict=True)
        out = self._zeros(*left.shape[:2], *lag.shape)
        for weight, x, y in channels:
            out += x[..., None] * weight[:, lag] * y[..., None, :]
        return Strip(out, rows, columns)

    def _forward(self, v: Tensor) -> Tensor:
        out = self._filter(v, conjugate=False)
        return _zero_outside_reach(out, v, before=0, after=self.kernel.shape[-1] - 1)

    def _adjoint(self, u: Tensor) -> Tensor:
        out = self._filter(u, conjugate=True)
        return _zero_outside_reach(out, u, before=self.kernel.shape[-1] - 1, after=0)

    def _filter(self, x: Tensor, conjugate: bool) -> Tensor:
        """Convolve ``x`` with the kernel by fast Fourier transforms, some heads at a time."""
        x = x.to(torch.promote_types(x.dtype, self.kernel.dtype))
        tokens, heads, per_head = x.shape[-3:]
        # padded so that nothing wraps around, to a length that transforms fast
        size = 1 << (tokens + self.kernel.shape[-1] - 2).bit_length()
        at_once = max(1, _SIGNAL_ELEMENTS // (x.shape[:-3].numel() * size * per_head))
        out = torch.empty_like(x)
        for start in range(0, heads, at_once):
            part = slice(start, start + at_once)
            # tokens last: transforms along a stride of a power of two take twice as long
            signal = x[..., part, :].movedim(-3, -1).contiguous()  # (..., h, P, L)
            response = torch.fft.rfft(self.kernel[part], size)  # (h, P or 1, frequencies)
            spectrum = torch.fft.rfft(signal, size)
            spectrum *= response.conj() if conjugate else response  # the conjugate: the adjoint
            filtered = torch.fft.irfft(spectrum, size)[..., :tokens]
            out[..., part, :] = filtered.movedim(-1, -3)
        return out

    def _toeplitz(
        self, weight: Tensor, rows: range, columns: range, by_column: bool = False
    ) -> Tensor:
        """Sum weight[i, c] kernel_c[i - j] over c, (B, R, W); weight[j, c] if ``by_column``."""
        batch, _, heads, per_head = self.shape
        weighted = columns if by_column else rows
        if weight.shape[1] > 1:
            weight = weight[:, weighted.start : weighted.stop]
        weight = weight.expand(-1, -1, heads, per_head)
        by_lag = self._weighted_kernel(weight)  # (B or 1, R or W or 1, K)
        by_lag = by_lag.expand(batch, len(weighted), -1)
        row, column = (torch.arange(x.start, x.stop, device=self.device) for x in (rows, columns))
        lag = row - column[:, None] if by_column else row[:, None] - column
        length = by_lag.shape[-1]
        index = lag.clamp(0, length - 1).expand(batch, -1, -1)
        out = by_lag.gather(-1, index).masked_fill((lag < 0) | (lag >= length), 0)
        return out.mT.contiguous() if by_column else out

    def _weighted_kernel(self, weight: Tensor) -> Tensor:
        """Return the sum over channels c of weight[..., c] kernel_c, (..., K)."""
        if self.kernel.shape[1] == 1:
            weight = weight.sum(-1, keepdim=True)
        return weight.flatten(-2) @ self.kernel.flatten(0, 1)

    def _lag_by_lag(self, left: Tensor, right: Tensor, rows: range, columns: range) -> Tensor:
        """Sum left[i, c] kernel_c[i - j] right[j, c] over channels c, one lag i - j at a time."""
        batch, _, heads, per_head = self.shape
        out = self._zeros(batch, len(rows), len(columns))
        weights = self.kernel.expand(-1, per_head, -1).flatten(0, 1).T.contiguous()  # (K, C)
        # reused memory, because allocating the products of each lag takes longer
        memory = left.new_empty(batch * len(rows) * heads * per_head)
        for lag, weight in enumerate(weights[: rows.stop]):  # one diagonal of ``out`` each
            first = max(rows.start, lag)
            size = (batch, rows.stop - first, heads, per_head)
            products = memory[: torch.Size(size).numel()].view(size)
            row, column = left[:, first : rows.stop], right[:, first - lag : rows.stop - lag]
            torch.mul(row, column, out=products)
            corner = out[:, first - rows.start :, first - lag - columns.start :]
            corner.diagonal(0, 1, 2)[:, : size[1]].copy_(products.flatten(2) @ weight)
        return out


def _check(kernel: Tensor, shape: Shape) -> None:
    """Raise OptionError unless the kernel is real and has the heads and channels of ``shape``."""
    if kernel.is_complex():
        raise OptionError(
            f"LongConv needs a real kernel, but kernel has dtype {kernel.dtype}. If the states are "
            "conjugate pairs, pass twice the real part of the sum over one state of each pair."
        )
    heads, per_head = shape.heads, shape.per_head
    accepted = {(heads, per_head), (heads, 1)}
    if kernel.dim() != 3 or tuple(kernel.shape[:2]) not in accepted or not kernel.shape[2]:
        raise OptionError(
            f"LongConv needs a kernel (H, P, K) with H = {heads}, P = {per_head} or 1, and K >= 1, "
            f"got shape {tuple(kernel.shape)}. If every channel is a head, pass a kernel (C, K) as "
            "kernel[:, None]."
        )


def _as_constant(x: Tensor) -> Tensor:
    """Undo ``expand`` along tokens: return factors (B, 1, H, P) if all tokens share them."""
    return x[:, :1] if x.stride(1) == 0 else x


def _zero_outside_reach(out: Tensor, x: Tensor, before: int, after: int) -> Tensor:
    """Set ``out`` to zero where the convolution of ``x`` is exactly zero, channel by channel.

    Fourier transforms leave rounding errors at all tokens, but the entries of causal rows after the
    query must be exactly zero.  ``out`` may be nonzero from ``before`` tokens before the first
    nonzero value to ``after`` tokens after the last one.
    """
    tokens = x.shape[-3]
    is_nonzero = (x != 0).to(torch.uint8)
    # argmax is the first nonzero token, or 0 without any; then ``out`` is exactly zero anyway
    first = is_nonzero.argmax(-3, keepdim=True)
    last = tokens - 1 - is_nonzero.flip(-3).argmax(-3, keepdim=True)
    position = torch.arange(tokens, device=x.device)[:, None, None]
    return out.masked_fill((position < first - before) | (position > last + after), 0)
