"""What a page is told."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from helpers.insights_examples import CLASSES, Always, numbers, softmax, table, table_model
from zoo.small import VOCABULARY, mamba_lm

from captum_ssm import EdgeEffects, Edges
from captum_ssm.errors import OptionError
from captum_ssm.explain.knockout import cut_edges
from captum_ssm.insights import AttributionVisualizer, Batch, FilterConfig, TextFeature
from captum_ssm.insights.api import Api, encoded, plain

PLAIN = [
    (-math.inf, None),
    ({1: torch.tensor([1.0, math.nan])}, {"1": [1.0, None]}),
    (torch.tensor(3), 3),
    (np.array([[1, 2]]), [[1, 2]]),
    (np.float64("nan"), None),
    (np.bool_(True), True),
    ((1, "a", None, {"b"}), [1, "a", None, ["b"]]),
    (OptionError, "<class 'captum_ssm.errors.OptionError'>"),
]


def test_values_become_json():
    for value, wanted in PLAIN:
        found = plain(value)
        assert found == wanted and type(found) is type(wanted)
        json.loads(encoded(value), parse_constant=pytest.fail)
    named = plain(FilterConfig("x", {"a": math.nan}))
    assert named["attribution_method"] == "x" and named["attribution_arguments"] == {"a": None}


def test_the_page_is_told_what_it_needs():
    api = Api(table([Always(1), table_model()], [numbers(1)]))
    config = json.loads(encoded(api.answer("config", {})))
    assert config["models"] == ["Always", "Sequential"] and config["classes"] == CLASSES
    assert config["obstacles"]["Saliency"] == [None, None]
    assert config["filter"]["prediction"] == "all" and config["filter"]["num_examples"] == 4
    assert config["filter"]["attribution_method"] == config["selected_method"]


def test_examples_and_another_class_of_one_of_them():
    model = table_model()
    api = Api(table(model, [numbers(0, 1, 2)]))
    chosen = {"attribution_method": "Saliency", "attribution_arguments": {"abs": False}}
    answer = api.answer("examples", {"filter": chosen | {"num_examples": 2}})
    assert [each["number"] for each in answer["examples"]] == [1, 2]
    assert (answer["searched"], answer["ended"]) == (2, False)
    second = answer["examples"][1]
    request = {"filter": chosen, "id": second["id"], "model": 0, "target": 3}
    told = api.answer("relevance", request)
    assert told["active_index"] == 3 and told["predicted"] == second["models"][0]["predicted"]
    other = api.answer("relevance", request | {"target": 2})
    assert other["feature_outputs"] != told["feature_outputs"]
    rest = api.answer("examples", {"filter": chosen | {"num_examples": 2}})
    assert [each["number"] for each in rest["examples"]] == [3] and rest["ended"]
    again = api.answer("examples", {"filter": chosen | {"num_examples": 2}, "again": True})
    assert [each["number"] for each in again["examples"]] == [3]
    # an example that another page still shows can be asked about
    assert api.answer("relevance", request) == told


WORDS, IDS = [f"w{i}" for i in range(VOCABULARY)], torch.tensor([[3, 1, 4, 1, 5]])


def texts(model, words=WORDS):
    """A visualizer of one text of five words."""
    feature = TextFeature("text", None, None, lambda ids: [words[i] for i in ids[0]])
    return AttributionVisualizer(model, words, feature, [Batch(IDS, None)], softmax)


def test_the_prediction_without_a_message():
    model = mamba_lm()
    api = Api(texts(model))
    (layers,) = api.answer("config", {})["layers"]
    assert layers == [f"backbone.layers.{i}.mixer" for i in range(3)]
    (shown,) = api.answer("examples", {})["examples"]
    asked = {"id": shown["id"], "model": 0, "target": 7}
    edge = {"name": layers[1], "source": 2, "target": 4}
    request = asked | {"edges": [edge]}
    (strongest, *_) = api.answer("messages", asked)["messages"]
    found = EdgeEffects(model).attribute(IDS, (-1, 7)).top(1)[0][0]
    assert strongest[:4] == found[:4] and strongest.effect == pytest.approx(found.effect)
    cut = cut_edges(EdgeEffects(model), IDS, (-1, 7), Edges(1, 2, 4), lambda k, output: WORDS[k])
    assert api.answer("cut", request) == cut._asdict()
    for changed, said in CUTS:
        wrong = asked | {"edges": [edge | changed]} | ({"id": 99} if "id" in changed else {})
        try:
            error = api.answer("cut", wrong)["error"]
        except OptionError as refused:  # what no page asks for
            error = str(refused)
        assert said in error


def test_the_way_from_the_words_to_a_class():
    model = mamba_lm()
    api = Api(texts(model))
    (shown,) = api.answer("examples", {})["examples"]
    found = api.answer("flow", {"id": shown["id"], "model": 0, "target": 7})
    assert found["tokens"] == 5
    nodes, links = found["graph"]["nodes"], found["graph"]["links"]
    last = len(nodes) - 1
    assert nodes[last]["value"] == pytest.approx(model(IDS).logits[0, -1, 7].item(), abs=1e-4)
    entering = sum(link["weight"] for link in links if link["target"] == last)
    assert entering + nodes[last]["constants"] == pytest.approx(nodes[last]["value"], abs=1e-3)


def test_only_models_of_one_text_have_messages_to_cut():
    api = Api(table([Always(1)], [numbers(1)]))
    assert api.answer("config", {})["layers"] == [[]]
    (shown,) = api.answer("examples", {})["examples"]
    request = {"id": shown["id"], "model": 0, "target": 1}
    request["edges"] = [{"name": "x", "source": 0, "target": 0}]
    assert "words of one text" in api.answer("cut", request)["error"]
    assert "words of one text" in api.answer("flow", request)["error"]
    embedding = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Flatten())
    assert texts(embedding, ["w"] * 7).layers() == [[]]


def test_an_error_of_one_model_leaves_the_other(capsys):
    class Failing(torch.nn.Module):
        def forward(self, x):
            raise ValueError("out of order")

    api = Api(table([Failing(), table_model()], [numbers(1)]))
    (example,) = api.answer("examples", {})["examples"]
    failed = {"model_index": 0, "method_index": 0, "error": "out of order"}
    assert example["models"][0] == failed
    assert example["models"][1]["model_index"] == 1 and "error" not in example["models"][1]
    assert capsys.readouterr().err == ""
    api.debug = True
    request = {"again": True, "filter": {"attribution_arguments": {"n_steps": 2.5}}}
    (example,) = api.answer("examples", request)["examples"]
    assert "Traceback" in capsys.readouterr().err
    assert example["models"][1]["error"] == "n_steps=2.5: use a whole number."


BAD = [
    ("examples", {"filter": 3}, "filter=3. Pass a JSON object"),
    ("examples", {"filter": {"colour": 1}}, "unknown field 'colour'"),
    ("relevance", {"id": 99, "model": 0, "target": 0}, "no longer stored"),
    ("relevance", {}, "no longer stored"),
    ("relevance", {"id": 1, "model": 1, "target": 0}, "model=1 is none of the 1 models"),
    ("relevance", {"id": 1, "model": -1, "target": 0}, "model=-1"),
    ("relevance", {"id": 1, "model": True, "target": 0}, "model=True"),
    ("relevance", {"id": 1, "model": 0, "target": 5}, "target=5 is none of the 5 classes"),
    ("relevance", {"id": 1, "model": 0, "target": None}, "target=None"),
]


def test_a_question_that_cannot_be_answered_is_named():
    api = Api(table(table_model(), [numbers(1)]))
    api.answer("examples", {})
    for question, request, what in BAD:
        with pytest.raises(OptionError, match=what):
            api.answer(question, request)


CUTS = [
    ({"id": 99}, "no longer stored"),
    ({"name": 1}, "name=1. Pass the name of a layer"),
    ({"name": "nowhere"}, "'nowhere', which is not a mixer"),
    ({"source": "w1"}, "source='w1'. Pass the position"),
    ({"target": 5}, "position 5, outside the sequence of 5"),
    ({"source": 4, "target": 2}, "every target comes before its source"),
]


@pytest.mark.slow
def test_examples_of_long_ago_are_forgotten():
    """So that a page that is left open does not fill the memory."""
    api = Api(table(torch.nn.Linear(3, 5), [numbers(*[0] * 100)]))
    chosen = {"filter": FilterConfig("Saliency", {}, num_examples=100)._asdict()}
    first = api.answer("examples", chosen)["examples"][0]["id"]
    asked = chosen | {"id": first, "model": 0, "target": 0}
    for _ in range(2):
        assert api.answer("relevance", asked)
        last = api.answer("examples", chosen)["examples"][-1]["id"]
    with pytest.raises(OptionError, match="no longer stored"):
        api.answer("relevance", asked)
    assert api.answer("relevance", asked | {"id": last})
