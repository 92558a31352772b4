"""Pictures of text, of roles and of matrices: what is drawn is what was given."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from helpers.pictures import AWKWARD, draw
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from captum_ssm.errors import InputError, OptionError
from captum_ssm.viz import (
    Tokens,
    plot_contributions,
    plot_matrices,
    plot_roles,
    plot_text,
)
from captum_ssm.viz.figure import new_figure
from captum_ssm.viz.labels import as_words, plot_label, visible_text


def boxes(axis: object) -> list[Rectangle]:
    return [p for p in axis.patches if isinstance(p, Rectangle)]  # type: ignore[attr-defined]


def labels(ticks: object) -> list[str]:
    return [t.get_text() for t in ticks]  # type: ignore[attr-defined]


def test_text_colours_follow_the_relevance() -> None:
    relevance = torch.tensor([0.0, 0.5, 1.0, -1.0])
    for kind in (relevance.bfloat16().requires_grad_(), relevance.numpy(), list(relevance)):
        _, axes = plot_text(["a", "b", "c", "d"], {"signed": kind}, marked=[2])
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


NAN, SQUARE = float("nan"), torch.rand(3, 3)
REFUSED: dict[str, Callable[[], object]] = {
    "3 numbers for 2 tokens": lambda: plot_text(["a", "b"], torch.rand(3)),
    "1 of the numbers in": lambda: plot_text(["a", "b"], torch.tensor([0.1, NAN])),
    "empty mapping": lambda: plot_text(["a"], {}),
    "tokens has 2 labels": lambda: plot_matrices([SQUARE], ["a", "b"]),
    "titles has 1 labels": lambda: plot_matrices([SQUARE] * 2, titles=["a"]),
    r"shape \(2, 3\).* cannot be drawn": lambda: plot_matrices([torch.rand(2, 3)]),
    r"shape \(4,\).* cannot be drawn": lambda: plot_matrices([torch.rand(4)]),
    "matrices is empty": lambda: plot_matrices([]),
    "targets has 2 labels for 3": lambda: plot_contributions(SQUARE, targets=["x", "y"]),
    r"Pass \(targets, sources\)": lambda: plot_contributions(torch.rand(4)),
    "roles=.* Pass a mapping": lambda: plot_roles(["a"], {}),
    "role 'key' has 3 numbers for 2": lambda: plot_roles(["a", "b"], {"key": torch.rand(3)}),
    "is not accepted. Pass only real numbers": lambda: plot_text(["a", "b"], [1.0, 2j]),
    "is complex": lambda: plot_text(["a", "b"], torch.zeros(2, dtype=torch.complex64)),
    "contains 3 of type int": lambda: plot_text([3, 4], torch.rand(2)),
}


def test_a_notebook_shows_a_figure_without_pyplot() -> None:
    figure, _ = new_figure(2.0, 1.0)
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_the_identity_is_white_if_the_asking_token_is_named() -> None:
    scores = torch.tensor([0.2, -0.1, 5.0])
    given = {name: scores for name in ("LatimFlow", "MambaAttribution")}
    axes = plot_text(["a", "b", "c"], given, asking=-1)[1]
    flow, row = ([patch.get_facecolor() for patch in axis.patches] for axis in axes)
    white = plot_text(["a", "b", "c"], {"it": torch.tensor([0.2, -0.1, 0.0])})[1][0]
    assert row == [patch.get_facecolor() for patch in white.patches] != flow
    assert "without query token “c” (5)" in axes[1].get_title(loc="left")
    assert float(scores[2]) == 5.0
    # beside an identity that is far larger all else is pale
    pale = plot_text(["a", "b"], {"MambaAttribution": torch.tensor([1e-5, 1.0])}, asking=-1)[1][0]
    assert min(pale.patches[0].get_facecolor()) > 0.9


def test_refusals() -> None:
    for said, draw_it in REFUSED.items():
        with pytest.raises((InputError, OptionError), match=said):
            draw_it()


def test_matrices_show_their_values() -> None:
    matrix = torch.randn(1, 5, 5).bfloat16()
    figure, axes = plot_matrices([matrix, 2 * matrix[0]], list("abcde"), titles=["x", "$y$"])
    np.testing.assert_allclose(axes[0].images[0].get_array(), matrix[0].double().numpy())
    low, high = axes[1].images[0].get_clim()
    assert high == -low == pytest.approx(2 * float(matrix.abs().max()))
    assert labels(axes[0].get_xticklabels()) == labels(axes[0].get_yticklabels()) == list("abcde")
    draw(figure)
    size = matrix[0].abs().double()  # absolute ones are stretched as in the papers
    _, axes = plot_matrices([-size, torch.zeros(5, 5)], absolute=True)
    expected = (size - size.min()) / (size.max() - size.min())
    np.testing.assert_allclose(axes[0].images[0].get_array(), expected.numpy(), rtol=1e-6)
    assert not axes[1].images[0].get_array().any()


@pytest.mark.slow
def test_channels_are_laid_out_in_a_grid() -> None:
    channels = torch.randn(7, 4, 4)
    _, axes = plot_matrices(channels, columns=3)
    assert len({round(axis.get_position().y0, 6) for axis in axes}) == 3
    for i, axis in enumerate(axes):
        np.testing.assert_allclose(axis.images[0].get_array(), channels[i].numpy())


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


def test_colours_of_a_text_are_explained() -> None:
    """By the colors themselves: purple adds, and brown subtracts."""
    before = plt.get_fignums()
    for rows, said in (
        ({"a": [1.0, -2.0], "b": [1.0, 2.0]}, {"adds": "PuOr", "subtracts": "PuOr"}),
        ({"a": [1.0, 2.0]}, {"more relevant": "Purples"}),
    ):
        figure, _ = plot_text(["one", "two"], {k: torch.tensor(v) for k, v in rows.items()})
        (legend,) = figure.legends
        for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=True):
            colours = plt.colormaps[said[text.get_text()]](np.linspace(0, 1, 256))
            red, _, blue, _ = patch.get_facecolor()
            assert (red > blue) == (text.get_text() == "subtracts")
            assert np.abs(colours - patch.get_facecolor()).sum(-1).min() < 0.02
        assert {text.get_text() for text in legend.get_texts()} == set(said)
    assert plt.get_fignums() == before  # figures belong to nobody


ROLES = {
    "content": torch.tensor([0.0, 2.0, -1.0]),
    "key": torch.tensor([1.0, 0.5, -2.0]),
    "query": torch.tensor([-0.5, 0.25, 3.0]),
}


def test_what_is_negative_is_stacked_below() -> None:
    _, (axis,) = plot_roles(["a", "b", "c"], ROLES)
    spans = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in axis.patches]
    assert spans == [
        *[(0, 0), (0, 2), (0, -1)],
        *[(0, 1), (2, 2.5), (-1, -3)],
        *[(0, -0.5), (2.5, 2.75), (0, 3)],
    ]
    low, high = axis.get_ylim()
    assert low < -3 and high > 3
    roles = {role: [1.0] for role in ("content", "key", "query", "gate", "step")}
    _, (axis,) = plot_roles(["a"], roles)  # no two of which look alike
    assert len({bar.get_facecolor() for bar in axis.patches}) == 5
    assert len({bar.get_hatch() for bar in axis.patches}) == 5


def test_a_bar_stands_over_its_word_and_roles_are_named_at_their_largest_part() -> None:
    figure, (axis,) = plot_roles(["a", "b", "longer"], ROLES, marked=[1], title="$t$")
    draw(figure)
    words = axis.get_xticklabels()
    assert [word.get_text() for word in words] == ["a", "b", "longer"]
    middles = [bar.get_x() + bar.get_width() / 2 for bar in axis.patches]
    np.testing.assert_allclose(middles, [word.get_position()[0] for word in words] * 3)
    named = {text.get_text(): text.get_position() for text in axis.texts}
    beside = {role: min(middles, key=lambda m: abs(m - x)) for role, (x, _) in named.items()}
    assert beside == {"content": middles[1], "key": middles[0], "query": middles[2]}
    assert [word.get_bbox_patch() is not None for word in words] == [False, True, False]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(ROLES)


def test_texts_may_share_a_scale() -> None:
    rows = {"strong": torch.tensor([0.0, 4.0]), "weak": torch.tensor([1.0, 0.0])}

    def colour(one_scale: bool) -> tuple[float, ...]:
        _, axes = plot_text(["a", "b"], rows, one_scale=one_scale)
        boxes = [[box.get_facecolor() for box in axis.patches] for axis in axes]
        assert (boxes[0][1] == boxes[1][0]) is not one_scale
        return boxes[1][0]

    # a quarter of the scale is paler than all of it
    assert sum(colour(one_scale=True)[:3]) > sum(colour(one_scale=False)[:3])


SPELLED = {
    "lamp": "lamp", " owns": " owns", "": "∅", "  ": "␣␣", "a\nb\t": r"a\nb\t",
    "\x07\x9f": r"\x07\x9f", "a\u200bb\u200f\u2066": r"a\u200bb\u200f\u2066",
    "\xad\u3164\u2800": r"\xad\u3164\u2800", "❤\ufe0f": "❤\\ufe0f", "e\u0301": "e\u0301",
    " \u0301": r" \u0301", "\ud800": r"\ud800", "שלום": "שלום", "<b>$x$\\": "<b>$x$\\",
}  # fmt: skip


def test_whatever_is_spelled_is_seen() -> None:
    some = [chr(c) for c in range(0, sys.maxunicode, 499)]
    for token in (*AWKWARD, *some, *map("".join, zip(some, reversed(some), strict=True))):
        text = visible_text(token)
        assert text.isprintable() and text.strip(" ")
        categories = [unicodedata.category(c) for c in text]
        assert categories[0] not in ("Mn", "Me")
        assert not {"Cc", "Cf", "Cs", "Co", "Cn"} & set(categories)
    assert {token: visible_text(token) for token in SPELLED} == SPELLED


def test_what_the_font_lacks_is_named_and_dollars_are_no_mathematics() -> None:
    assert plot_label("日") == r"\u65e5"
    assert plot_label("\U00013000") == r"\U00013000"
    _, axis = new_figure(2, 2)
    text = axis.text(0, 0, plot_label("$x_1$"))
    assert text._preprocess_math(text.get_text()) == ("$x_1$", False)


def test_words_are_set_as_in_their_text() -> None:
    pieces = [None, "Go", "ing", " home", ".\n", "你", "", "", " \n", "再", None, "见", "a\n\nb"]
    names = ["<s>", "Go", "ing", "home", ".", "x", "y", "z", " \n", "再", "<e>", "见", "a b"]
    found = as_words(Tokens(names, pieces))
    shown = ["<s>", "Go", "ing", "home", r".", "你", "₂", "₃", r" \n", "再", "<e>", "见", r"a\n\nb"]
    assert found.labels == shown
    assert found.joined == [2, 4, 6, 7, 12]
    assert (found.breaks, found.marks) == ([4, 8], [0, 10])
    # they stand apart where the text is not known
    assert as_words(["a", "b\n", "", " c"]) == (["a", r"b\n", "∅", " c"], [], [1], [])
    assert as_words(Tokens(["a"], [""])).labels == ["∅"]
    assert as_words(Tokens(["a", "b"], ["x", "\n y"])).breaks == [0]
