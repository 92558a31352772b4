"""Matrices of recurrences from chunks: assembly of a hierarchically semiseparable matrix.

For two neighboring chunks, with reads and writes as in :class:`.Chunk`,

    alpha[second, first] = second.reads . transposed first.writes

is a submatrix (tile) of rank N.  The two chunks together are one longer chunk, whose reads and
writes are computed from the two chunks' reads and writes.  Joining chunks in pairs, level by level,
expresses all tiles of a matrix as products of two thin factors.

:takes: the chunks of all tokens up to the last row, and row and column factors (B, H, L, P).
:gives: the matrix of every head (B, H, L, L), or the last R rows of the sum over heads (B, R, L).
:cost: L^2 N / 2 multiplications with additions for the entries of a head's matrix, and
    L N log(L / T) to join chunks, or L N^2 log(L / T) if a carry is a matrix.
:literature: Chandrasekaran, Gu and Pals, A Fast ULV Decomposition Solver for Hierarchically
    Semiseparable Representations, 2006, where carries are called translation operators.
:naive version: ``kernels.semiseparable``, ``kernels.decays_between``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from .chunks import CHUNK, Chunk, ChunkOf, in_chunks, runs_of_chunks
from .portions import at_a_time
from .within_chunk import Decays

#: Largest number of elements of tiles computed together (1 MiB in float32).
_TILE_ELEMENTS = 2**18


class _Span(NamedTuple):
    """A run of tokens, with factors that read the state before it and write the state after it."""

    tokens: slice
    reads: Tensor
    writes: Tensor


#: Function to call for a tile, with its rows, its columns, the rows' reads, the columns' writes.
WriteTile = Callable[[slice, slice, Tensor, Tensor], None]


def chunks_up_to(chunk_of: ChunkOf, rows: range, each: int) -> list[Chunk]:
    """Return chunks of all tokens up to the last row; one of the chunks begins at the first row.

    Args:
        chunk_of: function that computes the chunks of some tokens.
        rows: indices of the rows.
        each: number of heads per token, over all examples: B * H.
    """
    runs = (runs_of_chunks(tokens, CHUNK, each) for tokens in (range(rows.start), rows))
    return [_by_head(chunk_of(part, CHUNK)) for part in chain.from_iterable(runs)]


def _by_head(chunk: Chunk) -> Chunk:
    """Return the chunk with reads and writes per head (B, H, C, T, N).

    The G groups of heads may share reads and writes (B, G, C, T, N). What differs between the heads
    of a group are the factors ``faded`` (B, H, C, T, 1): decays since the chunk's start (of reads)
    and until its end (of writes). They are multiplied into reads and writes.
    """
    if chunk.faded is None:
        return chunk
    heads = chunk.within.shape[1]
    reads, writes = (
        x.repeat_interleave(heads // x.shape[1], 1) * factor
        for x, factor in zip((chunk.reads, chunk.writes), chunk.faded, strict=True)
    )
    return chunk._replace(reads=reads, writes=writes, faded=None)


def _decay_chunks(decay: Tensor, rows: range) -> list[Chunk]:
    """Return the chunks of alpha[i, j] = product of decay[t] over j < t <= i, up to the last row.

    Above the diagonal the matrices contain arbitrary values of at most 1. Do not write to them.
    """

    def chunk(part: slice, length: int) -> Chunk:
        products = Decays(in_chunks(decay[:, part, :, None], length).squeeze(-1))
        return Chunk(part, products.between, products.since, products.until, products.total)

    return chunks_up_to(chunk, rows, decay.shape[0] * decay.shape[2])


def weigh(chunk: Chunk, left: Tensor, right: Tensor) -> Chunk:
    """Return the chunk with rows times ``left`` and columns times ``right``, both (B, H, L, 1)."""
    left, right = (
        torch.unflatten(x[:, :, chunk.tokens], 2, chunk.within.shape[2:4]) for x in (left, right)
    )
    within = chunk.within * left * right.mT
    return chunk._replace(within=within, reads=left * chunk.reads, writes=right * chunk.writes)


def assemble(chunks: Sequence[Chunk], out: Tensor) -> Tensor:
    """Write the matrix of every head into ``out`` (B, H, L, L), which is zero, and return it."""

    def write(rows: slice, columns: slice, reads: Tensor, writes: Tensor) -> None:
        out[..., rows, columns] = reads @ writes.mT

    for at, within, _ in _single_chunks(chunks):
        out[..., at, at] = within
    _write_tiles(chunks, 0, write)
    return out


def decay_matrices(decay: Tensor) -> Tensor:
    """Return matrices (B, H, L, L): the product of decay[j+1..i] for j <= i, and 0 for j > i."""
    batch, tokens, heads = decay.shape
    chunks = [
        chunk._replace(within=chunk.within.tril()) for chunk in _decay_chunks(decay, range(tokens))
    ]
    return assemble(chunks, decay.new_zeros(batch, heads, tokens, tokens))


def sum_over_heads(chunks: Sequence[Chunk], out: Tensor) -> Tensor:
    """Return the last R rows of the sum of all heads' matrices.

    Args:
        chunks: chunks of all L tokens; one of them begins at the first of the rows.
        out: zeros (B, R, L); written to and returned.
    """
    start = out.shape[-1] - out.shape[-2]

    def write(rows: slice, columns: slice, reads: Tensor, writes: Tensor) -> None:
        into = out[:, _less(rows, start), columns]
        for tile, read, written in zip(into, reads, writes, strict=True):
            tile.addbmm_(read, written.mT)

    for at, within, _ in _single_chunks(_from(chunks, start)):
        out[:, _less(at, start), at] = within.sum(1)
    _write_tiles(chunks, start, write)
    return out


def sums_over_channels(
    chunks: Sequence[Chunk], left: Tensor, rights: Sequence[Tensor], out: Tensor
) -> Tensor:
    """Sum left[i, c] alpha_c[i, j] right[j, c] over channels, for the last R rows i.

    Args:
        chunks: chunks of all L tokens; one of them begins at the first of the rows.
        left: row factors (B, H, L, P).
        rights: column factors, one tensor (B, H, L, P) for each sum.
        out: zeros, (B, R, L) for each of the sums; written to and returned.
    """
    start = out.shape[-1] - out.shape[-2]

    def write(rows: slice, columns: slice, reads: Tensor, writes: Tensor) -> None:
        into = out[..., _less(rows, start), columns]
        # few heads at a time: their tiles stay in the cache
        size = max(1, at_a_time(_TILE_ELEMENTS, into.device) // into[0].numel())
        for first in range(0, reads.shape[1], size):
            some = slice(first, first + size)
            tile = reads[:, some] @ writes[:, some].mT
            row = left[:, some, rows]
            for total, right in zip(into, rights, strict=True):
                total += (row @ right[:, some, columns].mT).mul_(tile).sum(1)

    for at, within, _ in _single_chunks(_from(chunks, start)):
        for total, right in zip(out, rights, strict=True):
            weight = left[..., at, :] @ right[..., at, :].mT
            total[:, _less(at, start), at] = weight.mul_(within).sum(1)
    _write_tiles(chunks, start, write)
    return out


def sums_over_groups(
    decay: Tensor,
    query: Tensor,
    key: Tensor,
    left: Tensor,
    rights: Sequence[Tensor],
    out: Tensor,
) -> Tensor:
    """Compute :func:`sums_over_channels` of alpha[i, j] = q[i] . k[j] times decays over j+1..i.

    The heads of a group share q and k, so q[i] . k[j] multiplies one sum over all channels of the
    group.  For a tile between two chunks this sum is one matrix product of decayed factors.

    Args:
        decay: decay of each token and head (B, L, H).
        query: queries of each group (B, L, G, N).
        key: keys of each group (B, L, G, N).
        left: row factors (B, L, H, P).
        rights: column factors, one tensor (B, L, H, P) for each sum.
        out: zeros, (B, R, L) for each of the sums; written to and returned.
    """
    start, groups = out.shape[-1] - out.shape[-2], query.shape[2]
    chunks = _decay_chunks(decay, range(start, out.shape[-1]))

    def grams(rows: slice, columns: slice) -> Tensor:
        return query[:, rows].transpose(1, 2) @ key[:, columns].permute(0, 2, 3, 1)

    def channels(x: Tensor, factor: Tensor) -> Tensor:
        """Return ``x`` (B, T, H, P) times factors (B, H, T, 1), by group (B, G, T, H P / G)."""
        faded = torch.unflatten(x * factor.transpose(1, 2), 2, (groups, -1))
        return faded.flatten(3).transpose(1, 2)

    def write(rows: slice, columns: slice, reads: Tensor, writes: Tensor) -> None:
        row, gram = channels(left[:, rows], reads), grams(rows, columns)
        for total, right in zip(out, rights, strict=True):
            found = row @ channels(right[:, columns], writes).mT
            _add_groups(total[:, _less(rows, start), columns], found, gram)

    for at, within, _ in _single_chunks(_from(chunks, start)):
        # above the diagonal, the decays within a chunk are arbitrary numbers
        row, gram = left[:, at].transpose(1, 2), grams(at, at).tril_()
        for total, right in zip(out, rights, strict=True):
            found = (row @ right[:, at].permute(0, 2, 3, 1)).mul_(within)
            found = torch.unflatten(found, 1, (groups, -1)).sum(2)
            _add_groups(total[:, _less(at, start), at], found, gram)
    _write_tiles(chunks, start, write)
    return out


def _add_groups(into: Tensor, sums: Tensor, grams: Tensor) -> None:
    """Add the sum over groups of ``sums * grams``, each (B, G, R, W), to ``into`` (B, R, W)."""
    for of_channels, gram in zip(sums.unbind(1), grams.unbind(1), strict=True):
        into.addcmul_(of_channels, gram)


def _write_tiles(chunks: Sequence[Chunk], start: int, write: WriteTile) -> None:
    """Call ``write`` for each tile below the diagonal chunks, in the rows from ``start`` on."""
    wanted = _from(chunks, start)
    earlier = chunks[: len(chunks) - len(wanted)]
    rows = _joined(wanted, write, alone=not earlier)
    if earlier:
        columns = _joined(earlier)
        write(rows.tokens, columns.tokens, rows.reads, columns.writes)


def _joined(chunks: Sequence[Chunk], write: WriteTile | None = None, alone: bool = False) -> _Span:
    """Join neighboring chunks in pairs until one run is left, and return the run.

    Args:
        chunks: neighboring chunks.
        write: function to call for the tile between the chunks of each pair. Default: None.
        alone: whether these are all chunks, so that the reads and writes of the last pair are not
            needed. Default: False.
    """
    begin = chunks[0].tokens.start
    reads, writes = (
        torch.cat([c.reads.flatten(2, 3) for c in chunks], 2),
        torch.cat([c.writes.flatten(2, 3) for c in chunks], 2),
    )
    spans = [(at, carry) for at, _, carry in _single_chunks(chunks)]
    while len(spans) > 1:
        joined = []
        for (first, before), (second, after) in zip(spans[::2], spans[1::2], strict=False):
            written, read = writes[..., _less(first, begin), :], reads[..., _less(second, begin), :]
            if write is not None:
                write(second, first, read, written)
            if len(spans) > 2 or not alone:
                _times_carry(read, before)
                _times_carry(written, after if after.shape[-1] == 1 else after.mT)
            joined.append((slice(first.start, second.stop), _product(after, before)))
        spans = joined + spans[2 * len(joined) :]
    return _Span(spans[0][0], reads, writes)


def _single_chunks(chunks: Sequence[Chunk]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each chunk's tokens, matrix (B, H, T, T) and carry (factor of the state), in order."""
    for several in chunks:
        length = several.within.shape[-1]
        start = several.tokens.start
        for within, carry in zip(several.within.unbind(2), several.carry.unbind(2), strict=True):
            yield slice(start, start + length), within, carry
            start += length


def _from(chunks: Sequence[Chunk], start: int) -> Sequence[Chunk]:
    return [chunk for chunk in chunks if chunk.tokens.start >= start]


def _less(tokens: slice, by: int) -> slice:
    """Return the slice ``tokens`` with ``by`` subtracted from its start and its stop."""
    return slice(tokens.start - by, tokens.stop - by)


def _times_carry(x: Tensor, carry: Tensor) -> None:
    """Write x @ carry to ``x`` (B, H, T, N); a carry (..., N, 1) is the diagonal of a matrix."""
    if carry.shape[-1] == 1:
        x.mul_(carry.mT)
    else:
        x.copy_(x @ carry)


def _product(after: Tensor, before: Tensor) -> Tensor:
    return after * before if after.shape[-1] == 1 else after @ before
