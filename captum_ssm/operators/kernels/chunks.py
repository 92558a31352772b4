"""Recurrences by chunks, with matrices within chunks and states between: the SSD algorithm.

For the T tokens of a chunk, with the state S (N, P) of each head before them and S' after them,

    y = within v + reads S,      S' = carry S + transposed writes v

A sequence then costs matrix products and one step per chunk.  The products that do not use the
state are computed for several neighboring chunks together.

:takes: a function that computes the :class:`Chunk` of some tokens (C chunks of T tokens), and
    values (..., B, L, H, P).
:gives: outputs of the same size, of the recurrence or of its adjoint.
:cost: L (T P + 2 N P) multiplications with additions for a head, L / T steps from chunk to chunk,
    and the cost of computing the chunks.
:literature: Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality, 2024, section 6.
:naive version: ``kernels.semiseparable``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .arithmetic import matmul
from .portions import even_size

#: Number of tokens of a chunk.
CHUNK = 64
#: Number of tokens of a chunk for few vectors, for which a long chunk's matrix costs too much.
SHORT = 32
#: Largest number of vectors per head that counts as few.
FEW = 8

#: Largest number of tokens times heads in memory together (8 MiB of float32 keys with N = 128).
_HELD = 2**14


class Chunk(NamedTuple):
    """A linear recurrence over C neighboring chunks of T tokens each.

    Attributes:
        tokens: slice of the tokens of all chunks.
        within: matrix of each chunk, from its values to its outputs (B, H, C, T, T).
        reads: query of each token for the state before its chunk (B, H, C, T, N).
        writes: key of each token in the state after its chunk (B, H, C, T, N).
        carry: factor by which a chunk multiplies the state: a matrix (B, H, C, N, N), a diagonal
            (B, H, C, N, 1), or a scalar (B, H, C, 1, 1).
        faded: factors (B, H, C, T, 1) of the reads and of the writes; then reads and writes may be
            per group of heads (B, G, C, T, N). Default: None, no factors.
    """

    tokens: slice
    within: Tensor
    reads: Tensor
    writes: Tensor
    carry: Tensor
    faded: tuple[Tensor, Tensor] | None = None

    def transposed(self) -> Chunk:
        """Return the chunks of the adjoint, which runs from the last chunk to the first."""
        return Chunk(
            tokens=self.tokens,
            within=self.within.mT,
            reads=self.writes,
            writes=self.reads,
            # a diagonal or a scalar is its own transpose
            carry=self.carry.mT if self.carry.shape[-1] > 1 else self.carry,
            faded=None if self.faded is None else self.faded[::-1],
        )


#: Function that returns the chunks of a slice of tokens, given the length of a whole chunk.
ChunkOf = Callable[[slice, int], Chunk]


def runs_of_chunks(tokens: range, length: int, batch_heads: int) -> Iterator[slice]:
    """Yield slices of several whole chunks to compute together, then a shorter last chunk.

    Args:
        tokens: range of all tokens.
        length: number of tokens of a whole chunk.
        batch_heads: number of heads per token, over all examples: B * H.
    """
    chunks, rest = divmod(len(tokens), length)
    rest_start = tokens.stop - rest
    size = even_size(max(1, chunks), max(1, _HELD // (batch_heads * length))) * length
    for start in range(tokens.start, rest_start, size):
        yield slice(start, min(start + size, rest_start))
    if rest:
        yield slice(rest_start, tokens.stop)


def in_chunks(x: Tensor, length: int) -> Tensor:
    """Split ``x`` (..., B, L, H, N) into chunks of ``length`` tokens, (..., B, H, C, T, N).

    If there are fewer tokens than ``length``, they form one chunk.
    """
    length = min(length, x.shape[-3])
    return torch.unflatten(x, -3, (-1, length)).movedim(-2, -4).contiguous()


class ChunkSteps:
    """Run a recurrence chunk by chunk, and keep its state between calls.

    Args:
        chunk_of: function that computes the chunks of some tokens.
        length: number of tokens of a whole chunk.
        transposed: whether to run the adjoint, from the last token to the first.
    """

    def __init__(self, chunk_of: ChunkOf, length: int, transposed: bool) -> None:
        self.chunk_of = chunk_of
        self.length = length
        self.transposed = transposed
        self.state: Tensor | None = None

    def __call__(self, v: Tensor, part: slice, out: Tensor) -> None:
        """Map values (..., B, T, H, P) of the tokens ``part``; write within v + reads S to out."""
        chunk = self.chunk_of(part, self.length)
        chunk = chunk.transposed() if self.transposed else chunk
        length, groups = chunk.within.shape[-1], chunk.writes.shape[1]
        x = _by_group(v.reshape(-1, *v.shape[-4:]), length, groups)  # (B, G, C, T, S, H / G, P)
        out_by_group = _by_group(out.view(-1, *out.shape[-4:]), length, groups)  # views ``out``
        reads_faded, writes_faded = (
            None if factor is None else _factors_by_group(factor, groups)
            for factor in chunk.faded or (None, None)
        )
        states = self._states_before(chunk, x if writes_faded is None else x * writes_faded)
        from_states = torch.unflatten(matmul(chunk.reads, states.flatten(-3)), -1, x.shape[4:])
        from_chunk = _times_matrices(chunk.within, x)
        if reads_faded is None:
            torch.add(from_chunk, from_states, out=out_by_group)
        else:
            torch.addcmul(from_chunk, reads_faded, from_states, out=out_by_group)

    def _states_before(self, chunk: Chunk, x: Tensor) -> Tensor:
        """Return the state before each chunk (B, G, C, N, S, H / G, P); store the last state."""
        written = torch.unflatten(matmul(chunk.writes.mT, x.flatten(-3)), -1, x.shape[4:])
        carry = chunk.carry
        if carry.shape[-1] == 1:  # otherwise a matrix
            carry = _factors_by_group(carry, chunk.writes.shape[1])
        before, self.state = _run_over_chunks(written, carry, self.state, self.transposed)
        return before


def run_all(chunk_of: ChunkOf, v: Tensor, transposed: bool) -> Tensor:
    """Return alpha v, or alpha-transposed v, for values ``v`` (..., B, L, H, P) of all tokens.

    Args:
        chunk_of: function that computes the chunks of some tokens.
        v: the values.
        transposed: whether to use the adjoint.
    """
    length = SHORT if few_vectors(v) else CHUNK
    steps, tokens = ChunkSteps(chunk_of, length, transposed), range(v.shape[-3])
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    parts = list(runs_of_chunks(tokens, length, v.shape[-4] * v.shape[-2]))
    with torch.inference_mode():  # many calls, each faster without a graph
        for part in reversed(parts) if transposed else parts:
            steps(v[..., part, :, :], part, out[..., part, :, :])
    return out


def few_vectors(v: Tensor) -> bool:
    """Return True if ``v`` (..., B, L, H, P) has too few vectors to gain from long chunks."""
    return v.shape[:-4].numel() * v.shape[-1] <= FEW


def _by_group(x: Tensor, length: int, groups: int) -> Tensor:
    """View a stack (S, B, L, H, P) in chunks and groups of heads, (B, G, C, T, S, H / G, P)."""
    x = torch.unflatten(torch.unflatten(x, 3, (groups, -1)), 2, (-1, length))
    return x.permute(1, 4, 2, 3, 0, 5, 6)


def _factors_by_group(x: Tensor, groups: int) -> Tensor:
    """View one factor per head (B, H, C, T, 1) in groups of heads, (B, G, C, T, 1, H / G, 1)."""
    return torch.unflatten(x, 1, (groups, -1)).movedim(2, -1)[..., None]


def _times_matrices(matrices: Tensor, x: Tensor) -> Tensor:
    """Return matrices per head (B, H, C, T, T) times values (B, G, C, T, S, H / G, P)."""
    by_head = x.movedim(-2, 2).flatten(1, 2)  # (B, H, C, T, S, P)
    out = matmul(matrices, by_head.flatten(-2).contiguous())
    out = torch.unflatten(torch.unflatten(out, -1, by_head.shape[4:]), 1, (x.shape[1], -1))
    return out.movedim(2, -2)


def _run_over_chunks(
    terms: Tensor, carry: Tensor, state: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor]:
    """Run state = carry * state + term; return the state before each chunk, and the last state.

    Args:
        terms: the term that each chunk adds (B, G, C, N, S, H / G, P); overwritten.
        carry: factor of the state before each chunk: a diagonal (B, G, C, N or 1, 1, H / G, 1), or
            a matrix (B, H, C, N, N), with G = H.
        state: state before the first chunk (B, G, N, S, H / G, P); None if it is zero.
        backwards: whether to run from the last chunk to the first.
    """
    steps = list(zip(carry.unbind(2), terms.unbind(2), strict=True))
    order = range(len(steps))[:: -1 if backwards else 1]
    states: list[Tensor] = [terms] * len(steps)  # each is replaced
    for c in order:
        factor, term = steps[c]
        states[c] = torch.zeros_like(term) if state is None else state
        # ``term`` becomes the state after the chunk, in place; a zero state adds nothing
        if state is not None and carry.dim() == 5:  # matrices
            term += matmul(factor, state.flatten(-3)).view(state.shape)
        elif state is not None:
            term.addcmul_(factor, state)
        state = term
    assert state is not None
    return states[0][:, :, None] if len(states) == 1 else torch.stack(states, 2), state
