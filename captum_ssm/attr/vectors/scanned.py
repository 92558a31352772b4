"""Conversion of operators with one selective scan per direction to :class:`ScanRows`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators import Diagonal, Operator, Permute, SelectiveScan, ShortConv, Sum
from ...operators.kernels.bands import Band, shift_tokens
from .scan_tiles import ScanRows
from .taps import TapPath, TapShares, products


class ScanMatrices(NamedTuple):
    """The matrices of one scan, or of two scans in opposite directions whose outputs are added.

    Attributes:
        ahead: the matrix of the forward scan.
        back: the matrix of the backward scan, with tokens in reverse order; or None.
    """

    ahead: ScanRows
    back: ScanRows | None


def scans_of(paths: Sequence[TapPath]) -> ScanMatrices | None:
    """Return the matrices of all paths; None unless each path has the form of Mamba-1.

    The form is outer . (scan + skip) . inner, in one or both directions. Outer is a product of
    diagonals; inner is a product of diagonals and causal convolutions.
    """
    by_direction: dict[bool, ScanRows] = {}  # the key is `backwards`
    for path in paths:
        for parts in products(path.operator):
            in_order = _in_scan_order(path, parts)
            rows = None if in_order is None else _as_scan_rows(in_order.parts, in_order.shares)
            if in_order is None or rows is None or in_order.backwards in by_direction:
                return None
            by_direction[in_order.backwards] = rows
    return (
        ScanMatrices(by_direction[False], by_direction.get(True)) if False in by_direction else None
    )


class _ScanProduct(NamedTuple):
    """A product of operators, outermost first, and the product's input by lag.

    Tokens are in the order in which the scan reads them, reversed if ``backwards``.
    """

    backwards: bool
    parts: Sequence[Operator]
    shares: TapShares


def _in_scan_order(path: TapPath, parts: Sequence[Operator]) -> _ScanProduct | None:
    """Remove the token reversals around a backward scan; return None for different reorderings."""
    # a backward scan is S M S with two token reversals S: move them outward and inward
    outer, rest = _split_off_permutes(parts, lambda permute: permute.inverse)
    inner, middle = _split_off_permutes(rest[::-1], lambda permute: permute.order)
    middle, inner = middle[::-1], inner[::-1]  # back in the product's order
    orders = [permute.on_host for permute in (*outer, *inner)]
    orders += [] if path.token is None else [path.token]
    if not orders:  # a forward scan
        return _ScanProduct(False, middle, path.shares)
    reverse = torch.arange(len(orders[0]), device="cpu").flip(0)
    if len(outer) != 1 or len(orders) != 2 or not all(torch.equal(x, reverse) for x in orders):
        return None
    if not inner:  # path.token is the inner reordering, so the shares are reversed already
        return _ScanProduct(True, middle, path.shares)
    if any(lag for lag, _ in path.shares):
        return None  # these lags would be negative in reverse order
    return _ScanProduct(True, middle, [(0, inner[0].apply(phi)) for _, phi in path.shares])


def _split_off_permutes(
    parts: Sequence[Operator], order: Callable[[Permute], Tensor]
) -> tuple[list[Permute], list[Operator]]:
    """Move reorderings past diagonals to one end; return reorderings, and the remaining operators.

    Args:
        parts: the parts, from one end of a product.
        order: function that returns the order in which a reordering rearranges diagonals.
    """
    permutes: list[Permute] = []
    diagonals: list[Diagonal] = []  # all so far, with tokens in the order behind the reorderings
    for i, part in enumerate(parts):
        if isinstance(part, Permute):
            permutes.append(part)
            diagonals = [diagonal.reordered(order(part)) for diagonal in diagonals]
        elif isinstance(part, Diagonal):
            diagonals.append(part)
        else:
            return permutes, [*diagonals, *parts[i:]]
    return permutes, [*diagonals]


def _as_scan_rows(parts: Sequence[Operator], shares: TapShares) -> ScanRows | None:
    """Return the matrix of a product in scan order; None unless it has Mamba-1's form.

    The form is outer . (scan + skip) . inner, see :func:`scans_of`. The product of ``inner`` and
    ``shares`` is the scan's input.
    """
    scans = [(i, scan) for i, part in enumerate(parts) if (scan := _scan_in(part)) is not None]
    if len(scans) != 1:
        return None
    place, scan = scans[0]
    outer, core, inner = parts[:place], parts[place], parts[place + 1 :]
    is_outer_diagonal = all(isinstance(part, Diagonal) for part in outer)
    is_inner_banded = all(isinstance(part, Diagonal | ShortConv) for part in inner)
    if not (is_outer_diagonal and is_inner_banded and scan.b.dim() == 3):  # b common to all heads
        return None
    scan_input = _scan_input(shares, inner)
    if min(scan_input) < 0:  # a convolution looks ahead
        return None
    one = scan.dt.new_ones(1, 1, 1, 1)
    summands = core.parts if isinstance(core, Sum) else ()  # without a Sum the skip is 0
    skip = sum((p.weight for p in summands if isinstance(p, Diagonal)), torch.zeros_like(one))
    outer_factor = one
    for part in outer:
        outer_factor = outer_factor * part.tensors()["weight"]
    shape = scan.shape
    return ScanRows(
        scan,
        shares={lag: share.expand(shape).squeeze(-1) for lag, share in scan_input.items()},
        outer=outer_factor.expand(shape).squeeze(-1),
        skip=skip.expand(shape).squeeze(-1),
    )


def _scan_in(part: Operator) -> SelectiveScan | None:
    """Return ``part`` if it is a scan, or the only scan in a sum with diagonals; else None."""
    if isinstance(part, SelectiveScan):
        return part
    if not isinstance(part, Sum):
        return None
    scans = [p for p in part.parts if isinstance(p, SelectiveScan)]
    diagonals = [p for p in part.parts if isinstance(p, Diagonal)]
    return scans[0] if len(scans) == 1 and len(diagonals) + 1 == len(part.parts) else None


def _scan_input(shares: TapShares, inner: Sequence[Operator]) -> Band:
    """Return token t - k's contribution to the scan's input at t, (B, L, H, P) for each lag k.

    The lags of the taps and of the convolutions in ``inner`` add up.
    """
    band: Band = {0: shares[0][1].new_ones(1, 1, 1, 1)}  # the product of ``inner``: factors by lag
    for part in reversed(inner):
        next_band = part.after_band(band)
        assert next_band is not None
        band = next_band
    by_lag: Band = {}
    for tap, phi in shares:
        for lag, factor in band.items():
            share = factor * shift_tokens(phi, lag)
            by_lag[tap + lag] = by_lag[tap + lag] + share if tap + lag in by_lag else share
    return by_lag
