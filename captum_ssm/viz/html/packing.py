"""Compress the token-to-token maps of an example for a page.

24 layers of 2,000 tokens have 96 million entries. A page has an overview of each map and the
strongest entries of every row, with exact columns, and values rounded to 1/127 of the row's largest
value. If there is room, all entries are kept.

Shapes: L tokens, K entries kept in each row, O cells along the overview's side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from .page import Facts, short

#: Titles of the token-to-token maps, by value of the option ``matrices``.
MAPS = {"attention": "Implicit attention", "contributions": "LATIM contributions"}

#: The number of cells along each side of a map's overview.
_OVERVIEW = 128
#: The smallest number of entries per row in a map.
_MIN_ENTRIES = 8
#: Bytes of an entry that is kept: its column and its value.
_ENTRY_BYTES = 3
#: The largest number of a map's tokens, because column indices are stored in 16 bits.
_MOST_TOKENS = 2**16
_STEPS = 127
#: The number of matrix elements that are in memory at a time (1 GiB in float32).
_MAX_ELEMENTS = 2**28


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
    """Return how many entries of each row of maps with ``sizes`` tokens fit into ``room`` bytes."""
    if max(sizes) > _MOST_TOKENS:
        raise OptionError(
            f"matrices: a map of {max(sizes)} tokens is too large for a page; at most "
            f"{_MOST_TOKENS} are accepted. Use matrices=False (--maps with nothing after it)."
        )
    # of each row's two numbers, and of the overviews
    fixed_bytes = sum(8 * size + min(size, _OVERVIEW) ** 2 for size in sizes)
    entries = (room - fixed_bytes) // (_ENTRY_BYTES * sum(sizes))
    if entries < min(_MIN_ENTRIES, *sizes):
        raise OptionError(
            f"matrices: {len(sizes)} maps with {sum(sizes)} rows do not fit into {room / 1e6:.1f} "
            "MB. Pass fewer layers in shown_layers= (--layers), fewer examples or a larger "
            "megabytes=, or use matrices=False (--maps with nothing after it)."
        )
    return int(entries)


def maps_of(
    subject: Subject,
    example: ShownExample,
    outline: Outline,
    kind: str,
    layers: Sequence[int],
    entries: int,
) -> Iterator[tuple[Facts, bytes]]:
    """Yield each layer's map as JSON values and packed bytes; ``kind`` is a key of MAPS."""
    maps = _compute_maps(subject, example, outline, kind, layers)
    for index, matrix in zip(layers, maps, strict=True):
        packed, layer = pack(matrix, entries), outline.layers[index]
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


def _compute_maps(
    subject: Subject, example: ShownExample, outline: Outline, kind: str, layers: Sequence[int]
) -> Iterator[Tensor]:
    """Yield each layer's map (L, L) without padding, with few maps in memory at a time."""
    method = (ImplicitAttention if kind == "attention" else LatimNorm)(
        subject.forward_func, subject.module, subject.layers
    )
    compute_maps = method.matrices if isinstance(method, ImplicitAttention) else method.maps
    tokens = max(outline.layers[i].tokens for i in layers)
    layers_at_once = max(1, _MAX_ELEMENTS // tokens**2)
    starts = range(0, len(layers), layers_at_once)
    for start in shown(starts):
        indices = list(layers[start : start + layers_at_once])
        matrices = compute_maps(
            example.inputs, layers=indices, additional_forward_args=example.additional or None
        )
        for matrix in matrices:
            yield _without_padding(matrix[0], outline)


def pack(matrix: Tensor, entries: int) -> PackedMap:
    """Pack a map (L, L) in few bytes: an overview, and ``entries`` entries of each row."""
    values = matrix.detach().cpu().to(torch.promote_types(matrix.dtype, torch.float32))
    size = len(values)
    scales = values.abs().amax(-1)  # (L,)
    overview, cell = _overview(values)
    largest = float(scales.max())
    data = [_little_endian(scales, "<f4")]
    if _ENTRY_BYTES * entries >= size:  # naming the columns would cost more than keeping all
        entries = size
        data += [_little_endian(torch.ones(size), "<f4"), b""]
    else:
        columns = values.abs().topk(entries, dim=-1).indices.sort(-1).values  # (L, K)
        sums = values.abs().sum(-1)
        values = values.gather(-1, columns)
        shares = values.abs().sum(-1) / sums.where(sums > 0, 1.0)
        data += [_little_endian(shares.where(sums > 0, 1.0), "<f4"), _little_endian(columns, "<u2")]
    if entries < size or cell > 1:  # else the values are the overview, and come once
        data.append(_as_steps(overview, scales.max()))
    data.append(_as_steps(values, scales[:, None]))
    return PackedMap(size, entries, len(overview), cell, largest, b"".join(data))


def _without_padding(matrix: Tensor, outline: Outline) -> Tensor:
    """Return a map without padding tokens; unchanged if its layer has different tokens."""
    if len(matrix) != outline.layers[0].tokens or len(outline.unpadded) == len(matrix):
        return matrix
    positions = torch.tensor(outline.unpadded, device=matrix.device)
    return matrix[positions[:, None], positions]


def _overview(values: Tensor) -> tuple[Tensor, int]:
    """Return the strongest entry of each cell (O, O), and the cell's side in tokens."""
    size = len(values)
    cell = -(-size // _OVERVIEW)
    if cell == 1:
        return values, 1
    pad = (0, -size % cell, 0, -size % cell)
    # the largest positive and the largest negative entry of each cell, by absolute value
    high, low = (F.max_pool2d(F.pad(x, pad)[None], cell)[0] for x in (values, -values))
    return torch.where(high >= low, high, -low), cell


def _as_steps(values: Tensor, largest: Tensor) -> bytes:
    """Round values to 127ths of ``largest``, int8."""
    shares = values / largest.where(largest > 0, 1.0)
    return _little_endian((shares * _STEPS).round(), "|i1")


def _little_endian(values: Tensor, dtype: str) -> bytes:
    """Return values as bytes of numpy's ``dtype``, such as ``"<f4"`` for float32."""
    array: npt.NDArray[np.generic] = values.numpy().astype(dtype)
    return array.tobytes()
