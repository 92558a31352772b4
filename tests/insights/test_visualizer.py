"""Going through examples with one model or several."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.insights_examples import (
    CLASSES,
    Always,
    cnn,
    numbers,
    photos,
    table,
    table_model,
    without_end,
)
from zoo.small import VOCABULARY, mamba_lm, token_ids

from captum_ssm import LatimFlow
from captum_ssm.errors import InputError, OptionError
from captum_ssm.insights import (
    AttributionVisualizer,
    Batch,
    EmptyFeature,
    FilterConfig,
    TextFeature,
)
from captum_ssm.insights.dataset import MOST_SEARCHED
from captum_ssm.insights.vocabularies import check_sizes, check_tokenizers


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
def test_a_language_model_begins_with_the_method_that_is_recommended():
    model, ids = mamba_lm(), token_ids(2, 6)
    visualizer = prompts(model, ids)
    assert visualizer.config.methods == [("LatimFlow", {"rule": "centred"})]
    assert visualizer.get_insights_config()["selected_method"] == "LatimFlow"
    for example, (output,) in zip(ids.split(1), visualizer.visualize(), strict=True):
        target = int(model(example).logits[0, -1].argmax())
        wanted = LatimFlow(model).attribute(example, target=(-1, target), rule="centred")[0]
        assert output.active_index == target and output.method == "LatimFlow, rule centred"
        assert output.feature_outputs[0].base == [f"w{i}" for i in example[0].tolist()]
        check_percents(output.feature_outputs[0].modified, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("word", "baselines"), [("0", 0.0), ("mean", "mean")])
def test_the_words_of_a_text_by_role(word, baselines):
    model, ids = mamba_lm(), token_ids(2, 6)
    visualizer = prompts(model, ids)
    chosen = {"rule": "centred", "baselines": word}
    visualizer.config = FilterConfig("LatimFlow", chosen)
    for example, (output,) in zip(ids.split(1), visualizer.visualize(), strict=True):
        target = (-1, output.active_index)
        found = LatimFlow(model).decompose(example, target, rule="centred", baselines=baselines)
        end = max(float(x.abs().max()) for x in found.roles.values())
        assert set(output.roles) == set(found.roles)
        for role, percents in output.roles.items():
            wanted = 100 * found.roles[role][0] / end
            assert percents == pytest.approx(wanted.tolist(), abs=1e-3)
        check_percents(output.feature_outputs[0].modified, found.tokens[0])


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


@pytest.mark.slow
def test_a_class_is_held_against_another_by_its_name():
    model, ids = mamba_lm(), token_ids(1, 6)
    visualizer = prompts(model, ids)
    visualizer.config = FilterConfig("LatimFlow", {"contrast": "w4"})
    ((output,),) = visualizer.visualize()
    target = (-1, output.active_index)
    wanted = LatimFlow(model).attribute(ids, target=target, contrast=(-1, 4))[0]
    check_percents(output.feature_outputs[0].modified, wanted)
    visualizer.config = FilterConfig("LatimFlow", {"contrast": "none such"})
    with pytest.raises(OptionError, match="contrast='none such' is no class"):
        visualizer.search(visualizer.view, again=True)


def test_the_filter_is_by_prediction_and_by_class():
    dataset = [numbers(1, 0, 1, 4, 1, 2)]
    for options, wanted in [
        ({"prediction": "correct"}, [1, 1, 1]),
        ({"prediction": "incorrect"}, [0, 4, 2]),
        ({"classes": ["bee"], "num_examples": 9}, [1, 0, 1, 4, 1, 2]),
        ({"classes": ["ant", "bee"], "prediction": "incorrect"}, [0, 4, 2]),
        ({"classes": ["ant"]}, []),
    ]:
        visualizer = table(Always(1), dataset)
        visualizer.config = FilterConfig(**options)
        assert [o.actual.index for (o,) in visualizer.visualize()] == wanted, options


def test_an_empty_dataset_shows_nothing():
    for dataset in ([], iter([])):
        visualizer = table(Always(1), dataset)
        assert visualizer.visualize() == [] == visualizer.visualize()
        assert set(map(tuple, visualizer.obstacles().values())) == {(None,)}


def test_a_filter_that_nothing_of_an_endless_dataset_passes_ends():
    visualizer = table(Always(1), without_end())
    visualizer.config = FilterConfig(classes=["cat"])
    found = visualizer.search(visualizer.view)
    assert found.examples == [] and found.searched == MOST_SEARCHED and not found.ended


def test_a_config_that_is_not_known_is_refused_and_the_old_one_stays():
    visualizer = table(table_model(), [numbers(1)])
    before = visualizer.config
    with pytest.raises(OptionError, match="prediction='right'"):
        visualizer.config = FilterConfig(prediction="right")
    assert visualizer.config == before


def reader(size):
    return SimpleNamespace(config=SimpleNamespace(vocab_size=size))


def test_models_of_one_tokenizer():
    for sizes in ((50280, 50304), (50280, 50257)):  # large embeddings may be filled up
        check_sizes([reader(size) for size in sizes])
    for sizes in ((50280, 50560), (60, 64)):
        with pytest.raises(OptionError, match="Show models of one tokenizer"):
            check_sizes([reader(size) for size in sizes])
    first, same, other, short = (SimpleNamespace(vocab=[*w]) for w in ("abc", "abc", "abd", "ab"))
    listed = SimpleNamespace(get_vocab=lambda: {word: i for i, word in enumerate("abc")})
    for alike in (same, listed, SimpleNamespace()):  # the last one does not say
        check_tokenizers(["one", "two"], [first, alike])
    with pytest.raises(OptionError, match="one and two have different vocabularies: '"):
        check_tokenizers(["one", "two"], [first, other])
    with pytest.raises(OptionError, match=r"'c' is token .* to the one and no token to the"):
        check_tokenizers(["a", "b"], [first, short])


def test_refusals():
    with pytest.raises(OptionError, match="models is empty"):
        AttributionVisualizer([], CLASSES, [EmptyFeature()], [])
    with pytest.raises(OptionError, match="features is empty"):
        AttributionVisualizer([cnn()], CLASSES, [], [])
    with pytest.raises(InputError, match="wrap inputs and labels"):
        table(table_model(), [(torch.rand(1, 3), torch.tensor([1]))]).visualize()
    with pytest.raises(InputError, match="label is 9"):
        table(table_model(), [numbers(9)]).visualize()
    models = [mamba_lm(vocab_size=size) for size in (17, 17, 18)]
    for kept in (models[:1], models[:2], [models[0], lambda ids: ids]):
        AttributionVisualizer(kept, ["a"], EmptyFeature(), [])
    with pytest.raises(OptionError, match=r"\(models\[0\]\).* 17 .*\(models\[2\]\) one of 18"):
        AttributionVisualizer(models, ["a"], EmptyFeature(), [])
