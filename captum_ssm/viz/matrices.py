"""Implicit attention matrices as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import InputError
from .colours import SEQUENTIAL, new_figure, scale, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: More labels than this are thinned out so that they do not collide.
_MOST_LABELS = 64


def plot_matrices(
    matrices: Sequence[Tensor],
    tokens: Sequence[str] | None = None,
    *,
    titles: Sequence[str] | None = None,
    absolute: bool = False,
) -> tuple[Figure, Any]:
    """Draw implicit attention matrices side by side; row i is what token i takes from the others.

    Args:
        matrices: matrices (L, L), or (1, L, L) as :meth:`ImplicitAttention.matrices` returns them.
        tokens: labels of the tokens. Default: None, positions.
        titles: a heading for each. Default: None, ``layer 0``, ``layer 1``, ...
        absolute: show min-max normalised absolute values, as the papers do, instead of signed
            ones. Default: False.

    Returns:
        The matplotlib figure and its axes, one per matrix.

    Example:
        >>> import torch
        >>> from captum_ssm.viz import plot_matrices
        >>> figure, axes = plot_matrices([torch.eye(3)], ["a", "b", "c"])
    """
    squares = [_square(m) for m in matrices]
    tokens_count = len(squares[0])
    side = min(9.0, 2.6 + 0.13 * tokens_count)
    figure, axes = new_figure(side * len(squares), side, ncols=len(squares), squeeze=False)
    for i, (axis, square) in enumerate(zip(axes[0], squares, strict=True)):
        colour_map, low, high = scale(square)
        if absolute:
            square = square.abs()
            square = (square - square.min()) / (square.max() - square.min()).clamp_min(1e-30)
            colour_map, low, high = SEQUENTIAL, 0.0, 1.0
        image = axis.imshow(square.numpy(), cmap=colour_map, vmin=low, vmax=high)
        figure.colorbar(image, ax=axis, shrink=0.7)
        axis.set_title(shown(titles[i]) if titles else f"layer {i}", size=10)
        _label(axis, tokens, len(square))
    axes[0, 0].set_ylabel("takes from …")
    return figure, axes[0]


def _square(matrix: Tensor) -> Tensor:
    square = matrix.detach().float().cpu()
    square = square[0] if square.dim() == 3 and len(square) == 1 else square
    if square.dim() != 2 or square.shape[0] != square.shape[1]:
        raise InputError(
            f"a matrix of shape {tuple(matrix.shape)} cannot be drawn; pass one (L, L) per "
            "picture, for example matrices[layer][example]."
        )
    return square


def _label(axis: Any, tokens: Sequence[str] | None, count: int) -> None:
    if tokens is not None and len(tokens) != count:
        raise InputError(f"{len(tokens)} tokens were given for a matrix of {count}.")
    step = -(-count // _MOST_LABELS)
    ticks = list(range(0, count, step))
    labels = [str(i) if tokens is None else shown(tokens[i]) for i in ticks]
    size = max(4.0, min(8.0, 260 / len(ticks)))
    axis.set_xticks(ticks, labels, rotation=90, fontsize=size)
    axis.set_yticks(ticks, labels, fontsize=size)
