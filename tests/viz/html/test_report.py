"""Reports and their graphs: what the page holds is what methods, matrices and the model say."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import Saliency
from helpers.pages import ReadPage, read_page, streams
from helpers.pictures import AWKWARD
from zoo.architectures import vit
from zoo.language import word_tokenizer
from zoo.small import VOCABULARY, classifier, falcon_lm, images, mamba_lm, token_ids, vision

from captum_ssm import (
    EdgeEffects,
    Edges,
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimFlow,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
    attribution_graph,
    knock_out,
    report,
)
from captum_ssm.attr.call.targets import logits_of
from captum_ssm.errors import InputError, OptionError, TargetError
from captum_ssm.inside import Graph

METHODS = [LatimFlow, MambaAttribution]
MAPS_ALONE: dict[str, Any] = {"cuts": 0, "graph": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "report.html"


def values(method: dict, missing: float = float("nan")) -> np.ndarray:
    return np.array([missing if v is None else v for v in method["values"]])


def check_values(method: dict, found: torch.Tensor, size: float = 0.0) -> None:
    """A method's numbers on a page are those."""
    np.testing.assert_allclose(values(method), found.numpy(), rtol=1e-4, atol=size or 1e-12)


def check_map(page: ReadPage, layer: dict, exact: torch.Tensor) -> None:
    """A layer's map on a page is that, in 127 steps of each row's largest."""
    limit = exact.abs().amax(-1, keepdim=True).numpy() / 254
    assert (np.abs(page.matrix(layer)[0] - exact.numpy()) <= limit * 1.01).all()


def padded(examples: int, tokens: int, *hidden: slice) -> torch.Tensor:
    """A mask of which later examples hide some tokens."""
    mask = torch.ones(examples, tokens, dtype=torch.long)
    for row, part in zip(mask[1:], hidden, strict=True):
        row[part] = 0
    return mask


@pytest.mark.slow
@pytest.mark.parametrize("padding", [False, True])
def test_numbers_are_those_of_each_example_alone(path: Path, padding: bool) -> None:
    """Of a language model, and of a classifier whose examples are padded on either side."""
    model = classifier("mean") if padding else mamba_lm()
    ids = token_ids(3, 11)
    mask = padded(3, 11, slice(7, None), slice(4)) if padding else torch.ones_like(ids)
    names = [[f"{letter}{i}" for i in range(11)] for letter in "abc"]
    given = {"tokens": names, "title": "T & U", **MAPS_ALONE}
    given |= {"additional_forward_args": mask} if padding else {}
    assert report(model, ids, METHODS, path=path, **given) == path
    page = read_page(path)
    assert page.texts("title") == page.texts("h1") == ["T & U"]
    assert (page.facts["layers"], page.facts["families"]) == (3, ["Mamba"])
    for b, example in enumerate(page.facts["examples"]):
        real = mask[b].bool()
        alone = ids[b : b + 1, real]
        logits = (model(alone)[0] if padding else model(alone).logits[0, -1]).detach().double()
        answer = int(logits.argmax())
        target = answer if padding else (-1, answer)
        assert example["name"] == f"Example {b + 1}"
        where = "" if padding else ", predicted after token 10"
        assert example["explained"] == f"the logit of “{answer}”{where}"
        best = [p for p in example["predictions"] if not p["rival"]]
        assert [p["label"] for p in best] == [str(k) for k in logits.topk(5).indices.tolist()]
        assert best[0]["probability"] == pytest.approx(float(logits.softmax(-1).max()), rel=1e-4)
        assert best[0]["logit"] == pytest.approx(float(logits.max()), rel=1e-4)
        assert example["tokens"] == [name for name, r in zip(names[b], real, strict=True) if r]
        for method, kind in zip(example["methods"], METHODS, strict=True):
            assert method["name"] == kind.name
            found = kind(model).attribute(alone, target)[0]
            check_values(method, found, 1e-4 * float(found.abs().max()))
        told = example["methods"][0]["answers"][example["asked"]]["streams"]
        entering = LatimFlow(model).decompose(alone, target).streams
        for row, stream in zip(streams(page, told, alone.shape[1]), entering, strict=True):
            np.testing.assert_allclose(row, stream[0], atol=1e-3 * float(stream.abs().max()))
        (attention,) = example["maps"]
        matrices = ImplicitAttention(model).matrices(alone)
        for index, layer in enumerate(attention["layers"]):
            assert page.matrix(layer)[1].all()
            check_map(page, layer, matrices[index][0])
            assert (layer["index"], layer["family"]) == (index, "Mamba")
            assert layer["module"].endswith(f"layers.{index}.mixer")


@pytest.mark.slow
def test_the_identity_is_told_from_sources(path: Path) -> None:
    """Of the asking token in rollouts, where the head reads it."""
    ids, mask = token_ids(2, 11), padded(2, 11, slice(4))
    for pool in ("last", "mean"):
        model = classifier(pool)
        methods = {"a": ImplicitAttentionRollout, "b": MambaAttribution(model), "c": LatimFlow}
        report(model, ids, methods, additional_forward_args=mask, matrices=False, path=path)
        for example, length in zip(read_page(path).facts["examples"], [11, 7], strict=True):
            wanted = length - 1 if pool == "last" else None
            assert [m["own"] for m in example["methods"]] == [wanted, wanted, None]


@pytest.mark.slow
def test_images_have_patches(path: Path) -> None:
    methods, labels = [MambaAttribution, ImplicitAttentionRollout], [*"abcde"]
    for cls in ("middle", None):
        model, pictures = vision(cls, (3, 5)), images(2, (3, 5))
        given = {"target": [1, 4], "labels": labels, **MAPS_ALONE}
        report(model, pictures, methods, path=path, **given)
        tokens = model.patch_tokens()
        for b, example in enumerate(read_page(path).facts["examples"]):
            image = example["image"]
            assert (image["grid"], image["cells"]) == ([3, 5], tokens)
            assert (image["height"], image["width"]) == (12, 15)
            assert image["source"].startswith("data:image/png;base64,")
            assert example["explained"] == f"the logit of “{labels[[1, 4][b]]}”"
            assert example["tokens"][tokens[7]] == "row 1, column 2"
            if cls is not None:
                assert example["tokens"][model.cls_position] == "class token"
            for method, kind in zip(example["methods"], methods, strict=True):
                found = kind(model).attribute(pictures[b : b + 1], target=[1, 4][b], per_token=True)
                np.testing.assert_allclose(
                    values(method)[tokens], found.flatten().numpy(), rtol=1e-4
                )
                others = set(range(len(example["tokens"]))) - set(tokens)
                assert all(method["values"][token] is None for token in others)
            assert example["maps"][0]["layers"][0]["size"] == len(example["tokens"])


@pytest.mark.slow
def test_pixels_are_there_where_a_method_tells_them_apart(path: Path) -> None:
    model, picture = vision("head", (3, 5)), images(1, (3, 5))
    methods = [LatimFlow, MambaAttribution, Saliency]
    report(model, picture, methods, target=1, matrices=False, path=path)
    flow, row, saliency = read_page(path).facts["examples"][0]["methods"]
    assert row["pixels"] is None
    for method, kind in ((flow, LatimFlow), (saliency, Saliency)):
        relevance = kind(model).attribute(picture, target=1)
        pixels, exact = method["pixels"], relevance.sum(1)[0].detach().numpy()
        assert (pixels["rows"], pixels["columns"]) == exact.shape
        steps = np.frombuffer(base64.b64decode(pixels["steps"]), "i1").reshape(exact.shape)
        end = pixels["largest"]
        assert np.abs(steps / 127 * end - exact.clip(-end, end)).max() <= end / 254 * 1.01
        patches = exact.reshape(3, 4, 5, 3).sum((1, 3)).flatten()
        np.testing.assert_allclose(values(method)[model.patch_tokens()], patches, rtol=1e-4)
    # other classes are explained by patches, too
    best = model(picture)[0].topk(5).indices.tolist()
    for label, answer in zip(best, flow["answers"], strict=False):
        exact = LatimFlow(model).attribute(picture, label, per_token=True).flatten()
        found = np.array(answer["values"])[model.patch_tokens()].astype(float)
        np.testing.assert_allclose(found, exact, atol=1e-4 * float(exact.abs().max()))


@pytest.mark.slow
def test_roles_stand_where_a_rule_tells_some(path: Path) -> None:
    model, ids = mamba_lm(), token_ids(1, 9)
    methods = {"content": LatimFlow, "cause": LatimFlow, "lrp": MambaLRP(model)}
    rules = {"content": {"rule": "frozen"}, "cause": {"rule": "centered", "baselines": 0.0}}
    methods |= {"row": ImplicitAttentionRollout, "own": LatimFlow}
    rules["own"] = {"contrast": "mean"}
    report(model, ids, methods, target=(-1, 4), options=rules, matrices=False, path=path)
    (example,) = read_page(path).facts["examples"]
    content, cause, lrp, row, own = example["methods"]
    assert own["answers"] == [] != lrp["answers"]  # its contrast is the user's own
    assert content["roles"] == row["roles"] == {}
    assert set(cause["roles"]) == {"content", "key", "query", "gate", "step"}
    assert set(lrp["roles"]) == {"content", "gate"}  # what else its rule tells is all zero
    found = LatimFlow(model).decompose(ids, (-1, 4), rule="centered", baselines=0.0).roles
    assert found is not None
    for role, relevance in cause["roles"].items():
        np.testing.assert_allclose(relevance, found[role][0].numpy(), rtol=1e-4, atol=1e-12)
    for method in (cause, lrp):
        total = np.sum(list(method["roles"].values()), axis=0)
        np.testing.assert_allclose(total, method["values"], atol=1e-4 * np.abs(total).max())


@pytest.mark.slow
def test_tokenizers_of_transformers_and_a_given_target(path: Path) -> None:
    model, tokenizer = mamba_lm().double(), word_tokenizer()
    text = "anna owns the $5 lamp"
    given = {"tokenizer": tokenizer, "target": (3, 7), "matrices": False, "names": ["$y$"]}
    report(model, text, [LatimFlow], path=path, **given)
    (example,) = read_page(path).facts["examples"]
    assert example["name"] == "$y$" and example["tokens"] == [
        "<s>",
        "anna",
        "owns",
        "the",
        "$5",
        "lamp",
    ]
    assert example["explained"] == "the logit of “$5”, predicted after token 3"
    assert example["maps"] == []
    ids = torch.tensor([tokenizer.encode(text)])
    chances = model(ids).logits[0, 3].detach().double().softmax(-1)
    found = {p["label"]: p["probability"] for p in example["predictions"]}
    assert found["$5"] == pytest.approx(float(chances[7]), rel=1e-4)
    for tokens, spelled, direction in (
        (AWKWARD, ["$x_1$", "<script>", r"a\nb", "∅"], "ltr"),
        (["שלום", "a", "סוף"], ["שלום", "a", "סוף"], "rtl"),
    ):
        given = {"tokens": tokens, "matrices": False}
        report(model, token_ids(1, len(tokens)), [LatimFlow], path=path, **given)
        (example,) = read_page(path).facts["examples"]
        assert example["tokens"][:4] == spelled and example["direction"] == direction
        assert example["breaks"] == ([2] if tokens is AWKWARD else [])


@pytest.mark.slow
def test_chosen_layers_and_little_room(path: Path) -> None:
    model, ids = mamba_lm(), token_ids(1, 150)
    chosen = {"matrices": ["contributions", "attention"], "shown_layers": [-1, 0]}
    report(model, ids[:, :9], [LatimFlow], **chosen, **MAPS_ALONE, path=path)
    page = read_page(path)
    maps = page.facts["examples"][0]["maps"]
    assert [m["name"] for m in maps] == ["LATIM contributions", "Implicit attention"]
    assert [layer["index"] for layer in maps[0]["layers"]] == [2, 0]
    check_map(page, maps[0]["layers"][0], LatimNorm(model).maps(ids[:, :9], layers=[2])[0][0])
    # the strongest are kept
    report(model, ids, [LatimFlow], path=path, megabytes=0.164, **MAPS_ALONE)
    page = read_page(path)
    layer = page.facts["examples"][0]["maps"][0]["layers"][2]
    exact = ImplicitAttention(model).matrices(ids, layers=[2])[0][0].numpy()
    matrix, known = page.matrix(layer)
    assert known.sum(1).tolist() == [layer["kept"]] * 150
    assert 8 <= layer["kept"] < 50
    for row in (20, 149):
        strongest = np.abs(exact[row]).argsort()[::-1][: layer["kept"]]
        limit = np.abs(exact[row]).max() / 254 * 1.01
        np.testing.assert_allclose(matrix[row, strongest], exact[row, strongest], atol=limit)


def check_states(cuts: dict, run: Callable[[], torch.Tensor], model: Any, asked: int) -> None:
    """What a page keeps of every run is what the model says in a fresh one, by the page's call."""
    classes = [int(label.removeprefix("LABEL_")) for label in cuts["labels"]]
    assert classes[0] == asked
    for name, (score, chance, *best) in cuts["states"].items():
        calls = [cuts["rows"][int(n)]["call"] for n in name.split("-") if n]
        edges = [eval(call, {"Edges": Edges}) for call in calls]
        with torch.no_grad(), knock_out(model, *edges):
            logits = run().double()
        chances = logits.softmax(-1)
        assert score == pytest.approx(float(logits[asked]), abs=1e-4)
        assert chance == pytest.approx(float(chances[asked]), abs=1e-4)
        assert best[1::2] == pytest.approx(chances.topk(len(best) // 2).values.tolist(), abs=1e-4)
        found = [classes[place] for place in best[::2]]
        np.testing.assert_allclose(chances[found], best[1::2], atol=1e-4)


def check_order(cuts: dict) -> None:
    """Messages first; the strongest is paired with all, the strongest eight with each other."""
    states, count = cuts["states"], len(cuts["rows"])
    losses = [abs(states[""][0] - states[str(n)][0]) for n in range(count)]
    whole = [row["target"] is None for row in cuts["rows"]]
    assert sum(whole) == count // 4 and whole == sorted(whole)
    for part in (losses[: -sum(whole)], losses[-sum(whole) :]):
        assert part == sorted(part, reverse=True)
    most = min(8, count - sum(whole))
    pairs = [f"{i}-{j}" for i in range(count) for j in range(i + 1, count) if i == 0 or j < most]
    assert set(states) == {"", *map(str, range(count)), *pairs}


@pytest.mark.slow
def test_messages_are_cut_alone_and_in_pairs(path: Path) -> None:
    model, ids, mask = mamba_lm(), token_ids(2, 9), padded(2, 9, slice(3))
    names = list(inspect.signature(model.forward).parameters)
    empty = [None] * (names.index("attention_mask") - 1)
    given = {"target": [(-1, 4)] * 2, "cuts": 10, "graph": 0, "path": path}
    report(model, ids, [MambaAttribution], additional_forward_args=(*empty, mask), **given)
    for b, example in enumerate(read_page(path).facts["examples"]):
        cuts, alone = example["cuts"], ids[b : b + 1, mask[b].bool()]
        effects = EdgeEffects(model).attribute(alone, (-1, 4))
        expected = effects.top(8)[0]
        rows = {(row["layer"], row["source"], row["target"]): row for row in cuts["rows"]}
        senders = [rows.pop((None, row["source"], None)) for row in cuts["rows"][8:]]
        for row in senders:
            exact = float(effects.of(Edges(sources=row["source"], targets="other"))[0])
            assert row["effect"] == pytest.approx(exact, rel=1e-3)
        sent: dict[int, float] = {}
        for e in effects.top(10)[0]:
            sent[e.source] = sent.get(e.source, 0) + abs(e.effect) * (e.source != e.target)
        best = sorted(sent, key=lambda source: -sent[source])[:2]
        assert {row["source"] for row in senders} == set(best)
        assert cuts["obstacle"] is None and len(rows) == len(cuts["rows"]) - 2
        assert set(rows) == {(e.layer, e.source, e.target) for e in expected}
        for edge in expected:
            row = rows[edge.layer, edge.source, edge.target]
            assert row["effect"] == pytest.approx(edge.effect, rel=1e-3) and not row["first_order"]
        part = slice(b, b + 1)
        check_states(
            cuts, lambda part=part: model(ids[part], *empty, mask[part]).logits[0, -1], model, 4
        )
        check_order(cuts)
        assert cuts["classes"] == VOCABULARY


@pytest.mark.slow
def test_how_many_messages_are_cut(path: Path) -> None:
    """By default 20, without matrices none; a page may hold none, and never many bytes of them."""
    model, ids = mamba_lm(), token_ids(1, 11)
    run = torch.no_grad()(lambda x: model(x).logits)
    for forward, options, count, said in (
        (model, {}, 20, ""),
        (model, {"cuts": 60}, 60, ""),
        (model, {"matrices": False}, 0, ""),
        (model, {"cuts": 0}, 0, ""),
        (run, {"model": model}, 0, "records no gradients"),
    ):
        report(forward, ids, [ImplicitAttentionRollout], graph=0, path=path, **options)
        cuts = read_page(path).facts["examples"][0]["cuts"]
        assert len(cuts["rows"]) == count and said in (cuts["obstacle"] or "")
        assert len(json.dumps(cuts, separators=(",", ":"))) < 20_000


@pytest.mark.slow
def test_cuts_of_images_and_of_layers_of_first_order(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, effects = vit(monkeypatch), partial(EdgeEffects, exact_norms=False)
    monkeypatch.setattr("captum_ssm.viz.html.scissors.EdgeEffects", effects)
    report(case.model, case.inputs[:1], [LatimFlow], cuts=5, graph=0, path=path)
    (example,) = read_page(path).facts["examples"]
    asked = int(logits_of(case.model(case.inputs[:1])).argmax())
    cuts = example["cuts"]
    assert [row["layer"] is None for row in cuts["rows"]] == [False] * 4 + [True]
    assert all(row["first_order"] for row in cuts["rows"])
    check_states(cuts, lambda: logits_of(case.model(case.inputs[:1]))[0], case.model, asked)


REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (OptionError, "matrices='all'", {"matrices": "all"}),
    (OptionError, "layers contains 7", {"shown_layers": [7]}),
    (OptionError, "cuts=-1", {"cuts": -1}),
    (OptionError, "at most 60", {"cuts": 61}),
    (InputError, "Pass the model's tokenizer", {"inputs": "a text"}),
    (InputError, "inputs is an empty list", {"inputs": [], "tokenizer": word_tokenizer()}),
    (InputError, "one list of names. Pass 2 lists", {"tokens": ["a"] * 5}),
    (InputError, "3 names for a sequence of 5", {"tokens": [["a"] * 3] * 2}),
    (InputError, "names has 1 labels for 2", {"names": ["a"]}),
    (TargetError, "out of range", {"target": (-1, VOCABULARY)}),
    *(
        (OptionError, "has an ending that is not accepted", {"path": f"other/report{suffix}"})
        for suffix in (".pdf", ".htm", "")
    ),
]


@pytest.mark.slow
def test_a_deep_model_and_a_prompt_take_at_most_300_kb(path: Path) -> None:
    model = mamba_lm(num_hidden_layers=24, hidden_size=48, vocab_size=3000)
    ids = torch.randint(0, 3000, (1, 60), generator=torch.Generator().manual_seed(5))
    report(model, ids, tokens=[f"word{i}" for i in range(60)], path=path)
    facts = read_page(path).facts
    (example,) = facts["examples"]
    assert len(example["maps"][0]["layers"]) == 24 and len(example["cuts"]["rows"]) == 20
    assert path.stat().st_size < 300_000


def test_refusals(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent.parent)
    model, ids = mamba_lm(), token_ids(2, 5)
    for error, said, changed in REFUSED:
        with pytest.raises(error, match=said):
            report(model, **{"inputs": ids, "methods": METHODS, "path": path, **changed})
    assert not path.exists() and not Path("other").exists()
    path.parent.parent.joinpath("file").write_text("")
    unusable = path.parent.parent / "file" / "r.html"
    with pytest.raises(OSError, match="file"):  # before the work
        report(lambda x: 1 / 0, ids, METHODS, model=model, path=unusable)


@pytest.mark.parametrize(
    ("make", "inputs", "blocks"),
    [
        (mamba_lm, token_ids, "backbone.layers"),
        pytest.param(falcon_lm, token_ids, "backbone.layers", marks=pytest.mark.slow),
        pytest.param(lambda: vision(layers=3), images, "blocks", marks=pytest.mark.slow),
    ],
)
def test_predictions_by_block_are_those_of_shorter_models(
    path: Path, make: Any, inputs: Any, blocks: str
) -> None:
    model, given = make(), inputs(1)
    report(model, given, [LatimFlow], cuts=0, graph=0, path=path)
    (example,) = read_page(path).facts["examples"]
    outer, _, name = blocks.rpartition(".")
    holder, layers = model.get_submodule(outer), model.get_submodule(blocks)
    assert [x["name"] for x in example["lens"]] == [f"{blocks}.{i}" for i in range(len(layers))]
    answer = int(logits_of(model(given)).flatten(0, -2)[-1].argmax())
    for count, found in enumerate(example["lens"], 1):
        setattr(holder, name, layers[:count])
        chances = logits_of(model(given)).detach().flatten(0, -2)[-1].softmax(-1)
        best = int(chances.argmax())
        assert found["best"] == str(best)
        assert found["chance"] == pytest.approx(float(chances[best]), rel=1e-4)
        assert found["explained"] == pytest.approx(float(chances[answer]), rel=1e-4)


def test_a_model_without_a_list_of_blocks_has_no_predictions_by_block(path: Path) -> None:
    model = mamba_lm()
    model.backbone.layers.__class__ = torch.nn.Sequential
    report(model, token_ids(1), [LatimFlow], cuts=0, graph=0, path=path)
    assert read_page(path).facts["examples"][0]["lens"] == []


BLOCKS = [f"backbone.layers.{i}" for i in range(3)]
EVERYTHING = 1000
EMPTY = {"rows": [], "kind": "blocks", "places": 0, "how": "", "nodes": [], "links": [], "path": []}
EMPTY |= {"obstacle": None}


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
    model, ids, mask = classifier("last"), token_ids(2, 9), padded(2, 9, slice(3))
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
    assert found == EMPTY | {"obstacle": "Graphs are made only for texts."}


@pytest.mark.slow
def test_how_many_nodes(path: Path) -> None:
    model, ids = mamba_lm(), token_ids(1, 20)
    assert drawn(path, model, ids) == [EMPTY]
    assert drawn(path, model, ids, matrices=True, graph=0, cuts=0) == [EMPTY]
    (beside_maps,) = drawn(path, model, ids, matrices=True, cuts=0)
    (of_24,) = drawn(path, model, ids, graph=24)
    (of_4,) = drawn(path, model, ids, graph=4)
    assert beside_maps == of_24
    assert len(of_4["nodes"]) < len(of_24["nodes"])
    links, nodes = of_4["links"], of_4["nodes"]  # every link leads on to the target
    assert {link["source"] for link in links} == set(range(len(nodes) - 1))
    assert {nodes[link["target"]]["kind"] for link in links} <= {"whole", "target"}
    deep_model = mamba_lm(num_hidden_layers=14)
    (deep,) = drawn(path, deep_model, ids[:, :6], graph=3)
    numbers = [int(row.removeprefix("backbone.layers.")) for row in deep["rows"]]
    assert deep["places"] == 14 and len(numbers) == 12 and numbers[-1] == 13
    # those that move most between tokens
    streams = (
        LatimFlow(deep_model)
        .decompose(ids[:, :6], (-1, int(deep_model(ids[:, :6]).logits[0, -1].argmax())))
        .streams
    )
    leaving = torch.zeros_like(streams[-1])
    leaving[0, -1] = streams[-1].sum()
    moves = [float((b - a).abs().sum()) for a, b in pairwise([*streams, leaving])]
    assert numbers == sorted([13, *np.argsort(moves[:13])[::-1][:11].tolist()])
    for wrong in (-1, 2.5, True):
        with pytest.raises(OptionError, match=f"graph={wrong}"):
            drawn(path, model, ids, graph=wrong)
