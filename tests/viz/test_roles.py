"""Bars of roles: heights, stacking, names and words are those of the relevance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.pictures import AWKWARD, draw

from captum_ssm import LatimFlow
from captum_ssm.errors import InputError
from captum_ssm.models import load_bundled
from captum_ssm.viz import plot_roles, plot_text

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


def test_no_two_roles_look_alike() -> None:
    roles = {role: [1.0] for role in ("content", "key", "query", "gate", "step")}
    _, (axis,) = plot_roles(["a"], roles)
    assert len({bar.get_facecolor() for bar in axis.patches}) == 5
    assert len({bar.get_hatch() for bar in axis.patches}) == 5


@pytest.mark.slow
def test_lines_of_a_long_text_have_one_scale_and_hold_every_token_once() -> None:
    tokens = AWKWARD * 6
    roles = {"content": torch.arange(len(tokens)) - 5.0, "key": torch.rand(len(tokens))}
    figure, axes = plot_roles(tokens, roles)
    draw(figure)
    assert len(axes) > 1
    assert len({axis.get_ylim() for axis in axes}) == 1
    assert sum(len(axis.patches) for axis in axes) == 2 * len(tokens)
    total = sum(bar.get_height() for axis in axes for bar in axis.patches)
    assert total == pytest.approx(sum(float(x.sum()) for x in roles.values()))


def test_the_bars_of_a_decomposition_sum_to_its_relevance() -> None:
    model, vocabulary = load_bundled()
    text = "anna owns the lamp . ? anna owns the"
    words, ids = text.split(), torch.tensor([vocabulary.encode(text)])
    found = LatimFlow(model).decompose(ids, (-1, 3), rule="centred")
    assert found.roles is not None
    _, (axis,) = plot_roles(words, {role: x[0] for role, x in found.roles.items()})
    heights = np.array([bar.get_height() for bar in axis.patches]).reshape(5, len(words))
    np.testing.assert_allclose(heights.sum(0), found.tokens[0].numpy(), atol=1e-5)


def test_it_refuses_what_it_cannot_draw() -> None:
    with pytest.raises(InputError, match="roles must be a mapping"):
        plot_roles(["a"], torch.rand(1))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="roles must be a mapping"):
        plot_roles(["a"], {})
    with pytest.raises(InputError, match="role 'key' has 3 numbers for 2 tokens"):
        plot_roles(["a", "b"], {"key": torch.rand(3)})


def test_texts_may_share_a_scale() -> None:
    rows = {"strong": torch.tensor([0.0, 4.0]), "weak": torch.tensor([1.0, 0.0])}

    def colour(one_scale: bool) -> tuple[float, ...]:
        _, axes = plot_text(["a", "b"], rows, one_scale=one_scale)
        boxes = [[box.get_facecolor() for box in axis.patches] for axis in axes]
        assert (boxes[0][1] == boxes[1][0]) is not one_scale
        return boxes[1][0]

    # a quarter of the scale is paler than all of it
    assert sum(colour(one_scale=True)[:3]) > sum(colour(one_scale=False)[:3])
