"""Plot one value per layer as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import InputError
from .figure import by_name, finite_numbers, line_style, new_figure
from .labels import plot_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Values per layer: a tensor (layers,), or a list as decomposition_error() returns it.
Profile = Tensor | Sequence[float]


def plot_layers(
    profiles: Profile | Mapping[str, Profile],
    *,
    quantity: str = "relevance",
    logarithmic: bool = False,
    title: str | None = None,
) -> tuple[Figure, Any]:
    """Draw how a value, such as relevance, changes from layer to layer.

    Args:
        profiles: one number per layer, or a mapping from names to such numbers, of any lengths.
        quantity: the label of the vertical axis. Default: ``"relevance"``.
        logarithmic: use a logarithmic axis, which cannot show zeros. Default: False.
        title: a heading. Default: None.

    Returns:
        The matplotlib figure and its axes.

    Raises:
        InputError: when there is no profile, or one is not (layers,) of finite numbers.

    Example:
        >>> from captum_ssm.viz import plot_layers
        >>> figure, axis = plot_layers({"the evidence": [0.25, 0.75], "the rest": [0.5, 0.0]})
        >>> axis.lines[0].get_ydata().tolist()
        [0.25, 0.75]
    """
    profiles_by_name = by_name(profiles, "profiles")
    figure, axis = new_figure(6.4, 3.6)
    for i, (name, values) in enumerate(profiles_by_name.items()):
        heights = finite_numbers(values, "profiles")
        if heights.dim() != 1:
            raise InputError(
                f"profile {name!r} has shape {tuple(heights.shape)}. Pass one number per layer."
            )
        style = line_style(i) | {"label": plot_label(name)}
        axis.plot(heights.numpy(), marker="o", markersize=4, **style)
    if logarithmic:
        axis.set_yscale("log")
    else:
        axis.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="layer", ylabel=plot_label(quantity))
    finish_line_plot(figure, axis, [*profiles_by_name], title)
    return figure, axis


def finish_line_plot(figure: Figure, axis: Any, names: Sequence[str], title: str | None) -> None:
    """Add grid, legend and heading to a picture of lines."""
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    if any(names):
        figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    if title:
        axis.set_title(plot_label(title), size=10, loc="left")
