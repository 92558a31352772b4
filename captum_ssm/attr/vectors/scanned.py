"""Paths that hold one selective scan each, and the fast rows of such paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...operators import Diagonal, Operator, SelectiveScan, ShortConv, Sum
from ...operators.kernels.bands import Band, shift_tokens
from ...operators.readings.scan_tiles import ScanRows
from ...operators.reorder import outermost
from .taps import Path, TapShares, products


class Scanned(NamedTuple):
    """The rows of scans whose outputs add up.

    Attributes:
        ahead: of the one from the first token to the last.
        back: of the one in the opposite direction, in reverse order; None if there is none.
    """

    ahead: ScanRows
    back: ScanRows | None


def scanned(paths: Sequence[Path]) -> Scanned | None:
    """The rows of all paths from their scans' states, or None if one has another form.

    The form is that of Mamba-1, in one direction or in both: diagonals after a scan with its skip,
    diagonals and causal convolutions before it.
    """
    found: dict[bool, ScanRows] = {}
    for path in paths:
        for parts in products(path.operator):
            turned = _turned(path, parts)
            rows = None if turned is None else _rows(turned.parts, turned.shares)
            if turned is None or rows is None or turned.backwards in found:
                return None
            found[turned.backwards] = rows
    return Scanned(found[False], found.get(True)) if False in found else None


class _Turned(NamedTuple):
    """A product and what is sent into it, in the order in which its scan runs."""

    backwards: bool
    parts: Sequence[Operator]
    shares: TapShares


def _turned(path: Path, parts: Sequence[Operator]) -> _Turned | None:
    """Without reorderings, or with those that reverse the tokens and then restore them."""
    last, inside, first = outermost(parts)
    orders = [permute.on_host for permute in (*last, *first)]
    orders += [] if path.token is None else [path.token]
    if not orders:
        return _Turned(False, inside, path.shares)
    reverse = torch.arange(len(orders[0]), device="cpu").flip(0)
    if len(last) != 1 or len(orders) != 2 or not all(torch.equal(x, reverse) for x in orders):
        return None
    if not first:  # the path says it in this order
        return _Turned(True, inside, path.shares)
    if any(lag for lag, _ in path.shares):
        return None
    return _Turned(True, inside, [(0, first[0].apply(phi)) for _, phi in path.shares])


def _rows(parts: Sequence[Operator], shares: TapShares) -> ScanRows | None:
    """Those of one product, or None if it has another form."""
    places = [(i, scan) for i, part in enumerate(parts) if (scan := _scan_in(part)) is not None]
    if len(places) != 1:
        return None
    at, scan = places[0]
    front, core, behind = parts[:at], parts[at], parts[at + 1 :]
    diagonal = all(isinstance(part, Diagonal) for part in front)
    banded = all(isinstance(part, Diagonal | ShortConv) for part in behind)
    if not (diagonal and banded and scan.b.dim() == 3):
        return None
    sent = _sent(shares, behind)
    if min(sent) < 0:
        return None
    one = scan.dt.new_ones(1, 1, 1, 1)
    beside = core.parts if isinstance(core, Sum) else ()
    skip = sum((p.weight for p in beside if isinstance(p, Diagonal)), torch.zeros_like(one))
    factor = one
    for part in front:
        factor = factor * part.tensors()["weight"]
    whole = scan.shape
    return ScanRows(
        scan,
        {lag: share.expand(whole).squeeze(-1) for lag, share in sent.items()},
        factor.expand(whole).squeeze(-1),
        skip.expand(whole).squeeze(-1),
    )


def _scan_in(part: Operator) -> SelectiveScan | None:
    """The scan that a part is, or that it is with diagonals beside it."""
    if isinstance(part, SelectiveScan):
        return part
    if not isinstance(part, Sum):
        return None
    scans = [p for p in part.parts if isinstance(p, SelectiveScan)]
    others = [p for p in part.parts if isinstance(p, Diagonal)]
    return scans[0] if len(scans) == 1 and len(others) + 1 == len(part.parts) else None


def _sent(shares: TapShares, behind: Sequence[Operator]) -> Band:
    """What reaches the scan at each token from the token some lags before."""
    band: Band = {0: shares[0][1].new_ones(1, 1, 1, 1)}
    for part in reversed(behind):
        following = part.after_band(band)
        assert following is not None
        band = following
    found: Band = {}
    for inner, phi in shares:
        for lag, factor in band.items():
            share = factor * shift_tokens(phi, lag)
            found[inner + lag] = found[inner + lag] + share if inner + lag in found else share
    return found
