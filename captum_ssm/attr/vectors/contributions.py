"""Contribution vectors: the part of a mixer's output due to each token (LATIM, eqs. 3-4, 16-25).

    T_i(x_j) = W_out Post_i sum over k of (M[i, j + k] + delta D) phi[k][j + k]

is a vector of the residual stream's width E, for a query token i and a source token j. M is the
scan's matrix, delta D the skip within a token, Post_i the factor after the scan at token i, and
phi[k] the share of the input that passes tap k of the convolution (see :mod:`.taps`).

    output[i] = sum over j of T_i(x_j) + constant[i]

The sum is exact if the activation is linearized. The constant comes from biases. L^2 vectors may
exceed the memory, so they are computed in tiles of a few queries and sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedMixerError
from ...operators import Chain, Diagonal, HeadCentering, Operator, ShortConv
from ...operators.kernels.arithmetic import sum_tensors
from ...operators.kernels.bands import overlap, shift_tokens
from ...operators.kernels.portions import as_memory_allows, at_a_time
from ...operators.kernels.rows import at_positions
from ...operators.kernels.truths import are_noted, looks_ahead, nonzero_range
from ...tracing import Layer
from ...tracing.projection import projection_of
from ...tracing.way import AffineStep, Way, along
from ..engine.states import products_of
from .scan_tiles import tiles as scan_tiles
from .scanned import scans_of
from .taps import TapPath, TapShares, paths_of, silenced

#: Largest number of elements of vectors before, and of vectors after the output projection (8 MiB
#: in float32).  The B L C elements of one query before the projection are never split.
_TILE_ELEMENTS = 2**21

#: With at least this many queries, a scan's states are computed once for all queries.
_MANY_QUERIES = 6


class Tile(NamedTuple):
    """The contribution vectors from s source tokens to q query tokens.

    Attributes:
        queries: a slice of the Q queries.
        sources: a slice of the tokens. Vectors of sources outside all tiles are zero.
        vectors: the vectors T_i(x_j), (B, q, s, E).
    """

    queries: slice
    sources: slice
    vectors: Tensor


class Contributions:
    """The contribution vectors of one mixer at one input.

    Args:
        layer: the recorded call of the mixer.
        activation: the rule that divides the activation among the taps of the convolution before
            it; see :mod:`.taps`. Default: ``"linearized"``.
        way: affine steps between the mixer's output and the residual stream. Default: none.
        hooks: whether changes of the output by forward hooks are included. Default: True.
    """

    def __init__(
        self, layer: Layer, activation: str = "linearized", way: Way = (), *, hooks: bool = True
    ) -> None:
        linear = layer.written if hooks else layer.linear
        self.shape = linear.operator.shape
        self.paths = paths_of(linear, layer.mixer.module, activation)
        self.weight, self._last_steps = _merge_steps(projection_of(linear).weight, way)  # (C, E)
        self._linear = linear
        self._exact = activation == "linearized"
        self._way = way

    @property
    def channels(self) -> int:
        """The number of channels over all heads, C."""
        return self.shape.heads * self.shape.per_head

    def total(self) -> Tensor:
        """Return the sum of the vectors over all sources, (B, L, E): the output of all inputs."""
        summed = torch.stack([path.total() for path in self.paths]).sum(0)
        return along(self._last_steps, summed.flatten(2) @ self.weight)

    def constant(self) -> Tensor:
        """Return the biases' part of the output (B, L, E), which belongs to no token.

        With ``activation="linearized"`` this part includes the bias before the activation.
        """
        operator = self._linear.operator
        # other rules give the bias before the activation to tokens, so only later biases are left
        offset = (operator if self._exact else silenced(operator)).offset()
        values = self._linear.values
        biases = torch.zeros_like(values) if offset is None else offset.expand(values.shape)
        return along(self._way, self._linear.project(biases))

    def toward(self, direction: Tensor, within: range | None = None) -> Tensor:
        """Return each source's contribution (..., B, L) to the inner product <output, direction>.

        One backward pass through the operator gives the sum over all queries, without vectors.

        Args:
            direction: one vector per query (..., B, L, E), usually 0 for most queries.
            within: a range of queries outside of which all vectors are zero, to avoid a GPU
                synchronization. Default: None, not known.
        """
        direction = direction.to(self.weight)  # then go back through the steps and W_out
        for step in reversed(self._last_steps):
            direction = step.back(direction)
        leading_shape = direction.shape[:-1]
        at_channels = direction.new_zeros(*leading_shape, self.channels)  # (..., B, L, C)
        if are_noted(direction):  # a range of queries, found without waiting for the GPU
            queries = nonzero_range(direction.ne(0).any(-1)) if within is None else within
            rows = slice(queries.start, queries.stop)  # all other rows stay 0
            at_channels[..., rows, :] = direction[..., rows, :] @ self.weight.T
        else:
            is_query = direction.ne(0).any(-1)
            at_channels[is_query] = direction[is_query] @ self.weight.T
        at_channels = at_channels.view(*leading_shape, *self.shape[2:])
        out = self.paths[0].toward(at_channels)
        for path in self.paths[1:]:
            out = out + path.toward(at_channels)
        return out

    def behind(self, vectors: Tensor, index: Tensor) -> Tensor:
        """Apply the affine steps after W_out to the vectors (B, q, s, E) of queries (B, q)."""
        return along([step.at(index) for step in self._last_steps], vectors)

    def before_projection(self, index: Tensor) -> Tensor:
        """Return the vectors (q, B, L, C) of queries (B, q) before the output projection."""
        by_path = [_contributions_at_queries(path, index) for path in self.paths]
        return (by_path[0] if len(by_path) == 1 else torch.stack(by_path).sum(0)).flatten(-2)


def tiles(
    mixers: Sequence[Contributions], index: Tensor, stream: Tensor | None = None
) -> Iterator[Tile]:
    """Yield the vectors of some queries in tiles; sources whose vectors are 0 may be missing.

    Args:
        mixers: the contributions of parallel mixers, whose vectors are added.
        index: positions of the queries (B, Q), on the CPU to avoid a synchronization.
        stream: the residual stream (B, L, E), added to the vectors T_i(x_i). Default: None.
    """
    # a selective scan has thin factors, which are faster for many queries; see scan_tiles.py
    goes_by_scan = len(mixers) == 1 and _suits_scan_tiles(index)
    scans = scans_of(mixers[0].paths) if goes_by_scan else None
    if scans is None:  # the mixer has another form
        yield from _tiles_by_query(mixers, index, stream)
        return
    on_device = index.to(mixers[0].weight.device)
    for queries, sources, entries in scan_tiles(scans.ahead, scans.back, index[0].tolist()):
        # one product for all pairs of an example; entries may lie in any order
        vectors = torch.unflatten(entries.flatten(1, 2) @ mixers[0].weight, 1, entries.shape[1:3])
        vectors = mixers[0].behind(vectors, on_device[:, queries])
        if stream is not None:
            _add_stream_at_queries(vectors, on_device[:, queries], sources, stream)
        yield Tile(queries, sources, vectors)


def _merge_steps(weight: Tensor, way: Way) -> tuple[Tensor, list[AffineStep]]:
    """Multiply affine steps into a weight (C, E); return the product, and the remaining steps.

    A norm's factor per token commutes with all other steps. So this factor is applied later, and
    the steps after it are multiplied into the weight. Biases are left out: they are of no token.
    """
    remaining: list[AffineStep] = []  # factors per token, and steps that cannot be merged
    for step in way:
        if step.is_of_tokens:
            remaining.append(AffineStep(step.factor))
            step = AffineStep(matrix=step.matrix)  # the rest, which may be the identity
        if all(earlier.is_of_tokens for earlier in remaining) and step.is_alike:
            weight = AffineStep(step.factor, step.matrix)(weight)
        else:
            remaining.append(AffineStep(step.factor, step.matrix))
    return weight, remaining


def _suits_scan_tiles(index: Tensor) -> bool:
    """Return True if the queries (B, Q) are many, ascending, and equal in all examples."""
    if index.shape[1] < _MANY_QUERIES:
        return False
    return bool((index == index[:1]).all() and (index[0].diff() > 0).all())


def _tiles_by_query(
    mixers: Sequence[Contributions], index: Tensor, stream: Tensor | None
) -> Iterator[Tile]:
    """Yield tiles for any operator, by computing one row of the operator's matrix per query."""
    batch, tokens = mixers[0].shape[:2]
    widest = max(max(mixer.weight.shape) for mixer in mixers)  # C or E, for memory per vector
    elements = at_a_time(_TILE_ELEMENTS, mixers[0].weight.device)
    queries_at_once = max(1, elements // (batch * tokens * widest))
    on_device = index.to(mixers[0].weight.device)

    def rows_of(query_range: range) -> tuple[slice, list[Tensor]]:
        """Return a slice of queries, and each mixer's vectors (q, B, L, C) before W_out."""
        queries = slice(query_range.start, query_range.stop)
        positions = on_device[:, queries]
        return queries, [mixer.before_projection(positions) for mixer in mixers]

    for queries, rows in as_memory_allows(range(index.shape[1]), queries_at_once, rows_of):
        at = on_device[:, queries]

        def tile(source_range: range, queries: slice = queries, rows: list[Tensor] = rows) -> Tile:
            """Return the tile of a range of sources, with vectors added over parallel mixers."""
            sources = slice(source_range.start, source_range.stop)
            vectors: Tensor | None = None
            for mixer_rows, mixer in zip(rows, mixers, strict=True):
                term = (mixer_rows[:, :, sources] @ mixer.weight).transpose(0, 1)  # (B, q, s, E)
                term = mixer.behind(term, on_device[:, queries])
                vectors = term if vectors is None else vectors.add_(term)  # its own memory
            assert vectors is not None
            if stream is not None:
                _add_stream_at_queries(vectors, on_device[:, queries], sources, stream)
            return Tile(queries, sources, vectors)

        # an index on a GPU is not read, to avoid waiting; L is right for all queries
        stop = int(index[:, queries].max()) + 1 if index.device.type == "cpu" else tokens
        sources = _source_range(rows, at if stream is not None else None, stop)
        yield from as_memory_allows(sources, max(1, elements // (at.numel() * widest)), tile)


def _contributions_at_queries(path: TapPath, index: Tensor) -> Tensor:
    """Return each token's contribution (q, B, L, H, P) to a path's output at queries (B, q)."""

    def of_product(local: Sequence[Operator], core: Operator) -> Tensor:
        """Return the contributions (q, B, L, H, P) through local . core."""
        # a core that mixes channels: one unit vector per output channel, summed over its inputs
        if _mixes_channels(core):
            units = torch.eye(core.shape.per_head, dtype=core.dtype, device=core.device)
            sums = (_to_sources(core.unit_rows(index.T, u), path.shares).sum(-1) for u in units)
            rows = torch.stack([*sums], -1)
        else:
            rows = _to_sources(core.unit_rows(index.T), path.shares)
        for part in reversed(local):  # innermost first; they act at the query itself
            rows = _apply_at_queries(part, rows, index)
        return rows

    products = locals_and_cores(path.operator, like=path.shares[0][1])
    rows = sum_tensors(of_product(local, core) for local, core in products)
    # a path may have the tokens in another order
    return rows if path.token is None else rows.index_select(2, path.position_of(rows))


def _to_sources(weight: Tensor, shares: TapShares) -> Tensor:
    """Return for each source token j the sum over lags k of weight[j + k] phi[k][j + k]."""
    (first_lag, phi), *further_lags = shares
    out = shift_tokens(weight * phi, -first_lag)
    for lag, phi in further_lags:
        earlier, later = overlap(weight.shape[-3], lag)  # the tokens j and j + k
        out[..., earlier, :, :].addcmul_(weight[..., later, :, :], phi[..., later, :, :])
    return out


def locals_and_cores(operator: Operator, like: Tensor) -> list[tuple[Sequence[Operator], Operator]]:
    """Split an operator into a sum of products, each of *local* parts and an inner *core*.

    Returns:
        For each product, the local parts, which act within tokens and end with the innermost part
        that mixes channels; and the core, which acts first and maps each channel separately (or is
        a recurrence that mixes channels). If no part mixes channels, the core is the operator.
    """
    if not _mixes_channels(operator):
        return [((), operator)]
    return [_local_and_core(parts, like) for parts in products_of(operator)]


def _local_and_core(
    parts: tuple[Operator, ...], like: Tensor
) -> tuple[Sequence[Operator], Operator]:
    """Split one product into local parts and core; see :func:`locals_and_cores`."""
    mixing_places = [i for i, p in enumerate(parts) if _mixes_channels(p) and not p.mixes_tokens]
    local = parts[: mixing_places[-1] + 1] if mixing_places else ()
    core = parts[len(local) :]
    for part in local:
        if part.mixes_tokens or not isinstance(part, Diagonal | ShortConv | HeadCentering):
            raise UnsupportedMixerError(
                f"The operator has no matrix per channel, because {type(part).__name__} acts after "
                "a part that mixes channels. Put that part first in the Chain, or use LatimFlow."
            )
    identity = Diagonal(like.new_ones(1, 1, 1, 1), parts[0].shape)  # the core if all are local
    return local, Chain(*core) if core else identity


def _mixes_channels(operator: Operator) -> bool:
    """Return True if a part mixes channels: per_channel() returns other operators unchanged."""
    return any(leaf.per_channel() is not leaf for leaf in operator.leaves())


def _apply_at_queries(part: Operator, rows: Tensor, index: Tensor) -> Tensor:
    """Apply an operator that does not mix tokens to the rows (q, B, L, H, P) of queries (B, q)."""
    if isinstance(part, Diagonal):
        return rows * at_positions(part.weight, index.T)
    return part.apply(rows)


def _source_range(rows: Sequence[Tensor], queries: Tensor | None, stop: int) -> range:
    """Return a range of source tokens outside of which all rows are zero.

    Args:
        rows: for each mixer, the vectors before the output projection (q, B, L, C).
        queries: the queries (B, q), if the range must include them; else None.
        stop: the token after the last query, or L if unknown. On a GPU the range ends there if no
            query depends on a later token.
    """
    # a row is 0 if its maximum and minimum are, which take a tenth of comparing every number
    bounds = (bound for x in rows for bound in (x.amax(-1), x.amin(-1)))  # (q, B, L) each
    is_source = torch.stack([bound.ne(0).flatten(0, 1).any(0) for bound in bounds]).any(0)
    if queries is not None:
        is_source = is_source.index_fill(0, queries.flatten(), True)
    if are_noted(is_source):
        return range(len(is_source)) if looks_ahead(is_source, stop) else range(stop)
    sources = is_source.nonzero().flatten().tolist()
    return range(sources[0], sources[-1] + 1) if sources else range(0)


def _add_stream_at_queries(vectors: Tensor, index: Tensor, sources: slice, stream: Tensor) -> None:
    """Add the residual stream (B, L, E) at each query i to the vector T_i(x_i), in place."""
    column = index - sources.start  # of each query among the sources, (B, q)
    inside = (column >= 0) & (column < vectors.shape[2])
    example, query = (torch.arange(size, device=index.device) for size in index.shape)
    # queries outside of the sources add 0, at any column
    stream_at_query = stream[example[:, None], index].where(inside[..., None], 0)
    vectors[example[:, None], query, column.clamp(0, vectors.shape[2] - 1)] += stream_at_query
