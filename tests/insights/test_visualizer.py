"""Examples with one model or several: what is shown is what models and methods say."""

from __future__ import annotations

import base64
import math

import numpy as np
import pytest
import torch
from captum.attr import IntegratedGradients, Saliency
from helpers.insights_examples import (
    CLASSES,
    Always,
    cnn,
    numbers,
    photos,
    softmax,
    table,
    table_model,
    without_end,
)
from zoo.small import VOCABULARY, mamba_lm, token_ids, vision

from captum_ssm import ImplicitAttentionRollout, LatimFlow
from captum_ssm.errors import InputError, OptionError
from captum_ssm.insights import (
    AttributionVisualizer,
    Batch,
    EmptyFeature,
    FilterConfig,
    ImageFeature,
    TextFeature,
)
from captum_ssm.insights.calculation import AttributionCalculation
from captum_ssm.insights.dataset import MOST_SEARCHED, DatasetExample
from captum_ssm.viz.html.pictures import heat


def prompts(model, ids):
    """A visualizer of texts."""
    words = [f"w{i}" for i in range(VOCABULARY)]
    feature = TextFeature("prompt", None, None, lambda ids: [words[i] for i in ids[0]])
    return AttributionVisualizer(model, words, feature, [Batch(ids, None)])


def check_percents(found, relevance):
    """In hundredths of the largest."""
    wanted = (100 * relevance / relevance.abs().max()).tolist()
    assert found == pytest.approx(wanted, abs=1e-3)


def test_an_example_as_captum_insights_shows_it():
    model, images, labels = cnn(), torch.rand(3, 3, 6, 6), torch.tensor([4, 0, 2])
    shown = photos(model, [Batch(images, labels)]).visualize()
    assert len(shown) == 3
    for i, (output,) in enumerate(shown):
        scores = model((images[i : i + 1] - 0.5) / 0.5).detach().softmax(-1)[0]
        assert output.active_index == output.predicted[0].index == int(scores.argmax())
        assert output.predicted[0].score == pytest.approx(float(scores.max()))
        assert (output.actual.index, output.actual.label) == (labels[i], CLASSES[labels[i]])
        (feature,) = output.feature_outputs
        assert (feature.name, feature.type, output.model_index) == ("photo", "image", 0)
        assert abs(feature.contribution) == 1.0


@pytest.mark.slow
def test_the_words_of_a_text():
    """By the method that is recommended, by roles, and against another class by its name."""
    model, ids = mamba_lm(), token_ids(2, 6)
    visualizer, flow = prompts(model, ids), LatimFlow(model)
    rules = ("balanced", "frozen")
    assert visualizer.config.methods == [("LatimFlow", {"rule": rule}) for rule in rules]
    assert visualizer.get_insights_config()["selected_method"] == "LatimFlow"
    best = model(ids).logits[:, -1].argmax(-1).tolist()
    rival = next(k for k in range(VOCABULARY) if k not in best)
    for given, options in (
        ({}, {}),
        ({"baselines": "0"}, {"baselines": 0.0}),
        ({"baselines": "mean"}, {"baselines": "mean"}),
        ({"contrast": f"w{rival}"}, {"contrast": (-1, rival)}),
    ):
        if given:
            visualizer.config = FilterConfig("LatimFlow", {"rule": "balanced", **given})
        shown = [outputs for _, outputs in visualizer.search(visualizer.view, again=True).examples]
        for example, label, (output, *_) in zip(ids.split(1), best, shown, strict=True):
            assert output.active_index == label
            target = (-1, label)
            found = flow.decompose(example, target, rule="balanced", **options)
            assert output.feature_outputs[0].base == [f"w{i}" for i in example[0].tolist()]
            assert given or output.method == "What mattered? LatimFlow, rule balanced"
            check_percents(output.feature_outputs[0].modified, found.tokens[0])
            end = max(float(x.abs().max()) for x in found.roles.values())
            assert set(output.roles) == set(found.roles)
            for role, percents in output.roles.items():
                wanted = 100 * found.roles[role][0] / end
                assert percents == pytest.approx(wanted.tolist(), abs=1e-3)
    visualizer.config = FilterConfig("LatimFlow", {"contrast": "none such"})
    with pytest.raises(OptionError, match="contrast='none such' is neither a class"):
        visualizer.search(visualizer.view, again=True)


def test_a_model_whose_output_is_no_class():
    model = torch.nn.Linear(3, 1)
    visualizer = table(model, [Batch(torch.full((1, 3), 1e6), None)], use_label_for_attr=False)
    ((output,),) = visualizer.visualize()
    assert output.predicted == [] and output.active_index is None and output.actual is None
    assert output.feature_outputs[0].modified != [0.0, 0.0, 0.0]


def test_under_no_grad_and_with_a_model_in_training(seed):
    model = table_model().train()
    batch = numbers(1)
    wanted = table(model, [batch]).visualize()
    with torch.no_grad():
        assert table(model, [batch]).visualize() == wanted
    assert model.training and all(p.grad is None for p in model.parameters())


def test_a_method_may_fit_one_model_and_not_the_other():
    plain = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, 4), torch.nn.Flatten(), torch.nn.Linear(20, VOCABULARY)
    )
    visualizer = prompts([mamba_lm(), plain], token_ids(1, 5))
    visualizer.config = FilterConfig("LatimFlow")
    obstacles = visualizer.obstacles()
    assert obstacles["LatimFlow"][0] is None and "No token mixer" in obstacles["LatimFlow"][1]
    assert obstacles["Feature Ablation"] == [None, None]
    assert all("integers" in reason for reason in obstacles["Saliency"])
    with pytest.raises(OptionError, match="LatimFlow does not fit this model"):
        visualizer.visualize()


def test_several_methods_of_each_model_side_by_side():
    models, batch = [Always(1), Always(3)], numbers(3)
    visualizer = table(models, [batch])
    beside = [("Saliency", {"abs": False}), ("Input X Gradient", {})]
    visualizer.config = FilterConfig("Saliency", beside=beside)
    ((*shown,),) = visualizer.visualize()
    assert [(o.model_index, o.method_index) for o in shown] == [
        (model, method) for model in (0, 1) for method in (0, 1, 2)
    ]
    assert [o.method for o in shown[:3]] == ["Saliency", "Saliency, abs False", "Input X Gradient"]
    for output in shown:
        gradient = models[output.model_index].linear.weight[output.active_index].detach()
        value = (gradient.abs(), gradient, gradient * batch.inputs[0])[output.method_index]
        wanted = (100 * value / value.norm()).tolist()
        assert output.feature_outputs[0].modified == pytest.approx(wanted, abs=1e-3)


def test_pages_follow_each_other_and_one_again_is_the_same():
    """Of lists and of generators, which are read no further than asked."""

    def broken():
        yield numbers(0)
        raise RuntimeError("broken")

    def published():
        loader = iter([numbers(0, 1), numbers(2, 3, 4)])
        while True:
            yield next(loader)  # which ends as the published example does

    def seen(again=False):
        found = visualizer.search(visualizer.view, again=again)
        return [example.number for example, _ in found.examples], found.ended

    for dataset in (list, iter, lambda batches: published()):
        visualizer = table(Always(1), dataset([numbers(0, 1), numbers(2, 3, 4)]))
        visualizer.config = FilterConfig(num_examples=2)
        assert seen() == ([1, 2], False) and seen() == ([3, 4], False) == seen(again=True)
        for again in (False, True, True):
            assert seen(again) == ([5], True)
        assert seen() == ([1, 2], False)
    visualizer = table(Always(1), broken())
    visualizer.config = FilterConfig(num_examples=1)
    assert seen() == ([1], False)
    with pytest.raises(RuntimeError, match="broken"):
        seen()
    for dataset in ([], iter([])):
        visualizer = table(Always(1), dataset)
        assert visualizer.visualize() == [] == visualizer.visualize()
        assert set(map(tuple, visualizer.obstacles().values())) == {(None,)}


def test_a_filter_that_nothing_of_an_endless_dataset_passes_ends():
    visualizer = table(Always(1), without_end())
    visualizer.config = FilterConfig(classes=["cat"])
    found = visualizer.search(visualizer.view)
    assert found.examples == [] and found.searched == MOST_SEARCHED and not found.ended


def test_refusals():
    numbers_, batch = torch.rand(1, 3), [(torch.rand(1, 3), torch.tensor([1]))]
    of, few = calculation(table_model()), calculation(None, classes=["a", "b"])
    readers = [mamba_lm(vocab_size=size) for size in (17, 17, 18)]
    for kept in (readers[:1], readers[:2], [readers[0], lambda ids: ids]):
        AttributionVisualizer(kept, ["a"], EmptyFeature(), [])

    def asked(name, **arguments):
        of.relevance(table_model(), (numbers_,), (), 1, name, arguments)

    for said, ask in {
        "models is empty": lambda: AttributionVisualizer([], CLASSES, [EmptyFeature()], []),
        "features is empty": lambda: AttributionVisualizer([cnn()], CLASSES, [], []),
        "Wrap inputs and labels": lambda: table(table_model(), batch).visualize(),
        "label is 9": lambda: table(table_model(), [numbers(9)]).visualize(),
        r"\(models\[0\]\).* 17 .*\(models\[2\]\) has 18": lambda: AttributionVisualizer(
            readers, ["a"], EmptyFeature(), []
        ),
        "5 scores, but classes has 2 names": lambda: few.predict(table_model(), (numbers_,), ()),
        "label is 7, but classes has 5": lambda: of.score(1.0, 7),
        "features has 1 entries.*2 inputs": lambda: of.transformed(example(numbers_, numbers_)),
        "LatimFlow does not fit this model: it explains token": lambda: asked("LatimFlow"),
        "Saliency has no argument 'steps'": lambda: asked("Saliency", steps=1),
        "Saliency has no argument 'target'": lambda: asked("Saliency", target=1),
        "n_steps=0: use a number of at least 2": lambda: asked("Integrated Gradients", n_steps=0),
    }.items():
        with pytest.raises((OptionError, InputError), match=said):
            ask()


def calculation(model, *features, classes=CLASSES, **options):
    features = features or (EmptyFeature(),)
    return AttributionCalculation([model], classes, features, **options)


def example(*inputs, additional=()):
    return DatasetExample(inputs, additional, None)


def test_transforms_see_one_example_without_its_batch():
    shapes = []

    def noted(change):
        return lambda image: (shapes.append(tuple(image.shape)), change(image))[1]

    halved, floor = noted(lambda x: x / 2), noted(torch.floor)
    feature = ImageFeature("photo", [lambda x: x + 3, floor], [halved, floor])
    of = calculation(cnn(), feature, EmptyFeature())
    image, numbers = 9 * torch.rand(1, 3, 6, 6), torch.rand(1, 3)
    inputs = of.transformed(example(image, numbers))
    assert shapes == [(3, 6, 6)] * 2
    assert torch.equal(inputs[0], (image / 2).floor()) and torch.equal(inputs[1], numbers)
    baselines = of.baselines(inputs)
    assert torch.equal(baselines[0], inputs[0] + 3) and not baselines[1].any()
    assert baselines[1].shape == numbers.shape


def test_the_likeliest_classes():
    for dtype, score_func in ((torch.float64, None), (torch.bfloat16, softmax)):
        model, numbers = table_model().to(dtype), torch.randn(1, 3).to(dtype)
        found = calculation(model, score_func=score_func).predict(model, (numbers,), ())
        scores = model(numbers).detach()[0]
        scores = scores if score_func is None else score_func(scores)
        best = sorted(range(5), key=lambda i: -float(scores[i]))[:4]
        assert [tuple(s) for s in found.scores] == [(float(scores[i]), i, CLASSES[i]) for i in best]
        assert found.target(3) == 3 and not found.output.requires_grad


def test_one_number_is_the_nearest_of_the_classes():
    numbers, rows = torch.rand(1, 3), {0.2: [0], 0.8: [1], 1.7: [], -0.6: [], math.nan: []}
    for output, indices in rows.items():
        model = lambda numbers: torch.full((1, 1), output)  # noqa: B023, E731
        found = calculation(model, classes=["no", "yes"]).predict(model, (numbers,), ())
        assert [s.index for s in found.scores] == indices and found.target(1) is None
    model = table_model(classes=1)
    of = calculation(model, classes=["no", "yes"], use_label_for_attr=False)
    (found,), _ = of.relevance(model, (numbers,), (), 1, "Saliency", {})
    torch.testing.assert_close(found, Saliency(model).attribute(numbers))


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


def test_captums_methods_get_baselines_targets_and_arguments():
    model, image = cnn(), torch.rand(1, 3, 6, 6)
    of = calculation(model, ImageFeature("photo", [lambda x: x * 0 + 0.3], None))
    options = {"n_steps": 7, "method": "riemann_left"}
    (found,), _ = of.relevance(model, (image,), (), 2, "Integrated Gradients", options)
    baselines = torch.full_like(image, 0.3)
    wanted = IntegratedGradients(model).attribute(image, baselines, target=2, **options)
    torch.testing.assert_close(found, wanted)
    assert not found.requires_grad
