"""Draw perturbation curves: a measurement against the changed share of the input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .figure import by_name, finite_numbers, line_style, new_figure
from .labels import plot_label
from .layers import finish_line_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..metrics import Curve


def plot_curves(
    curves: Curve | Mapping[str, Curve],
    *,
    quantity: str = "measured",
    change: str = "share changed",
    title: str | None = None,
) -> tuple[Figure, Any]:
    """Draw each method's mean curve with a band of its standard error, and the area below it.

    Args:
        curves: a :class:`captum_ssm.metrics.Curve`, or a mapping from names to several.
        quantity: the label of the vertical axis. Default: ``"measured"``.
        change: the label of the horizontal axis. Default: ``"share changed"``.
        title: a heading. Default: None.

    Returns:
        The matplotlib figure and its axes.

    Raises:
        InputError: when there is no curve, or a value is NaN or infinite.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import Curve
        >>> from captum_ssm.viz import plot_curves
        >>> curve = Curve(torch.tensor([0.0, 1.0]), torch.tensor([[1.0, 0.5], [1.0, 0.0]]))
        >>> figure, axis = plot_curves({"rollout": curve}, quantity="accuracy")
        >>> axis.get_legend_handles_labels()[1]
        ['rollout  area 0.625']
    """
    figure, axis = new_figure(6.6, 3.6)
    curves_by_name = by_name(curves, "curves")
    _draw_curves(axis, curves_by_name)
    axis.set(xlabel=plot_label(change), ylabel=plot_label(quantity))
    finish_line_plot(figure, axis, [*curves_by_name] if isinstance(curves, Mapping) else [], title)
    return figure, axis


def _draw_curves(axis: Any, curves: Mapping[str, Curve]) -> None:
    """Draw each curve's mean over examples, and for several examples its standard error."""
    for i, (name, curve) in enumerate(curves.items()):
        shares = finite_numbers(curve.fractions, "fractions").numpy()
        values = finite_numbers(curve.values, "values")
        style, mean = line_style(i), values.mean(0)
        label = plot_label(name)
        if len(shares) > 1:
            label = f"{label}  area {float(curve.area().mean()):.3g}".strip()
        axis.plot(shares, mean.numpy(), marker="o", markersize=3.5, label=label, **style)
        if len(values) > 1:
            error = values.std(0) / len(values) ** 0.5
            low, high = (mean - error).numpy(), (mean + error).numpy()
            axis.fill_between(shares, low, high, color=style["color"], alpha=0.15, linewidth=0)
