"""Draw implicit attention matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import InputError, OptionError
from .figure import SEQUENTIAL, check_labels, min_max, new_figure, numbers, scale
from .labels import label_axis, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Depths at which the papers' figures show matrices.
QUARTERS = (0.25, 0.5, 0.75)


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
            <captum_ssm.ImplicitAttention.matrices>` returns them.
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
    wide = len(squares) if columns is None else columns
    side = min(9.0, 2.6 + 0.13 * max(map(len, squares)))
    wide, high = min(wide, len(squares)), -(-len(squares) // wide)
    figure, grid = new_figure(side * wide, side * high, nrows=high, ncols=wide, squeeze=False)
    axes = grid.flatten()
    for axis, square, name in zip(axes, squares, names, strict=False):
        image = _draw(axis, square, absolute)
        figure.colorbar(image, ax=axis, shrink=0.7)
        axis.set_title(shown(name), size=10)
        label_axis(axis.xaxis, tokens, len(square), "tokens")
        label_axis(axis.yaxis, tokens, len(square), "tokens")
    for axis in axes[len(squares) :]:
        axis.remove()
    for place, axis in enumerate(axes[: len(squares)]):
        axis.set_xlabel("source token" if place + wide >= len(squares) else "")
        axis.set_ylabel("receiving token" if place % wide == 0 else "")
    if title:
        figure.suptitle(shown(title), x=0.01, ha="left", size=11)
    return figure, axes[: len(squares)]


def plot_depths(
    matrices: Sequence[Tensor],
    tokens: Sequence[str] | None = None,
    *,
    depths: Sequence[float] = QUARTERS,
    title: str | None = None,
    absolute: bool = True,
) -> tuple[Figure, Any]:
    """Draw the matrices at some depths of the model, as the papers' figures do.

    Args:
        matrices: matrices of all layers, as for :func:`plot_matrices`.
        tokens: labels of the tokens. Default: None, positions.
        depths: shares of the layers, 0 for the first and 1 for the last. Default: 25 %, 50 %, 75 %.
        title: a heading for all. Default: None.
        absolute: as in :func:`plot_matrices`. Default: True, as in the papers.

    Returns:
        The matplotlib figure and its axes, one per depth.

    Raises:
        InputError: as in :func:`plot_matrices`.
        OptionError: when depths is empty, or one is not from 0 to 1.

    Example:
        >>> import torch
        >>> from captum_ssm.viz import plot_depths
        >>> figure, axes = plot_depths([torch.eye(3)] * 9)
        >>> [axis.get_title() for axis in axes]
        ['layer 2  (25%)', 'layer 4  (50%)', 'layer 6  (75%)']
    """
    wrong = [depth for depth in depths if not 0 <= depth <= 1]
    if wrong or not len(depths):
        raise OptionError(f"depths={list(depths)!r}: pass one or more shares from 0 to 1.")
    places = [round(depth * (len(matrices) - 1)) for depth in depths]
    titles = [f"layer {i}  ({d:.0%})" for i, d in zip(places, depths, strict=True)]
    chosen = [matrices[i] for i in places] if len(matrices) else []
    return plot_matrices(chosen, tokens, titles=titles, title=title, absolute=absolute)


def plot_channels(
    matrix: Tensor,
    tokens: Sequence[str] | None = None,
    *,
    channels: Sequence[int] | None = None,
    title: str | None = None,
    absolute: bool = True,
    columns: int = 4,
) -> tuple[Figure, Any]:
    """Draw the matrices of single channels, or heads, of one layer.

    Args:
        matrix: a tensor (C, L, L), or (1, C, L, L) as :meth:`ImplicitAttention.matrices
            <captum_ssm.ImplicitAttention.matrices>` returns it with ``reduce=None`` or ``"heads"``.
        tokens: labels of the tokens. Default: None, positions.
        channels: the channels' indices; negative ones count from the end. Default: None, the first
            16.
        title: a heading for all. Default: None.
        absolute: as in :func:`plot_matrices`. Default: True, as in the papers.
        columns: the number of pictures in a row. Default: 4.

    Returns:
        The matplotlib figure and its axes, one per channel.

    Raises:
        InputError: as in :func:`plot_matrices`, and when matrix has no channels.
        OptionError: when a channel does not exist, or columns is below 1.

    Example:
        >>> import torch
        >>> from captum_ssm.viz import plot_channels
        >>> figure, axes = plot_channels(torch.rand(6, 4, 4), channels=[0, -1])
        >>> [axis.get_title() for axis in axes]
        ['channel 0', 'channel 5']
    """
    parts = matrix[0] if matrix.dim() == 4 and len(matrix) == 1 else matrix
    if parts.dim() != 3:
        raise InputError(
            f"matrix of shape {tuple(matrix.shape)} has no channels to draw. Pass (C, L, L), for "
            "example ImplicitAttention(model).matrices(inputs, reduce=None)[layer][example]."
        )
    count = len(parts)
    chosen = range(min(count, 16)) if channels is None else channels
    for channel in chosen:
        if not -count <= channel < count:
            raise OptionError(f"channels contains {channel}. Pass numbers from 0 to {count - 1}.")
    titles = [f"channel {channel % count}" for channel in chosen]
    squares = [parts[channel] for channel in chosen]
    return plot_matrices(
        squares, tokens, titles=titles, title=title, absolute=absolute, columns=columns
    )


def _draw(axis: Any, square: Tensor, absolute: bool) -> Any:
    color_map, low, high = (SEQUENTIAL, 0.0, 1.0) if absolute else scale(square)
    drawn = min_max(square) if absolute else square
    return axis.imshow(drawn.numpy(), cmap=color_map, vmin=low, vmax=high)


def _square(matrix: Tensor) -> Tensor:
    square = numbers(matrix, "matrices")
    square = square[0] if square.dim() == 3 and len(square) == 1 else square
    if square.dim() != 2 or square.shape[0] != square.shape[1]:
        raise InputError(
            f"a matrix of shape {tuple(matrix.shape)} cannot be drawn. Pass one matrix (L, L) per "
            "picture, for example matrices[layer][example]."
        )
    return square
