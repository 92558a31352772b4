"""A short causal convolution over tokens and its adjoint in one launch, for GPUs with Triton.

    y[t] = sum over k of w[k] x[t - k]

Written as a product and a sum for each tap, it would read and write all values as often as there
are taps, and a library's convolution wants tokens side by side in memory, not channels.

:takes: weights (C, K), and vectors x (R, L, C), which may lie anyhow in memory.
:gives: y (R, L, C) in the dtype of x, or the adjoint's output for x, with x[t + k] for x[t - k].
:cost: one launch; K multiplications with additions for each number, which is read once.
:literature: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023, has
    such a convolution in front of each scan, and a kernel for it.
:naive version: ``kernels.band_matrix``
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import gpu
from .gpu import device_of, jitted, power_of_two

#: Tokens and channels of a program, and the most taps.
_TOKENS, _CHANNELS, _TAPS = 16, 64, 16

#: Triton's language, set by :func:`.gpu.jitted` before the kernel is compiled.
tl: Any = None


def serves(lags: tuple[Any, ...]) -> bool:
    """Whether the kernel takes a convolution on a GPU: with Triton, a tap for each token back."""
    return gpu.has_triton() and lags == tuple(range(len(lags))) and len(lags) <= _TAPS


def run(weight: Tensor, x: Tensor, *, transposed: bool) -> Tensor:
    """Convolve x (R, L, C) with weights (C, K), or apply the adjoint."""
    rows, tokens, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    block = min(_CHANNELS, power_of_two(channels))
    with device_of(x):
        compiled()[(-(-tokens // _TOKENS), -(-channels // block), rows)](
            *(weight, x, out, tokens, channels, *weight.stride(), *x.stride()),
            TRANSPOSED=transposed,
            WIDE=weight.dtype == torch.float64,
            TAPS=weight.shape[1],
            T=_TOKENS,
            BLOCK=block,
        )
    return out


@functools.cache
def compiled() -> Any:
    """The kernel as Triton runs it."""
    return jitted(_convolve)


def _convolve(  # type: ignore[no-untyped-def]
    weight, x, out, tokens, channels, weight_c, weight_k, x_r, x_l, x_c,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr,
    TAPS: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of T tokens."""
    token = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)[:, None]
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = tl.program_id(2).to(tl.int64)
    wide = tl.float64 if WIDE else tl.float32
    found = tl.zeros((T, BLOCK), wide)
    for tap in tl.static_range(TAPS):
        source = token + tap if TRANSPOSED else token - tap
        present = (source >= 0) & (source < tokens) & (channel < channels)
        value = tl.load(x + row * x_r + source * x_l + channel * x_c, mask=present, other=0.0)
        place = weight + channel * weight_c + tap * weight_k
        factor = tl.load(place, mask=channel < channels, other=0.0)
        found += factor.to(wide) * value.to(wide)
    stored = (token < tokens) & (channel < channels)
    into = out + (row * tokens + token) * channels + channel
    tl.store(into, found.to(out.dtype.element_ty), mask=stored)
