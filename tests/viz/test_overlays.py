"""Relevance laid over images, by our pictures and by Captum's own."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captum.attr import visualization
from helpers.pictures import AWKWARD, draw
from zoo.small import images, mamba_lm, token_ids, vision

from captum_ssm import ImplicitAttentionRollout, MambaAttribution
from captum_ssm.errors import InputError, OptionError
from captum_ssm.viz import captum_image, captum_text, image_arrays, plot_image
from captum_ssm.viz.overlay import MANNERS, pixel_relevance


@pytest.mark.slow
def test_all_manners_of_all_methods() -> None:
    image = torch.rand(3, 24, 18)
    maps = {
        "grid": torch.randn(4, 3),
        "$pixels$": torch.randn(1, 3, 24, 18),
        "positive": torch.rand(24, 18),
        "nothing": torch.zeros(4, 3),
        "negative": -torch.rand(4, 3),
    }
    figure, axes = plot_image(image, maps, how=MANNERS, title="$x")
    assert axes.shape == (len(MANNERS), 1 + len(maps))
    draw(figure)
    for axis, (name, relevance) in zip(axes[0, 1:], maps.items(), strict=True):
        heat = axis.images[0]
        np.testing.assert_allclose(heat.get_array(), pixel_relevance(relevance, (24, 18)).numpy())
        assert heat.get_cmap().name == ("PuOr" if float(relevance.min()) < 0 else "Purples")
        assert axis.get_title().replace("\\", "").startswith(name)


def test_a_grid_is_enlarged_bilinearly_and_channels_are_summed() -> None:
    grid, pixels = torch.randn(3, 4), torch.randn(3, 12, 8, dtype=torch.float64)
    expected = F.interpolate(grid.double()[None, None], size=(12, 8), mode="bilinear")[0, 0]
    torch.testing.assert_close(pixel_relevance(grid, (12, 8)), expected, rtol=0, atol=0)
    torch.testing.assert_close(pixel_relevance(pixels[None], (12, 8)), pixels.sum(0))
    grid[1, 1] = -9.25  # told is the strongest of the grid, which its enlarged map does not reach
    _, axes = plot_image(torch.rand(3, 12, 12), {"flow": grid})
    assert axes[0, 1].get_title() == "flow\n(strongest: -9.25)"


def test_masked_images_show_what_is_positively_relevant() -> None:
    image = torch.rand(1, 6, 6)
    relevance = torch.randn(6, 6).clamp(-1, 1)
    relevance[0, 0], relevance[0, 1] = 2, -2
    _, axes = plot_image(image, relevance, how="masked")
    shown = torch.tensor(np.array(axes[0, 1].images[0].get_array()))
    expected = image[0].double() * relevance.double().clamp_min(0) / 2
    torch.testing.assert_close(shown, expected[..., None].expand(-1, -1, 3))


def test_blended_maps_leave_what_has_no_relevance() -> None:
    relevance = torch.tensor([[0.0, -1.0], [0.25, 0.5]])
    _, axes = plot_image(torch.rand(3, 2, 2), relevance)
    alpha = axes[0, 1].images[1].get_alpha()
    np.testing.assert_allclose(alpha, 0.85 * np.sqrt([[0, 1], [0.25, 0.5]]), rtol=1e-6)


def test_contours_lie_at_shares_of_the_largest() -> None:
    ramp = torch.linspace(-1, 2, 31).expand(31, 31)
    _, axes = plot_image(torch.rand(3, 31, 31), ramp, how="contour")
    (lines,) = axes[0, 1].collections
    np.testing.assert_allclose(lines.levels, [-0.5, 0.5, 1, 1.5])
    assert not plot_image(torch.rand(3, 8, 8), torch.zeros(8, 8), how="contour")[1][
        0, 1
    ].collections


def test_images_are_brought_into_range() -> None:
    for image, expected in (
        (torch.tensor([[[0.0, 0.5]]]), [0, 0.5]),
        (torch.tensor([[[-1.0, 3.0]]]), [0, 1]),
        (torch.tensor([[[0, 255]]], dtype=torch.uint8), [0, 1]),
        (torch.tensor([[[-2.0, -2.0]]]), [0, 0]),
        (torch.tensor([[[[0.25, 1.0]]]], dtype=torch.bfloat16), [0.25, 1]),
    ):
        _, axes = plot_image(image, torch.tensor([[1.0, 2.0]]))
        for channel in np.array(axes[0, 0].images[0].get_array())[0].T:
            assert channel.tolist() == pytest.approx(expected)


def test_refusals() -> None:
    for error, said, channels, relevance, how in (
        (OptionError, "how='glow'", 3, torch.rand(4, 4), "glow"),
        (OptionError, "how is empty", 3, torch.rand(4, 4), []),
        (InputError, r"image has shape \(2, 4, 4\)", 2, torch.rand(4, 4), "blend"),
        (InputError, r"relevance has shape \(16,\)", 3, torch.rand(16), "blend"),
        (InputError, "NaN", 3, torch.full((4, 4), torch.nan), "blend"),
        (InputError, "empty", 3, torch.zeros(0, 4), "blend"),
    ):
        with pytest.raises(error, match=said):
            plot_image(torch.rand(channels, 4, 4), relevance, how=how)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["blended_heat_map", "original_image"])
def test_every_sign_of_every_map(method: str) -> None:
    image = torch.randn(3, 12, 12)
    for sign in (None, "all", "positive", "negative", "absolute_value"):
        for relevance, lacks in (
            (torch.zeros(4, 3), True),
            (torch.rand(4, 3), sign == "negative"),
            (-torch.rand(3, 12, 12), sign == "positive"),
        ):
            figure, axis = captum_image(image, relevance, method=method, sign=sign, title="$x$")
            draw_into_png(figure)
            assert sign is None or ("no relevance" in axis.get_title()) == lacks
    with pytest.raises(OptionError, match="sign='both'"):
        captum_image(image, torch.rand(4, 4), method=method, sign="both")
    with pytest.raises(OptionError, match="both signs at once"):
        captum_image(image, torch.randn(4, 3), method="masked_image", sign="all")


def draw_into_png(figure: object) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)  # type: ignore[arg-type]
    draw(figure)


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
