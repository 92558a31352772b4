"""Compress the token-to-token maps of an example for a page.

24 layers of 2,000 tokens have 96 million entries. A page has an overview of each map and the
strongest entries of every row, with exact columns, and values rounded to 1/127 of the row's largest
value. If there is room, all entries are kept.

Shapes: L tokens, K entries kept in each row, O cells along the overview's side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ...attr import ImplicitAttention, LatimNorm
from ...attr.call.progress import shown
from ...errors import OptionError
from .example import ShownExample, Subject
from .outline import Outline
from .page import short

#: Titles of the token-to-token maps, by value of the option ``matrices``.
MAPS = {"attention": "Implicit attention", "contributions": "LATIM contributions"}

#: The number of cells along each side of a map's overview.
_OVERVIEW = 128
#: The smallest number of entries per row in a map.
_FEWEST = 8
#: Bytes of an entry that is kept: its column and its value.
_ENTRY = 3
#: The largest number of a map's tokens, because column indices are stored in 16 bits.
_MOST_TOKENS = 2**16
_STEPS = 127
#: The number of matrix elements that are in memory at a time (1 GiB in float32).
_HELD = 2**28


@dataclass(frozen=True, eq=False)
class PackedMap:
    """A token-to-token map in few bytes.

    Attributes:
        size: the number of tokens L.
        kept: the number of entries kept in each row; L if all are kept.
        overview_side: the number of cells along the overview's side, O.
        overview_cell: the number of the map's rows, and of its columns, in a cell.
        largest: the largest absolute value of the map.
        data: four little-endian parts. Each row's largest absolute value, and kept share of its
            absolute sum (2, L), float32. The columns kept (L, K), uint16, unless all are kept. The
            overview (O, O) of each cell's strongest entry in 127ths of ``largest``, int8. The
            values (L, K) in 127ths of the row's largest value, int8.
    """

    size: int
    kept: int
    overview_side: int
    overview_cell: int
    largest: float
    data: bytes


def entries_kept(sizes: Sequence[int], room: int) -> int:
    """Return the number of entries of each map row that fit into a page."""
    if max(sizes) > _MOST_TOKENS:
        raise OptionError(
            f"matrices: a map of {max(sizes)} tokens is too large for a page; at most "
            f"{_MOST_TOKENS} are accepted. Use matrices=False (--maps with nothing after it)."
        )
    fixed = sum(8 * size + min(size, _OVERVIEW) ** 2 for size in sizes)
    kept = (room - fixed) // (_ENTRY * sum(sizes))
    if kept < min(_FEWEST, *sizes):
        raise OptionError(
            f"matrices: {len(sizes)} maps with {sum(sizes)} rows do not fit into {room / 1e6:.1f} "
            "MB. Pass fewer layers in shown_layers= (--layers), fewer examples or a larger "
            "megabytes=, or use matrices=False (--maps with nothing after it)."
        )
    return int(kept)


def maps_of(
    subject: Subject,
    example: ShownExample,
    known: Outline,
    kind: str,
    layers: Sequence[int],
    kept: int,
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield each layer's map as JSON values and packed bytes."""
    maps = _matrices(subject, example, known, kind, layers)
    for index, matrix in zip(layers, maps, strict=True):
        packed, layer = pack(matrix, kept), known.layers[index]
        facts = {
            "index": index,
            "module": layer.name,
            "family": layer.architecture,
            "size": packed.size,
            "kept": packed.kept,
            "side": packed.overview_side,
            "cell": packed.overview_cell,
            "largest": short(packed.largest),
        }
        yield facts, packed.data


def _matrices(
    subject: Subject,
    example: ShownExample,
    known: Outline,
    kind: str,
    layers: Sequence[int],
) -> Iterator[Tensor]:
    """Yield each layer's map (L, L) without padding, with few maps in memory at a time."""
    method = (ImplicitAttention if kind == "attention" else LatimNorm)(
        subject.forward_func, subject.module, subject.layers
    )
    take = method.matrices if isinstance(method, ImplicitAttention) else method.maps
    tokens = max(known.layers[i].tokens for i in layers)
    together = max(1, _HELD // tokens**2)
    starts = range(0, len(layers), together)
    for start in shown(starts):
        part = list(layers[start : start + together])
        found = take(
            example.inputs, layers=part, additional_forward_args=example.additional or None
        )
        for matrix in found:
            yield _without_padding(matrix[0], known)


def pack(matrix: Tensor, kept: int) -> PackedMap:
    """Pack a map (L, L) in few bytes: an overview, and ``kept`` entries of each row."""
    values = matrix.detach().cpu().to(torch.promote_types(matrix.dtype, torch.float32))
    size = len(values)
    scales = values.abs().amax(-1)  # (L,)
    cells, cell = _overview(values)
    largest = float(scales.max())
    parts = [_little(scales, "<f4")]
    if _ENTRY * kept >= size:  # naming the columns would cost more than keeping all
        kept = size
        parts += [_little(torch.ones(size), "<f4"), b""]
    else:
        columns = values.abs().topk(kept, dim=-1).indices.sort(-1).values  # (L, K)
        sums = values.abs().sum(-1)
        values = values.gather(-1, columns)
        shares = values.abs().sum(-1) / sums.where(sums > 0, 1.0)
        parts += [_little(shares.where(sums > 0, 1.0), "<f4"), _little(columns, "<u2")]
    if kept < size or cell > 1:  # else the overview is the map itself
        parts.append(_steps(cells, scales.max()))
    parts.append(_steps(values, scales[:, None]))
    return PackedMap(size, kept, len(cells), cell, largest, b"".join(parts))


def _without_padding(matrix: Tensor, known: Outline) -> Tensor:
    if len(matrix) != known.layers[0].tokens or len(known.real) == len(matrix):
        return matrix
    real = torch.tensor(known.real, device=matrix.device)
    return matrix[real[:, None], real]


def _overview(values: Tensor) -> tuple[Tensor, int]:
    """Return the strongest entry of each cell (O, O), and the cell's side in tokens."""
    size = len(values)
    cell = -(-size // _OVERVIEW)
    if cell == 1:
        return values, 1
    pad = (0, -size % cell, 0, -size % cell)
    high, low = (F.max_pool2d(F.pad(x, pad)[None], cell)[0] for x in (values, -values))
    return torch.where(high >= low, high, -low), cell


def _steps(values: Tensor, largest: Tensor) -> bytes:
    unit = values / largest.where(largest > 0, 1.0)
    return _little((unit * _STEPS).round(), "|i1")


def _little(values: Tensor, kind: str) -> bytes:
    array: npt.NDArray[np.generic] = values.numpy().astype(kind)
    return array.tobytes()
