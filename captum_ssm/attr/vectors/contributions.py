"""Contribution vectors: the share of each token in a mixer's output (LATIM, eqs. 3-4, 16-25).

    T_i(x_j) = W_out Post_i sum over k of (M[i, j + k] + delta D) phi[k][j + k]

is a vector of the stream's width E for every pair of a query i and a source j, with

    output[i] = sum over j of T_i(x_j) + constant[i]

exactly if the activation is linearized. The constant comes from biases and belongs to no token. E
L^2 numbers never exist at once: vectors come in tiles of a few queries by a range of sources.
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
from .scanned import scanned
from .taps import TapPath, TapShares, paths_of, silenced

#: Elements of the vectors held at a time, before and after the output projection alike (8 MiB in
#: float32 each).  One query's vectors before the projection, B L C elements, are never cut.
_TILE_ELEMENTS = 2**21

#: From this many queries on, the states of a scan are made for all of them together.
_MANY_QUERIES = 6


class Tile(NamedTuple):
    """The vectors of some queries from a range of sources.

    Attributes:
        queries: slice of the Q queries.
        sources: slice of the tokens; vectors from tokens in no tile are zero.
        vectors: T (B, q, s, E).
    """

    queries: slice
    sources: slice
    vectors: Tensor


class Contributions:
    """The contribution vectors of one mixer at one input.

    Args:
        layer: the recorded call.
        activation: how the activation is divided among the taps of the convolution before it; see
            :mod:`.taps`. Default: ``"linearized"``.
        way: steps applied to the output, as before it joins the residual stream. Default: none.
        hooks: whether changes of the output by hooks of others are included. Default: True.
    """

    def __init__(
        self,
        layer: Layer,
        activation: str = "linearized",
        way: Way = (),
        *,
        hooks: bool = True,
    ) -> None:
        linear = layer.written if hooks else layer.linear
        self.shape = linear.operator.shape
        self.paths = paths_of(linear, layer.mixer.module, activation)
        self.weight, self._behind = _folded(projection_of(linear).weight, way)  # (C, E)
        self._linear = linear
        self._exact = activation == "linearized"
        self._way = way

    @property
    def channels(self) -> int:
        """C."""
        return self.shape.heads * self.shape.per_head

    def total(self) -> Tensor:
        """Return the sum over all sources, (B, L, E), without a single tile."""
        before = torch.stack([path.total() for path in self.paths]).sum(0)
        return along(self._behind, before.flatten(2) @ self.weight)

    def constant(self) -> Tensor:
        """Return the part of no token: biases behind the activation and of W_out, (B, L, E).

        Linearized, the bias before the activation is in it as well; else that is part of a tap.
        """
        operator = self._linear.operator
        offset = (operator if self._exact else silenced(operator)).offset()
        values = self._linear.values
        biases = torch.zeros_like(values) if offset is None else offset.expand(values.shape)
        return along(self._way, self._linear.project(biases))

    def toward(self, direction: Tensor, within: range | None = None) -> Tensor:
        """Sum <T_i(x_j), direction_i> over queries i, without a single vector: (..., B, L).

        Args:
            direction: (..., B, L, E), 0 but for a few queries as a rule.
            within: a range that includes these queries, to avoid a synchronization. Default: None,
                not known.
        """
        direction = direction.to(self.weight)
        for step in reversed(self._behind):
            direction = step.back(direction)
        size = direction.shape[:-1]
        before = direction.new_zeros(*size, self.channels)  # (..., B, L, C)
        if are_noted(direction):
            some = nonzero_range(direction.ne(0).any(-1)) if within is None else within
            part = slice(some.start, some.stop)
            before[..., part, :] = direction[..., part, :] @ self.weight.T
        else:
            queries = direction.ne(0).any(-1)
            before[queries] = direction[queries] @ self.weight.T
        before = before.view(*size, *self.shape[2:])
        found = self.paths[0].toward(before)
        for path in self.paths[1:]:
            found = found + path.toward(before)
        return found

    def behind(self, vectors: Tensor, index: Tensor) -> Tensor:
        """Apply the steps behind W_out to vectors (B, q, s, E) of queries ``index`` (B, q)."""
        return along([step.at(index) for step in self._behind], vectors)

    def before_projection(self, index: Tensor) -> Tensor:
        """Return vectors before W_out of queries ``index`` (B, q), all sources: (q, B, L, C)."""
        rows = [_rows(path, index) for path in self.paths]
        return (rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)).flatten(-2)


def tiles(
    parts: Sequence[Contributions], index: Tensor, stream: Tensor | None = None
) -> Iterator[Tile]:
    """Yield the vectors of queries ``index`` (B, Q) tile by tile; zeros may be left out.

    Args:
        parts: the mixers that write to the stream together; their vectors add up.
        index: the queries, (B, Q), on the host to avoid a synchronization.
        stream: the residual stream (B, L, E), added to the vector of each query from its own
            token. Default: None.
    """
    quick = len(parts) == 1 and _is_long_and_ascends(index)
    scans = scanned(parts[0].paths) if quick else None
    if scans is None:
        yield from _tiles_by_query(parts, index, stream)
        return
    there = index.to(parts[0].weight.device)
    for queries, sources, entries in scan_tiles(scans.ahead, scans.back, index[0].tolist()):
        # one product for all pairs of an example; entries may lie in any order
        vectors = torch.unflatten(entries.flatten(1, 2) @ parts[0].weight, 1, entries.shape[1:3])
        vectors = parts[0].behind(vectors, there[:, queries])
        if stream is not None:
            _add_own(vectors, there[:, queries], sources, stream)
        yield Tile(queries, sources, vectors)


def _folded(weight: Tensor, way: Way) -> tuple[Tensor, list[AffineStep]]:
    """Multiply the first steps of a way into a projection's weight (C, E); return the others, too.

    Factors on whole tokens commute with all else: they wait, so a later step, such as a norm's, is
    multiplied into the weight and not into every vector. Biases are left out.
    """
    remain: list[AffineStep] = []
    for step in way:
        if step.is_of_tokens:
            remain.append(AffineStep(step.factor))
            step = AffineStep(matrix=step.matrix)
        if all(each.is_of_tokens for each in remain) and step.is_alike:
            weight = AffineStep(step.factor, step.matrix)(weight)
        else:
            remain.append(AffineStep(step.factor, step.matrix))
    return weight, remain


def _is_long_and_ascends(index: Tensor) -> bool:
    """Return True if the queries (B, Q) are many, and the same and rising in all examples."""
    if index.shape[1] < _MANY_QUERIES:
        return False
    return bool((index == index[:1]).all() and (index[0].diff() > 0).all())


def _tiles_by_query(
    parts: Sequence[Contributions], index: Tensor, stream: Tensor | None
) -> Iterator[Tile]:
    """Yield the tiles by one adjoint vector for each query, for any operator."""
    batch, tokens = parts[0].shape[:2]
    widest = max(max(part.weight.shape) for part in parts)
    most = at_a_time(_TILE_ELEMENTS, parts[0].weight.device)
    count = max(1, most // (batch * tokens * widest))
    there = index.to(parts[0].weight.device)

    def rows_of(some: range) -> tuple[slice, list[Tensor]]:
        queries = slice(some.start, some.stop)
        at = there[:, queries]
        return queries, [part.before_projection(at) for part in parts]  # (q, B, L, C) each

    for queries, rows in as_memory_allows(range(index.shape[1]), count, rows_of):
        at = there[:, queries]

        def tile(some: range, queries: slice = queries, rows: list[Tensor] = rows) -> Tile:
            """Project the rows from some sources, apply the steps behind, and add the parts."""
            sources = slice(some.start, some.stop)
            vectors: Tensor | None = None  # (B, q, s, E)
            for row, part in zip(rows, parts, strict=True):
                each = (row[:, :, sources] @ part.weight).transpose(0, 1)  # q, B, s to B, q, s
                each = part.behind(each, there[:, queries])
                vectors = each if vectors is None else vectors.add_(each)
            assert vectors is not None
            if stream is not None:
                _add_own(vectors, there[:, queries], sources, stream)
            return Tile(queries, sources, vectors)

        until = int(index[:, queries].max()) + 1 if index.device.type == "cpu" else tokens
        sources = _reach(rows, at if stream is not None else None, until)
        yield from as_memory_allows(sources, max(1, most // (at.numel() * widest)), tile)


def _rows(path: TapPath, index: Tensor) -> Tensor:
    """Return the part that reaches queries ``index`` (B, q) from each token, (q, B, L, H, P)."""

    def of_product(local: Sequence[Operator], core: Operator) -> Tensor:
        if _mixes_channels(core):
            units = torch.eye(core.shape.per_head, dtype=core.dtype, device=core.device)
            each = (_sent(core.unit_rows(index.T, unit), path.shares).sum(-1) for unit in units)
            rows = torch.stack([*each], -1)
        else:
            rows = _sent(core.unit_rows(index.T), path.shares)
        for part in reversed(local):
            rows = _at_token(part, rows, index)
        return rows

    products = locals_and_cores(path.operator, like=path.shares[0][1])
    rows = sum_tensors(of_product(local, core) for local, core in products)
    return rows if path.token is None else rows.index_select(2, path.position_of(rows))


def _sent(weight: Tensor, shares: TapShares) -> Tensor:
    """Sum each token's shares phi, times ``weight`` at their destination, (q, B, L, H, P)."""
    (first, phi), *others = shares
    out = shift_tokens(weight * phi, -first)
    for lag, phi in others:
        earlier, later = overlap(weight.shape[-3], lag)
        out[..., earlier, :, :].addcmul_(weight[..., later, :, :], phi[..., later, :, :])
    return out


def locals_and_cores(operator: Operator, like: Tensor) -> list[tuple[Sequence[Operator], Operator]]:
    """Split an operator into a sum of products, each of local parts and a core that acts before.

    Returns:
        For each product its local parts, up to the innermost that mixes channels within tokens,
        and its core: a map per channel, or a recurrence whose steps mix channels, too. A single
        product without local parts if nothing mixes channels.
    """
    if not _mixes_channels(operator):
        return [((), operator)]
    return [_local_and_core(parts, like) for parts in products_of(operator)]


def _local_and_core(
    parts: tuple[Operator, ...], like: Tensor
) -> tuple[Sequence[Operator], Operator]:
    """Split one product behind its innermost part that mixes channels within tokens."""
    mixing = [i for i, p in enumerate(parts) if _mixes_channels(p) and not p.mixes_tokens]
    local = parts[: mixing[-1] + 1] if mixing else ()
    core = parts[len(local) :]
    for part in local:
        if part.mixes_tokens or not isinstance(part, Diagonal | ShortConv | HeadCentering):
            raise UnsupportedMixerError(
                f"{type(part).__name__} acts after channels were mixed, so the operator has no "
                "matrix per channel. A part that mixes channels within tokens must come last."
            )
    identity = Diagonal(like.new_ones(1, 1, 1, 1), parts[0].shape)
    return local, Chain(*core) if core else identity


def _mixes_channels(operator: Operator) -> bool:
    return any(leaf.per_channel() is not leaf for leaf in operator.leaves())


def _at_token(part: Operator, rows: Tensor, index: Tensor) -> Tensor:
    """Apply an operator within tokens, taken at the queries (B, q), to rows (q, B, L, H, P)."""
    if isinstance(part, Diagonal):
        return rows * at_positions(part.weight, index.T)
    return part.apply(rows)


def _reach(rows: Sequence[Tensor], queries: Tensor | None, until: int) -> range:
    """Return a range of sources outside of which all rows (q, B, L, C) are zero.

    Args:
        rows: rows of some queries.
        queries: the queries (B, q), if the range is to include them; else None.
        until: the token behind the last query, or L if unknown; on a GPU the range ends there if no
            query reads ahead.
    """
    # minimum and maximum take a tenth of the time of comparing every number
    ends = (end for part in rows for end in (part.amax(-1), part.amin(-1)))  # (q, B, L) each
    is_read = torch.stack([end.ne(0).flatten(0, 1).any(0) for end in ends]).any(0)
    if queries is not None:
        is_read = is_read.index_fill(0, queries.flatten(), True)
    if are_noted(is_read):
        return range(len(is_read)) if looks_ahead(is_read, until) else range(until)
    found = is_read.nonzero().flatten().tolist()
    return range(found[0], found[-1] + 1) if found else range(0)


def _add_own(vectors: Tensor, index: Tensor, sources: slice, stream: Tensor) -> None:
    """Add each query's own stream (B, L, E) to the vector from its own token, in place."""
    place = index - sources.start
    inside = (place >= 0) & (place < vectors.shape[2])
    example, query = (torch.arange(size, device=index.device) for size in index.shape)
    own = stream[example[:, None], index].where(inside[..., None], 0)
    vectors[example[:, None], query, place.clamp(0, vectors.shape[2] - 1)] += own
