"""Products of operators.

``parts[0]`` is the outermost factor and acts last; see "outer" and "inner" in :mod:`.base`.
Diagonals and short convolutions at both ends are passed as factors and shifts to the fast methods
of the operator between them, and reorderings are applied to the resulting rows and columns.  If the
channels of a head share a matrix, means over channels map one channel per head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from .base import Operator
from .combine import Composite
from .diagonal import Diagonal
from .heads import HeadCentering, HeadOperator
from .kernels.bands import Band, shift_tokens
from .kernels.portions import at_a_time
from .kernels.rows import Positions, Strip, clipped, sum_of_lags, sum_strips
from .reorder import Permute

#: Largest number of elements of the factors of a block of heads (4 MiB in float32).
_FACTOR_ELEMENTS = 2**20


class Chain(Composite):
    """A product of operators, in the order of a matrix product: the last operator acts first.

    alpha = parts[0] . parts[1] . ... , so ``Chain(gate, scan, conv)`` convolves, then scans, then
    gates.  A part that is a Chain is replaced by its own parts.

    Attributes:
        parts: the factors; none of them is a Chain.

    Args:
        *parts: at least one operator, all of the same shape.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Chain, Diagonal, Permute, Shape
        >>> shape = Shape(batch=1, tokens=3, heads=1, per_head=1)
        >>> gate = Diagonal(torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1), shape, "gate")
        >>> flip = Permute(torch.tensor([2, 1, 0]), shape)
        >>> Chain(gate, flip).dense().int()
        tensor([[[0, 0, 1],
                 [0, 2, 0],
                 [3, 0, 0]]], dtype=torch.int32)
    """

    def __init__(self, *parts: Operator) -> None:
        self.parts = tuple(p for part in parts for p in _parts_of(part))
        self.shape = self.parts[0].shape

    def apply(self, v: Tensor) -> Tensor:
        for part in reversed(self.parts):
            v = part.apply(v)
        return v

    def transpose(self, u: Tensor) -> Tensor:
        for part in self.parts:
            u = part.transpose(u)
        return u

    def unit_rows(self, positions: Positions, weight: Tensor | None = None) -> Tensor:
        """Compute rows of the outermost factor, and map them by the adjoints of all others."""
        outer, *inner = self.parts
        while inner and isinstance(outer, Diagonal | Permute):
            # its rows are scaled rows of its inner factor: cheaper than to scale vectors
            positions, weight = outer.inner_rows(positions, weight)
            outer = inner.pop(0)
        u = outer.unit_rows(positions, weight)
        for part in inner:
            if isinstance(part, Diagonal) and u.is_contiguous() and u.dtype == part.dtype:
                u *= part.weight  # in place: unit_rows made this memory
            else:
                u = part.transpose(u)
        return u

    def _mean_forward(self, x: Tensor) -> Tensor:
        return _mean_of_channels(self.parts, x, transposed=False)

    def _mean_adjoint(self, r: Tensor) -> Tensor:
        return _mean_of_channels(self.parts, r, transposed=True)

    def offset(self) -> Tensor | None:
        """Sum the parts' constants, each mapped by the parts outside of it."""
        total: Tensor | None = None
        for part in reversed(self.parts):
            total = part.offset() if total is None else part.affine(total)
        return total

    def affine(self, v: Tensor) -> Tensor:
        for part in reversed(self.parts):
            v = part.affine(v)
        return v

    def restrict(self, components: Collection[str]) -> Operator | None:
        kept = [p for part in self.parts if (p := part.restrict(components)) is not None]
        return Chain(*kept) if kept else None

    def select(self, heads: Sequence[int]) -> Operator:
        return Chain(*(part.select(heads) for part in self.parts))

    def per_channel(self) -> Operator:
        return Chain(*(part.per_channel() for part in self.parts))

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        """Compute rows of left . product . band, summed over channels; see :class:`.Operator`.

        Diagonals and short convolutions at the product's ends are multiplied into ``left`` and
        ``band``. If one part remains, such as a recurrence, its fast method computes the rows.
        """
        outer, inner = self.parts[0], self.parts[-1]
        if isinstance(outer, Permute):
            read_rows = outer.input_rows(rows)
            if read_rows is None:  # no range, as a strip needs
                return super().entries(left, band, rows, by_head)
            # row i is row order[i] of the rest, so its factor moves there
            left, rest = outer.transpose(left.expand(self.shape)), self._product_of(self.parts[1:])
            return outer.rows_of_strip(rest.entries(left, band, read_rows, by_head), rows)
        if isinstance(inner, Permute):
            rest = self._product_of(self.parts[:-1])

            def strip_for(right: Tensor) -> Strip:  # rows of diag(left) . self . diag(right)
                # column order[t] is column t of the rest, so its factor moves there
                right = inner.apply(right.expand(self.shape))
                return inner.columns_of_strip(rest.entries(left, {0: right}, rows, by_head))

            return sum_of_lags(strip_for, band, rows, self.shape.tokens)
        if by_head:
            return self._strip_of_core(left, band, rows, by_head)
        return sum_strips(self._strips_by_heads(left, band, rows), rows)

    def _strips_by_heads(self, left: Tensor, band: Band, rows: range) -> Iterator[Strip]:
        """Yield strips that sum to the result of :meth:`entries`, one per block of heads.

        So only one block's factors are in memory. A block has at least half as many heads as there
        are rows, because each strip costs time to allocate and to add.
        """
        batch, tokens, heads, per_head = self.shape
        fitting = at_a_time(_FACTOR_ELEMENTS, self.device) // (batch * tokens)
        size = max(1, len(rows) // 2, fitting)
        # only heads of one channel are split, such as a selective scan's, of which there are many
        if per_head > 1 or size >= heads or any(map(_mixes_heads, self.parts)):
            yield self._strip_of_core(left, band, rows, False)
            return
        left = left.expand(self.shape)
        band = {lag: factor.expand(self.shape) for lag, factor in band.items()}
        for start in range(0, heads, size):
            block = range(start, min(start + size, heads))
            block_chain = Chain(*(operator.select(block) for operator in self.parts))
            heads_of_block = slice(block.start, block.stop)
            block_band = {lag: factor[:, :, heads_of_block] for lag, factor in band.items()}
            yield block_chain._strip_of_core(left[:, :, heads_of_block], block_band, rows, False)

    def _strip_of_core(self, left: Tensor, band: Band, rows: range, by_head: bool) -> Strip:
        """Compute :meth:`entries` of outer band . core . inner band, where the core is one part."""
        outer, middle, inner = self._split_off_bands(band)
        if len(middle) > 1:
            return super().entries(left, band, rows, by_head)
        tokens = self.shape.tokens
        core = middle[0] if middle else self._product_of(())
        strips = []
        for lag, weight in outer.items():
            # alpha[i] += weight[i] core[i - lag]
            earlier = clipped(rows, -lag, tokens)
            if earlier:
                factors = shift_tokens((left * weight).expand(self.shape), -lag)
                strips.append(core.entries(factors, inner, earlier, by_head).moved(lag, 0, tokens))
        if not strips:  # the rows only read tokens beyond the ends
            size = self.shape[:3:2] if by_head else self.shape[:1]  # (B, H) or (B,)
            return Strip(self._zeros(*size, len(rows), 0), rows, range(0))
        return sum_strips(strips, rows)

    def _product_of(self, parts: Sequence[Operator]) -> Operator:
        """Return the product of some of the parts, or the identity if there are none."""
        return Chain(*parts) if parts else Diagonal(self._ones(1, 1, 1, 1), self.shape)

    def _split_off_bands(self, inner: Band) -> tuple[Band, list[Operator], Band]:
        """Split into a band of the outer parts, the middle parts, and inner parts . ``inner``."""
        middle = list(self.parts)
        while middle and (combined := middle[-1].after_band(inner)) is not None:
            inner = combined
            middle.pop()
        outer_parts: list[Operator] = []
        outer: Band = {0: self._ones(1, 1, 1, 1)}  # the identity
        while middle and middle[0].after_band(outer) is not None:  # only tests for a band
            outer_parts.append(middle.pop(0))
        for part in reversed(outer_parts):  # from the innermost outwards
            combined = part.after_band(outer)
            outer = outer if combined is None else combined  # never None, as tested above
        return outer, middle, {lag: factor.expand(self.shape) for lag, factor in inner.items()}


def _parts_of(part: Operator) -> tuple[Operator, ...]:
    """Return a chain's parts, or the operator itself."""
    return part.parts if isinstance(part, Chain) else (part,)


def _mixes_heads(part: Operator) -> bool:
    """Return True if a part mixes the channels of different heads."""
    return any(isinstance(leaf, HeadCentering) and leaf.across for leaf in part.leaves())


def _mean_of_channels(parts: Sequence[Operator], x: Tensor, transposed: bool) -> Tensor:
    """Return the mean over channels of a product, or of its adjoint, times ``x`` (B, L).

    One channel per head is mapped before the first part that treats a head's channels differently.
    The mean over the head's channels is mapped after the last such part.

    Args:
        parts: the factors of the product; the last one acts first.
        x: one value per token (B, L).
        transposed: whether to use the adjoint.
    """
    shape = parts[0].shape
    acting = list(parts if transposed else parts[::-1])  # the part that acts first is first
    differing = [i for i, part in enumerate(acting) if not _maps_channels_alike(part)]  # indices
    # a single diagonal among parts that map channels alike: its mean over channels suffices
    if len(differing) == 1 and isinstance(only := acting[differing[0]], Diagonal):
        acting[differing.pop()] = only.mean_of_channels()
    x = x[..., None, None].expand(*shape[:3], 1)
    for i, part in enumerate(acting):
        x = x.expand(shape) if differing and i == differing[0] else x
        x = part.transpose(x) if transposed else part.apply(x)
        x = x.mean(-1, keepdim=True) if differing and i == differing[-1] else x
    return x.mean((-1, -2))


def _maps_channels_alike(part: Operator) -> bool:
    """Return True if an operator maps all value channels of a head by the same matrix."""
    if isinstance(part, Composite):
        return all(map(_maps_channels_alike, part.parts))
    if isinstance(part, Diagonal):
        return part.weight.shape[-1] == 1
    return isinstance(part, HeadOperator | Permute)
