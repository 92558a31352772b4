"""Numbers that are drawn, and the figures they are drawn in."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from captum_ssm.errors import InputError
from captum_ssm.viz import plot_text
from captum_ssm.viz.figure import numbers


def test_numbers_of_any_kind() -> None:
    for values in (
        torch.tensor([1.5, -2.0], requires_grad=True),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        np.array([1.5, -2.0]),
        [torch.tensor(1.5), -2.0],
    ):
        found = numbers(values, "x")
        assert found.dtype == torch.float64 and not found.requires_grad
        assert found.tolist() == [1.5, -2.0]
    assert numbers([0.1, 1e-300], "x").tolist() == [0.1, 1e-300]


def test_other_things_are_refused() -> None:
    for values, message in (
        ("words", "x does not consist of real numbers"),
        ([[1.0], [1.0, 2.0]], "x does not consist of real numbers"),
        ([1.0, 2j], "x does not consist of real numbers"),
        (torch.zeros(2, 0), r"x of shape \(2, 0\) is empty"),
        (torch.zeros(2, dtype=torch.complex64), r"x of shape \(2,\) is complex"),
        ([0.0, float("inf"), float("nan")], "x holds 2 numbers that are NaN or infinite"),
    ):
        with pytest.raises(InputError, match=message):
            numbers(values, "x")


def test_colours_of_a_text_are_explained() -> None:
    """By the colours themselves: purple adds, and brown takes off."""
    before = plt.get_fignums()
    for rows, said in (
        ({"a": [1.0, -2.0], "b": [1.0, 2.0]}, {"adds": "PuOr", "takes off": "PuOr"}),
        ({"a": [1.0, 2.0]}, {"more": "Purples"}),
    ):
        figure, _ = plot_text(["one", "two"], {k: torch.tensor(v) for k, v in rows.items()})
        (legend,) = figure.legends
        for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=True):
            colours = plt.colormaps[said[text.get_text()]](np.linspace(0, 1, 256))
            red, _, blue, _ = patch.get_facecolor()
            assert (red > blue) == (text.get_text() == "takes off")
            assert np.abs(colours - patch.get_facecolor()).sum(-1).min() < 0.02
        assert {text.get_text() for text in legend.get_texts()} == set(said)
    assert plt.get_fignums() == before  # figures belong to nobody
