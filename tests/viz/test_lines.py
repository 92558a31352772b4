"""Lines: layer profiles, decomposition errors, perturbation curves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.pictures import draw
from zoo.small import mamba_lm, token_ids

from captum_ssm import LatimNorm
from captum_ssm.errors import InputError
from captum_ssm.metrics import Curve, Perturbed
from captum_ssm.viz import plot_curves, plot_decomposition_errors, plot_layers, plot_perturbed


def curve(examples: int = 5) -> Curve:
    return Curve(torch.tensor([0.1, 0.4, 0.9]), torch.rand(examples, 3, dtype=torch.float64))


def test_profiles_are_drawn_by_layer() -> None:
    profiles = {"$a$": torch.randn(5), "b": [0.5, -0.25]}
    figure, axis = plot_layers(profiles, quantity="$q", title="$t")
    for line, values in zip(axis.lines, profiles.values(), strict=False):
        np.testing.assert_allclose(line.get_ydata(), torch.as_tensor(values).numpy())
        assert line.get_xdata().tolist() == list(range(len(values)))
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [r"\$a\$", "b"]
    draw(figure)
    assert not plot_layers([1.0, 2.0])[0].legends
    with pytest.raises(InputError, match="one number per layer"):
        plot_layers({"a": torch.rand(2, 2)})


@pytest.mark.slow
def test_decomposition_errors_of_a_real_model() -> None:
    model, ids = mamba_lm(), token_ids()
    errors = {
        kind: LatimNorm(model, activation=kind).decomposition_error(ids)
        for kind in ("linearized", "silu")
    }
    figure, axis = plot_decomposition_errors(errors)
    draw(figure)
    drawn = [line.get_ydata() for line in axis.lines]
    np.testing.assert_allclose(drawn[0], np.maximum(errors["linearized"], 1e-8))
    np.testing.assert_allclose(drawn[1], errors["silu"])
    assert axis.get_yscale() == "log"
    low, high = axis.get_ylim()
    assert all(low < y < high for ys in drawn for y in ys)
    _, axis = plot_decomposition_errors([0.0, 0.5])
    assert axis.lines[0].get_ydata().tolist() == [1e-8, 0.5]


def test_curves_are_means_with_standard_errors_and_areas() -> None:
    curves = {"one": curve(), "two": curve()}
    figure, axis = plot_curves(curves, quantity="accuracy", change="pixels masked")
    draw(figure)
    for (name, found), line, band in zip(curves.items(), axis.lines, axis.collections, strict=True):
        np.testing.assert_allclose(line.get_ydata(), found.values.mean(0))
        assert line.get_label() == f"{name}  area {float(found.area().mean()):.3g}"
        heights = band.get_paths()[0].vertices[:, 1]
        error = found.values.std(0) / 5**0.5
        assert heights.max() == pytest.approx(float((found.values.mean(0) + error).max()))
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("pixels masked", "accuracy")
    both = Perturbed(curve(), curve(), curve())  # which has a panel each
    figure, axes = plot_perturbed({"flow": both, "rollout": Perturbed(*both)}, title="$")
    draw(figure)
    for axis, part in zip(axes, both, strict=True):
        np.testing.assert_allclose(axis.lines[0].get_ydata(), part.values.mean(0))
    assert [axis.get_ylabel() for axis in axes] == ["accuracy", "probability", "logit"]


def test_one_example_has_no_band_and_one_share_no_area() -> None:
    assert not plot_curves({"a": curve(1)})[1].collections
    figure, axis = plot_curves(Curve(torch.tensor([0.5]), torch.rand(3, 1)))
    assert "area" not in axis.lines[0].get_label()
    draw(figure)
