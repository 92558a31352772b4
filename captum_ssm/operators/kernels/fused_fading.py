"""A first-order linear recurrence and its adjoint in one launch, for GPUs with Triton.

    y[t] = a[t] y[t-1] + x[t]

Each program takes a few channels of one example from the first token to the last, some tokens at a
time.  A parallel prefix computation composes their steps; the last output is carried on.

:takes: decays a (B, L, H), and vectors x (S, B, L, H), in any memory layout.
:gives: y (S, B, L, H) in the dtype of x, or the adjoint's output for x, which runs from the last
    token to the first.
:cost: one launch; a logarithm of the tile's tokens of multiplications with additions for each
    number, which is read and written once.
:literature: Blelloch, Prefix Sums and Their Applications, 1990; for recurrences of networks, Martin
    and Cundy, Parallelizing Linear Recurrent Neural Nets Over Sequence Length, 2018.
:naive version: ``kernels.recurrence``
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .fused_scan import composed, device_of, has_triton, jitted, power_of_two

#: Tokens and channels that a program holds at a time.
_TOKENS, _CHANNELS = 64, 32

#: Triton's language, set before the kernel is compiled.
tl: Any = None


def serves() -> bool:
    """Return True if the kernel takes recurrences on a GPU: with Triton."""
    return has_triton()


def run(decay: Tensor, x: Tensor, *, transposed: bool) -> Tensor:
    """Run the recurrence, or its adjoint, on S stacked vectors x (S, B, L, H).

    Args:
        decay: a (B, L, H).
        x: the vectors.
        transposed: whether it is the adjoint.
    """
    stack, batch, tokens, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    block = min(_CHANNELS, power_of_two(channels))
    with device_of(x):
        compiled()[(-(-channels // block), stack * batch)](
            *(decay, x, out, batch, tokens, channels, *decay.stride(), *x.stride()),
            TRANSPOSED=transposed,
            WIDE=decay.dtype == torch.float64,
            T=min(_TOKENS, power_of_two(tokens)),
            BLOCK=block,
        )
    return out


@functools.cache
def compiled() -> Any:
    """Return the kernel as Triton runs it."""
    return jitted(_fade)


def _fade(  # type: ignore[no-untyped-def]
    decay, x, out, batch, tokens, channels,
    decay_b, decay_l, decay_h, x_s, x_b, x_l, x_h,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of one example, T tokens at a time.

    The adjoint goes from the last token to the first, each with the decay of the one it comes from.
    """
    row, place = tl.program_id(1).to(tl.int64), tl.arange(0, T)
    vector, example = row // batch, row % batch
    channel = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    decay += example * decay_b + channel * decay_h
    x += vector * x_s + example * x_b + channel * x_h
    out += row * tokens * channels + channel
    wide = tl.float64 if WIDE else tl.float32
    carried = tl.zeros((BLOCK,), wide)
    for begin in range(0, tokens, T):
        step = begin + place
        token = (tokens - 1 - step if TRANSPOSED else step).to(tl.int64)[:, None]
        present = (step < tokens)[:, None] & (channel < channels)
        value = tl.load(x + token * x_l, mask=present, other=0.0).to(wide)
        source = token + 1 if TRANSPOSED else token
        led = present & (step > 0)[:, None]  # nothing leads to the first
        fading = tl.load(decay + source * decay_l, mask=led, other=1.0).to(wide)
        faded, held = tl.associative_scan((fading, value), 0, composed)
        held += faded * carried[None, :]
        carried = tl.sum(tl.where((place == T - 1)[:, None], held, 0.0), 0)
        tl.store(out + token * channels, held.to(out.dtype.element_ty), mask=present)
