"""Matrices of recurrences by one tree, whole or as strips of neighboring rows.

For two neighboring runs of tokens, with reads and writes as in :class:`.Chunk`,

    alpha[second, first] = second.reads . transposed first.writes

is a submatrix (tile) of rank N.  The two runs together are one longer run, whose reads and writes
are computed from the two runs' reads and writes.  Joining chunks in pairs, level by level,
expresses all tiles of a matrix as products of two thin factors.

The rows of a strip depend on earlier tokens only through the state before the first row.  So the
tree joins the chunks of the rows alone.  The rows' reads are then carried back chunk by chunk, and
multiplied by each earlier chunk's writes.

The map of every diagonal recurrence is such a matrix,

    M[i, j] = sum over k of U[i, k] (product of A[t, k] over j < t <= i) V[j, k]

Its factors contain only products of decays, no quotients and no exponentials of differences of
cumulative sums, hence no overflow and no cancellation.  Channels whose decays are strong make
entries far from the diagonal smaller than rounding, and these are not computed.

A banded matrix on the right is included.  With factors V[lag] that token t receives from token
t - lag, lags first .. last, token j + last completes the writing of token j, which then decays like
any state.  Column j of the product is column j + last of a matrix M, whose factors are a few steps
of the recurrence.  The few entries before that are single products.

:takes: the chunks of some tokens, and row and column factors (B, H, L, P); or blocks of K channels:
    decays A between 0 and 1, row factors U, and column factors V for each lag (B, T, K).
:gives: the matrix of every head (B, H, L, L), or R neighboring rows of the sum over heads or
    channels (B, R, W).
:cost: R (L - R / 2) N multiplications with additions for the entries of R rows of a head's matrix,
    and R N log(R / T) + R N L / T to join chunks; or N times as many if a carry is a matrix.
:literature: Chandrasekaran, Gu and Pals, A Fast ULV Decomposition Solver for Hierarchically
    Semiseparable Representations, 2006, where carries are called translation operators; Vandebril,
    Van Barel and Mastronardi, Matrix Computations and Semiseparable Matrices, volume 1, 2008.
:naive version: ``kernels.semiseparable``, ``kernels.banded_semiseparable``
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunks import CHUNK, Chunk, ChunkOf, in_chunks, runs_of_chunks
from .portions import at_a_time
from .rows import Strip
from .truths import are_noted
from .within_chunk import Decays, decayed_grams

#: Largest number of elements of tiles computed together (1 MiB in float32).
_TILE_ELEMENTS = 2**18


class Submatrix(NamedTuple):
    """A submatrix of every head, on the diagonal or as a product of two thin factors.

    Attributes:
        rows: slice of the rows, counted from the first row of the strip.
        columns: slice of the columns.
        reads: the rows' factors (B, H, R, N), or the submatrix itself (B, H, R, R).
        writes: the columns' factors (B, H, W, N); None if ``reads`` is the submatrix.
    """

    rows: slice
    columns: slice
    reads: Tensor
    writes: Tensor | None

    def entries_of(self, heads: slice) -> Tensor:
        """Return the submatrices of some heads, (B, h, R, W)."""
        reads = self.reads[:, heads]
        return reads if self.writes is None else reads @ self.writes[:, heads].mT


#: The tokens of a chunk, its writes (B, H, T, N), and its carry (B, H, N, N or 1) or (B, H, 1, 1).
Earlier = tuple[slice, Tensor, Tensor]


def tiles_of(chunk_of: ChunkOf, rows: range, batch_heads: int) -> Iterator[Submatrix]:
    """Yield the tiles of a strip of rows.

    Args:
        chunk_of: function that computes the chunks of some tokens.
        rows: indices of the rows.
        batch_heads: number of heads per token, over all examples: B * H.
    """

    def chunks_backwards(tokens: range) -> Iterator[Chunk]:  # last first, with factors per head
        for part in reversed(list(runs_of_chunks(tokens, CHUNK, batch_heads))):
            yield expand_groups(chunk_of(part, CHUNK))

    of_rows = [*chunks_backwards(rows)][::-1]
    before = map(_as_one_chunk, chunks_backwards(range(rows.start))) if rows.start else None
    return tiles(of_rows, before)


def _as_one_chunk(chunk: Chunk) -> Earlier:
    """Join chunks to one: multiply each one's writes, in place, by the carries of later ones."""
    writes, carries = chunk.writes.unbind(2), chunk.carry.unbind(2)
    carry = carries[-1]  # of the chunks after, composed
    for written, own in zip(writes[-2::-1], carries[-2::-1], strict=True):
        _times_carry(written, carry if carry.shape[-1] == 1 else carry.mT)
        carry = _compose(carry, own)
    return chunk.tokens, chunk.writes.flatten(2, 3), carry


def tiles(
    chunks: Sequence[Chunk], earlier: Iterable[Earlier] | None = None, horizon: float = math.inf
) -> Iterator[Submatrix]:
    """Yield a strip's tiles: on the diagonal, of the tree, then of earlier columns.

    Args:
        chunks: neighboring chunks of the strip's rows, with reads and writes per head; overwritten.
        earlier: the chunks before the rows, from the last to the first. Default: None, there are
            none.
        horizon: number of tokens after which every state is below rounding. Default: infinite.
    """
    start, spans = chunks[0].tokens.start, list[tuple[slice, Tensor]]()
    for chunk in chunks:
        singles = zip(*_tokens_and_matrices(chunk), chunk.carry.unbind(2), strict=True)
        for tokens, within, carry in singles:
            yield Submatrix(_counted_from(tokens, start), tokens, within, None)
            spans.append((tokens, carry))
    reads, writes = _by_token([c.reads for c in chunks]), _by_token([c.writes for c in chunks])
    # spans: the tokens and carry of each run; each level joins runs in pairs and updates reads and
    # writes, so that they refer to the state before and after the joined run
    while len(spans) > 1:
        joined_spans = []
        for (first, carry0), (second, carry1) in zip(spans[::2], spans[1::2], strict=False):
            rows, columns, length = second, first, first.stop - first.start
            # entries of tokens further from the pair's border are below rounding
            if length >= horizon:
                rows = slice(rows.start, min(rows.stop, rows.start + int(horizon)))
                columns = slice(columns.stop - int(horizon), columns.stop)
            row_factors = reads[..., _counted_from(rows, start), :]
            column_factors = writes[..., _counted_from(columns, start), :]
            yield Submatrix(_counted_from(rows, start), columns, row_factors, column_factors)
            # only if later tiles use them
            if length < horizon and (earlier is not None or len(spans) > 2):
                _times_carry(row_factors, carry0)
            if length < horizon and len(spans) > 2:
                _times_carry(column_factors, carry1 if carry1.shape[-1] == 1 else carry1.mT)
            joined_spans.append((slice(first.start, second.stop), _compose(carry1, carry0)))
        spans = joined_spans + spans[2 * len(joined_spans) :]  # with an odd last run
    reads = reads[:, :, : int(min(horizon, reads.shape[2]))]  # later rows read nothing earlier
    for tokens, column_factors, carry in earlier or ():
        yield Submatrix(slice(0, reads.shape[2]), tokens, reads, column_factors)
        _times_carry(reads, carry)  # now they read the state before this chunk


def _by_token(parts: list[Tensor]) -> Tensor:
    """Concatenate reads or writes (B, H, C, T, N) of several chunks to one tensor (B, H, L, N)."""
    factors = [x.flatten(2, 3) for x in parts]
    return torch.cat(factors, 2) if len(factors) > 1 else factors[0]


def expand_groups(chunk: Chunk) -> Chunk:
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


def weigh(chunk: Chunk, left: Tensor, right: Tensor) -> Chunk:
    """Return the chunk with rows times ``left`` and columns times ``right``, both (B, H, L, 1)."""
    left, right = (
        torch.unflatten(x[:, :, chunk.tokens], 2, chunk.within.shape[2:4]) for x in (left, right)
    )
    within = chunk.within * left * right.mT
    return chunk._replace(within=within, reads=left * chunk.reads, writes=right * chunk.writes)


def _tokens_and_matrices(chunk: Chunk) -> tuple[list[slice], tuple[Tensor, ...]]:
    """Return the tokens of each single chunk, and its matrix (B, H, T, T)."""
    length, start = chunk.within.shape[-1], chunk.tokens.start
    matrices = chunk.within.unbind(2)
    starts = range(start, chunk.tokens.stop, length)
    return [slice(first, first + length) for first in starts], matrices


def _counted_from(tokens: slice, start: int) -> slice:
    """Return the slice ``tokens`` with token ``start`` as number 0."""
    return slice(tokens.start - start, tokens.stop - start)


def _times_carry(x: Tensor, carry: Tensor) -> None:
    """Write x @ carry to ``x`` (B, H, T, N); a carry (..., N, 1) is the diagonal of a matrix."""
    if carry.shape[-1] == 1:
        x.mul_(carry.mT)
    else:
        x.copy_(x @ carry)


def _compose(after: Tensor, before: Tensor) -> Tensor:
    """Return the carry of two neighboring runs, given the second run's and the first run's."""
    return after * before if after.shape[-1] == 1 else after @ before


# --- sums of tiles -----------------------------------------------------------------------------


def assemble(submatrices: Iterable[Submatrix], out: Tensor) -> Tensor:
    """Write the matrix of every head into ``out`` (B, H, L, L), which is zero, and return it."""
    for tile in submatrices:
        out[..., tile.rows, tile.columns] = tile.entries_of(slice(None))
    return out


def sum_over_heads(submatrices: Iterable[Submatrix], out: Tensor) -> Tensor:
    """Add rows of the sum of all heads' matrices to ``out`` (B, R, W), and return it."""
    for tile in submatrices:
        into = out[:, tile.rows, tile.columns]
        if tile.writes is None:
            into += tile.reads[:, 0] if tile.reads.shape[1] == 1 else tile.reads.sum(1)
        elif tile.reads.shape[1] == 1:
            into.baddbmm_(tile.reads[:, 0], tile.writes[:, 0].mT)
        else:  # addbmm sums over the heads of one example
            for total, read, write in zip(into, tile.reads, tile.writes, strict=True):
                total.addbmm_(read, write.mT)
    return out


def sums_over_channels(
    submatrices: Iterable[Submatrix], left: Tensor, rights: Sequence[Tensor], out: Tensor
) -> Tensor:
    """Sum left[i, c] alpha_c[i, j] right[j, c] over channels, for R rows i.

    Args:
        submatrices: the tiles of the rows.
        left: factors of the rows (B, H, R, P).
        rights: column factors, one tensor (B, H, L, P) for each sum.
        out: zeros, (B, R, W) for each of the sums; written to and returned.
    """
    for tile in submatrices:
        into = out[..., tile.rows, tile.columns]
        # few heads at a time: their tiles stay in the cache
        size = max(1, at_a_time(_TILE_ELEMENTS, into.device) // into[0].numel())
        for first in range(0, left.shape[1], size):
            heads = slice(first, first + size)
            row_factors, matrices = left[:, heads, tile.rows], tile.entries_of(heads)
            for total, right in zip(into, rights, strict=True):
                total += (row_factors @ right[:, heads, tile.columns].mT).mul_(matrices).sum(1)
    return out


def decay_tiles(decay: Tensor, rows: range) -> Iterator[Submatrix]:
    """Yield the tiles of alpha[i, j] = product of decay[t] over j < t <= i, for decays (B, L, H).

    Entries above the diagonal are arbitrary, at most 1.  Rows share memory: do not write to them.
    """

    def chunk(part: slice, length: int) -> Chunk:
        """Return chunks with queries and keys of one channel, all 1, times the decays."""
        # in_chunks expects a last dimension
        products = Decays(in_chunks(decay[:, part, :, None], length).squeeze(-1))
        return Chunk(
            tokens=part,
            within=products.between,
            reads=products.since,
            writes=products.until,
            carry=products.total,
        )

    return tiles_of(chunk, rows, decay.shape[0] * decay.shape[2])


def decay_matrices(decay: Tensor) -> Tensor:
    """Return matrices (B, H, L, L): the product of decay[j+1..i] for j <= i, and 0 for j > i."""
    batch, tokens, heads = decay.shape
    out = decay.new_zeros(batch, heads, tokens, tokens)
    return assemble(decay_tiles(decay, range(tokens)), out).tril_()


def sums_over_groups(
    decay: Tensor, query: Tensor, key: Tensor, left: Tensor, rights: Sequence[Tensor], out: Tensor
) -> Tensor:
    """Compute :func:`sums_over_channels` of alpha[i, j] = q[i] . k[j] times decays over j+1..i.

    The heads of a group share q and k, so q[i] . k[j] multiplies one sum over all channels of the
    group.  For a tile between two chunks this sum is one matrix product of decayed factors.

    Args:
        decay: decay of each token and head (B, L, H).
        query: queries of each group, for the rows (B, R, G, N).
        key: keys of each group (B, L, G, N).
        left: factors of the rows (B, R, H, P).
        rights: column factors, one tensor (B, L, H, P) for each sum.
        out: zeros, (B, R, L) for each of the sums; written to and returned.
    """
    groups, (height, tokens) = query.shape[2], out.shape[-2:]

    def channels(x: Tensor, factor: Tensor) -> Tensor:
        """Return ``x`` (B, T, H, P) times factors (B, H, T, 1), by group (B, G, T, H P / G)."""
        faded = torch.unflatten(x * factor.transpose(1, 2), 2, (groups, -1))
        return faded.flatten(3).transpose(1, 2)

    for tile in decay_tiles(decay, range(tokens - height, tokens)):
        rows, columns, row_factors = tile.rows, tile.columns, left[:, tile.rows]
        grams = query[:, rows].transpose(1, 2) @ key[:, columns].permute(0, 2, 3, 1)
        if tile.writes is None:
            grams.tril_()  # above the diagonal, the decays within a chunk are arbitrary numbers
            row_factors = row_factors.transpose(1, 2)
        else:
            row_factors = channels(row_factors, tile.reads)
        for total, right in zip(out, rights, strict=True):
            if tile.writes is None:  # ``reads`` is the matrix of decays
                products = (row_factors @ right[:, columns].permute(0, 2, 3, 1)).mul_(tile.reads)
                sums = torch.unflatten(products, 1, (groups, -1)).sum(2)
            else:
                sums = row_factors @ channels(right[:, columns], tile.writes).mT
            for of_channels, gram in zip(sums.unbind(1), grams.unbind(1), strict=True):
                total[:, rows, columns].addcmul_(of_channels, gram)
    return out


# --- diagonal recurrences, with a band on the right --------------------------------------------

#: Number of tokens of a chunk of these recurrences.
_CHUNK = 128
#: Largest number of tokens before the rows whose factors are computed together.
EARLIER = 512
#: Number of tokens in each run of :func:`_decays_after`.
_RUN = 32
#: Smallest number of tokens for which reading from a GPU whether states are forgotten saves time.
_LONG = 4096
#: Largest number of elements of one factor of a block of channels (2 MiB in float32).
_FACTOR_ELEMENTS = 2**19
#: Smallest number of channels of a block, because smaller products are slow.
_LEAST = 256


def block_width(batch: int, rows: range, device: torch.device) -> int:
    """Return the number of channels of a block, for a strip of rows of ``batch`` examples."""
    tokens = batch * max(len(rows), min(EARLIER, rows.stop))
    return max(_LEAST, at_a_time(_FACTOR_ELEMENTS, device) // tokens)


class Block(NamedTuple):
    """Some channels of a diagonal recurrence: row factors, and functions of a slice of tokens.

    Attributes:
        rows: function that returns the row factors U (B, R, K), which are overwritten.
        columns: function that returns the column factors V (B, T, K) for each of some neighboring
            lags, ascending; they are overwritten.
        decays: function that returns the decays A (B, T, K).
        after: function that returns the products of the decays after each token (B, T, K). Default:
            None, they are computed from ``decays``.
    """

    rows: Callable[[], Tensor]
    columns: Callable[[slice], Sequence[Tensor]]
    decays: Callable[[slice], Tensor]
    after: Callable[[slice], Tensor] | None = None

    def chunks_before(self, stop: int, reach: int) -> Iterator[Earlier]:
        """Yield chunks of the tokens before ``stop``, last chunk first.

        End early once every channel has decayed below rounding; each check waits for a GPU.

        Args:
            stop: index of the token after the last one to yield.
            reach: number of tokens from a column's first write to its last.
        """
        remaining: Tensor | None = None
        for chunk_stop in range(stop, 0, -EARLIER):
            chunk_start = max(0, chunk_stop - EARLIER)
            # at least one token earlier, whose ``after`` is the decay of the whole chunk
            read_from = max(0, chunk_start - max(1, reach))
            tokens = slice(read_from, chunk_stop)
            after = _decays_after(self.decays(tokens)) if self.after is None else self.after(tokens)
            extra = chunk_start - read_from  # tokens that are read before the chunk
            total = after[:, max(0, extra - 1), :, None]  # unused if no token is before the chunk
            *shorter_lags, writes = (x.mul_(after) for x in self.columns(tokens))
            writes = writes[:, extra:]
            # columns of shorter lags are complete ``delay`` tokens after this write
            for delay, column in enumerate(reversed(shorter_lags), 1):
                # the first column of the chunk whose token ``delay`` before it was read
                first = min(chunk_stop, max(chunk_start, read_from + delay))
                written = slice(first - delay - read_from, chunk_stop - delay - read_from)
                writes[:, first - chunk_start :] += column[:, written]
            yield slice(chunk_start, chunk_stop), writes[:, None], total[:, None]
            remaining = total if remaining is None else remaining * total
            if bool(remaining.amax() <= negligible_decay(remaining.dtype)):
                return


def block_of(u: Tensor, columns: Sequence[Tensor], decay: Tensor) -> Block:
    """Return a block from factors U (B, R, K), V (B, L, K) for each lag, and A (B, L, K)."""
    return Block(
        rows=u.clone,
        columns=lambda tokens: [v[:, tokens].clone() for v in columns],
        decays=lambda tokens: decay[:, tokens],
    )


def semiseparable_strip(
    blocks: Iterable[Block], batch: int, tokens: int, rows: range, lags: range = range(1)
) -> Strip:
    """Return rows of M times a banded matrix, summed over all blocks of channels.

    Args:
        blocks: yields the blocks of channels, at least one.
        batch: number of examples, B.
        tokens: number of tokens, L.
        rows: neighboring rows, ascending; at least one.
        lags: neighboring lags of the column factors, ascending. Default: 0 alone.
    """
    out: Tensor | None = None
    reach = len(lags) - 1
    for block in blocks:
        u = block.rows()
        if out is None:
            # column j of the result is column j + lags[-1] here
            out = u.new_zeros(batch, len(rows), rows.stop + reach)
        read_from = max(0, rows.start - reach)
        read_tokens = slice(read_from, rows.stop)
        decay, columns = block.decays(read_tokens), block.columns(read_tokens)
        # each lag's column continues the column of the lag before, which has decayed by one token
        for sooner, later in pairwise(columns):
            later[:, 1:].addcmul_(decay[:, 1:], sooner[:, :-1])
        decay, *columns = (x[:, rows.start - read_from :] for x in (decay, *columns))
        # entries of rows that read a column before it is complete
        for diagonal, column in enumerate(columns[-2::-1], rows.start + 1):
            out.diagonal(diagonal, 1, 2)[:] += (u * column).sum(-1)
        chunks = _chunks_of_rows(decay, u, columns[-1], rows.start)
        horizon = math.inf
        # for few rows on a GPU, reading it would take longer than the tiles that it saves
        if len(rows) > 2 * _CHUNK and (len(rows) >= _LONG or not are_noted(decay)):
            horizon = _horizon(chunks[0].carry, _CHUNK)
        earlier = block.chunks_before(rows.start, reach) if rows.start else None
        sum_over_heads(tiles(chunks, earlier, horizon), out)
    if out is None:
        raise ValueError("blocks is empty. Pass at least one block of factors (decays, U, V).")
    return Strip(out, rows, range(out.shape[-1])).moved(0, -lags[-1], tokens)


def _chunks_of_rows(decay: Tensor, u: Tensor, v: Tensor, start: int) -> list[Chunk]:
    """Return the chunks of rows from ``start`` on, from factors (B, R, K) of a single head."""
    height, chunks = u.shape[1], []
    in_whole_chunks = height - height % _CHUNK  # the last chunk may be shorter
    for part in (range(in_whole_chunks), range(in_whole_chunks, height)):
        if part:
            tensors = (x[:, part.start : part.stop, None] for x in (decay, u, v))
            a, row, column = (in_chunks(x, _CHUNK) for x in tensors)  # (B, 1, C, T, K)
            (within,), (reads,), writes, total = decayed_grams(a, [row], column)
            tokens = slice(start + part.start, start + part.stop)
            chunks.append(Chunk(tokens, within, reads, writes, total.mT))
    return chunks


def _decays_after(decay: Tensor) -> Tensor:
    """Return the product of the decays after each token (B, T, K).

    A loop over the positions in a run computes all runs in parallel; then each run is multiplied by
    the runs after it.
    """
    tokens = decay.shape[1]
    runs = torch.unflatten(F.pad(decay, (0, 0, 0, -tokens % _RUN), value=1.0), 1, (-1, _RUN))
    out = torch.empty_like(runs)
    out[:, :, -1] = 1  # no decay after the last token
    for i in range(_RUN - 1, 0, -1):
        torch.mul(out[:, :, i], runs[:, :, i], out=out[:, :, i - 1])
    later = runs[:, -1, 0] * out[:, -1, 0]  # all decays of the runs after
    for i in range(runs.shape[1] - 2, -1, -1):
        total = out[:, i, 0] * runs[:, i, 0]
        out[:, i] *= later[:, None]
        later = later * total
    return out.flatten(1, 2)[:, :tokens]


def _horizon(totals: Tensor, span: int) -> float:
    """Return after how many tokens a state is below rounding, a multiple of ``span``.

    Args:
        totals: products of the decays of ``span`` tokens each.
        span: number of tokens.
    """
    largest = float(totals.amax())
    if largest >= 1:  # some state does not decay
        return math.inf
    if largest <= 0:  # no logarithm
        return span
    return span * math.ceil(math.log(negligible_decay(totals.dtype)) / math.log(largest))


def negligible_decay(dtype: torch.dtype) -> float:
    """Return the product of decays below which a state is smaller than rounding."""
    return torch.finfo(dtype).eps / 16
