"""Captum's own pictures, of what these methods return."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from captum.attr import visualization
from helpers.pictures import AWKWARD, draw
from zoo.small import images, mamba_lm, token_ids, vision

from captum_ssm import ImplicitAttentionRollout, MambaAttribution
from captum_ssm.errors import OptionError
from captum_ssm.viz import captum_image, captum_text, image_arrays

METHODS = ["heat_map", "blended_heat_map", "original_image", "masked_image", "alpha_scaling"]
SIGNS = [None, "all", "positive", "negative", "absolute_value"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_sign_of_every_map(method: str) -> None:
    image = torch.randn(3, 12, 12)
    for sign in SIGNS:
        if sign == "all" and method in ("masked_image", "alpha_scaling"):
            with pytest.raises(OptionError, match="both signs at once"):
                captum_image(image, torch.randn(4, 3), method=method, sign=sign)
            continue
        for relevance in (torch.zeros(4, 3), torch.rand(4, 3), -torch.rand(3, 12, 12)):
            figure, axis = captum_image(image, relevance, method=method, sign=sign, title="$x$")
            draw_into_png(figure)
            empty = not relevance.any() or (sign == "negative" and float(relevance.min()) >= 0)
            empty |= sign == "positive" and float(relevance.max()) <= 0
            if sign is not None:
                assert ("no relevance" in axis.get_title()) == empty
    with pytest.raises(OptionError, match="sign='both'"):
        captum_image(torch.rand(3, 4, 4), torch.rand(4, 4), method=method, sign="both")


def draw_into_png(figure: object) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)  # type: ignore[arg-type]
    draw(figure)


def test_captum_draws_what_was_given() -> None:
    relevance = torch.randn(6, 6, dtype=torch.float64) * 1e-30  # Captum alone would warn, or fail
    _, axis = captum_image(torch.rand(3, 6, 6), relevance, method="heat_map", outlier_perc=0)
    shown = np.array(axis.images[0].get_array())
    np.testing.assert_allclose(shown, (relevance / relevance.abs().max()).numpy(), rtol=1e-9)


def test_arrays_are_captums_layout() -> None:
    model, pictures = vision(), images(1)
    relevance = ImplicitAttentionRollout(model).attribute(pictures, per_token=True)
    pixels, picture = image_arrays(relevance, pictures)
    assert (pixels.shape, picture.shape, picture.dtype) == ((12, 12, 1), (12, 12, 3), np.uint8)
    assert (picture.min(), picture.max()) == (0, 255)
    kinds, signs = ["original_image", "heat_map"], ["all", "absolute_value"]
    figure, _ = visualization.visualize_image_attr_multiple(
        pixels, picture, kinds, signs, use_pyplot=False
    )
    draw_into_png(figure)


def test_text_reaches_captum_escaped_and_in_range() -> None:
    model, ids = mamba_lm(), token_ids(1, len(AWKWARD))
    relevance = 40 * MambaAttribution(model).attribute(ids, target=(-1, 3))[0]
    record = captum_text(
        AWKWARD, relevance, predicted="<i>", probability=0.5, true=0, explained="&"
    )
    assert float(record.word_attributions.abs().max()) == 1
    assert record.attr_score == pytest.approx(float(relevance.sum()), rel=1e-5)
    page = visualization.visualize_text([record]).data
    assert "&lt;script&gt;" in page
    assert "&lt;i&gt; (0.50)" in page
    assert "<b>0</b>" in page
    tags = set(re.findall(r"<\s*/?\s*(\w+)", page))
    assert tags <= {"table", "tr", "th", "td", "text", "b", "mark", "font", "div", "span"}
    words = re.findall(r'<font color="black"> (.*?)\s*</font>', page)
    assert words == [w.rstrip() for w in record.raw_input_ids]
