"""A first-order linear recurrence and its adjoint in one launch, for GPUs with Triton.

    y[t] = a[t] y[t-1] + x[t]

Each GPU program maps a few channels of one example from the first token to the last, a tile of
tokens at a time.  A parallel prefix computation composes the steps within a tile; the last output
of a tile is carried to the next.

:takes: decays a (B, L, H), and vectors x (S, B, L, H), in any memory layout.
:gives: y (S, B, L, H) in the dtype of x, or the adjoint's output for x, which runs from the last
    token to the first.
:cost: one launch; log T multiplications with additions for each element, for tiles of T tokens.
    Each element is read and written once.
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

#: Number of tokens and of channels in a program's tile.
_TOKENS, _CHANNELS = 64, 32

#: The module ``triton.language``, imported before the kernel is compiled.
tl: Any = None


def serves() -> bool:
    """Return True if this kernel can run, that is, if Triton is installed."""
    return has_triton()


def run(decay: Tensor, x: Tensor, *, transposed: bool) -> Tensor:
    """Return y[t] = decay[t] y[t-1] + x[t] for S stacked vectors x, or the adjoint's output.

    Args:
        decay: the decays a (B, L, H).
        x: the vectors (S, B, L, H).
        transposed: whether to use the adjoint.
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
    """Return the kernel, wrapped for compilation by Triton."""
    return jitted(_fade)


def _fade(  # type: ignore[no-untyped-def]
    decay, x, out, batch, tokens, channels,
    decay_b, decay_l, decay_h, x_s, x_b, x_l, x_h,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out[t] = decay[t] out[t-1] + x[t] of BLOCK channels, T tokens at a time.

    The adjoint runs from the last token to the first; step t uses the decay of token t + 1.
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
        led = present & (step > 0)[:, None]  # the first step has no step before it
        fading = tl.load(decay + source * decay_l, mask=led, other=1.0).to(wide)
        faded, held = tl.associative_scan((fading, value), 0, composed)
        held += faded * carried[None, :]
        carried = tl.sum(tl.where((place == T - 1)[:, None], held, 0.0), 0)
        tl.store(out + token * channels, held.to(out.dtype.element_ty), mask=present)
