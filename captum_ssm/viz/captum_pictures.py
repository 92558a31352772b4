"""Draw relevance tensors with the functions of ``captum.attr.visualization``.

Captum's functions need numpy arrays of a certain layout, and relevance of the requested sign. They
neither enlarge a patch grid nor escape words in HTML. The functions here prepare the arguments.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, OptionError
from .figure import finite_numbers, for_notebooks
from .labels import as_words, plot_label, visible_text
from .overlay import pixel_relevance, rgb_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Captum's values of ``sign``, and a test whether relevance has values of this sign.
_SIGNS = {
    "all": lambda x: bool(x.any()),
    "absolute_value": lambda x: bool(x.any()),
    "positive": lambda x: bool((x > 0).any()),
    "negative": lambda x: bool((x < 0).any()),
}
#: Outlier percentage so small that Captum clips no pixel of an image of any size.
_NO_OUTLIERS = 1e-9
#: Captum's methods that cannot show both signs at once.
_ONE_SIGN = ("masked_image", "alpha_scaling")


def image_arrays(relevance: Tensor, image: Tensor) -> tuple[Any, Any]:
    """Return the two arrays that ``visualize_image_attr`` and similar functions take.

    Args:
        relevance: the relevance, as in :func:`captum_ssm.viz.plot_image`.
        image: the image, as in :func:`captum_ssm.viz.plot_image`.

    Returns:
        Relevance (H, W, 1), and the image (H, W, 3) with values from 0 to 255.

    Raises:
        InputError: when the shapes do not fit one image, or a number is NaN or infinite.

    Example:
        >>> import torch
        >>> from captum_ssm.viz import image_arrays
        >>> relevance, image = image_arrays(torch.rand(4, 4), torch.rand(3, 8, 8))
        >>> relevance.shape, image.shape
        ((8, 8, 1), (8, 8, 3))
    """
    picture = rgb_image(image)
    pixels = pixel_relevance(relevance, (picture.shape[0], picture.shape[1]))
    return pixels[..., None].numpy(), (picture * 255).round().to(torch.uint8).numpy()


def captum_image(
    image: Tensor,
    relevance: Tensor,
    *,
    method: str = "blended_heat_map",
    sign: str | None = None,
    title: str | None = None,
    **options: Any,
) -> tuple[Figure, Any]:
    """Draw the relevance of an image with Captum's ``visualize_image_attr``.

    Args:
        image: as in :func:`captum_ssm.viz.plot_image`.
        relevance: as in :func:`captum_ssm.viz.plot_image`.
        method: the form of the picture: ``"heat_map"``, ``"blended_heat_map"``,
            ``"original_image"``, ``"masked_image"`` or ``"alpha_scaling"``. Default:
            ``"blended_heat_map"``.
        sign: the numbers to show: ``"all"``, ``"positive"``, ``"negative"`` or
            ``"absolute_value"``. Default: None, ``"positive"``, or ``"all"`` if there are negative
            numbers that the method can show.
        title: a heading. Default: None.
        **options: further arguments of ``visualize_image_attr``; ``use_pyplot`` is False unless
            set.

    Returns:
        The matplotlib figure and its axes. Without relevance of the sign they show only the image,
        with a note in the title.

    Raises:
        InputError: as in :func:`image_arrays`.
        OptionError: when sign is unknown, or method cannot show it.

    Example:
        >>> import torch
        >>> from captum_ssm.viz import captum_image
        >>> figure, axis = captum_image(torch.rand(3, 8, 8), torch.eye(4), title="rollout")
        >>> axis.get_title()
        'rollout'
    """
    from captum.attr import visualization

    if sign is not None and sign not in _SIGNS:
        raise OptionError(f"sign={sign!r} is not known. Pass None or one of {tuple(_SIGNS)}.")
    pixels, picture = image_arrays(relevance, image)
    if sign == "all" and method in _ONE_SIGN:
        raise OptionError(
            f"sign='all': method={method!r} cannot show both signs at once. Pass 'positive', "
            "'negative', 'absolute_value' or None."
        )
    if sign is None:
        sign = "all" if pixels.min() < 0 and method not in _ONE_SIGN else "positive"
    heading = "" if title is None else plot_label(title)
    # Captum divides by a sum of these numbers; tiny ones would become 0 unless scaled first
    largest = float(np.abs(pixels).max())
    pixels = pixels / largest if largest else pixels
    if not _SIGNS[sign](pixels):
        method, sign = "original_image", "all"
        pixels = np.ones_like(pixels)
        heading = f"{heading}\n(no relevance of this sign)".strip()
    options.setdefault("use_pyplot", False)
    if options.get("outlier_perc") == 0:
        # with 0, Captum looks for the total in cumulative sums, which rounding may make too small
        options["outlier_perc"] = _NO_OUTLIERS
    figure, axis = visualization.visualize_image_attr(
        pixels, picture, method=method, sign=sign, title=heading or None, **options
    )
    return for_notebooks(figure), axis


def captum_text(
    tokens: Sequence[str],
    relevance: Tensor,
    *,
    predicted: str | int = "",
    probability: float = float("nan"),
    true: str | int = "",
    explained: str | int = "",
    convergence: float = float("nan"),
) -> Any:
    """Return an escaped record for Captum's ``visualization.visualize_text``.

    Args:
        tokens: the tokens of a text, escaped here.
        relevance: one number per token (L,), scaled here so that the largest is 1 or -1.
        predicted: the model's prediction. Default: ``""``.
        probability: the probability of the prediction. Default: nan, not known.
        true: the correct answer. Default: ``""``.
        explained: the explained output. Default: ``""``.
        convergence: the convergence delta. Default: nan, not known.

    Returns:
        A ``VisualizationDataRecord``.

    Raises:
        InputError: when tokens and relevance differ in length, or relevance is not finite.

    Example:
        >>> import torch
        >>> from captum_ssm.viz import captum_text
        >>> record = captum_text(["<b>", "lamp"], torch.tensor([0.1, 0.4]))
        >>> record.raw_input_ids
        ['&lt;b&gt;', 'lamp']
    """
    from captum.attr import visualization

    scores = finite_numbers(relevance, "relevance").flatten()
    if len(scores) != len(tokens):
        mismatch = f"relevance has {len(scores)} numbers for {len(tokens)} tokens"
        raise InputError(f"{mismatch}. Pass one number per token.")
    words = [html.escape(label) for label in as_words(tokens).labels]
    names = (str(c) for c in (predicted, true, explained))
    classes = [html.escape(visible_text(name)) if name else "" for name in names]
    return visualization.VisualizationDataRecord(
        word_attributions=scores / (float(scores.abs().max()) or 1.0),
        pred_prob=probability,
        pred_class=classes[0],
        true_class=classes[1],
        attr_class=classes[2],
        attr_score=float(scores.sum()),
        raw_input_ids=words,
        convergence_score=convergence,
    )
