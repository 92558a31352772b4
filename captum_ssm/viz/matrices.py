"""Draw implicit attention matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import InputError, OptionError
from .figure import SEQUENTIAL, check_labels, color_scale, finite_numbers, min_max, new_figure
from .labels import label_axis, plot_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_matrices(
    matrices: Sequence[Tensor],
    tokens: Sequence[str] | None = None,
    *,
    titles: Sequence[str] | None = None,
    title: str | None = None,
    absolute: bool = False,
    columns: int | None = None,
) -> tuple[Figure, Any]:
    """Draw implicit attention matrices side by side; row i has the weights for target token i.

    Args:
        matrices: matrices (L, L), or (1, L, L) as :meth:`ImplicitAttention.matrices
            <captum_ssm.ImplicitAttention.matrices>` returns them; or the channels of one layer in a
            tensor (C, L, L).
        tokens: labels of the tokens. Default: None, positions.
        titles: a heading for each picture. Default: None, ``layer 0``, ``layer 1``, ...
        title: a heading for all. Default: None.
        absolute: show absolute values, stretched to 0 to 1 as in the papers, instead of signed
            values. Default: False.
        columns: the number of pictures in a row. Default: None, all in one row.

    Returns:
        The matplotlib figure and its axes, one per matrix.

    Raises:
        InputError: when there is no matrix, one is not (L, L) of finite numbers, or labels are too
            few or too many.
        OptionError: when columns is below 1.

    Example:
        >>> import torch
        >>> from captum_ssm.viz import plot_matrices
        >>> figure, axes = plot_matrices([torch.eye(3), torch.ones(3, 3)], ["a", "b", "c"])
        >>> [axis.get_title() for axis in axes]
        ['layer 0', 'layer 1']
    """
    squares = [_square(m) for m in matrices]
    if not squares:
        raise InputError("matrices is empty. Pass at least one matrix (L, L).")
    names = [f"layer {i}" for i in range(len(squares))] if titles is None else list(titles)
    check_labels(names, len(squares), "titles")
    if columns is not None and columns < 1:
        raise OptionError(f"columns={columns} is below 1. Pass an integer of at least 1, or None.")
    per_row = len(squares) if columns is None else columns
    side = min(9.0, 2.6 + 0.13 * max(map(len, squares)))
    per_row, rows = min(per_row, len(squares)), -(-len(squares) // per_row)
    figure, grid = new_figure(side * per_row, side * rows, nrows=rows, ncols=per_row, squeeze=False)
    axes = grid.flatten()
    for axis, square, name in zip(axes, squares, names, strict=False):
        image = _draw_matrix(axis, square, absolute)
        figure.colorbar(image, ax=axis, shrink=0.7)
        axis.set_title(plot_label(name), size=10)
        label_axis(axis.xaxis, tokens, len(square), "tokens")
        label_axis(axis.yaxis, tokens, len(square), "tokens")
    for axis in axes[len(squares) :]:
        axis.remove()
    for i, axis in enumerate(axes[: len(squares)]):
        axis.set_xlabel("source token" if i + per_row >= len(squares) else "")
        axis.set_ylabel("receiving token" if i % per_row == 0 else "")
    if title:
        figure.suptitle(plot_label(title), x=0.01, ha="left", size=11)
    return figure, axes[: len(squares)]


def _draw_matrix(axis: Any, square: Tensor, absolute: bool) -> Any:
    """Draw a matrix in colors, and return matplotlib's image, from which a color bar is made."""
    color_map, low, high = (SEQUENTIAL, 0.0, 1.0) if absolute else color_scale(square)
    values = min_max(square) if absolute else square
    return axis.imshow(values.numpy(), cmap=color_map, vmin=low, vmax=high)


def _square(matrix: Tensor) -> Tensor:
    """Check a matrix (L, L) or (1, L, L), and return it as (L, L) in float64."""
    square = finite_numbers(matrix, "matrices")
    square = square[0] if square.dim() == 3 and len(square) == 1 else square
    if square.dim() != 2 or square.shape[0] != square.shape[1]:
        raise InputError(
            f"a matrix of shape {tuple(matrix.shape)} cannot be drawn. Pass one matrix (L, L) per "
            "picture, for example matrices[layer][example]."
        )
    return square
