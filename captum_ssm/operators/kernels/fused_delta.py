"""A delta rule with decay, and its adjoint, in one launch, for GPUs with Triton.

    S[t] = decay[t] S[t-1] - f[t] (e[t] . S[t-1]) + beta[t] k[t] v[t],   y[t] = q[t] . S[t]

Each program takes some columns of one head of one example, channels of vectors of the stack, from
the first token to the last, token by token; their state does not leave its registers.  Decays are
multiplied by as they come, so that one of zero is one like any other.

The UT transform of :mod:`.ut_transform` would save nothing here.  Without tensor cores it takes as
much arithmetic, its triangular system as many sums one after the other as there are tokens, and its
products operands that no registers hold beside the state.

:takes: q and k (B, L, H, N), step sizes beta (B, L, H), logarithms of decays, at most 0, per head
    (B, L, H), per key channel (B, L, H, N) or None, e (B, L, H, N) or None for k times the decay,
    f / e (B, L, H, N) or None for f = beta k, and vectors v (S, B, L, H, P), all of which may lie
    anyhow in memory.
:gives: y (S, B, L, H, P) in the dtype of v, or the adjoint's output for v, which runs from the
    last token to the first.
:cost: one launch; 3 N multiplications with additions and N multiplications by decays for each
    number of v, or N more where f is not beta k, and sums over N one after the other for each
    token.
:literature: Schlag, Irie and Schmidhuber, Linear Transformers Are Secretly Fast Weight Programmers,
    2021, section 4.2, for the rule; Yang et al., Gated Delta Networks: Improving Mamba2 with Delta
    Rule, 2025, for its decay; Peng et al., RWKV-7 Goose with Expressive Dynamic State Evolution,
    2025, for two keys.
:naive version: ``token_loops.delta_rule``
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from . import gpu
from .arithmetic import BINARY
from .gpu import device_of, jitted, power_of_two

#: Most columns of a program, a few for each of its warps, and most numbers of its state, which are
#: to stay in registers.
_COLUMNS, _STATE = 16, 2**11
#: Most states: of more, several warps would share a column and wait for each other at every token.
_STATES = 512
#: Tokens of which a program has coefficients on their way.
_AHEAD = 4

#: Triton's language, set by :func:`.gpu.jitted` before the kernel is compiled.
tl: Any = None


class DeltaCoefficients(Protocol):
    """The coefficients of the rule; ``query`` is (B, L, H, N)."""

    query: Tensor


def serves(rule: DeltaCoefficients) -> bool:
    """Whether the kernel takes a rule on a GPU: with Triton, and of not too many states."""
    return gpu.has_triton() and 0 < rule.query.shape[3] <= _STATES


def run(
    query: Tensor,
    key: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
    erase_step: Tensor | None,
    v: Tensor,
    *,
    transposed: bool,
) -> Tensor:
    """alpha v, or alpha-transposed v, for S stacked vectors v (S, B, L, H, P)."""
    stack, batch, tokens, heads, channels = v.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not out.numel():
        return out
    # the kernel does not read an option that is missing: any tensor may take its place
    logs, erasing, steps = (key if x is None else x for x in (log_decay, erase, erase_step))
    if logs.dim() == 3:
        logs = logs[..., None].expand(key.shape)
    inputs = query, key, beta, logs, erasing, steps, v
    columns, states = stack * channels, power_of_two(query.shape[3])
    block = min(_COLUMNS, max(1, _STATE // states), power_of_two(columns))
    with device_of(v):
        compiled()[(-(-columns // block), batch * heads)](
            *(*inputs, out, tokens, heads, query.shape[3], columns, channels),
            *(size for x in inputs for size in x.stride()),
            TRANSPOSED=transposed,
            DECAYING=log_decay is not None,
            ERASING=erase is not None,
            APART=erase_step is not None,
            WIDE=beta.dtype == torch.float64,
            BINARY=BINARY,
            AHEAD=_AHEAD,
            BLOCK=block,
            STATES=states,
            num_warps=4,
        )
    return out


@functools.cache
def compiled() -> Any:
    """The kernel as Triton runs it."""
    return jitted(_correct)


def _correct(  # type: ignore[no-untyped-def]
    query, key, beta, decay, erase, steps, x, out, tokens, heads, states, columns, channels,
    query_b, query_l, query_h, query_n, key_b, key_l, key_h, key_n, beta_b, beta_l, beta_h,
    decay_b, decay_l, decay_h, decay_n, erase_b, erase_l, erase_h, erase_n,
    steps_b, steps_l, steps_h, steps_n, x_s, x_b, x_l, x_h, x_p,
    TRANSPOSED: tl.constexpr, DECAYING: tl.constexpr, ERASING: tl.constexpr, APART: tl.constexpr,
    WIDE: tl.constexpr, BINARY: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one head of one example.

    The adjoint goes from the last token to the first, and exchanges q with k, and e with f: it
    writes by q, reads by k and f, and erases along e.  A state lies along a row, of which one warp
    holds all, so that sums over it wait for no other.
    """
    row = tl.program_id(1).to(tl.int64)
    example, head = row // heads, row % heads
    column, state = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATES)
    vector, channel = (column // channels).to(tl.int64), column % channels
    mapped, held = column < columns, state < states
    query += example * query_b + head * query_h + state * query_n
    key += example * key_b + head * key_h + state * key_n
    beta += example * beta_b + head * beta_h
    decay += example * decay_b + head * decay_h + state * decay_n
    erase += example * erase_b + head * erase_h + state * erase_n
    steps += example * steps_b + head * steps_h + state * steps_n
    x += vector * x_s + example * x_b + head * x_h + channel * x_p
    out += vector * tl.num_programs(1) * tokens * channels
    out += (example * tokens * heads + head) * channels + channel
    wide = tl.float64 if WIDE else tl.float32
    carried = tl.zeros((BLOCK, STATES), wide)
    for step in tl.range(0, tokens, num_stages=AHEAD):
        token = tl.cast(tokens - 1 - step if TRANSPOSED else step, tl.int64)
        value = tl.load(x + token * x_l, mask=mapped, other=0.0).to(wide)[:, None]
        read = tl.load(query + token * query_l, mask=held, other=0.0).to(wide)[None, :]
        erases = tl.load(key + token * key_l, mask=held, other=0.0).to(wide)[None, :]
        written = erases * tl.load(beta + token * beta_l).to(wide)
        if DECAYING:
            log = tl.load(decay + token * decay_l, mask=held, other=0.0).to(wide)[None, :]
            fading = tl.exp2(log * BINARY)
            erases *= fading
        else:
            fading = 1.0
        if ERASING:
            erases = tl.load(erase + token * erase_l, mask=held, other=0.0).to(wide)[None, :]
        taken = written
        if APART:
            size = tl.load(steps + token * steps_l, mask=held, other=0.0).to(wide)[None, :]
            taken = erases * size
        if TRANSPOSED:
            carried += read * value
            found = tl.sum(carried * taken, 1)[:, None]
            result = tl.sum(carried * written, 1)[:, None] if APART else found
            carried = carried * fading - erases * found
        else:
            found = tl.sum(carried * erases, 1)[:, None]
            if APART:
                carried = carried * fading - taken * found + written * value
            else:
                carried = carried * fading + written * (value - found)
            result = tl.sum(carried * read, 1)[:, None]
        place = (out + token * heads * channels)[:, None]
        tl.store(place, result.to(out.dtype.element_ty), mask=mapped[:, None])
