"""Linear attention with one decay per head, and its adjoint, in one launch, for GPUs with Triton.

    S[t] = a[t] S[t-1] + k[t] scale[t] v[t],      y[t] = q[t] . S[t]

Each program takes some columns of one head of one example, channels of vectors of the stack, from
the first token to the last, some tokens at a time: a matrix within these, and between them the
state, which does not leave the program.  As in :mod:`.within_chunk` no product of decays is a
quotient of others, and none an exponential of a difference of sums of logarithms: each is a prefix
product of its own column, so that a decay of zero is one like any other.

:takes: q and k (B, L, G, N), of which each group serves H / G heads in a row, logarithms of decays
    a (B, L, H), at most 0, factors on the values (B, L, H) or None, and vectors v (S, B, L, H, P),
    all of which may lie anyhow in memory.
:gives: y (S, B, L, H, P) in the dtype of v, or the adjoint's output for v, which runs from the
    last token to the first with queries and keys exchanged.
:cost: one launch; for T tokens at a time 2 N + T multiplications with additions for each number of
    v, and, for each of some columns, (N + log T) T more for each token.
:literature: Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality, 2024, section 6; with the state kept in the program: Yang et
    al., Gated Linear Attention Transformers with Hardware-Efficient Training, 2024, section 4.
:naive version: ``kernels.semiseparable``
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from . import gpu
from .arithmetic import BINARY
from .gpu import device_of, jitted, power_of_two

#: Most tokens and columns that a program holds at a time, and the fewest of each of which Triton
#: multiplies matrices.
_MOST, _LEAST = 32, 16
#: Most numbers of its queries, or keys, and of its state, which are to stay in registers.
_VECTORS, _STATE = 2**11, 2**12
#: Most states: of more, the fewest tokens and columns would not.
_STATES = 256

#: Triton's language, set by :func:`.gpu.jitted` before the kernel is compiled.
tl: Any = None


class HeadCoefficients(Protocol):
    """Coefficients of heads: ``log_decay`` (B, L, H), and ``query`` and ``key`` (B, L, G, N)."""

    log_decay: Tensor
    query: Tensor
    key: Tensor


def serves(heads: HeadCoefficients) -> bool:
    """Whether the kernel takes heads on a GPU: with Triton, of not too many states, in float32.

    Some versions of Triton have no product of matrices in float64.
    """
    single = heads.log_decay.dtype != torch.float64
    return gpu.has_triton() and single and 0 < heads.query.shape[3] <= _STATES


def run(
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    scale: Tensor | None,
    v: Tensor,
    *,
    transposed: bool,
) -> Tensor:
    """alpha v, or alpha-transposed v, for S stacked vectors v (S, B, L, H, P)."""
    stack, batch, tokens, heads, channels = v.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not out.numel():
        return out
    groups, states = query.shape[2:]
    read, written = (key, query) if transposed else (query, key)
    factor = log_decay if scale is None else scale
    columns, padded = stack * channels, max(_LEAST, power_of_two(states))
    block = _within(_STATE // padded, columns)
    with device_of(v):
        compiled()[(-(-columns // block), batch * heads)](
            *(read, written, log_decay, factor, v, out),
            *(tokens, heads, heads // groups, states, columns, channels),
            *(
                *read.stride(),
                *written.stride(),
                *log_decay.stride(),
                *factor.stride(),
                *v.stride(),
            ),
            TRANSPOSED=transposed,
            SCALED=scale is not None,
            BINARY=BINARY,
            T=_within(_VECTORS // padded, tokens),
            BLOCK=block,
            STATES=padded,
            num_warps=8,
            num_stages=2,
        )
    return out


def _within(room: int, count: int) -> int:
    """How many tokens or columns a program holds at a time, of so many that there are."""
    return max(_LEAST, min(_MOST, room, power_of_two(count)))


@functools.cache
def compiled() -> Any:
    """The kernel as Triton runs it."""
    return jitted(_attend)


def _attend(  # type: ignore[no-untyped-def]
    read, key, decay, scale, x, out,
    tokens, heads, per_group, states, columns, channels,
    read_b, read_l, read_g, read_n, key_b, key_l, key_g, key_n,
    decay_b, decay_l, decay_h, scale_b, scale_l, scale_h, x_s, x_b, x_l, x_h, x_p,
    TRANSPOSED: tl.constexpr, SCALED: tl.constexpr, BINARY: tl.constexpr,
    T: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one head of one example, T tokens at a time.

    The adjoint goes from the last token to the first, each with the decay of the one it comes from.
    """
    row, place = tl.program_id(1).to(tl.int64), tl.arange(0, T)
    example, head = row // heads, row % heads
    group = head // per_group
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    vector, channel = (column // channels).to(tl.int64), column % channels
    state = tl.arange(0, STATES)[None, :]
    read += example * read_b + group * read_g + state * read_n
    key += example * key_b + group * key_g + state * key_n
    decay += example * decay_b + head * decay_h
    scale += example * scale_b + head * scale_h
    x += vector * x_s + example * x_b + head * x_h + channel * x_p
    out += vector * tl.num_programs(1) * tokens * channels
    out += (example * tokens * heads + head) * channels + channel
    late, early = place[:, None], place[None, :]
    carried = tl.zeros((STATES, BLOCK), tl.float32)
    for begin in range(0, tokens, T):
        step = begin + place
        token = (tokens - 1 - step if TRANSPOSED else step).to(tl.int64)
        at, present = token[:, None], step < tokens
        held, mapped = present[:, None] & (state < states), present[:, None] & (column < columns)
        source = token + 1 if TRANSPOSED else token
        led = present & (step > 0)  # nothing leads to the first
        log = tl.load(decay + source * decay_l, mask=led, other=0.0).to(tl.float32)
        fading = tl.exp2(log * BINARY)
        since = tl.cumprod(fading, 0)
        between = tl.cumprod(tl.where(late > early, fading[:, None], 1.0), 0)
        value = tl.load(x + at * x_l, mask=mapped, other=0.0).to(tl.float32)
        if SCALED:
            factor = tl.load(scale + at * scale_l, mask=present[:, None], other=0.0).to(tl.float32)
            if not TRANSPOSED:
                value *= factor
        reads = tl.load(read + at * read_l, mask=held, other=0.0).to(tl.float32)
        keys = tl.load(key + at * key_l, mask=held, other=0.0).to(tl.float32)
        within = tl.dot(reads, tl.trans(keys), input_precision="ieee")
        within = tl.where(late >= early, within * between, 0.0)
        found = tl.dot(within, value, input_precision="ieee")
        found += tl.dot(reads * since[:, None], carried, input_precision="ieee")
        until = tl.sum(tl.where(late == T - 1, between, 0.0), 0)
        keys *= until[:, None]
        carried *= tl.sum(tl.where(place == T - 1, since, 0.0), 0)
        carried += tl.dot(tl.trans(keys), value, input_precision="ieee")
        if SCALED and TRANSPOSED:
            found *= factor
        tl.store(out + at * heads * channels, found.to(out.dtype.element_ty), mask=mapped)
