"""Graphs of exact parts: against matrices, against sums over all paths, and on a trained model."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from oracles import frozen_network
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from zoo.small import WIDTH, classifier, mamba_lm, token_ids
from zoo.wrapped import never_rounded

from captum_ssm import Feature, LatimFlow, attribution_graph
from captum_ssm.errors import InputError, LayerError, OptionError
from captum_ssm.inside import Graph, Node, without
from captum_ssm.inside.influence import influences, scores

BLOCKS = ["backbone.layers.0", "backbone.layers.1"]
MIXERS = [f"{block}.mixer" for block in BLOCKS]


class Words:
    def __init__(self, width: int = WIDTH, count: int = 14) -> None:
        self.read = torch.randn(width, count, dtype=torch.double)
        self.write = torch.randn(count, width, dtype=torch.double)
        self.start, self.rest = torch.randn(count).double(), torch.randn(width).double()

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.read.to(x) + self.start.to(x)).relu()

    def decode(self, features: Tensor) -> Tensor:
        return features @ self.write.to(features) + self.rest.to(features)


class OfAnotherLayer(Words):
    layer = BLOCKS[0]


def sums(graph: Graph) -> list[tuple[float, float]]:
    """What enters each node that anything enters, and its activation."""
    entered = {"feature", "direction", "whole", "target"}
    return [
        (float(row.sum()), node.activation)
        for node, row in zip(graph.nodes, graph.edges, strict=True)
        if node.kind in entered
    ]


def close(graph: Graph, limit: float) -> bool:
    size = float(graph.edges.abs().sum(1).max())
    return all(abs(total - wanted) <= limit * size for total, wanted in sums(graph))


@pytest.mark.slow
@never_rounded()
def test_edges_are_those_of_the_matrices():
    model, ids, words = mamba_lm().double(), token_ids(1, 5), [Words(), Words()]
    nodes = dict(zip(BLOCKS, words, strict=True))
    graph = attribution_graph(model, ids, (-1, 3), nodes=nodes, keep=None)
    assert close(graph, 1e-6)
    norms = [layer.norm for layer in model.backbone.layers]
    with torch.no_grad(), frozen_network.recording(model, norms, []) as seen:
        model(ids)
    matrices = frozen_network.mamba_layers(model, seen, half=False)
    embeddings = model.backbone.embeddings(ids)[0].detach()
    streams = [seen[norm] for norm in norms[1:]]  # behind the first block, and the second
    for depth, (stream, before) in enumerate(zip(streams, words, strict=True), 1):
        own = before.encode(stream)
        found = {
            (n.position, n.index): n.activation
            for n in graph.nodes
            if n.depth == depth and n.kind == "feature"
        }
        active = {tuple(x): float(own[tuple(x)]) for x in own.nonzero().tolist()}
        assert found == pytest.approx(active, rel=1e-5, abs=1e-6)
    number = {id(node): i for i, node in enumerate(graph.nodes)}

    def part(node: Node) -> Tensor:
        return node.activation * words[node.depth - 1].write[node.index]

    checked = 0
    for node in graph.nodes:
        if node.kind != "feature":
            continue
        reading = words[node.depth - 1].read[:, node.index]
        row = torch.einsum("e,eif->if", reading, matrices[node.depth - 1][node.position])
        for source in graph.nodes:
            edge = float(graph.edges[number[id(node)], number[id(source)]])
            if source.kind == "token":
                wanted = (
                    float(row[source.position] @ embeddings[source.position])
                    if node.depth == 1
                    else 0.0
                )
            elif source.kind == "feature":
                wanted = (
                    float(row[source.position] @ part(source))
                    if source.depth == node.depth - 1
                    else 0.0
                )
            else:
                continue
            assert edge == pytest.approx(wanted, rel=1e-6, abs=1e-5)
            checked += wanted != 0
    assert checked > 50


@never_rounded()
def test_whole_activations_have_the_parts_of_the_whole_decomposition():
    model, ids = mamba_lm().double(), token_ids(1, 6)
    found = LatimFlow(model).decompose(ids, (-1, 3), rule="frozen")
    graph = attribution_graph(model, ids, (-1, 3), nodes=MIXERS, keep=None)
    assert close(graph, 1e-6)
    for depth, mixer in enumerate(found.mixers[:2], 1):
        own = [n.activation for n in graph.nodes if n.kind == "whole" and n.depth == depth]
        assert own == pytest.approx(mixer[0].tolist(), abs=1e-6)
    # all paths together are what each token adds
    tokens = torch.tensor([n.kind == "token" for n in graph.nodes])
    wanted = found.tokens[0].double()
    torch.testing.assert_close(graph.effects()[tokens], wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "rule", ["centered", *(pytest.param(x, marks=pytest.mark.slow) for x in ("half", "balanced"))]
)
def test_other_rules_add_up(rule):
    model, ids = mamba_lm().double(), token_ids(1, 5)
    nodes = {BLOCKS[0]: Words(), MIXERS[1]: None, f"{MIXERS[0]}.heads": None}
    graph = attribution_graph(
        model, ids, (2, 3), nodes=nodes, rule=rule, contrast="mean", keep=None
    )
    assert close(graph, 1e-6)


def test_named_directions_leave_as_little_over_as_can_be():
    model, ids = mamba_lm().double(), token_ids(1, 5)
    pair = [Feature(BLOCKS[0], torch.randn(WIDTH), position=-1) for _ in range(2)]
    read = torch.randn(WIDTH).double()
    other = Feature(BLOCKS[1], 4, position=3, encode=read, label="four")
    graph = attribution_graph(model, ids, (-1, 3), nodes=[*pair, other], keep=None)
    assert close(graph, 1e-6)
    with (
        torch.no_grad(),
        frozen_network.recording(model, [model.backbone.layers[1].norm], []) as seen,
    ):
        model(ids)
    (stream,) = seen.values()
    along = torch.stack([f.direction for f in pair]).double()
    wanted = torch.linalg.lstsq(along.mT, stream[-1]).solution
    found = [n.activation for n in graph.nodes if n.kind == "direction" and n.depth == 1]
    assert found == pytest.approx(wanted.tolist(), abs=1e-6)
    (left,) = [
        n.activation for n in graph.nodes if n.kind == "error" and (n.depth, n.position) == (1, 4)
    ]
    assert left == pytest.approx(float((stream[-1] - wanted @ along).norm()), abs=1e-6)
    (four,) = [n for n in graph.nodes if n.label == "four"]
    assert (four.position, four.index) == (3, 0)


def test_what_is_not_followed_is_in_the_errors():
    model, ids, words = mamba_lm().double(), token_ids(1, 5), Words()
    whole, few = (
        attribution_graph(model, ids, (-1, 3), nodes={BLOCKS[0]: words}, top=top, keep=None)
        for top in (512, 3)
    )
    assert sum(n.kind == "feature" for n in few.nodes) == 3
    assert close(few, 1e-6)
    written = [torch.zeros(5, WIDTH, dtype=torch.double) for _ in (whole, few)]
    for graph, sums in zip((whole, few), written, strict=True):
        for node, writes in zip(graph.nodes, graph.writes, strict=True):
            if node.kind in ("feature", "error"):
                sums[node.position] += writes
    torch.testing.assert_close(*written)
    chosen = {
        (n.position, n.index): float(e)
        for n, e in zip(few.nodes, few.edges[-1], strict=True)
        if n.kind == "feature"
    }
    every = {
        (n.position, n.index): float(e)
        for n, e in zip(whole.nodes, whole.edges[-1], strict=True)
        if n.kind == "feature"
    }
    assert chosen == pytest.approx({at: every[at] for at in chosen})
    assert min(map(abs, chosen.values())) >= sorted(map(abs, every.values()))[-3] - 1e-12


def test_tokens_that_the_model_puts_in_front():
    model, ids = mamba_lm(), token_ids(1, 4)

    def run(x: Tensor) -> Tensor:
        return model(torch.cat([x.new_full((1, 1), 7), x], 1)).logits

    graph = attribution_graph(
        run, ids, (-1, 3), nodes=BLOCKS, keep=None, model=model, tokens=list("abcd")
    )
    assert close(graph, 1e-4)
    assert graph.tokens == ("(virtual)", "a", "b", "c", "d")


def drawn(seed: int) -> Graph:
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    kinds = ["token"] * 3 + ["feature"] * 4 + ["error"] * 2 + ["constants", "target"]
    depths = [0] * 3 + [1, 1, 2, 2] + [1, 2, 0, 3]
    nodes = tuple(
        Node(kind, "", depth, i % 3, i, 1.0, 0.0, str(i))
        for i, (kind, depth) in enumerate(zip(kinds, depths, strict=True))
    )
    edges = torch.zeros(len(nodes), len(nodes))
    for t, s in itertools.product(range(len(nodes)), repeat=2):
        entered = kinds[t] in ("feature", "target")
        if entered and depths[s] < depths[t] and rng.random() < 0.8:
            edges[t, s] = torch.randn((), generator=torch_rng)
    told = torch.tensor([k != "constants" for k in kinds])
    _, through = influences(edges, told)
    nodes = tuple(
        Node(n.kind, n.layer, n.depth, n.position, n.index, 1.0, x, n.label)
        for n, x in zip(nodes, through.tolist(), strict=True)
    )
    return Graph(nodes, edges, ("a", "b", "c"), {"kept": 1.0})


def paths(graph: Graph) -> list[tuple[float, list[int]]]:
    last = len(graph.nodes) - 1
    edges = graph.edges.abs().double().clone()
    edges[:, [n.kind == "constants" for n in graph.nodes]] = 0
    shares = edges / edges.sum(1, keepdim=True).clamp_min(1e-30)
    found, todo = [], [(1.0, [last])]
    while todo:
        weight, path = todo.pop()
        for source in shares[path[0]].nonzero()[:, 0].tolist():
            longer = (weight * float(shares[path[0], source]), [source, *path])
            found.append(longer)
            todo.append(longer)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_influence_is_the_sum_over_paths(seed):
    graph = drawn(seed)
    for i, node in enumerate(graph.nodes[:-1]):
        wanted = sum(weight for weight, path in paths(graph) if path[0] == i)
        assert node.influence == pytest.approx(wanted, abs=1e-12)
    tokens, errors = (
        sum(w for w, path in paths(graph) if graph.nodes[path[0]].kind == kind)
        for kind in ("token", "error")
    )
    kinds = [n.kind for n in graph.nodes]
    told, at_error, given = (
        torch.tensor([k in which for k in kinds])
        for which in ({"token", "feature", "error", "target"}, {"error"}, {"token"})
    )
    found = scores(graph.edges, told, at_error, given)
    assert found["replacement"] == pytest.approx(tokens / (tokens + errors))
    assert 0 < found["completeness"] < 1
    begun = [(w, p) for w, p in paths(graph) if graph.nodes[p[0]].kind == "token"]
    assert [int(n.label) for n in graph.path()] == max(begun)[1]
    second = [(w, p) for w, p in begun if graph.nodes[p[0]].position == 1]
    assert [int(n.label) for n in graph.path(1)] == max(second)[1]


@pytest.mark.parametrize("keep", [0.3, 1.0])
def test_pruning_keeps_the_fewest_that_have_the_share(keep):
    graph = drawn(3)
    pruned = graph.pruned(keep, keep_edges=1.0)
    kinds = {"feature", "error"}
    inner = sorted((n.influence for n in graph.nodes if n.kind in kinds), reverse=True)
    kept = [n.influence for n in pruned.nodes if n.kind in kinds]
    assert sum(kept) >= keep * sum(inner) - 1e-9
    assert sum(sorted(kept)[1:]) < keep * sum(inner)
    assert sorted(kept, reverse=True) == inner[: len(kept)]
    assert pruned.scores["kept"] == pytest.approx(sum(kept) / sum(inner))
    assert [n.kind for n in pruned.nodes if n.kind not in kinds] == [
        n.kind for n in graph.nodes if n.kind not in kinds
    ]
    fewer = graph.pruned(keep, keep_edges=0.5)
    assert 0 < int((fewer.edges != 0).sum()) <= int((pruned.edges != 0).sum())


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that is made."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.found = max(self.found, out.untyped_storage().nbytes() // out.element_size())
        return out


@pytest.mark.slow
def test_what_is_pruned_is_never_held():
    """Of long inputs there are many errors, and edges between all nodes would fill the memory."""
    model, ids = mamba_lm(), token_ids(1, 300)
    asked = {"target": (-1, 3), "nodes": BLOCKS, "top": 3}
    whole = attribution_graph(model, ids, **asked, keep=None)
    with Largest() as largest:
        graph = attribution_graph(model, ids, **asked, keep=0.2)
    assert len(whole.nodes) > 3 * ids.numel()
    assert largest.found < len(whole.nodes) ** 2 / 3
    pruned = whole.pruned(0.2)
    assert graph.nodes == pruned.nodes and graph.scores == pytest.approx(pruned.scores)
    torch.testing.assert_close(graph.edges, pruned.edges)
    for own, other in zip(graph.writes, pruned.writes, strict=True):
        assert (own is None) == (other is None) and (own is None or torch.equal(own, other))


def test_what_nodes_write_is_taken_off():
    model, ids = mamba_lm(), token_ids(1, 5)
    words, layer = Words(), model.backbone.layers[0]
    graph = attribution_graph(model, ids, (-1, 3), nodes={BLOCKS[0]: words}, keep=None)
    chosen = [n for n in graph.nodes if n.kind == "feature"][:3]
    outputs = []
    with without(model, graph, chosen):
        handle = layer.register_forward_hook(lambda m, args, out: outputs.append(out.clone()))
        model(ids)
        handle.remove()
    handle = layer.register_forward_hook(lambda m, args, out: outputs.append(out.clone()))
    model(ids)
    handle.remove()
    lost = torch.zeros_like(outputs[0])
    for node in chosen:
        lost[0, node.position] += node.activation * words.write[node.index].float()
    torch.testing.assert_close(outputs[1] - outputs[0], lost, atol=1e-5, rtol=1e-5)


def test_only_what_is_written_can_be_taken_off():
    model, ids = mamba_lm(), token_ids(1, 5)
    nodes = [f"{MIXERS[0]}.heads", BLOCKS[1]]
    graph = attribution_graph(model, ids, (-1, 3), nodes=nodes, keep=None)
    heads = next(node for node in graph.nodes if node.layer == nodes[0])
    for node in (graph.nodes[0], graph.nodes[-1], graph.nodes[-2], heads):
        with pytest.raises(OptionError, match="be subtracted"), without(model, graph, [node]):
            pass
    other = attribution_graph(model, ids, (-1, 3), nodes=[BLOCKS[1]])
    node = [n for n in other.nodes if n.kind == "whole"][-1]
    with pytest.raises(OptionError, match="be subtracted"), without(model, graph, [node]):
        pass
    with without(model, other, [node]), pytest.raises(LayerError, match="as many tokens"):
        model(ids[:, :1])


REFUSED = [
    ({"nodes": []}, OptionError, "at least one entry"),
    ({"nodes": "backbone.layers.0"}, OptionError, "dict from layers"),
    ({"nodes": ["nowhere"]}, LayerError, "not a module of the model"),
    ({"nodes": ["backbone.layers.0.mixer.in_proj"]}, LayerError, "is inside the mixer"),
    ({"nodes": [BLOCKS[0], Feature(BLOCKS[0], 2)]}, OptionError, "also features of it"),
    ({"nodes": {BLOCKS[0]: Words(WIDTH + 1)}}, OptionError, "does not fit the activation"),
    ({"nodes": {MIXERS[0]: OfAnotherLayer()}}, OptionError, "a dictionary for"),
    ({"nodes": [Feature(BLOCKS[0], WIDTH)]}, OptionError, "is not a direction"),
    ({"nodes": [Feature(BLOCKS[0], torch.ones(3))]}, OptionError, "is not a direction"),
    ({"nodes": [Feature(BLOCKS[0], 1, position=9)]}, OptionError, "is outside of"),
    ({"nodes": BLOCKS, "top": 0}, OptionError, "top"),
    ({"nodes": BLOCKS, "keep": 0.0}, OptionError, "keep"),
    ({"nodes": BLOCKS, "tokens": ["a"]}, OptionError, "tokens=.* does not name"),
    ({"nodes": BLOCKS, "show_progress": 1}, OptionError, "show_progress"),
]


@pytest.mark.slow
def test_what_does_not_fit_is_named():
    model, ids = mamba_lm(), token_ids(1, 5)
    for options, error, words in REFUSED:
        with pytest.raises(error, match=words):
            attribution_graph(model, ids, (-1, 3), **options)
    with pytest.raises(InputError, match="2 examples"):
        attribution_graph(model, token_ids(2, 5), (-1, 3), nodes=BLOCKS)
    unused = classifier("last")
    unused.spare = torch.nn.Linear(2, 2)
    with pytest.raises(LayerError, match="was not called"):
        attribution_graph(unused, ids, 2, nodes=["spare"])
