"""Recurrences chunk by chunk: within a chunk a matrix, between chunks a state.

For the T tokens of a chunk, with the state S (N, P) of each head before them and S' after them,

    y = inner v + reads S,      S' = carry S + transposed writes v

so that a sequence costs matrix products and one step per chunk.  Several chunks in a row are held
at once: what they have to do with no state is done for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .decays import Decays

#: Tokens of a chunk.
CHUNK = 64
#: Tokens of a chunk where few vectors are mapped, which the matrices within chunks would outweigh.
SHORT = 32
#: Most of these vectors of each head.
FEW = 8

#: Tokens of all heads of the chunks held at once (4 MiB of keys of 128 channels in float32).
_HELD = 2**13


class Chunk(NamedTuple):
    """A linear recurrence over C chunks of T tokens each, one after the other.

    Attributes:
        tokens: which they are.
        inner: the matrix within each chunk (B, H, C, T, T).
        reads: what each token reads of the state before its chunk (B, H, C, T, N).
        writes: what each token's value adds to the state after its chunk (B, H, C, T, N).
        carry: what a chunk makes of the state before it: (B, H, C, N, N), or if that is diagonal
            its diagonal (B, H, C, N, 1), or (B, H, C, 1, 1) if it is a number.
        faded: factors (B, H, C, T, 1) on reads, and on writes, which then may be those of G groups
            of heads (B, G, C, T, N); None for no factors.
    """

    tokens: slice
    inner: Tensor
    reads: Tensor
    writes: Tensor
    carry: Tensor
    faded: tuple[Tensor, Tensor] | None = None

    def transposed(self) -> Chunk:
        """The adjoint, of which the last chunk comes first."""
        return Chunk(
            self.tokens,
            self.inner.mT,
            self.writes,
            self.reads,
            self.carry,
            None if self.faded is None else self.faded[::-1],
        )


#: The chunks of some tokens, of which each has so many.
Cut = Callable[[slice, int], Chunk]


def held(tokens: range, length: int, each: int) -> Iterator[slice]:
    """Tokens of the chunks held at once: of several whole chunks, then of a last shorter one.

    Args:
        tokens: all of them.
        length: tokens of a whole chunk.
        each: how many heads, of all examples, a token has.
    """
    whole = tokens.stop - len(tokens) % length
    size = max(1, _HELD // (each * length)) * length
    for start in range(tokens.start, whole, size):
        yield slice(start, min(start + size, whole))
    if whole < tokens.stop:
        yield slice(whole, tokens.stop)


def in_chunks(x: Tensor, length: int) -> Tensor:
    """(..., B, L, H, K) in chunks of so many tokens, or in one of fewer, (..., B, H, C, T, K)."""
    length = min(length, x.shape[-3])
    return torch.unflatten(x, -3, (-1, length)).movedim(-2, -4).contiguous()


def mapped(cut: Cut, v: Tensor, transposed: bool) -> Tensor:
    """alpha v, or alpha-transposed v, for ``v`` (..., B, L, H, P).

    Args:
        cut: the chunks of some tokens; their carries are diagonal.
        v: the values.
        transposed: which of the two.
    """
    batch, tokens, heads, _ = v.shape[-4:]
    length = chunk_length(v)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    state: Tensor | None = None
    parts = list(held(range(tokens), length, batch * heads))
    for part in reversed(parts) if transposed else parts:
        chunk = cut(part, length)
        chunk = chunk.transposed() if transposed else chunk
        reads_faded, writes_faded = chunk.faded or (None, None)
        x = stacked(v[..., part, :, :], length)  # (B, H, C, T, S P)
        result = times(chunk.inner, x)
        written = of_groups(chunk.writes.mT, x if writes_faded is None else writes_faded * x)
        before, state = states(written, chunk.carry, state, transposed)
        read = of_groups(chunk.reads, before)
        result += read if reads_faded is None else read.mul_(reads_faded)
        put(result, out[..., part, :, :])
    return out


def few(v: Tensor) -> bool:
    """Whether ``v`` (..., B, L, H, P) is so few vectors that matrices would outweigh them."""
    return v.shape[:-4].numel() * v.shape[-1] <= FEW


def chunk_length(v: Tensor) -> int:
    """How long chunks best are to map ``v`` (..., B, L, H, P)."""
    return SHORT if few(v) else CHUNK


def stacked(v: Tensor, length: int) -> Tensor:
    """Values (..., B, L, H, P) in chunks, the vectors of a stack side by side (B, H, C, T, S P)."""
    stack = v.flatten(0, -5) if v.dim() > 4 else v[None]
    return in_chunks(stack, length).movedim(0, -2).flatten(-2)


def put(x: Tensor, out: Tensor) -> None:
    """Write what :func:`stacked` made of values of the size of ``out`` to their places."""
    x = torch.unflatten(x, -1, (-1, out.shape[-1])).flatten(2, 3)  # (B, H, L, S, P)
    stack = x.permute(3, 0, 2, 1, 4)
    out.copy_(torch.unflatten(stack, 0, out.shape[:-4]) if out.dim() > 4 else stack[0])


def times(x: Tensor, values: Tensor) -> Tensor:
    """Many matrices (..., T, N) times as many (..., N, P)."""
    if values.shape[-1] == 1:  # products of small matrices with one vector would be slow
        out: Tensor = torch.linalg.vecdot(x, values.mT)
        return out[..., None]
    return x @ values


def of_groups(x: Tensor, values: Tensor) -> Tensor:
    """Matrices (B, G, C, T, N) of groups of heads times values (B, H, C, N, P) of each head."""
    groups, heads = x.shape[1], values.shape[1]
    if groups == heads:
        return x @ values
    # a group's values side by side
    wide = torch.unflatten(values, 1, (groups, -1)).movedim(2, -2).flatten(-2)
    out = torch.unflatten(x @ wide, -1, (heads // groups, -1))  # (B, G, C, T, H / G, P)
    return out.movedim(-2, 2).flatten(1, 2)


def states(
    written: Tensor, carry: Tensor, state: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor]:
    """The states before each chunk (B, H, C, N, P), and after the last of them (B, H, N, P).

    Args:
        written: what each chunk writes (B, H, C, N, P).
        carry: what each makes of the state before it, a diagonal or a number.
        state: the state before the first; None if that is zero.
        backwards: whether the last chunk comes first.
    """
    if carry.shape[-2] == 1:
        return _states_of_numbers(written, carry, state, backwards)
    before = torch.empty_like(written)
    steps = list(zip(before.unbind(2), carry.unbind(2), written.unbind(2), strict=True))
    state = torch.zeros_like(written[:, :, 0]) if state is None else state
    for into, kept, added in reversed(steps) if backwards else steps:
        state = torch.addcmul(added, kept, into.copy_(state))
    return before, state


def _states_of_numbers(
    written: Tensor, carry: Tensor, state: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor]:
    """The same for carries that are numbers: one matrix between chunks in place of many steps."""
    decay = Decays(carry[..., 0, 0])
    earlier = F.pad(decay.between.tril()[..., :-1, :], (0, 0, 1, 0))
    known = F.pad(decay.since[..., :-1, :], (0, 0, 1, 0), value=1.0)
    left = decay.until
    if backwards:
        earlier, known, left = earlier.mT, left, known
    flat = written.flatten(-2)  # (B, H, C, N P)
    before, after = earlier @ flat, left.mT @ flat
    if state is not None:
        start = state.flatten(-2)[:, :, None]
        before.addcmul_(known, start)
        after.addcmul_(decay.total, start)
    return before.view(written.shape), after.view(written[:, :, 0].shape)
