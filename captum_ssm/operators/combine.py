"""Operators made of other operators: sums, and direct sums of parts on separate heads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from .base import Operator
from .diagonal import Diagonal
from .kernels.arithmetic import sum_tensors
from .kernels.bands import Band
from .kernels.rows import Positions, Strip, by_query, sum_of_lags, sum_strips


class Composite(Operator):
    """Base class of operators that combine several operators, their ``parts``."""

    parts: tuple[Operator, ...]

    @property
    def mixes_tokens(self) -> bool:
        return any(part.mixes_tokens for part in self.parts)

    @property
    def data_dependent(self) -> bool:  # type: ignore[override]
        return any(part.data_dependent for part in self.parts)

    def leaves(self) -> Iterator[Operator]:
        for part in self.parts:
            yield from part.leaves()

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{k}": t for i, p in enumerate(self.parts) for k, t in p.tensors().items()}


class Sum(Composite):
    """A sum of operators on the same values, alpha = parts[0] + parts[1] + ...

    Attributes:
        parts: the summands.

    Args:
        *parts: at least one operator, all of the same shape.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Diagonal, ElementwiseRecurrence, Sum
        >>> scan = ElementwiseRecurrence(torch.full((1, 3, 1), 0.5))
        >>> skip = Diagonal(torch.ones(1, 1, 1, 1), scan.shape, "skip")
        >>> torch.allclose(Sum(scan, skip).dense(), scan.dense() + torch.eye(3))
        True
    """

    def __init__(self, *parts: Operator) -> None:
        self.parts = parts
        self.shape = parts[0].shape

    def apply(self, v: Tensor) -> Tensor:
        scalings, others = self._split_diagonals()
        return _with_scaled([part.apply(v) for part in others], scalings, v)

    def transpose(self, u: Tensor) -> Tensor:
        scalings, others = self._split_diagonals()
        return _with_scaled([part.transpose(u) for part in others], scalings, u)

    def unit_rows(self, positions: Positions, weight: Tensor | None = None) -> Tensor:
        """Sum the rows of all parts; a diagonal adds one entry per row."""
        scalings, others = self._split_diagonals()
        if not others:
            return super().unit_rows(positions, weight)
        out = sum_tensors(part.unit_rows(positions, weight) for part in others)
        out = out.contiguous()  # heads may have expanded one row to all their channels
        index = by_query(positions, out.device)
        query, example = (torch.arange(size, device=out.device) for size in out.shape[:2])
        for scaling in scalings:  # row i of a diagonal has one entry, at token i
            _, factors = scaling.inner_rows(positions, weight)
            out[query[:, None], example, index] += factors.squeeze(2)
        return out

    def mean_matvec(self, x: Tensor) -> Tensor:
        return sum_tensors(part.mean_matvec(x) for part in self.parts)

    def mean_rmatvec(self, r: Tensor) -> Tensor:
        return sum_tensors(part.mean_rmatvec(r) for part in self.parts)

    def _split_diagonals(self) -> tuple[list[Diagonal], list[Operator]]:
        """Return the summands that are diagonals, and all other summands."""
        scalings = [part for part in self.parts if isinstance(part, Diagonal)]
        return scalings, [part for part in self.parts if not isinstance(part, Diagonal)]

    def offset(self) -> Tensor | None:
        terms = [t for part in self.parts if (t := part.offset()) is not None]
        return sum_tensors(terms) if terms else None

    def restrict(self, components: Collection[str]) -> Operator | None:
        kept = [p for part in self.parts if (p := part.restrict(components)) is not None]
        if len(kept) <= 1:
            return kept[0] if kept else None
        return Sum(*kept)

    def select(self, heads: Sequence[int]) -> Operator:
        return Sum(*(part.select(heads) for part in self.parts))

    def per_channel(self) -> Operator:
        return Sum(*(part.per_channel() for part in self.parts))

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        """Sum the strips of all parts; diagonals are added in place."""
        scalings, others = self._split_diagonals()
        terms = others or [scalings.pop()]  # a first strip to add to
        out = sum_strips((part.entries(left, band, rows, by_head) for part in terms), rows)
        for scaling in scalings:
            out = scaling.added_to(out, left, band)
        return out


def _with_scaled(terms: list[Tensor], scalings: list[Diagonal], x: Tensor) -> Tensor:
    """Return the sum of ``terms`` and of ``x`` scaled by each diagonal; one list may be empty."""
    if not terms:
        first, *scalings = scalings
        terms = [first.apply(x)]
    out = sum_tensors(terms)
    for scaling in scalings:  # one pass over memory each
        out = torch.addcmul(out, scaling.weight, x)
    return out


class DirectSum(Composite):
    """Operators on separate heads: the first operator maps the first heads, and so on.

    :meth:`restrict` replaces a part by the identity if none of its components is kept.

    Args:
        *parts: operators with the same batch, tokens and channels per head.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Diagonal, DirectSum, ElementwiseRecurrence
        >>> scan = ElementwiseRecurrence(torch.full((1, 3, 1), 0.5))
        >>> passed = Diagonal(torch.ones(1, 1, 1, 1), scan.shape)
        >>> DirectSum(scan, passed).apply(torch.ones(1, 3, 2, 1))[0, :, :, 0].tolist()
        [[1.0, 1.0], [1.5, 1.0], [1.75, 1.0]]
    """

    def __init__(self, *parts: Operator) -> None:
        self.parts = parts
        self._heads = [part.shape.heads for part in parts]
        self.shape = parts[0].shape._replace(heads=sum(self._heads))

    def apply(self, v: Tensor) -> Tensor:
        pairs = zip(self.parts, self._split_heads(v), strict=True)
        return torch.cat([part.apply(x) for part, x in pairs], -2)

    def transpose(self, u: Tensor) -> Tensor:
        pairs = zip(self.parts, self._split_heads(u), strict=True)
        return torch.cat([part.transpose(x) for part, x in pairs], -2)

    def offset(self) -> Tensor | None:  # parts without a constant get zeros
        offsets = [part.offset() for part in self.parts]
        if all(offset is None for offset in offsets):
            return None
        pairs = zip(self.parts, offsets, strict=True)
        return torch.cat([self._zeros(*p.shape) if t is None else t for p, t in pairs], -2)

    def restrict(self, components: Collection[str]) -> Operator | None:
        restricted = [part.restrict(components) for part in self.parts]
        if all(part is None for part in restricted):
            return None
        pairs = zip(restricted, self.parts, strict=True)
        return DirectSum(*(_identity_like(part) if rest is None else rest for rest, part in pairs))

    def select(self, heads: Sequence[int]) -> Operator:
        # for each head, the index of its part and its index in this part
        part_heads = [(i, head) for i, count in enumerate(self._heads) for head in range(count)]
        # neighbors in ``heads`` from one part form one part; a part that occurs again is split
        runs = groupby((part_heads[head] for head in heads), key=itemgetter(0))
        return DirectSum(*(self.parts[i].select([head for _, head in run]) for i, run in runs))

    def per_channel(self) -> Operator:
        return DirectSum(*(part.per_channel() for part in self.parts))

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        """Compute the strips of all parts; sum them, or concatenate them along the heads."""
        tokens, lefts = self.shape.tokens, self._split_heads(left.expand(self.shape))

        def strip_for(right: Tensor) -> Strip:  # rows of diag(left) . self . diag(right)
            rights = self._split_heads(right.expand(self.shape))
            triples = zip(self.parts, lefts, rights, strict=True)
            strips = (part.entries(x, {0: y}, rows, by_head) for part, x, y in triples)
            if not by_head:
                return sum_strips(strips, rows)
            return Strip(torch.cat([x.full(tokens) for x in strips], 1), rows, range(tokens))

        return sum_of_lags(strip_for, band, rows, tokens)

    def _split_heads(self, v: Tensor) -> Sequence[Tensor]:
        """Split ``v`` (..., H, P) along its heads, one tensor for each part."""
        return torch.split(v, self._heads, -2)


def _identity_like(part: Operator) -> Operator:
    """Return the identity operator with the shape, dtype and device of a part."""
    one = torch.ones(1, 1, 1, 1, dtype=part.dtype, device=part.device)
    return Diagonal(one, part.shape)
