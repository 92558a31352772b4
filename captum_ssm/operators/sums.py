"""Sums of operators on the same values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from .band import Band
from .base import Operator
from .composite import Composite
from .diagonal import Diagonal
from .positions import Positions, by_query
from .streams import Stream, all_streams
from .strips import Strip, total


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
        return added(part.apply(v) for part in self.parts)

    def transpose(self, u: Tensor) -> Tensor:
        return added(part.transpose(u) for part in self.parts)

    def unit_rows(self, positions: Positions, weight: Tensor | None = None) -> Tensor:
        scalings, others = self._by_kind()
        if not others:
            return super().unit_rows(positions, weight)
        out = added(part.unit_rows(positions, weight) for part in others)
        out = out.contiguous()  # heads may have said it once for all their channels
        index = by_query(positions, out.device)
        query, example = (torch.arange(size, device=out.device) for size in out.shape[:2])
        for scaling in scalings:  # each token's own share, and nothing of others
            _, factors = scaling.asked(positions, weight)
            out[query[:, None], example, index] += factors.squeeze(2)
        return out

    def mean_matvec(self, x: Tensor) -> Tensor:
        return added(part.mean_matvec(x) for part in self.parts)

    def mean_rmatvec(self, r: Tensor) -> Tensor:
        return added(part.mean_rmatvec(r) for part in self.parts)

    def stream(self, transposed: bool, longest: int) -> Stream | None:
        scalings, others = self._by_kind()
        streams = all_streams(others or [scalings.pop()], transposed, longest)
        if streams is None:
            return None

        def summed(x: Tensor, part: slice) -> Tensor:
            out = added(stream(x, part) for stream in streams)
            for scaling in scalings:  # without a tensor of what each of them adds
                out = torch.addcmul(out, scaling.factors(part), x)
            return out

        return summed

    def _by_kind(self) -> tuple[list[Diagonal], list[Operator]]:
        """The summands that scale single tokens, and all others."""
        scalings = [part for part in self.parts if isinstance(part, Diagonal)]
        return scalings, [part for part in self.parts if not isinstance(part, Diagonal)]

    def offset(self) -> Tensor | None:
        terms = [t for part in self.parts if (t := part.offset()) is not None]
        return added(terms) if terms else None

    def restrict(self, components: Collection[str]) -> Operator | None:
        kept = [p for part in self.parts if (p := part.restrict(components)) is not None]
        if len(kept) <= 1:
            return kept[0] if kept else None
        return Sum(*kept)

    def select(self, heads: Sequence[int]) -> Operator:
        return Sum(*(part.select(heads) for part in self.parts))

    def per_channel(self) -> Operator:
        return Sum(*(part.per_channel() for part in self.parts))

    def contract(self, left: Tensor, right: Tensor) -> Tensor:
        tokens = self.shape.tokens
        return self.strip(left, right, range(tokens)).whole(tokens)

    def strip(self, left: Tensor, right: Tensor, rows: range) -> Strip:
        return total((part.strip(left, right, rows) for part in self.parts), rows)

    def contract_heads(self, left: Tensor, right: Tensor) -> Tensor:
        return self.heads_of_product(left, {0: right})

    def heads_of_product(self, left: Tensor, band: Band) -> Tensor:
        out = self.parts[0].heads_of_product(left, band)
        for part in self.parts[1:]:
            part.add_heads(out, left, band)
        return out

    def strip_of_product(self, left: Tensor, band: Band, rows: range) -> Strip:
        return total((part.strip_of_product(left, band, rows) for part in self.parts), rows)


def added(terms: Iterable[Tensor]) -> Tensor:
    """The sum of at least one tensor."""
    return reduce(torch.add, terms)
