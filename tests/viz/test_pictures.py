"""Pictures of text and of matrices: what is drawn is what was given."""

from __future__ import annotations

from itertools import pairwise

import matplotlib
import numpy as np
import pytest
import torch
from helpers.pictures import AWKWARD, draw
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from captum_ssm.errors import InputError, OptionError
from captum_ssm.viz import plot_channels, plot_contributions, plot_depths, plot_matrices, plot_text


def boxes(axis: object) -> list[Rectangle]:
    return [p for p in axis.patches if isinstance(p, Rectangle)]  # type: ignore[attr-defined]


def labels(ticks: object) -> list[str]:
    return [t.get_text() for t in ticks]  # type: ignore[attr-defined]


def test_text_colours_follow_the_relevance() -> None:
    relevance = torch.tensor([0.0, 0.5, 1.0, -1.0])
    _, axes = plot_text(["a", "b", "c", "d"], {"signed": relevance}, marked=[2])
    colours = [np.array(to_rgb(b.get_facecolor())) for b in boxes(axes[0])]
    wanted = [np.array(matplotlib.colormaps["PuOr"](x)[:3]) for x in (0.5, 0.75, 1.0, 0.0)]
    for colour, expected in zip(colours, wanted, strict=True):
        np.testing.assert_allclose(colour, expected, atol=0.01)
    assert axes[0].get_title(loc="left") == "signed   (strongest: 1)"
    framed = [to_rgb(b.get_edgecolor()) == (0, 0, 0) for b in boxes(axes[0])]
    assert framed == [False, False, True, False]


@pytest.mark.slow
def test_text_of_many_rows_and_awkward_tokens() -> None:
    tokens = AWKWARD * 6
    rows = {"one": torch.rand(len(tokens)), "$two$": torch.zeros(len(tokens))}
    figure, axes = plot_text(tokens, rows, title="$title <b>")
    assert len(axes) == 2
    assert "strongest: 0)" in axes[1].get_title(loc="left")
    draw(figure)
    placed = [(b.get_x(), b.get_y(), b.get_width()) for b in boxes(axes[0])]
    assert len(placed) == len(tokens)
    lines: dict[float, float] = {}
    for x, y, width in placed:  # boxes of a line do not overlap
        assert x >= lines.get(y, 0.0)
        lines[y] = x + width
    canvas = figure.canvas.get_renderer()
    for text, box in zip(axes[0].texts, boxes(axes[0]), strict=True):  # and words fit into them
        assert text.get_window_extent(canvas).width <= box.get_window_extent(canvas).width


def test_refusals() -> None:
    with pytest.raises(InputError, match="3 numbers for 2 tokens"):
        plot_text(["a", "b"], torch.rand(3))
    with pytest.raises(InputError, match="1 numbers that are NaN or infinite"):
        plot_text(["a", "b"], torch.tensor([0.1, float("nan")]))
    with pytest.raises(InputError, match="empty mapping"):
        plot_text(["a"], {})
    for shape in ((2, 3), (2, 4, 4), (4,)):
        with pytest.raises(InputError, match="cannot be drawn"):
            plot_matrices([torch.rand(shape)])
    with pytest.raises(InputError, match="tokens has 2 labels"):
        plot_matrices([torch.rand(3, 3)], ["a", "b"])
    with pytest.raises(InputError, match="titles has 1 labels"):
        plot_matrices([torch.rand(3, 3)] * 2, titles=["a"])


def test_matrices_show_their_values() -> None:
    matrix = torch.randn(1, 5, 5).bfloat16()
    figure, axes = plot_matrices([matrix, 2 * matrix[0]], list("abcde"), titles=["x", "$y$"])
    np.testing.assert_allclose(axes[0].images[0].get_array(), matrix[0].double().numpy())
    low, high = axes[1].images[0].get_clim()
    assert high == -low == pytest.approx(2 * float(matrix.abs().max()))
    assert labels(axes[0].get_xticklabels()) == labels(axes[0].get_yticklabels()) == list("abcde")
    draw(figure)


@pytest.mark.slow
def test_matrices_say_what_they_are() -> None:
    matrices = [torch.rand(3, 3)] * 5
    figure, axes = plot_matrices(matrices, title="$all$ of them", columns=2)
    assert figure.get_suptitle() == r"\$all\$ of them"
    assert [axis.get_ylabel() for axis in axes] == ["taking token", ""] * 2 + ["taking token"]
    assert [axis.get_xlabel() for axis in axes] == ["", "", "", *["source token"] * 2]
    draw(figure)
    assert plot_depths(matrices, title="some")[0].get_suptitle() == "some"
    assert not plot_matrices(matrices)[0].get_suptitle()
    # absolute ones are stretched like the papers'
    size = matrices[0].abs()
    _, axes = plot_matrices([-size, torch.zeros(3, 3)], absolute=True)
    expected = (size - size.min()) / (size.max() - size.min())
    np.testing.assert_allclose(axes[0].images[0].get_array(), expected.numpy(), rtol=1e-6)
    assert not axes[1].images[0].get_array().any()


@pytest.mark.slow
def test_labels_of_long_texts_do_not_collide() -> None:
    tokens = (AWKWARD * 20)[:200]
    figure, axes = plot_matrices([torch.rand(200, 200)], tokens)
    draw(figure)
    canvas = figure.canvas.get_renderer()
    for ticks, side in ((axes[0].get_xticklabels(), "x"), (axes[0].get_yticklabels(), "y")):
        places = [t.get_window_extent(canvas) for t in ticks]
        ends = sorted((getattr(p, f"{side}0"), getattr(p, f"{side}1")) for p in places)
        assert len(ends) >= 40
        for (_, before), (after, _) in pairwise(ends):
            assert after >= before - 1  # a pixel's rounding


def test_depths_are_shares_of_the_layers() -> None:
    matrices = [torch.full((3, 3), float(i)) for i in range(9)]
    _, axes = plot_depths(matrices, depths=[0, 0.25, 0.5, 1], absolute=False)
    shown = [float(axis.images[0].get_array()[0, 0]) for axis in axes]
    assert shown == [0, 2, 4, 8]
    assert axes[1].get_title() == "layer 2  (25%)"
    assert len(plot_depths(matrices)[1]) == 3
    with pytest.raises(OptionError, match="depths"):
        plot_depths(matrices, depths=[1.2])
    with pytest.raises(InputError, match="matrices is empty"):
        plot_depths([])


@pytest.mark.slow
def test_channels_are_laid_out_in_a_grid() -> None:
    matrix = torch.randn(1, 7, 4, 4)
    figure, axes = plot_channels(matrix, columns=3, absolute=False)
    assert [axis.get_title() for axis in axes] == [f"channel {i}" for i in range(7)]
    assert len({round(axis.get_position().y0, 6) for axis in axes}) == 3
    for i, axis in enumerate(axes):
        np.testing.assert_allclose(axis.images[0].get_array(), matrix[0, i].numpy())
    draw(figure)
    _, axes = plot_channels(matrix[0], channels=[-1, 2])
    assert [axis.get_title() for axis in axes] == ["channel 6", "channel 2"]
    with pytest.raises(OptionError, match="channels names 7"):
        plot_channels(matrix, channels=[7])
    with pytest.raises(InputError, match="no channels"):
        plot_channels(matrix[0, 0])


@pytest.mark.slow
def test_contributions_have_a_row_for_each_target() -> None:
    found = torch.randn(3, 5, dtype=torch.float64)
    figure, axis = plot_contributions(found, AWKWARD[:5], ["x", "y", "$z$"], title="$t")
    np.testing.assert_array_equal(axis.images[0].get_array(), found.numpy())
    assert len(axis.get_yticklabels()) == 3
    assert [t.get_text() for t in axis.texts][:2] == [f"{v:.2g}" for v in found[0, :2].tolist()]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("source", "explained")
    draw(figure)
    _, axis = plot_contributions(found, xlabel="$word$", ylabel="")
    assert (axis.get_xlabel(), axis.get_ylabel()) == (r"\$word\$", "")
    assert not plot_contributions(torch.rand(30, 30))[1].texts
    with pytest.raises(InputError, match="targets has 2 labels for 3"):
        plot_contributions(found, targets=["x", "y"])
    with pytest.raises(InputError, match="pass \\(targets, sources\\)"):
        plot_contributions(torch.rand(4))
