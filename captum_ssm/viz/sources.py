"""Draw contributions of sources to each target token as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import InputError
from .figure import color_scale, finite_numbers, new_figure
from .labels import label_axis, plot_heading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Contributions are written into the cells of heat maps with at most this number of cells.
_MOST_NUMBERS = 300


def plot_contributions(
    contributions: Tensor,
    sources: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    *,
    xlabel: str = "source",
    ylabel: str = "explained",
    title: str | None = None,
    values: bool | None = None,
) -> tuple[Figure, Any]:
    """Draw the contributions of sources to targets: one row per target, one column per source.

    Targets are the explained tokens of a generated text (:class:`~captum_ssm.SSMLLMAttribution`),
    or the positions of a map (:class:`~captum_ssm.LatimNorm`). Rows may also be layers (the stacked
    streams of :meth:`LatimFlow.decompose <captum_ssm.LatimFlow.decompose>`) or models; see
    ``ylabel``.

    Args:
        contributions: (targets, sources).
        sources: labels of the columns. Default: None, positions.
        targets: labels of the rows. Default: None, positions.
        xlabel: the label of columns. Default: ``"source"``.
        ylabel: the label of rows. Default: ``"explained"``.
        title: a heading. Default: None.
        values: write the numbers into the cells. Default: None, if there are at most 300 numbers.

    Returns:
        The matplotlib figure and its axes.

    Raises:
        InputError: when contributions is not (targets, sources) of finite numbers, or labels are
            too few or too many.

    Example:
        >>> import torch
        >>> from captum_ssm.viz import plot_contributions
        >>> figure, axis = plot_contributions(torch.eye(2), ["le", "chat"], ["the", "cat"])
        >>> [label.get_text() for label in axis.get_yticklabels()]
        ['the', 'cat']
        >>> axis.get_xlabel(), axis.get_ylabel()
        ('source', 'explained')
    """
    table = finite_numbers(contributions, "contributions")
    if table.dim() != 2:
        raise InputError(
            f"contributions of shape {tuple(table.shape)} cannot be drawn. Pass (targets, sources)."
        )
    rows, columns = table.shape
    size = (min(14.0, 2.6 + 0.32 * columns), min(12.0, 1.9 + 0.28 * rows))
    figure, axis = new_figure(*size)
    color_map, low, high = color_scale(table)
    image = axis.imshow(table.numpy(), cmap=color_map, vmin=low, vmax=high, aspect="auto")
    figure.colorbar(image, ax=axis, shrink=0.8)
    label_axis(axis.xaxis, sources, columns, "sources")
    label_axis(axis.yaxis, targets, rows, "targets")
    axis.set(xlabel=plot_heading(xlabel), ylabel=plot_heading(ylabel))
    axis.set_title(plot_heading(title), size=10, loc="left")
    if table.numel() <= _MOST_NUMBERS if values is None else values:
        _write_numbers(axis, table, high)
    return figure, axis


def _write_numbers(axis: Any, table: Tensor, largest: float) -> None:
    """Write the contributions into cells, in white on cells close to the ``largest`` value."""
    for row, line in enumerate(table.tolist()):
        for column, value in enumerate(line):
            color = "white" if abs(value) > 0.6 * largest else "black"
            text = f"{value:.2g}"
            axis.text(column, row, text, ha="center", va="center", size=5.5, color=color)
