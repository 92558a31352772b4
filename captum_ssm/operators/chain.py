"""Products of operators.

Diagonals and short convolutions around a core become factors and shifts of its own fast versions;
reorderings move to the ends.  Where heads have channels in common, means over channels are taken of
one channel a head for as long as channels are alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from .base import Mixing, Operator
from .combine import Composite, Sum
from .diagonal import Diagonal
from .generic import all_streams, channel_mean, channel_sums
from .heads import HeadCentering, HeadOperator
from .kernels.arithmetic import sum_tensors
from .kernels.bands import Band, add_shifted, shift_tokens
from .kernels.portions import Stream, at_a_time
from .kernels.rows import Positions, Strip, clipped, sum_strips
from .reorder import Permute, outermost

#: Elements of one factor over all tokens (4 MiB in float32).
_FACTOR_ELEMENTS = 2**20


class Chain(Composite):
    """A product of operators, written as in mathematics: the last one acts first.

    alpha = parts[0] . parts[1] . ... , so that ``Chain(gate, scan, conv)`` convolves, scans, gates.
    Parts that are products themselves are taken apart.

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
        self.parts = tuple(p for part in parts for p in _flat(part))
        self.shape = self.parts[0].shape

    @property
    def mixing(self) -> Mixing:
        """Gated if the data scales single tokens only, before and after all mixing."""
        if not (self.mixes_tokens and self.data_dependent):
            return super().mixing
        # a reordering only moves the factors of diagonals about, so it stands nowhere between
        mixers = [
            i
            for i, part in enumerate(self.parts)
            if part.mixes_tokens and not isinstance(part, Permute)
        ]
        inside = self.parts[mixers[0] : mixers[-1] + 1] if mixers else ()
        if len(mixers) == 1 and inside[0].data_dependent:
            return inside[0].mixing
        return Mixing.CONTROLLED if any(p.data_dependent for p in inside) else Mixing.GATED

    def apply(self, v: Tensor) -> Tensor:
        for part in reversed(self.parts):
            v = part.apply(v)
        return v

    def transpose(self, u: Tensor) -> Tensor:
        for part in self.parts:
            u = part.transpose(u)
        return u

    def unit_rows(self, positions: Positions, weight: Tensor | None = None) -> Tensor:
        first, *others = self.parts
        while others and isinstance(first, Diagonal | Permute):
            # what acts last on single tokens is done to the rows asked for, and not to vectors
            positions, weight = first.asked(positions, weight)
            first = others.pop(0)
        u = first.unit_rows(positions, weight)
        for part in others:
            if isinstance(part, Diagonal) and u.is_contiguous() and u.dtype == part.dtype:
                u *= part.weight  # nobody else's memory
            else:
                u = part.transpose(u)
        return u

    def stream(self, transposed: bool, longest: int) -> Stream | None:
        streams = all_streams(self.parts, transposed, longest)
        if streams is None:
            return None
        ordered = streams if transposed else streams[::-1]

        def chained(x: Tensor, part: slice) -> Tensor:
            for stream in ordered:
                x = stream(x, part)
            return x

        return chained

    def _mean_forward(self, x: Tensor) -> Tensor:
        return self._mean(x, transposed=False)

    def _mean_adjoint(self, r: Tensor) -> Tensor:
        return self._mean(r, transposed=True)

    def _mean(self, x: Tensor, transposed: bool) -> Tensor:
        """Reorders vectors rather than channels, so that what is left can be a stream."""
        if any(isinstance(leaf, HeadOperator) for leaf in self.leaves()):
            if _tells_heads_apart(self.parts) and self.stream(transposed, 1) is not None:
                return self._mean_in_turn(x, transposed)
            return _mean_at_once(self.parts, x, transposed)
        if not any(isinstance(leaf, Permute) for leaf in self.leaves()):
            return self._mean_in_turn(x, transposed)
        summands = self._summands()
        if len(summands) > 1:
            return sum_tensors(summand._mean(x, transposed) for summand in summands)
        ahead, inside, after = outermost(self.parts)
        first, last = (ahead, after) if transposed else (after[::-1], ahead[::-1])
        x = _reorder(first, x, transposed)
        x = Chain(*inside)._mean_in_turn(x, transposed) if inside else x
        return _reorder(last, x, transposed)

    def _mean_in_turn(self, x: Tensor, transposed: bool) -> Tensor:
        """From a few tokens at a time; what a convolution at the end does is done to sums.

        It then mixes one number for each of its taps and tokens in place of all channels, which on
        a GPU would take more launches than it saves work.
        """
        *others, last = self.parts if transposed else self.parts[::-1]
        taps = last.taps()
        if taps is None or not others or x.is_cuda:
            return channel_mean(self, x, transposed)
        rest = Chain(*(others if transposed else others[::-1]))
        weights = torch.stack(list(taps.values())).flatten(1)  # (K, C)
        sums = channel_sums(rest, x, transposed, weights / weights.shape[1])
        moved = (-lag if transposed else lag for lag in taps)
        return sum_tensors(
            shift_tokens(of_tap[..., None, None], lag)[..., 0, 0]
            for lag, of_tap in zip(moved, sums.unbind(-1), strict=True)
        )

    def _summands(self) -> list[Chain]:
        """This product as a sum, if all but one sum in it are diagonals."""
        others = [i for i, part in enumerate(self.parts) if not isinstance(part, Diagonal)]
        only = self.parts[others[0]] if len(others) == 1 else None
        if not isinstance(only, Sum):
            return [self]
        before, after = self.parts[: others[0]], self.parts[others[0] + 1 :]
        return [Chain(*before, summand, *after) for summand in only.parts]

    def offset(self) -> Tensor | None:
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

    def strip(self, left: Tensor, right: Tensor, rows: range) -> Strip:
        """Some rows; folds diagonals and short convolutions at both ends into factors and shifts.

        What is left in the middle is usually one recurrence, whose own fast version then serves;
        a chain of any other form falls back to the generic rows.

        Args:
            left, right, rows: as of any operator; see :meth:`.Operator.strip`.
        """
        first, last = self.parts[0], self.parts[-1]
        if isinstance(first, Permute):
            asked = first.read_by(rows)
            if asked is None:
                return super().strip(left, right, rows)
            left = first.transpose(left.expand(self.shape))
            return first.rows_of_strip(self._of(self.parts[1:]).strip(left, right, asked), rows)
        if isinstance(last, Permute):
            right = last.apply(right.expand(self.shape))
            return last.columns_of_strip(self._of(self.parts[:-1]).strip(left, right, rows))
        return sum_strips(self._by_blocks(left, right, rows), rows)

    def _by_blocks(self, left: Tensor, right: Tensor, rows: range) -> Iterator[Strip]:
        """The shares of blocks of channels, whose factors over all tokens are small.

        No smaller than half the shares, though: each of them is a matrix to be made and added.
        """
        batch, tokens, heads, per_head = self.shape
        most = at_a_time(_FACTOR_ELEMENTS, self.device) // (batch * tokens)
        size = max(1, len(rows) // 2, most)
        if per_head > 1 or size >= heads or any(map(_mixes_heads, self.parts)):
            yield self._folded(left, right, rows)
            return
        left, right = left.expand(self.shape), right.expand(self.shape)
        for start in range(0, heads, size):
            part = range(start, min(start + size, heads))
            of_part = Chain(*(operator.select(part) for operator in self.parts))
            left_part, right_part = (x[:, :, part.start : part.stop] for x in (left, right))
            yield of_part._folded(left_part, right_part, rows)

    def _folded(self, left: Tensor, right: Tensor, rows: range) -> Strip:
        before, core, band = self._bands(right)
        if len(core) > 1:
            return super().strip(left, right, rows)
        tokens = self.shape.tokens
        inner = core[0] if core else self._of(())
        strips = []
        for ahead, weight in before.items():
            # alpha[i] += weight[i] core[i - ahead]
            asked = clipped(rows, -ahead, tokens)
            if asked:
                factors = shift_tokens((left * weight).expand(self.shape), -ahead)
                strips.append(inner.strip_of_product(factors, band, asked).moved(ahead, 0, tokens))
        if not strips:  # all that the rows read lies beyond the ends
            return Strip(self._zeros(self.shape.batch, len(rows), 0), rows, range(0))
        return sum_strips(strips, rows)

    def contract_heads(self, left: Tensor, right: Tensor) -> Tensor:
        first, last = self.parts[0], self.parts[-1]
        if isinstance(first, Permute):
            left = first.transpose(left.expand(self.shape))
            return first.rows_of(self._of(self.parts[1:]).contract_heads(left, right))
        if isinstance(last, Permute):
            right = last.apply(right.expand(self.shape))
            return last.columns_of(self._of(self.parts[:-1]).contract_heads(left, right))
        before, core, band = self._bands(right)
        if len(core) > 1:
            return super().contract_heads(left, right)
        inner = core[0] if core else self._of(())
        return _folded_heads(inner, left, before, band)

    def _of(self, parts: Sequence[Operator]) -> Operator:
        """The product of some of the parts; of none, the identity."""
        return Chain(*parts) if parts else Diagonal(self._ones(1, 1, 1, 1), self.shape)

    def _bands(self, right: Tensor) -> tuple[Band, list[Operator], Band]:
        """The banded operators in front as one band, what is between, and those at the end.

        Those at the end act on columns with factors ``right``.
        """
        core = list(self.parts)
        after: Band = {0: right}
        while core and (combined := core[-1].after_band(after)) is not None:
            after = combined
            core.pop()
        front: list[Operator] = []
        before: Band = {0: self._ones(1, 1, 1, 1)}
        while core and core[0].after_band(before) is not None:
            front.append(core.pop(0))
        for part in reversed(front):
            combined = part.after_band(before)
            before = before if combined is None else combined
        return before, core, {lag: factor.expand(self.shape) for lag, factor in after.items()}


def _flat(part: Operator) -> tuple[Operator, ...]:
    return part.parts if isinstance(part, Chain) else (part,)


def _mixes_heads(part: Operator) -> bool:
    """Whether no head can be told apart from the others."""
    return any(isinstance(leaf, HeadCentering) and leaf.across for leaf in part.leaves())


def _tells_heads_apart(parts: Sequence[Operator]) -> bool:
    """Whether channels of a head differ both before and after what they have in common."""
    apart = [i for i, part in enumerate(parts) if not _alike(part)]
    inside = parts[apart[0] : apart[-1] + 1] if apart else ()
    return any(isinstance(leaf, HeadOperator) for part in inside for leaf in part.leaves())


def _mean_at_once(parts: Sequence[Operator], x: Tensor, transposed: bool) -> Tensor:
    """The mean over channels of a product, or of its adjoint, times ``x`` (B, L).

    From all tokens at once, and of each head one channel as long as its channels are alike: they
    are before the first part that tells them apart, and their mean is after the last.

    Args:
        parts: the factors; the last one acts first.
        x: one number per token (B, L).
        transposed: whether it is the adjoint.
    """
    shape = parts[0].shape
    acting = list(parts if transposed else parts[::-1])
    apart = [i for i, part in enumerate(acting) if not _alike(part)]
    if len(apart) == 1 and isinstance(only := acting[apart[0]], Diagonal):
        acting[apart.pop()] = only.mean_of_channels()
    x = x[..., None, None].expand(*shape[:3], 1)
    for i, part in enumerate(acting):
        x = x.expand(shape) if apart and i == apart[0] else x
        x = part.transpose(x) if transposed else part.apply(x)
        x = x.mean(-1, keepdim=True) if apart and i == apart[-1] else x
    return x.mean((-1, -2))


def _reorder(permutes: Sequence[Operator], x: Tensor, transposed: bool) -> Tensor:
    """Vectors (B, L) reordered by one permutation after the other, or by their adjoints.

    Args:
        permutes: those that act first come first.
        x: the vectors.
        transposed: whether it is the adjoints.
    """
    x = x[..., None, None]
    for permute in permutes:
        x = permute.transpose(x) if transposed else permute.apply(x)
    return x[..., 0, 0]


def _alike(part: Operator) -> bool:
    """Whether an operator acts alike on all value channels of a head, however many there are."""
    if isinstance(part, Composite):
        return all(map(_alike, part.parts))
    if isinstance(part, Diagonal):
        return part.weight.shape[-1] == 1
    return isinstance(part, HeadOperator | Permute)


def _folded_heads(core: Operator, left: Tensor, before: Band, columns: Band) -> Tensor:
    """By head, the sum over channels of left[i, c] (before_c core_c columns_c)[i, j].

    Args:
        core: what stands between the bands.
        left: row factors (B, L, H, P), broadcastable.
        before: what acts after the core.
        columns: what acts before it, column factors included.

    Returns:
        (B, H, L, L).
    """
    if len(before) == 1 and 0 in before:
        return core.heads_of_product(left * before[0], columns)
    batch, tokens, heads, _ = core.shape
    out = torch.zeros(batch, heads, tokens, tokens, dtype=core.dtype, device=core.device)
    for ahead, weight in before.items():
        # row i of the product holds row i - ahead of the core, weighed at i
        rows = shift_tokens((left * weight).expand(core.shape), -ahead)
        add_shifted(out, core.heads_of_product(rows, columns), ahead, 0)
    return out
