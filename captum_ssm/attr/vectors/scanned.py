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


class Scanned(NamedTuple):
    """The matrices of one scan, or of two scans in opposite directions whose outputs are added.

    Attributes:
        ahead: the matrix of the forward scan.
        back: the matrix of the backward scan, with tokens in reverse order; or None.
    """

    ahead: ScanRows
    back: ScanRows | None


def scanned(paths: Sequence[TapPath]) -> Scanned | None:
    """Return the matrices of all paths; None unless each path has the form of Mamba-1.

    The form is outer . (scan + skip) . inner, in one or both directions. Outer is a product of
    diagonals; inner is a product of diagonals and causal convolutions.
    """
    found: dict[bool, ScanRows] = {}
    for path in paths:
        for parts in products(path.operator):
            turned = _in_scan_order(path, parts)
            rows = None if turned is None else _rows(turned.parts, turned.shares)
            if turned is None or rows is None or turned.backwards in found:
                return None
            found[turned.backwards] = rows
    return Scanned(found[False], found.get(True)) if False in found else None


class _ScanProduct(NamedTuple):
    """A product of operators, and the input by lag, with tokens in the order of the scan."""

    backwards: bool
    parts: Sequence[Operator]
    shares: TapShares


def _in_scan_order(path: TapPath, parts: Sequence[Operator]) -> _ScanProduct | None:
    """Remove the token reversals around a backward scan; return None for different reorderings."""
    outer, rest = _split_off_permutes(parts, lambda permute: permute.inverse)
    inner, core = _split_off_permutes(rest[::-1], lambda permute: permute.order)
    core, inner = core[::-1], inner[::-1]
    orders = [permute.on_host for permute in (*outer, *inner)]
    orders += [] if path.token is None else [path.token]
    if not orders:
        return _ScanProduct(False, core, path.shares)
    reverse = torch.arange(len(orders[0]), device="cpu").flip(0)
    if len(outer) != 1 or len(orders) != 2 or not all(torch.equal(x, reverse) for x in orders):
        return None
    if not inner:  # path.token is the inner reordering, so the shares are reversed already
        return _ScanProduct(True, core, path.shares)
    if any(lag for lag, _ in path.shares):
        return None
    return _ScanProduct(True, core, [(0, inner[0].apply(phi)) for _, phi in path.shares])


def _split_off_permutes(
    parts: Sequence[Operator], order: Callable[[Permute], Tensor]
) -> tuple[list[Permute], list[Operator]]:
    """Move reorderings past diagonals to one end; return reorderings, and the remaining operators.

    Args:
        parts: the parts, from one end of a product.
        order: function that returns the order in which a reordering rearranges diagonals.
    """
    moved: list[Permute] = []
    diagonals: list[Diagonal] = []
    for i, part in enumerate(parts):
        if isinstance(part, Permute):
            moved.append(part)
            diagonals = [diagonal.reordered(order(part)) for diagonal in diagonals]
        elif isinstance(part, Diagonal):
            diagonals.append(part)
        else:
            return moved, [*diagonals, *parts[i:]]
    return moved, [*diagonals]


def _rows(parts: Sequence[Operator], shares: TapShares) -> ScanRows | None:
    """Return the matrix of a product in scan order; None unless the product has Mamba-1's form."""
    places = [(i, scan) for i, part in enumerate(parts) if (scan := _scan_in(part)) is not None]
    if len(places) != 1:
        return None
    at, scan = places[0]
    outer, core, inner = parts[:at], parts[at], parts[at + 1 :]
    diagonal = all(isinstance(part, Diagonal) for part in outer)
    banded = all(isinstance(part, Diagonal | ShortConv) for part in inner)
    if not (diagonal and banded and scan.b.dim() == 3):
        return None
    sent = _scan_input(shares, inner)
    if min(sent) < 0:
        return None
    one = scan.dt.new_ones(1, 1, 1, 1)
    summands = core.parts if isinstance(core, Sum) else ()
    skip = sum((p.weight for p in summands if isinstance(p, Diagonal)), torch.zeros_like(one))
    factor = one
    for part in outer:
        factor = factor * part.tensors()["weight"]
    whole = scan.shape
    return ScanRows(
        scan,
        {lag: share.expand(whole).squeeze(-1) for lag, share in sent.items()},
        factor.expand(whole).squeeze(-1),
        skip.expand(whole).squeeze(-1),
    )


def _scan_in(part: Operator) -> SelectiveScan | None:
    """Return ``part`` if it is a scan, or the only scan in a sum with diagonals; else None."""
    if isinstance(part, SelectiveScan):
        return part
    if not isinstance(part, Sum):
        return None
    scans = [p for p in part.parts if isinstance(p, SelectiveScan)]
    others = [p for p in part.parts if isinstance(p, Diagonal)]
    return scans[0] if len(scans) == 1 and len(others) + 1 == len(part.parts) else None


def _scan_input(shares: TapShares, inner: Sequence[Operator]) -> Band:
    """Return token t - k's contribution to the scan's input at t, (B, L, H, P) for each lag k."""
    band: Band = {0: shares[0][1].new_ones(1, 1, 1, 1)}
    for part in reversed(inner):
        following = part.after_band(band)
        assert following is not None
        band = following
    found: Band = {}
    for tap, phi in shares:
        for lag, factor in band.items():
            share = factor * shift_tokens(phi, lag)
            found[tap + lag] = found[tap + lag] + share if tap + lag in found else share
    return found
