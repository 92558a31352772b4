"""Numbers that are drawn, and the figures they are drawn in."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from captum_ssm.errors import InputError
from captum_ssm.viz import plot_text
from captum_ssm.viz.figure import min_max, numbers, scale


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([1.5, -2.0], requires_grad=True),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        np.array([1.5, -2.0]),
        [1.5, -2.0],
    ],
)
def test_numbers_of_any_kind(values: object) -> None:
    found = numbers(values, "x")
    assert found.dtype == torch.float64
    assert not found.requires_grad
    assert found.tolist() == [1.5, -2.0]


@pytest.mark.parametrize("values", [[0.1, 1e-300], [[0.1], [np.float64(1 / 3)]], (2**53 - 1, 0.1)])
def test_numbers_of_python_keep_their_digits(values: object) -> None:
    assert numbers(values, "x").tolist() == torch.tensor(values, dtype=torch.float64).tolist()
    assert 0.1 in np.ravel(numbers(values, "x"))


def test_lists_of_tensors_are_numbers() -> None:
    values = [torch.tensor(0.5), torch.tensor(-1.25, dtype=torch.bfloat16)]
    assert numbers(values, "x").tolist() == [0.5, -1.25]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("words", "x does not consist of real numbers"),
        ([[1.0], [1.0, 2.0]], "x does not consist of real numbers"),
        ([1.0, 2j], "x does not consist of real numbers"),
        (torch.zeros(2, 0), r"x of shape \(2, 0\) is empty"),
        (torch.zeros(2, dtype=torch.complex64), r"x of shape \(2,\) is complex"),
        ([0.0, float("inf"), float("nan")], "x holds 2 numbers that are NaN or infinite"),
    ],
)
def test_other_things_are_refused(values: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        numbers(values, "x")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"a": [1.0, -2.0], "b": [1.0, 2.0]}, {"adds": "PuOr", "takes off": "PuOr"}),
        ({"a": [1.0, 2.0]}, {"more": "Purples"}),
    ],
)
def test_colours_of_a_text_are_explained(
    rows: dict[str, list[float]], said: dict[str, str]
) -> None:
    """By the colours themselves: purple adds, and brown takes off."""
    figure, _ = plot_text(["one", "two"], {k: torch.tensor(v) for k, v in rows.items()})
    (legend,) = figure.legends
    for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=True):
        colours = plt.colormaps[said[text.get_text()]](np.linspace(0, 1, 256))
        red, _, blue, _ = patch.get_facecolor()
        assert (red > blue) == (text.get_text() == "takes off")
        assert np.abs(colours - patch.get_facecolor()).sum(-1).min() < 0.02
    assert {text.get_text() for text in legend.get_texts()} == set(said)


def test_scales_are_centred_where_something_is_negative() -> None:
    assert scale(torch.tensor([0.5, 2.0])) == ("Purples", 0, 2)
    assert scale(torch.tensor([0.5, -2.0])) == ("PuOr", -2, 2)
    assert scale(torch.zeros(3)) == ("Purples", 0, 1)


def test_min_max_of_tiny_and_of_equal_numbers() -> None:
    tiny = torch.tensor([1e-300, -3e-300, 2e-300], dtype=torch.float64)
    torch.testing.assert_close(min_max(tiny), torch.tensor([0, 1, 0.5], dtype=torch.float64))
    assert not min_max(torch.full((2, 2), -7.0)).any()


def test_figures_belong_to_nobody() -> None:
    before = plt.get_fignums()
    plot_text(["a"], torch.ones(1))
    assert plt.get_fignums() == before
