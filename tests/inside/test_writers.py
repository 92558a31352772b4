"""Graphs written for other programs: circuit-tracer's format against its facts, GraphML read back.

The same files were once validated by circuit-tracer's own models and opened in its viewer; see
``tests/oracles/circuit_tracer.py`` for what must hold for that.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from oracles.circuit_tracer import ERROR, FEATURE, LOGIT, TOKEN, complaints, unpaired

from captum_ssm.errors import DataError, NonFiniteError, OptionError
from captum_ssm.inside.graph import Graph, Node
from captum_ssm.inside.writers import to_graphml, to_json

LAYER, LAST = "backbone.layers.0", "backbone.layers.1"
NODES = (
    Node("token", "", 0, 0, 5, 1.0, 0.25, "anna"),
    Node("token", "", 0, 2, 25, 1.0, 0.5, "lamp"),
    Node("constants", "", 0, None, None, 0.5, 0.05, "constants"),
    Node("feature", LAYER, 1, 2, 17, 1.5, 0.6, "a lamp"),
    Node("feature", LAYER, 1, 0, 17, 0.5, 0.1, "a lamp"),
    Node("direction", LAYER, 1, 2, 18, -2.0, 0.05, "a direction"),
    Node("error", LAYER, 1, 2, None, 0.25, 0.02, "what is left at lamp"),
    Node("whole", LAST, 2, 2, None, 3.0, 0.4, ""),
    Node("target", "", 3, None, 25, 11.5, 1.0, "lamp"),
)
SCORES = {"kept": 0.75, "completeness": 0.5, "replacement": 0.25}


@pytest.fixture
def graph(seed: int) -> Graph:
    depths = torch.tensor([node.depth for node in NODES])
    edges = torch.randn(len(NODES), len(NODES), generator=torch.Generator().manual_seed(seed))
    edges = torch.where(depths[:, None] > depths, edges, torch.zeros(()))
    edges[-1, 0] = 0.0
    return Graph(NODES, edges, ("anna", " owns\n", "lamp"), SCORES)


def written(graph: Graph, path: Path) -> Any:
    to_json(graph, path)
    return json.loads(path.read_text("utf-8"))


def test_the_viewer_can_read_it(graph: Graph, tmp_path: Path) -> None:
    content = written(graph, tmp_path / "made" / "lamp.json")
    assert complaints(content) == []
    assert content["metadata"]["slug"] == "lamp"
    assert content["metadata"]["prompt_tokens"] == ["anna", " owns\n", "lamp"]
    assert content["metadata"]["prompt"] == "anna owns lamp"
    assert content["metadata"]["scores"] == SCORES
    # the viewer asks a hub for features of any other scan, and would show those of another model
    assert content["metadata"]["scan"].startswith("./")
    none = replace(graph, nodes=tuple(replace(node, influence=0.0) for node in NODES))
    content = written(none, tmp_path / "none.json")
    threshold = content["metadata"]["node_threshold"]  # without influence all are kept
    assert all((node["influence"] or 0.0) <= threshold for node in content["nodes"])


def test_every_kind_has_its_place(graph: Graph, tmp_path: Path) -> None:
    nodes = written(graph, tmp_path / "lamp.json")["nodes"]
    found = [(node["feature_type"], node["layer"], node["ctx_idx"]) for node in nodes]
    assert found == [
        (TOKEN, "E", 0),
        (TOKEN, "E", 2),
        ("constants", "E", 0),
        (FEATURE, "0", 2),
        (FEATURE, "0", 0),
        (FEATURE, "0", 2),
        (ERROR, "0", 2),
        (FEATURE, "1", 2),
        (LOGIT, "3", 2),
    ]
    assert [node["activation"] for node in nodes] == [node.activation for node in NODES]
    assert [node["is_target_logit"] for node in nodes] == 8 * [False] + [True]
    assert [node["clerp"] for node in nodes[:-2]] == [node.label for node in NODES[:-2]]
    assert nodes[-2]["clerp"] == LAST, "its layer stands for what has no label"
    assert nodes[3]["node_id"] == "0_17_2" and nodes[0]["node_id"] == "E_5_0"
    features = [unpaired(node["feature"]) for node in nodes if node["feature_type"] == FEATURE]
    assert features == [(0, 17), (0, 17), (0, 18), (1, 0)]


def test_links_are_the_edges(graph: Graph, tmp_path: Path) -> None:
    content = written(graph, tmp_path / "lamp.json")
    number = {node["node_id"]: i for i, node in enumerate(content["nodes"])}
    edges = torch.zeros_like(graph.edges)
    for link in content["links"]:
        edges[number[link["target"]], number[link["source"]]] = link["weight"]
    torch.testing.assert_close(edges, graph.edges, rtol=0, atol=0)
    assert len(content["links"]) == int((graph.edges != 0).sum())


def test_influence_is_that_of_a_node_and_of_all_above_it(graph: Graph, tmp_path: Path) -> None:
    nodes = written(graph, tmp_path / "lamp.json")["nodes"]
    by_share = sorted(zip(NODES[:-1], nodes, strict=False), key=lambda pair: -pair[0].influence)
    found = [node["influence"] for _, node in by_share]
    whole = 0.6 + 0.5 + 0.4 + 0.25 + 0.1 + 0.05 + 0.05 + 0.02
    assert found[:3] == pytest.approx([0.6 / whole, 1.1 / whole, 1.5 / whole])
    assert found == sorted(found) and found[-1] == 1.0
    assert nodes[-1]["influence"] is None


def test_a_probability_is_told_where_it_is_known(graph: Graph, tmp_path: Path) -> None:
    unknown = written(graph, tmp_path / "lamp.json")["nodes"][-1]
    assert (unknown["clerp"], unknown["token_prob"]) == ('Output "lamp" (p=?)', 0.0)
    known = replace(graph, scores={**SCORES, "probability": 0.875})
    found = written(known, tmp_path / "lamp.json")["nodes"][-1]
    assert (found["clerp"], found["token_prob"]) == ('Output "lamp" (p=0.875)', 0.875)


def test_graphs_of_a_folder_are_listed(graph: Graph, tmp_path: Path) -> None:
    for name in ("one", "two", "one"):
        content = written(graph, tmp_path / f"{name}.json")
    listed = json.loads((tmp_path / "graph-metadata.json").read_text("utf-8"))
    assert [each["slug"] for each in listed["graphs"]] == ["two", "one"]
    assert listed["graphs"][-1] == content["metadata"]


def test_a_list_of_something_else_is_left_alone(graph: Graph, tmp_path: Path) -> None:
    for name in ("lamp", "lamp.txt", "graph-metadata.json"):
        with pytest.raises(OptionError, match=r"path=.*ends in \.json"):
            to_json(graph, tmp_path / name)
        assert list(tmp_path.iterdir()) == []
    other = tmp_path / "graph-metadata.json"
    for held in ("[]", "{}", "{", '{"graphs": [1]}', '{"graphs": [{}]}'):
        other.write_text(held, "utf-8")
        with pytest.raises(DataError, match=r"graph-metadata\.json contains no list of graphs"):
            to_json(graph, tmp_path / "lamp.json")
        assert other.read_text("utf-8") == held and not (tmp_path / "lamp.json").exists()


SPACE = "{http://graphml.graphdrawing.org/xmlns}"
READ: dict[str, Any] = {"string": str, "int": int, "long": int, "double": float}


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[tuple[int, int], float]]:
    root = ElementTree.parse(path).getroot()
    keys = {key.attrib["id"]: key.attrib for key in root.iter(f"{SPACE}key")}
    (whole,) = root.iter(f"{SPACE}graph")
    assert whole.attrib["edgedefault"] == "directed"

    def held(element: ElementTree.Element, of: str) -> dict[str, Any]:
        values = {}
        for data in element.findall(f"{SPACE}data"):
            key = keys[data.attrib["key"]]
            assert key["for"] == of
            values[key["attr.name"]] = READ[key["attr.type"]](data.text or "")
        return values

    found = whole.findall(f"{SPACE}node")
    number = {node.attrib["id"]: i for i, node in enumerate(found)}
    edges = {
        (number[e.attrib["target"]], number[e.attrib["source"]]): held(e, "edge")["weight"]
        for e in whole.findall(f"{SPACE}edge")
    }
    return held(whole, "graph"), [held(node, "node") for node in found], edges


def test_graphml_holds_everything(graph: Graph, tmp_path: Path) -> None:
    path = tmp_path / "made" / "lamp.graphml"
    to_graphml(graph, path)
    whole, nodes, edges = read(path)
    assert json.loads(whole.pop("tokens")) == list(graph.tokens) and whole == SCORES
    for node, found in zip(NODES, nodes, strict=True):
        known = {each.name: getattr(node, each.name) for each in fields(node)}
        assert found == {name: value for name, value in known.items() if value is not None}
    targets, sources = graph.edges.nonzero(as_tuple=True)
    expected = {
        (int(t), int(s)): float(graph.edges[t, s]) for t, s in zip(targets, sources, strict=True)
    }
    assert edges == expected


def test_any_text_can_be_a_label(graph: Graph, tmp_path: Path) -> None:
    for text, shown in (
        ('a < b & "c"', 'a < b & "c"'),
        ("two\nlines\t", "two\nlines\t"),
        ("\x00 \x1b[0m \r", "\\x00 \\x1b[0m \\x0d"),
        ("\ud83d", "\\xd83d"),
        ("שלום 🙂", "שלום 🙂"),
    ):
        nodes = (replace(NODES[0], label=text), *NODES[1:])
        named = replace(graph, nodes=nodes, tokens=(text, "owns", "lamp"))
        to_graphml(named, tmp_path / "lamp.graphml")
        whole, found, _ = read(tmp_path / "lamp.graphml")
        assert found[0]["label"] == shown
        assert json.loads(whole["tokens"])[0] == text
        content = written(named, tmp_path / "lamp.json")
        assert content["nodes"][0]["clerp"] == content["metadata"]["prompt_tokens"][0] == text


@pytest.mark.parametrize("write", [to_json, to_graphml])
def test_what_is_not_finite_is_refused(graph: Graph, tmp_path: Path, write: Any) -> None:
    nan = float("nan")
    for broken in (
        replace(graph, edges=graph.edges * nan),
        replace(graph, nodes=(replace(NODES[0], activation=nan), *NODES[1:])),
        replace(graph, scores={"kept": nan}),
    ):
        with pytest.raises(NonFiniteError, match="graph has"):
            write(broken, tmp_path / "lamp.json")
    assert list(tmp_path.iterdir()) == []
