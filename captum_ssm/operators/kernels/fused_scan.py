"""The selective scan and its adjoint in one launch, and its gradients, for GPUs with Triton.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t],      y[t] = C[t] . h[t]

Each program takes a few channels of one example from the first token to the last, some tokens at a
time: within these steps are composed by a parallel prefix computation, and the state after them is
carried on.  No state leaves the program, so that what is read and written is what the layer itself
has: steps, vectors and values.  Gradients of coefficients are sums that hold the states of both
ways: for these each state is a channel of its own, and is written.

:takes: dt (B, L, H), A (H, N), B and C (B, L, N) or by group (B, L, G, N), and vectors x
    (S, B, L, H), all of which may lie anyhow in memory.
:gives: y (S, B, L, H) in the dtype of x, or what the adjoint makes of x.
:cost: one launch; an exponential and a logarithm of the tile's tokens of multiplications with
    additions for each of S B L H N states.  Gradients take two launches, eight operations, and
    memory for six times as many numbers as there are states.
:literature: Blelloch, Prefix Sums and Their Applications, 1990, by which Gu and Dao, Mamba:
    Linear-Time Sequence Modeling with Selective State Spaces, 2023, compute the scan on a GPU.
:naive version: ``kernels.selective_scan``
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import gpu
from .arithmetic import BINARY
from .gpu import jitted, power_of_two
from .token_loop import Coefficients

#: Tokens, and channels times states, of what a program holds at a time.
_TOKENS, _COLUMNS = 32, 64

#: What the names stand for in the functions that Triton compiles, which look for them here.
tl: Any = None


def serves(scan: Coefficients) -> bool:
    """Whether the kernel takes a scan on a GPU: with Triton, and of not too many states.

    Args:
        scan: dt, A, B and C.
    """
    return gpu.has_triton() and 0 < scan.a.shape[1] <= _COLUMNS


def run(
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    x: Tensor,
    *,
    transposed: bool,
    scaled: bool = True,
) -> Tensor:
    """alpha x, or alpha-transposed x, for S stacked vectors x (S, B, L, H).

    Args:
        dt, a, b, c: the scan, as above.
        x: the vectors.
        transposed: whether it is the adjoint.
        scaled: whether the adjoint ends with the steps as a factor. Default: True.
    """
    stack, batch, tokens, heads = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    b, c = (v[:, :, None] if v.dim() == 3 else v for v in (b, c))
    key, read = (c, b) if transposed else (b, c)
    states = power_of_two(a.shape[1])
    block = min(_COLUMNS // states, power_of_two(heads))
    compiled()[(-(-heads // block), stack * batch)](
        *(dt, a, key, read, x, out),
        *(batch, tokens, heads, a.shape[1], heads // b.shape[2]),
        *(*dt.stride(), *a.stride(), *key.stride(), *read.stride(), *x.stride()),
        TRANSPOSED=transposed,
        SCALED=scaled,
        WIDE=dt.dtype == torch.float64,
        BINARY=BINARY,
        T=min(_TOKENS, power_of_two(tokens)),
        BLOCK=block,
        STATES=states,
    )
    return out


def differentiable(dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
    """The scan of x (B, L, H), which autograd differentiates once, by all but the rates.

    Args:
        dt, a, b, c: the scan, as above, B and C without groups.
        x: the values.
    """
    found: Tensor = _Differentiable.apply(dt, a, b, c, x)  # type: ignore[no-untyped-call]
    return found


class _Differentiable(torch.autograd.Function):
    """With g[t] = C[t] u[t] + exp(dt[t+1] A) g[t+1], which are the states' gradients by y's, u."""

    @staticmethod
    def forward(ctx: Any, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(dt, a, b, c, x)
        return run(dt, a, b, c, x[None], transposed=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        dt, a, b, c, x = ctx.saved_tensors
        held, pulled = _states(dt, a, b, x, False), _states(dt, a, c, up, True)
        of_b = (pulled @ (dt * x)[..., None]).squeeze(-1)
        of_c = (held @ up[..., None]).squeeze(-1)
        of_written = (b[:, :, None] @ pulled).squeeze(2)
        of_dt = x * of_written
        decay = (dt[:, 1:, None] * a.T).exp_()
        of_dt[:, 1:] += decay.mul_(a.T).mul_(held[:, :-1]).mul_(pulled[:, 1:]).sum(2)
        return of_dt, None, of_b, of_c, dt * of_written


def _states(dt: Tensor, a: Tensor, key: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """The states of all tokens (B, L, N, H), by the key with which each is written (B, L, N)."""
    batch, tokens, heads = x.shape
    count = a.shape[1]
    keys, ones = key[..., None], key.new_ones(()).expand(*key.shape, 1)
    b, c = (ones, keys) if transposed else (keys, ones)
    dt, x = (y.repeat(1, 1, count) for y in (dt, x))
    rates = a.T.reshape(-1, 1)
    found = run(dt, rates, b, c, x[None], transposed=transposed, scaled=False)
    return found.view(batch, tokens, count, heads)


@functools.cache
def compiled() -> Any:
    """The kernel as Triton runs it."""
    return jitted(_scan, _composed)


def _composed(decay, state, next_decay, next_state):  # type: ignore[no-untyped-def]
    """Two steps as one."""
    return decay * next_decay, next_decay * state + next_state


def _scan(  # type: ignore[no-untyped-def]
    dt, a, key, read, x, out,
    batch, tokens, heads, states, per_group,
    dt_b, dt_l, dt_h, a_h, a_n,
    key_b, key_l, key_g, key_n, read_b, read_l, read_g, read_n, x_s, x_b, x_l, x_h,
    TRANSPOSED: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr, BINARY: tl.constexpr,
    T: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of one example, T tokens at a time; a column is a channel and a state of it.

    The adjoint goes from the last token to the first, and a state decays by the step of the token
    it comes from.
    """
    first, row = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    example = row % batch
    column, place = tl.arange(0, BLOCK * STATES), tl.arange(0, T)
    head, state = first + column // STATES, column % STATES
    is_there = ((head < heads) & (state < states))[None, :]
    dt += example * dt_b
    x += row // batch * x_s + example * x_b
    out += row * tokens * heads
    key += example * key_b + head // per_group * key_g + state * key_n
    read += example * read_b + head // per_group * read_g + state * read_n
    wide = tl.float64 if WIDE else tl.float32
    rate = tl.load(a + (head * a_h + state * a_n)[None, :], mask=is_there, other=0.0)
    rate = rate.to(wide) * BINARY
    carried = tl.zeros((BLOCK * STATES,), wide)
    own = first + tl.arange(0, BLOCK)  # the channels of the result
    for begin in range(0, tokens, T):
        step = begin + place
        token = (tokens - 1 - step if TRANSPOSED else step).to(tl.int64)
        present = (step < tokens)[:, None] & is_there
        at = token[:, None]
        size = tl.load(dt + at * dt_l + head * dt_h, mask=present, other=0.0).to(wide)
        written = tl.load(x + at * x_l + head * x_h, mask=present, other=0.0).to(wide)
        written *= tl.load(key + at * key_l, mask=present, other=0.0).to(wide)
        fading = size
        if TRANSPOSED:
            before = present & (step > 0)[:, None]
            fading = tl.load(dt + (at + 1) * dt_l + head * dt_h, mask=before, other=0.0).to(wide)
        else:
            written *= size
        decay = tl.exp2(fading * rate)
        faded, held = tl.associative_scan((decay, written), 0, _composed)
        held += faded * carried[None, :]
        carried = tl.sum(tl.where((place == T - 1)[:, None], held, 0.0), 0)
        held *= tl.load(read + at * read_l, mask=present, other=0.0).to(wide)
        found = tl.sum(tl.reshape(held, (T, BLOCK, STATES)), 2)
        stored = (step < tokens)[:, None] & (own < heads)[None, :]
        if TRANSPOSED and SCALED:
            found *= tl.load(dt + at * dt_l + own * dt_h, mask=stored, other=0.0).to(wide)
        tl.store(out + at * heads + own, found.to(out.dtype.element_ty), mask=stored)
