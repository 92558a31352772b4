"""The graph of a report: what the page holds is what attribution_graph says of the same blocks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pages import read_page
from torch import nn
from zoo.small import classifier, images, mamba_lm, token_ids, vision

from captum_ssm import ImplicitAttentionRollout, LatimFlow, attribution_graph, report
from captum_ssm.errors import OptionError
from captum_ssm.inside import Graph

BLOCKS = [f"backbone.layers.{i}" for i in range(3)]
EVERYTHING = 1000
EMPTY = {"rows": [], "kind": "blocks", "places": 0, "nodes": [], "links": [], "path": []}
EMPTY |= {"obstacle": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


def drawn(path: Path, model: Any, inputs: torch.Tensor, **options: Any) -> list[dict]:
    """The graphs that a report of each example holds."""
    report(model, inputs, [LatimFlow], path=path, **({"matrices": False} | options))
    return [example["graph"] for example in read_page(path).facts["examples"]]


def numbers_of(found: dict, graph: Graph, rows: list[str]) -> list[int]:
    """Which nodes of a graph a page's nodes are."""
    kept = ((i, node) for i, node in enumerate(graph.nodes) if node.kind != "constants")
    places = {(node.kind, node.layer, node.position): i for i, node in kept}

    def layer(node: dict) -> str:
        return "" if node["kind"] in ("token", "target") else rows[node["row"] - 1]

    return [places[node["kind"], layer(node), node["position"]] for node in found["nodes"]]


@pytest.mark.parametrize("count", [5, pytest.param(EVERYTHING, marks=pytest.mark.slow)])
def test_the_graph_is_of_the_blocks(path: Path, count: int) -> None:
    model, ids = classifier("last"), token_ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    given = {"additional_forward_args": mask, "target": 2, "graph": count}
    for b, found in enumerate(drawn(path, model, ids, **given)):
        alone = ids[b : b + 1, mask[b].bool()]
        graph = attribution_graph(model, alone, 2, nodes=BLOCKS, top=count, keep=None)
        assert (found["rows"], found["kind"], found["places"]) == (BLOCKS, "blocks", 3)
        assert found["obstacle"] is None
        which = numbers_of(found, graph, BLOCKS)
        for i, node in zip(which, found["nodes"], strict=True):
            expected = graph.nodes[i]
            assert node["row"] == expected.depth
            followed = expected.kind in ("whole", "target")
            value = expected.activation if followed else float(graph.edges[:, i].sum())
            assert node["value"] == pytest.approx(value, rel=1e-3, abs=1e-6)
        assert found["nodes"][-1]["kind"] == "target"
        assert sum(node["kind"] == "whole" for node in found["nodes"]) <= count
        for link in found["links"]:
            edge = graph.edges[which[link["target"]], which[link["source"]]]
            assert link["weight"] == pytest.approx(float(edge), rel=1e-3, abs=1e-6)
        walked = [graph.nodes[which[step["node"]]] for step in found["path"]]
        assert [*walked, graph.nodes[-1]] == graph.path()
        pairs = {(link["source"], link["target"]): link["weight"] for link in found["links"]}
        steps = [step["node"] for step in found["path"]] + [len(which) - 1]
        adds = [pairs[pair] for pair in pairwise(steps)]
        assert adds == [step["adds"] for step in found["path"]]


class OneMixer(nn.Module):
    """A language model that holds its mixer itself."""

    def __init__(self) -> None:
        super().__init__()
        model = mamba_lm()
        self.embedding, self.head = model.backbone.embeddings, model.lm_head
        self.mixer = model.backbone.layers[0].mixer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(x + self.mixer(x))


@pytest.mark.slow
def test_mixers_are_rows_where_blocks_cannot_be(path: Path) -> None:
    model, ids, name = OneMixer(), token_ids(1, 7), "mixer"
    (found,) = drawn(path, model, ids, target=(-1, 4), graph=EVERYTHING)
    assert (found["kind"], found["rows"], found["places"]) == ("mixers", [name], 1)
    graph = attribution_graph(model, ids, (-1, 4), nodes=[name], keep=None)
    which = numbers_of(found, graph, [name])
    (past,) = (
        link
        for link in found["links"]
        if found["nodes"][link["source"]]["kind"] == "token" and link["target"] == len(which) - 1
    )
    assert found["nodes"][past["source"]]["position"] == 6
    assert past["weight"] == pytest.approx(float(graph.edges[-1, 6]), rel=1e-3)


@pytest.mark.slow
def test_what_keeps_a_graph_from_being_made(path: Path) -> None:
    model, ids = mamba_lm(), token_ids(1, 6)
    run = torch.no_grad()(lambda x: model(x).logits)
    methods = [ImplicitAttentionRollout]
    report(run, ids, methods, model=model, graph=3, matrices=False, path=path)
    assert "runs under no_grad" in read_page(path).facts["examples"][0]["graph"]["obstacle"]
    model.config.use_cache = False  # both layers would write to one place of the cache
    model.backbone.layers[1] = model.backbone.layers[0]
    (found,) = drawn(path, model, ids, graph=3)
    assert "'backbone.layers.0' runs several times" in found["obstacle"]
    assert found == EMPTY | {"obstacle": found["obstacle"]}
    (found,) = drawn(path, vision("head", (3, 5)), images(1, (3, 5)), target=1, graph=3)
    assert found == EMPTY | {"obstacle": "Patches of an image are no tokens of the model's input."}


@pytest.mark.slow
def test_how_many_nodes(path: Path) -> None:
    model, ids = mamba_lm(), token_ids(1, 40)
    assert drawn(path, model, ids) == [EMPTY]
    assert drawn(path, model, ids, matrices=True, graph=0) == [EMPTY]
    (beside_maps,) = drawn(path, model, ids, matrices=True)
    (of_24,) = drawn(path, model, ids, graph=24)
    (of_4,) = drawn(path, model, ids, graph=4)
    assert beside_maps == of_24
    assert len(of_4["nodes"]) < len(of_24["nodes"])
    links, nodes = of_4["links"], of_4["nodes"]  # every link leads on to the target
    assert {link["source"] for link in links} == set(range(len(nodes) - 1))
    assert {nodes[link["target"]]["kind"] for link in links} <= {"whole", "target"}
    (deep,) = drawn(path, mamba_lm(num_hidden_layers=14), token_ids(1, 6), graph=3)
    numbers = [int(row.removeprefix("backbone.layers.")) for row in deep["rows"]]
    assert deep["places"] == 14 and len(numbers) == 12 and numbers[-1] == 13
    for wrong in (-1, 2.5, True):
        with pytest.raises(OptionError, match=f"graph={wrong}"):
            drawn(path, model, ids, graph=wrong)
