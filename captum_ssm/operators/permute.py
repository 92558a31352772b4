"""Reorderings of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .base import Operator, Shape
from .diagonal import Diagonal
from .positions import Positions, by_query
from .strips import Strip


class Permute(Operator):
    """y[t] = x[order[t]]: a reordering of the tokens, such as the flip of a backward direction.

    Attributes:
        inverse: which position reads each token (L,).

    Args:
        order: which token each position reads, a permutation (L,).
        shape: the sizes acted on.
        component: name of the part it stands for. A reordering around a core that is one term of a
            sum goes where the core goes, so it bears the core's name. Default: None, a structural
            part.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Permute, Shape
        >>> flip = Permute(torch.tensor([2, 1, 0]), Shape(batch=1, tokens=3, heads=1, per_head=1))
        >>> flip.apply(torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)).flatten().tolist()
        [3.0, 2.0, 1.0]
    """

    def __init__(self, order: Tensor, shape: Shape, component: str | None = None) -> None:
        self.order = order
        self.shape = shape
        self.component = component
        self.inverse = torch.argsort(order)

    @property
    def data_dependent(self) -> bool:
        return False

    def apply(self, v: Tensor) -> Tensor:
        return v.index_select(-3, self.order)

    def transpose(self, u: Tensor) -> Tensor:
        return u.index_select(-3, self.inverse)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def _without_coefficients(self) -> Tensor:
        return torch.zeros((), device=self.order.device)

    def select(self, heads: Sequence[int]) -> Operator:
        shape = self.shape._replace(heads=len(heads))
        return Permute(self.order, shape, self.component)

    def asked(self, positions: Positions, weight: Tensor | None) -> tuple[Positions, Tensor | None]:
        """What is asked of an operator, if its rows are wanted in this order.

        Args:
            positions: of the rows, in this order.
            weight: factors on them (Q, B, 1, H, P), broadcastable; None for none.
        """
        return self.order[by_query(positions, self.order.device)], weight

    def rows_of(self, matrix: Tensor) -> Tensor:
        """Permute . matrix.

        Args:
            matrix: (..., L, L).
        """
        return matrix.index_select(-2, self.order)

    def columns_of(self, matrix: Tensor) -> Tensor:
        """matrix . Permute.

        Args:
            matrix: (..., L, L).
        """
        return matrix.index_select(-1, self.inverse)

    def read_by(self, rows: range) -> range | None:
        """The tokens that some positions read, if they stand next to each other; else None.

        Args:
            rows: the positions.
        """
        return _neighbours(self.order[rows.start : rows.stop])

    def rows_of_strip(self, strip: Strip, rows: range) -> Strip:
        """Some rows of Permute . matrix, from the rows of the matrix that they read.

        Args:
            strip: the rows of the matrix; see :meth:`read_by`.
            rows: the rows wanted.
        """
        read = self.order[rows.start : rows.stop] - strip.rows.start
        return Strip(strip.entries.index_select(1, read), rows, strip.columns)

    def columns_of_strip(self, strip: Strip) -> Strip:
        """Some rows of matrix . Permute.

        Args:
            strip: the same rows of the matrix.
        """
        columns = _neighbours(self.order[strip.columns.start : strip.columns.stop])
        if columns is None:
            tokens = self.shape.tokens
            return Strip(self.columns_of(strip.whole(tokens)), strip.rows, range(tokens))
        wanted = self.inverse[columns.start : columns.stop] - strip.columns.start
        return Strip(strip.entries.index_select(2, wanted), strip.rows, columns)


def outermost(
    parts: Sequence[Operator],
) -> tuple[list[Permute], list[Operator], list[Permute]]:
    """A product whose reorderings at either end are moved past diagonals to the very end.

    Args:
        parts: the factors, the last one acting first.

    Returns:
        The reorderings that act last, what is between, and the reorderings that act first.
    """
    ahead, inside = _moved_ahead(parts, lambda permute: permute.inverse)
    after, inside = _moved_ahead(inside[::-1], lambda permute: permute.order)
    return ahead, inside[::-1], after[::-1]


def _moved_ahead(
    parts: Sequence[Operator], order: Callable[[Permute], Tensor]
) -> tuple[list[Permute], list[Operator]]:
    """The reorderings among the leading diagonals, and all else; ``order`` is the diagonals'."""
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


def _neighbours(positions: Tensor) -> range | None:
    """Different positions as a range; None if others lie between them."""
    if not len(positions):
        return range(0)
    first, last = int(positions.min()), int(positions.max())
    return range(first, last + 1) if last - first < len(positions) else None
