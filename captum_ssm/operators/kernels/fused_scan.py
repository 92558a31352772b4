"""The selective scan and its adjoint in one launch, and its gradients, for GPUs with Triton.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t],      y[t] = C[t] . h[t]

Each GPU program maps a few channels of one example from the first token to the last, a tile of
tokens at a time.  A parallel prefix computation composes the steps within a tile, and the state
after the tile is carried to the next.  States are never written to memory: a program only reads and
writes steps, vectors and values.  Gradients of coefficients are sums over states of the forward and
the backward scan.  With the outputs' gradients u, the state of the backward scan is
g[t] = C[t] u[t] + exp(dt[t+1] A) g[t+1].  Only one state h for every few tokens is stored; the
backward scan recomputes the others.  Names such as ``of_x`` are gradients, here of x.

:takes: dt (B, L, H), A as ``a`` (H, N), B and C as ``b`` and ``c`` (B, L, N), per group
    (B, L, G, N), or per vector (S, B, L, G, N), and vectors x (S, B, L, H), in any memory layout.
:gives: y (S, B, L, H) in the dtype of x, or the adjoint's output for x.
:cost: one launch; for each of S B L H N states an exponential and log T multiplications with
    additions, for tiles of T tokens. Gradients take two launches and two sums, three times the
    arithmetic, and memory for one in 16 states and for gradients of B and C per channel block.
:literature: Blelloch, Prefix Sums and Their Applications, 1990; Gu and Dao, Mamba: Linear-Time
    Sequence Modeling with Selective State Spaces, 2023, compute the scan on a GPU in this way, and
    recompute states for gradients.
:naive version: ``kernels.selective_scan``
"""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .arithmetic import BINARY
from .token_loop import ScanCoefficients

#: Number of tokens, and of channels times states, in a program's tile.
_TOKENS, _COLUMNS = 32, 64
#: The same sizes for gradients; more channels per program mean fewer partial sums to write.
_PULLED_TOKENS, _PULLED_COLUMNS = 16, 256

#: The module ``triton.language``, imported before a kernel is compiled.
tl: Any = None


@functools.cache
def has_triton() -> bool:
    """Return True if Triton is installed."""
    return find_spec("triton") is not None


def serves(scan: ScanCoefficients) -> bool:
    """Return True if this kernel supports ``scan``: Triton is installed and N is small enough."""
    return has_triton() and 0 < scan.a.shape[1] <= _COLUMNS


def run(dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor, *, transposed: bool) -> Tensor:
    """Return the scan's outputs y, or the adjoint's, for S stacked vectors x (S, B, L, H)."""
    stack, batch, tokens, heads = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    b, c = by_vector(b, stack), by_vector(c, stack)
    key, read = (c, b) if transposed else (b, c)
    states = power_of_two(a.shape[1])
    block = min(_COLUMNS // states, power_of_two(heads))  # channels per program
    with device_of(x):  # compiled()[grid of programs](arguments)
        compiled()[(-(-heads // block), stack * batch)](
            *(dt, a, key, read, x, out),
            *(batch, tokens, heads, a.shape[1], heads // b.shape[3]),
            *(*dt.stride(), *a.stride(), *key.stride(), *read.stride(), *x.stride()),
            TRANSPOSED=transposed,
            WIDE=dt.dtype == torch.float64,
            BINARY=BINARY,
            T=min(_TOKENS, power_of_two(tokens)),
            BLOCK=block,
            STATES=states,
        )
    return out


def by_vector(shared: Tensor, stack: int) -> Tensor:
    """View ``b`` or ``c`` as (S, B, L, G, N), for each of S stacked vectors and G head groups."""
    if shared.dim() == 3:
        shared = shared[:, :, None]
    return shared.expand(stack, *shared.shape[-4:])


def gradients(
    dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of dt, b and c (each summed over the S vectors) and of x.

    Args:
        dt, a, b, c: coefficients of the scan; see the module's docstring.
        x: the vectors (S, B, L, H).
        up: gradients of the scan's outputs (S, B, L, H).
    """
    coefficients = dt, a, by_vector(b, len(x)), by_vector(c, len(x))
    states = states_between_runs(*coefficients, x)
    of_x, of_dt, of_shared = gradients_from_states(*coefficients, x, up, states)
    of_b, of_c = of_shared.sum((1, 2))  # over channel blocks and vectors
    return (of_dt.sum(0) if len(x) > 1 else of_dt[0]), of_b, of_c, of_x


def states_between_runs(dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
    """Run the scan, and return the state h before each run of 16 tokens.

    Args:
        dt, a: coefficients of the scan; see the module's docstring.
        b, c: input and output vectors of the scan, for each stacked vector (S, B, L, G, N).
        x: the vectors (S, B, L, H).

    Returns:
        The states (programs, S B, runs, columns); a column is a pair of channel and state index.
    """
    block, blocks = blocks_of(x.shape[3] // b.shape[3], a.shape[1])
    runs = -(-x.shape[2] // _PULLED_TOKENS)
    columns = block * power_of_two(a.shape[1])  # Triton's tiles have powers of two
    states = dt.new_empty(b.shape[3] * blocks, x.shape[0] * x.shape[1], runs, columns)
    # x and states also take the places of the arguments that are not used without BACK
    _launch((dt, a, b, c, x, x, states, x, states, states), back=False)
    return states


def gradients_from_states(
    dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor, up: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of x and dt per vector, and of ``b`` and ``c`` per vector and channel block.

    Args:
        dt, a, b, c, x: as in :func:`states_between_runs`.
        up: gradients of the scan's outputs (S, B, L, H).
        states: the states that :func:`states_between_runs` returned.

    Returns:
        Gradients of x and of dt (S, B, L, H), and of ``b`` and ``c`` in one tensor
        (2, blocks, S, B, L, G, N) in the dtype of dt.
    """
    _, blocks = blocks_of(x.shape[3] // b.shape[3], a.shape[1])
    of_x, of_dt = x.new_empty(x.shape), dt.new_empty(x.shape)
    of_shared = dt.new_empty(2, blocks, *b.shape)
    _launch((dt, a, b, c, x, up, states, of_x, of_dt, of_shared), back=True)
    return of_x, of_dt, of_shared


def blocks_of(heads: int, states: int) -> tuple[int, int]:
    """Return the number of channels per gradient program, and the number of programs."""
    block = min(_PULLED_COLUMNS // power_of_two(states), power_of_two(heads))
    return block, -(-heads // block)


def _launch(tensors: tuple[Tensor, ...], *, back: bool) -> None:
    """Launch :func:`_pull` to compute gradients if ``back``, and to store states otherwise.

    ``tensors`` are its first ten arguments; any tensors take the places of unused ones.
    """
    dt, a, b, c, x, up, *_ = tensors
    stack, batch, tokens, heads = x.shape
    groups, states = b.shape[3:]
    block, blocks = blocks_of(heads // groups, states)
    if not x.numel():
        return
    with device_of(x):
        compiled_gradients()[(groups * blocks, stack * batch)](
            *tensors,
            *(batch, tokens, heads, states, heads // groups, blocks),
            *(*dt.stride(), *a.stride(), *b.stride(), *c.stride(), *x.stride(), *up.stride()),
            BACK=back,
            WIDE=dt.dtype == torch.float64,
            BINARY=BINARY,
            T=_PULLED_TOKENS,
            BLOCK=block,
            STATES=power_of_two(states),
            num_warps=8,
        )


@functools.cache
def compiled() -> Any:
    """Return :func:`_scan`, wrapped for compilation by Triton."""
    return jitted(_scan)


@functools.cache
def compiled_gradients() -> Any:
    """Return :func:`_pull`, wrapped for compilation by Triton."""
    return jitted(_pull)


def jitted(kernel: Any) -> Any:
    """Wrap a kernel for Triton, which is optional and imported only here.

    A kernel looks up ``tl`` and ``composed`` as globals of its module, so these are set first.
    """
    triton, module_globals = import_module("triton"), kernel.__globals__
    module_globals["tl"] = import_module("triton.language")
    if inspect.isfunction(module_globals["composed"]):  # not yet wrapped for a different kernel
        module_globals["composed"] = triton.jit(module_globals["composed"])
    return triton.jit(kernel)


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the tensor's GPU is current, because Triton launches there.

    A model may use several GPUs.  On a CPU (Triton's interpreter) the context does nothing.
    """
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def composed(decay, state, next_decay, next_state):  # type: ignore[no-untyped-def]
    """Compose two steps h -> decay h + state of a recurrence; Triton compiles this function."""
    return decay * next_decay, next_decay * state + next_state


def _scan(  # type: ignore[no-untyped-def]
    dt, a, key, read, x, out,
    batch, tokens, heads, states, per_group,
    dt_b, dt_l, dt_h, a_h, a_n,
    key_s, key_b, key_l, key_g, key_n, read_s, read_b, read_l, read_g, read_n, x_s, x_b, x_l, x_h,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, BINARY: tl.constexpr,
    T: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Write out[t] = read[t] . h[t] for BLOCK channels of one example, T tokens at a time.

    The states are h[t] = exp(dt[t] a) h[t-1] + dt[t] key[t] x[t].  A column is a pair of channel
    and state index.  The adjoint runs from the last token to the first; its step t uses the decay
    of token t + 1, and dt[t] multiplies out[t] instead of x[t].

    Arguments such as ``key_l`` are the strides of a tensor's dimensions, named as in the module's
    docstring (s, b, l, h, g, n).  A group has ``per_group`` heads.
    """
    first, row = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    vector, example = row // batch, row % batch
    column, place = tl.arange(0, BLOCK * STATES), tl.arange(0, T)
    head, state = first + column // STATES, column % STATES
    is_there = ((head < heads) & (state < states))[None, :]
    dt += example * dt_b
    x += vector * x_s + example * x_b
    out += row * tokens * heads
    key += vector * key_s + example * key_b + head // per_group * key_g + state * key_n
    read += vector * read_s + example * read_b + head // per_group * read_g + state * read_n
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
        step_size = tl.load(dt + at * dt_l + head * dt_h, mask=present, other=0.0).to(wide)
        written = tl.load(x + at * x_l + head * x_h, mask=present, other=0.0).to(wide)
        written *= tl.load(key + at * key_l, mask=present, other=0.0).to(wide)
        next_dt = step_size  # the adjoint's state decays by the step of the token after
        if TRANSPOSED:
            before = present & (step > 0)[:, None]
            next_dt = tl.load(dt + (at + 1) * dt_l + head * dt_h, mask=before, other=0.0).to(wide)
        else:
            written *= step_size
        decay = tl.exp2(next_dt * rate)
        decays, h = tl.associative_scan((decay, written), 0, composed)  # as if the tile were first
        h += decays * carried[None, :]
        carried = tl.sum(tl.where((place == T - 1)[:, None], h, 0.0), 0)
        h *= tl.load(read + at * read_l, mask=present, other=0.0).to(wide)
        result = tl.sum(tl.reshape(h, (T, BLOCK, STATES)), 2)
        stored = (step < tokens)[:, None] & (own < heads)[None, :]
        if TRANSPOSED:
            result *= tl.load(dt + at * dt_l + own * dt_h, mask=stored, other=0.0).to(wide)
        tl.store(out + at * heads + own, result.to(out.dtype.element_ty), mask=stored)


def _pull(  # type: ignore[no-untyped-def]
    dt, a, b, c, x, up, kept, of_x, of_dt, of_shared,
    batch, tokens, heads, states, per_group, blocks,
    dt_b, dt_l, dt_h, a_h, a_n, b_s, b_b, b_l, b_g, b_n, c_s, c_b, c_l, c_g, c_n,
    x_s, x_b, x_l, x_h, up_s, up_b, up_l, up_h,
    BACK: tl.constexpr, WIDE: tl.constexpr, BINARY: tl.constexpr,
    T: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Store states, or with BACK compute gradients, of BLOCK channels of one group and example.

    Without BACK, the state before every T tokens is stored in ``kept``; ``c``, ``up`` and ``of_*``
    are not used.  With BACK, states are recomputed from ``kept``: ``h`` is first the state after
    the previous token, so nothing is divided by a decay.  ``of_h`` is the gradient of the states.
    ``of_shared`` receives the gradients of B (``of_key``), then of C (``of_read``).  Each column is
    a pair of a channel and a state index.  Strides are as in :func:`_scan`.
    """
    group, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row = tl.program_id(1).to(tl.int64)
    vector, example = row // batch, row % batch
    first, end = group * per_group + block * BLOCK, (group + 1) * per_group
    column, place = tl.arange(0, BLOCK * STATES), tl.arange(0, T)
    head, state = first + column // STATES, column % STATES
    is_there = ((head < end) & (state < states))[None, :]
    dt += example * dt_b
    x += vector * x_s + example * x_b
    up += vector * up_s + example * up_b
    b += vector * b_s + example * b_b + group * b_g + state * b_n
    c += vector * c_s + example * c_b + group * c_g + state * c_n
    of_x += row * tokens * heads
    of_dt += row * tokens * heads
    groups = tl.num_programs(0) // blocks
    rows = tl.num_programs(1)
    size = tokens.to(tl.int64) * groups * states  # of one program's results for B, or for C
    of_b = of_shared + (block * rows + row) * size
    of_c = of_b + blocks * rows * size
    runs = tl.cdiv(tokens, T)
    kept += (tl.program_id(0) * rows + row) * runs * BLOCK * STATES + column
    wide = tl.float64 if WIDE else tl.float32
    rate = tl.load(a + (head * a_h + state * a_n)[None, :], mask=is_there, other=0.0).to(wide)
    own, state_index = first + tl.arange(0, BLOCK), tl.arange(0, STATES)
    carried = tl.zeros((BLOCK * STATES,), wide)
    for run in range(0, runs):
        begin = (runs - 1 - run if BACK else run) * T
        at = (begin + place)[:, None].to(tl.int64)
        present = (at < tokens) & is_there
        # each token's contribution to the state; with BACK the contribution of the token before
        source = at - 1 if BACK else at
        has_source = present & (place > 0)[:, None] if BACK else present
        step = tl.load(dt + source * dt_l + head * dt_h, mask=has_source, other=0.0).to(wide)
        written = tl.load(x + source * x_l + head * x_h, mask=has_source, other=0.0).to(wide) * step
        written *= tl.load(b + source * b_l, mask=has_source, other=0.0).to(wide)
        decays, h = tl.associative_scan((tl.exp2(step * rate * BINARY), written), 0, composed)
        stored_state = kept + begin // T * (BLOCK * STATES)
        if BACK:
            h += decays * tl.load(stored_state)[None, :]
            step = tl.load(dt + at * dt_l + head * dt_h, mask=present, other=0.0).to(wide)
            value = tl.load(x + at * x_l + head * x_h, mask=present, other=0.0).to(wide)
            key = tl.load(b + at * b_l, mask=present, other=0.0).to(wide)
            h *= tl.exp2(step * rate * BINARY)
            of_out = tl.load(up + at * up_l + head * up_h, mask=present, other=0.0).to(wide)
            of_read = (h + step * value * key) * of_out
            # gradients of the states, from the tile's last token to its first
            back = begin + T - 1 - place[:, None].to(tl.int64)
            inside = (back < tokens) & is_there
            after = (back + 1 < tokens) & is_there
            next_dt = tl.load(dt + (back + 1) * dt_l + head * dt_h, mask=after, other=0.0).to(wide)
            of_h = tl.load(up + back * up_l + head * up_h, mask=inside, other=0.0).to(wide)
            of_h *= tl.load(c + back * c_l, mask=inside, other=0.0).to(wide)
            decays, of_h = tl.associative_scan(
                (tl.exp2(next_dt * rate * BINARY), of_h), 0, composed
            )
            of_h += decays * carried[None, :]
            carried = tl.sum(tl.where((place == T - 1)[:, None], of_h, 0.0), 0)
            of_h = tl.trans(tl.flip(tl.trans(of_h), 1))
            of_key = tl.sum(tl.reshape(of_h * step * value, (T, BLOCK, STATES)), 1)
            of_read = tl.sum(tl.reshape(of_read, (T, BLOCK, STATES)), 1)
            shared = (at < tokens) & (state_index < states)[None, :]
            into = (at * groups + group) * states + state_index[None, :]
            tl.store(of_b + into, of_key, mask=shared)
            tl.store(of_c + into, of_read, mask=shared)
            of_written = tl.sum(tl.reshape(of_h * key, (T, BLOCK, STATES)), 2)
            of_decay = tl.sum(tl.reshape(h * of_h * rate, (T, BLOCK, STATES)), 2)
            stored = (at < tokens) & (own < end)[None, :]
            step = tl.load(dt + at * dt_l + own * dt_h, mask=stored, other=0.0).to(wide)
            value = tl.load(x + at * x_l + own * x_h, mask=stored, other=0.0).to(wide)
            into = at * heads + own
            tl.store(of_x + into, (step * of_written).to(of_x.dtype.element_ty), mask=stored)
            tl.store(of_dt + into, value * of_written + of_decay, mask=stored)
        else:
            h += decays * carried[None, :]
            tl.store(stored_state, carried)
            carried = tl.sum(tl.where((place == T - 1)[:, None], h, 0.0), 0)
