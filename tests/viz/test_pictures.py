"""Pictures: what is drawn is what was given."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from captum_ssm.errors import InputError
from captum_ssm.viz import plot_matrices, plot_text

AWKWARD = ["$x_1$", "<script>", "a\nb", "", "\u200f\u05d0", "\x07", "naïve", "$"]


def boxes(axis: object) -> list[Rectangle]:
    return [p for p in axis.patches if isinstance(p, Rectangle)]  # type: ignore[attr-defined]


def test_text_colours_follow_the_relevance() -> None:
    relevance = torch.tensor([0.0, 0.5, 1.0, -1.0])
    _, axes = plot_text(["a", "b", "c", "d"], {"signed": relevance}, marked=[2])
    colours = [np.array(to_rgb(b.get_facecolor())) for b in boxes(axes[0])]
    wanted = [np.array(matplotlib.colormaps["PuOr"](x)[:3]) for x in (0.5, 0.75, 1.0, 0.0)]
    for colour, expected in zip(colours, wanted, strict=True):
        np.testing.assert_allclose(colour, expected, atol=0.01)
    framed = [to_rgb(b.get_edgecolor()) == (0, 0, 0) for b in boxes(axes[0])]
    assert framed == [False, False, True, False]


def test_text_of_many_rows_and_awkward_tokens(tmp_path: object) -> None:
    tokens = AWKWARD * 25
    rows = {"one": torch.rand(200), "$two$": torch.zeros(200)}
    figure, axes = plot_text(tokens, rows, title="$title <b>")
    assert len(axes) == 2
    figure.savefig(f"{tmp_path}/text.png")  # mathtext would raise here
    placed = [(b.get_x(), b.get_y(), b.get_width()) for b in boxes(axes[0])]
    assert len(placed) == 200
    lines: dict[float, float] = {}
    for x, y, width in placed:  # boxes of a line do not overlap
        assert x >= lines.get(y, 0.0)
        lines[y] = x + width


def test_text_refuses_mismatched_lengths() -> None:
    with pytest.raises(InputError, match="3 numbers for 2 tokens"):
        plot_text(["a", "b"], torch.rand(3))


def test_matrices_show_their_values() -> None:
    matrix = torch.randn(1, 5, 5)
    figure, axes = plot_matrices([matrix, 2 * matrix[0]], list("abcde"), titles=["x", "y"])
    np.testing.assert_allclose(axes[0].images[0].get_array(), matrix[0].numpy())
    low, high = axes[1].images[0].get_clim()
    assert high == -low == pytest.approx(2 * float(matrix.abs().max()))
    assert [t.get_text() for t in axes[0].get_xticklabels()] == list("abcde")
    _, axes = plot_matrices([matrix], absolute=True)
    shown = axes[0].images[0].get_array()
    assert float(shown.min()) == 0
    assert float(shown.max()) == pytest.approx(1)
    figure.canvas.draw()


def test_labels_of_long_texts_are_thinned_out() -> None:
    figure, axes = plot_matrices([torch.rand(200, 200)], AWKWARD * 25)
    assert len(axes[0].get_xticks()) <= 64
    figure.canvas.draw()


@pytest.mark.parametrize("shape", [(2, 3), (2, 4, 4), (4,)])
def test_matrices_refuse_what_is_not_square(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="cannot be drawn"):
        plot_matrices([torch.rand(shape)])


def test_matrices_refuse_mismatched_tokens() -> None:
    with pytest.raises(InputError, match="2 tokens"):
        plot_matrices([torch.rand(3, 3)], ["a", "b"])
