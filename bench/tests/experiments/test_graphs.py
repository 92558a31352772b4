"""Paths and nodes of graphs against true interventions."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from captum_ssm import Edges, LatimFlow, knock_out
from captum_ssm.inside import Node
from captum_ssm.tracing import find_mixers
from captum_ssm_bench import EXPERIMENTS, Cell, load_bundled
from captum_ssm_bench.experiments.causal.questions import Question
from captum_ssm_bench.experiments.knockout.graphs import (
    CHANCE,
    DIRECT_CUT,
    SOURCES_CUT,
    WHOLE,
    Message,
    messages_of,
    other_messages,
)

GRAPHS = EXPERIMENTS["graphs"]


def asked(name: str, index: int, seed: int) -> tuple[nn.Module, Question]:
    """A model, and what it is asked."""
    (subject,) = (each for each in GRAPHS.subjects() if each.name == name)
    return subject.load(torch.device("cpu")), GRAPHS.example(subject, index, seed)


def measured(model: nn.Module, question: Question, *cell: str) -> Any:
    with GRAPHS.together():
        return GRAPHS.measure(model, question, Cell(*cell))


# --- paths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["frozen", "centered"])
def test_what_a_path_carries_is_what_the_answer_hangs_on(rule: str, seed: int) -> None:
    """In recall from where the thing stands, by one message of the second mixer."""
    for index in range(2):
        model, question = asked("recall-mamba", index, seed)
        numbers = measured(model, question, "path", rule)[""]
        assert (numbers["token"], numbers["place"], numbers["messages"]) == (1, 1, 1)
        (source,) = question.gold.nonzero()[:, 0].tolist()
        last, (_, token) = question.inputs.shape[1] - 1, question.target
        with torch.no_grad(), knock_out(model, Edges("backbone.layers.1.mixer", source, last)):
            cut = model(question.inputs).logits[0, -1].argmax() == token
        assert numbers["right"] == float(cut)
        assert numbers["others"] > numbers["right"] or cut


def test_messages_are_sent_within_the_block_that_they_lead_to() -> None:
    model, _ = load_bundled("pairs-bamba")
    places = [("", 0, 1), ("model.layers.0", 1, 3), ("model.layers.1", 2, 6)]
    path = [Node("whole", layer, depth, at, None, 1.0, 1.0, "") for layer, depth, at in places]
    found = list(messages_of(model, path))
    names = "model.layers.0.mamba", "model.layers.1.self_attn"
    assert found == [Message((names[0],), 1, 3), Message((names[1],), 3, 6)]
    assert list(messages_of(model, path[1:])) == found[1:]
    assert list(messages_of(model, path[2:])) == []


def test_others_are_in_the_same_layers_to_the_same_tokens() -> None:
    path = [Message(("a",), 1, 3), Message(("b",), 3, 6)]
    drawn = [other_messages(path, {1, 3, 6}, random.Random(i)) for i in range(40)]
    assert all(
        [(m.mixers, m.target) for m in found] == [(("a",), 3), (("b",), 6)] for found in drawn
    )
    assert {found[0].source for found in drawn} == {0, 2}
    assert {found[1].source for found in drawn} == {0, 2, 4, 5}
    assert other_messages([Message(("a",), 0, 1), path[1]], {0, 1, 6}, random.Random(0)) == []


def test_what_is_cut_besides_paths(seed: int) -> None:
    model, question = asked("copying-bamba", 0, seed)
    length, (_, token) = question.inputs.shape[1], question.target
    (source,) = question.gold.nonzero()[:, 0].tolist()
    others = [i for i in range(length) if i != source]
    for cell, edges in (
        (WHOLE, []),
        (SOURCES_CUT, [Edges(None, source, others)]),
        (DIRECT_CUT, [Edges(1, source, length - 1), Edges(0, source, length - 1)]),
    ):
        with torch.no_grad(), knock_out(model, *edges):
            right = model(question.inputs).logits[0, -1].argmax() == token
        assert measured(model, question, *cell)[""]["right"] == float(right)
    numbers = measured(model, question, *CHANCE)[""]
    assert numbers["token"] == pytest.approx(1 / length)
    assert math.isnan(numbers["right"])


# --- nodes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["frozen", "half", "centered"])
def test_nodes_against_hooks_and_the_decomposition(rule: Any, seed: int) -> None:
    model, question = asked("pairs-mamba", 0, seed)
    mixers = [mixer.module for mixer in find_mixers(model)]
    last, (_, token) = question.inputs.shape[1] - 1, question.target

    def number(mixer: nn.Module | None = None, position: int = 0) -> float:
        def nothing(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            kept = output.clone()
            kept[:, position] = 0
            return kept

        hooks = [] if mixer is None else [mixer.register_forward_hook(nothing)]
        with torch.no_grad():
            logits = model(question.inputs).logits[0, -1]
        for hook in hooks:
            hook.remove()
        return float(logits[token] - logits.mean())

    lost = [number() - number(mixers[0], i) for i in range(last + 1)]
    true = torch.tensor([*lost, number() - number(mixers[1], last)])
    parts = LatimFlow(model).decompose(question.inputs, question.target, contrast="mean", rule=rule)
    estimated = torch.cat([parts.mixers[0][0], parts.mixers[1][0, -1:]])
    rows = measured(model, question, "nodes", rule)
    for row, which in (("all", true == true), ("large", true.abs() > 0.01 * abs(number()))):
        x, y = estimated[which], true[which]
        expected = {"n": len(x), "x": x.sum(), "y": y.sum(), "xy": (x * y).sum()}
        expected |= {"off": (x - y).abs().sum(), "size": y.abs().sum()}
        for name, value in expected.items():
            assert rows[row][name] == pytest.approx(float(value), rel=1e-3, abs=1e-3), (row, name)
    assert 0 < rows["large"]["n"] <= rows["all"]["n"] == last + 2


def test_nothing_is_said_of_nodes_where_there_is_one_mixer(seed: int) -> None:
    assert measured(*asked("passkey-mamba", 0, seed), "nodes", "frozen") == {}
