"""Predictions and relevance, held to the model and the methods called directly."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch
from captum.attr import IntegratedGradients, Saliency
from helpers.insights_examples import CLASSES, cnn, softmax, table_model
from zoo.small import classifier, mamba_lm, token_ids, vision

from captum_ssm import ImplicitAttentionRollout, LatimFlow, MambaAttribution
from captum_ssm.errors import InputError, OptionError
from captum_ssm.insights import (
    AttributionVisualizer,
    Batch,
    EmptyFeature,
    FilterConfig,
    ImageFeature,
)
from captum_ssm.insights.calculation import AttributionCalculation
from captum_ssm.insights.dataset import Example
from captum_ssm.viz.html.pictures import heat


def calculation(model, *features, classes=CLASSES, **options):
    features = features or (EmptyFeature(),)
    return AttributionCalculation([model], classes, features, **options)


def example(*inputs, additional=()):
    return Example(inputs, additional, None)


def test_transforms_see_one_example_without_its_batch():
    shapes = []

    def halved(image):
        shapes.append(tuple(image.shape))
        return image / 2

    def floor(image):
        shapes.append(tuple(image.shape))
        return image.floor()

    feature = ImageFeature("photo", [lambda x: x + 3, floor], [halved, floor])
    of = calculation(cnn(), feature, EmptyFeature())
    image, numbers = 9 * torch.rand(1, 3, 6, 6), torch.rand(1, 3)
    inputs = of.transformed(example(image, numbers))
    assert shapes == [(3, 6, 6)] * 2
    assert torch.equal(inputs[0], (image / 2).floor()) and torch.equal(inputs[1], numbers)
    baselines = of.baselines(inputs)
    assert torch.equal(baselines[0], inputs[0] + 3) and not baselines[1].any()
    assert baselines[1].shape == numbers.shape


@pytest.mark.parametrize(
    ("dtype", "score_func"), [(torch.float64, None), (torch.bfloat16, softmax)]
)
def test_the_likeliest_classes(dtype, score_func):
    model, numbers = table_model().to(dtype), torch.randn(1, 3).to(dtype)
    found = calculation(model, score_func=score_func).predict(model, (numbers,), ())
    scores = model(numbers).detach()[0]
    scores = scores if score_func is None else score_func(scores)
    best = sorted(range(5), key=lambda i: -float(scores[i]))[:4]
    assert [s.index for s in found.scores] == best
    assert [s.label for s in found.scores] == [CLASSES[i] for i in best]
    assert [s.score for s in found.scores] == [float(scores[i]) for i in best]
    assert found.target(3) == 3 and not found.output.requires_grad


def test_one_number_is_the_nearest_of_the_classes():
    rows = [(0.2, [0]), (0.8, [1]), (1.7, []), (-0.6, []), (float("nan"), [])]
    for output, indices in rows:
        model = lambda numbers: torch.full((1, 1), output)  # noqa: B023, E731
        found = calculation(model, classes=["no", "yes"]).predict(model, (torch.rand(1, 3),), ())
        assert [s.index for s in found.scores] == indices and found.target(1) is None


def test_classes_that_are_too_few_are_named():
    with pytest.raises(InputError, match="returns 5 scores, but classes has 2 names"):
        calculation(None, classes=["a", "b"]).predict(table_model(), (torch.rand(1, 3),), ())
    with pytest.raises(InputError, match="label is 7, but classes has 5"):
        calculation(None).score(1.0, 7)
    with pytest.raises(InputError, match=r"features has 1 entries.*2 inputs"):
        calculation(cnn()).transformed(example(torch.rand(1, 3), torch.rand(1, 3)))


OURS = [
    (lambda: mamba_lm(), lambda: token_ids(1, 6), (-1, 3)),
    (lambda: classifier("mean"), lambda: token_ids(1, 6), 3),
    (lambda: vision(), lambda: torch.randn(1, 3, 12, 12), 3),
]


@pytest.mark.parametrize(("model", "inputs", "target"), OURS)
def test_our_methods_say_what_they_say_alone(model, inputs, target):
    model, inputs = model(), inputs()
    of = calculation(model)
    for name, method in [("LatimFlow", LatimFlow), ("MambaAttribution", MambaAttribution)]:
        (found,), _ = of.relevance(model, (inputs,), (), target, name, {})
        by_patch = inputs.dim() == 4 and method is MambaAttribution
        alone = method(model).attribute(inputs, target=target, per_token=by_patch)
        torch.testing.assert_close(found, alone)


def test_an_image_by_its_patches_and_by_its_pixels():
    model, image = vision("middle", (3, 4)), torch.randn(1, 3, 12, 12)
    feature = ImageFeature("photo", None, None)
    visualizer = AttributionVisualizer(model, CLASSES, feature, [Batch(image, None)])
    for method in [LatimFlow, ImplicitAttentionRollout]:
        visualizer.config = FilterConfig(method.get_name(), num_examples=1)
        ((output,),) = visualizer.visualize()
        target = output.active_index
        (rasters,) = output.rasters
        asked = {"target": target} if method is LatimFlow else {}
        patches = method(model).attribute(image, **asked, per_token=True)[0]
        pixels = method(model).attribute(image, **asked)
        steps = np.frombuffer(base64.b64decode(rasters["patches"].steps), "i1").reshape(3, 4)
        assert rasters["patches"].largest == pytest.approx(float(patches.abs().max()), rel=1e-5)
        wanted = (patches / patches.abs().max() * 127).numpy()
        assert np.abs(steps - wanted).max() <= 0.51
        assert ("pixels" in rasters) == (method is LatimFlow)
        assert output.feature_outputs[0].modified == heat(pixels)


def test_captums_methods_read_the_logits_of_transformers():
    model, ids = mamba_lm().double(), token_ids(1, 5)
    (found,), _ = calculation(model).relevance(model, (ids,), (), (-1, 4), "Feature Ablation", {})
    with torch.no_grad():
        whole = model(ids).logits[0, -1, 4]
        for i in range(5):
            without = ids.clone()
            without[0, i] = 0
            lost = whole - model(without).logits[0, -1, 4]
            torch.testing.assert_close(found[0, i], lost, rtol=1e-5, atol=1e-5)


def test_a_model_of_one_number_has_no_target():
    model, numbers = table_model(classes=1), torch.rand(1, 3)
    of = calculation(model, classes=["no", "yes"], use_label_for_attr=False)
    (found,), _ = of.relevance(model, (numbers,), (), 1, "Saliency", {})
    torch.testing.assert_close(found, Saliency(model).attribute(numbers))


def test_what_does_not_fit_or_is_no_argument_is_named():
    model, numbers = table_model(), torch.rand(1, 3)
    of = calculation(model)
    with pytest.raises(OptionError, match="LatimFlow does not fit this model: it explains token"):
        of.relevance(model, (numbers,), (), 1, "LatimFlow", {})
    for argument in ("steps", "target", "inputs", "self"):
        with pytest.raises(OptionError, match=f"Saliency has no argument '{argument}'"):
            of.relevance(model, (numbers,), (), 1, "Saliency", {argument: 1})
    with pytest.raises(OptionError, match="n_steps=0: use a number of at least 2"):
        of.relevance(model, (numbers,), (), 1, "Integrated Gradients", {"n_steps": 0})


def test_captums_methods_get_baselines_targets_and_arguments():
    model, image = cnn(), torch.rand(1, 3, 6, 6)
    of = calculation(model, ImageFeature("photo", [lambda x: x * 0 + 0.3], None))
    options = {"n_steps": 7, "method": "riemann_left"}
    (found,), _ = of.relevance(model, (image,), (), 2, "Integrated Gradients", options)
    wanted = IntegratedGradients(model).attribute(
        image, baselines=torch.full_like(image, 0.3), target=2, **options
    )
    torch.testing.assert_close(found, wanted)
    assert not found.requires_grad
