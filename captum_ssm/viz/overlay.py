"""Draw relevance over an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError, OptionError
from .figure import by_name, color_scale, finite_numbers, new_figure, strongest
from .labels import plot_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Forms of relevance: a heat map, a heat map over the image, lines on the image, or a mask.
MANNERS = ("heat", "blend", "contour", "masked")

#: Contour lines, as shares of the largest relevance.
_LEVELS = (0.25, 0.5, 0.75)


def plot_image(
    image: Tensor,
    relevance: Tensor | Mapping[str, Tensor],
    *,
    how: str | Sequence[str] = "blend",
    title: str | None = None,
) -> tuple[Figure, Any]:
    """Draw an image, and beside it the relevance of one method or of several.

    Args:
        image: an image (C, H, W) or (1, C, H, W) with one color channel or three. Numbers outside
            [0, 1], as in normalized images, are stretched to this range.
        relevance: a tensor (C, H, W) or (H, W), or a patch grid (h, w), which is enlarged
            bilinearly; a first dimension of 1 is dropped. A mapping from names to several tensors
            is drawn side by side, each with its own color scale.
        how: one form of the picture, or several, drawn below each other. ``"blend"``: a heat map
            over the gray image. ``"contour"``: lines at a quarter, half and three quarters of the
            largest value, dashed if negative. ``"masked"``: the image as bright as its positive
            relevance. ``"heat"``: only the heat map. Default: ``"blend"``.
        title: a heading. Default: None.

    Returns:
        The matplotlib figure and its axes, one row for each of ``how``; the image comes first.

    Raises:
        InputError: when image or relevance does not fit one image, or is not finite.
        OptionError: when ``how`` is empty or unknown.

    Example:
        >>> import torch
        >>> from captum_ssm.viz import plot_image
        >>> figure, axes = plot_image(torch.rand(3, 28, 28), {"flow": torch.randn(14, 14)})
        >>> axes.shape
        (1, 2)
    """
    manners = [how] if isinstance(how, str) else list(how)
    for manner in manners:
        if manner not in MANNERS:
            raise OptionError(f"how={manner!r} is not known. Pass one or more of {MANNERS}.")
    if not manners:
        raise OptionError(f"how is empty. Pass one or more of {MANNERS}.")
    rgb = rgb_image(image)  # (H, W, 3)
    size = (rgb.shape[0], rgb.shape[1])
    scores = {name: _sum_channels(r) for name, r in by_name(relevance, "relevance").items()}
    maps = {name: _enlarge(x, size) for name, x in scores.items()}
    width, height = 2.3 * (1 + len(maps)), 2.3 * size[0] / size[1] * len(manners) + 0.5
    figure, axes = new_figure(width, height, nrows=len(manners), ncols=1 + len(maps), squeeze=False)
    for row, manner in zip(axes, manners, strict=True):
        row[0].imshow(rgb.numpy())
        row[0].set_ylabel(manner if len(manners) > 1 else "", size=9)
        for axis, pixels in zip(row[1:], maps.values(), strict=True):
            _DRAW[manner](axis, rgb, pixels)
        for axis in row:
            axis.set(xticks=[], yticks=[])
    axes[0, 0].set_title("image", size=9)
    for axis, (name, x) in zip(axes[0, 1:], scores.items(), strict=True):
        heading = f"{plot_label(name)}\n(strongest: {strongest(x):.3g})"
        axis.set_title(heading if name else "", size=9)
    if title:
        figure.suptitle(plot_label(title), x=0.01, ha="left", size=11)
    return figure, axes


def rgb_image(image: Tensor) -> Tensor:
    """Return an image (C, H, W) or (1, C, H, W) as (H, W, 3), stretched to [0, 1]."""
    pixels = finite_numbers(image, "image")
    pixels = pixels[0] if pixels.dim() == 4 and len(pixels) == 1 else pixels
    if pixels.dim() != 3 or len(pixels) not in (1, 3):
        raise InputError(
            f"image has shape {tuple(image.shape)}. Pass one image (C, H, W) with one color "
            "channel or three."
        )
    if image.dtype == torch.uint8:
        pixels = pixels / 255
    low, high = float(pixels.min()), float(pixels.max())
    if low < 0 or high > 1:
        pixels = (pixels - low) / ((high - low) or 1.0)
    return pixels.expand(3, -1, -1).permute(1, 2, 0)


def pixel_relevance(relevance: Tensor, size: tuple[int, int]) -> Tensor:
    """Return relevance per pixel (H, W): channels summed, a patch grid enlarged bilinearly."""
    return _enlarge(_sum_channels(relevance), size)


def _sum_channels(relevance: Tensor) -> Tensor:
    """Return one image's relevance, (H, W) or a grid (h, w), as a sum over color channels."""
    scores = finite_numbers(relevance, "relevance")
    while scores.dim() > 3 and len(scores) == 1:
        scores = scores[0]
    if scores.dim() == 3:
        scores = scores.sum(0)
    if scores.dim() != 2:
        raise InputError(
            f"relevance has shape {tuple(relevance.shape)}. Pass the relevance of one image: "
            "(C, H, W), (H, W), or the patch grid (h, w) that per_token=True returns."
        )
    return scores


def _enlarge(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """Interpolate relevance (h, w) to the size (H, W) of an image."""
    if scores.shape == size:
        return scores
    return F.interpolate(scores[None, None], size=size, mode="bilinear", align_corners=False)[0, 0]


def _draw_heat(axis: Any, picture: Tensor, pixels: Tensor) -> None:
    color_map, low, high = color_scale(pixels)
    axis.imshow(pixels.numpy(), cmap=color_map, vmin=low, vmax=high)


def _draw_blend(axis: Any, picture: Tensor, pixels: Tensor) -> None:
    color_map, low, high = color_scale(pixels)
    axis.imshow(picture.mean(-1).numpy(), cmap="gray", vmin=0, vmax=1)
    # pixels without relevance stay unchanged; the root makes small relevance visible
    opacity = (pixels.abs() / high).sqrt() * 0.85
    axis.imshow(pixels.numpy(), cmap=color_map, vmin=low, vmax=high, alpha=opacity.numpy())


def _draw_contour(axis: Any, picture: Tensor, pixels: Tensor) -> None:
    axis.imshow(picture.numpy(), alpha=0.75)
    color_map, low, high = color_scale(pixels)
    levels = [s * high for s in _LEVELS]
    levels = [-x for x in reversed(levels)] * (low < 0) + levels  # ascending, as matplotlib needs
    inside = [x for x in levels if float(pixels.min()) < x < float(pixels.max())]
    if inside:  # a map without relevance has no lines
        dashes = ["dashed" if x < 0 else "solid" for x in inside]
        axis.contour(pixels.numpy(), inside, cmap=color_map, vmin=low, vmax=high, linestyles=dashes)


def _draw_masked(axis: Any, picture: Tensor, pixels: Tensor) -> None:
    positive = pixels.clamp_min(0)
    share = positive / (float(positive.max()) or 1.0)
    axis.imshow((picture * share[..., None]).numpy())


#: The functions that draw each form from (axis, image (H, W, 3), relevance (H, W)).
_DRAW = {"heat": _draw_heat, "blend": _draw_blend, "contour": _draw_contour, "masked": _draw_masked}
