"""captum-ssm knockout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_ssm import EdgeEffects, Edges, knock_out
from captum_ssm.explain.loading import Source, load
from captum_ssm.models import load_bundled
from captum_ssm.viz.html.pictures import png

PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"
WORDS = PROMPT.split()


@pytest.fixture
def answered(run: Callable[..., str]) -> Callable[..., Any]:
    """What is found, as JSON."""

    def ask(*options: object, of: Sequence[object] = ("recall-mamba", PROMPT)) -> Any:
        return json.loads(run("knockout", *of, *options, "--json"))

    return ask


def logits(*edges: Edges, **options: Any) -> Tensor:
    """Of bundled recall-mamba, after the prompt."""
    model, vocabulary = load_bundled()
    with torch.no_grad(), knock_out(model, *edges, **options):
        return model(torch.tensor([vocabulary.encode(PROMPT)])).logits[0, -1].double()


def test_the_prediction_with_and_without_an_edge(answered: Any, run: Any) -> None:
    asked = ["--layers", "1", "--from", "lamp", "--to", "-1"]
    found, (model, vocabulary) = answered(*asked), load_bundled()
    lamp, kite = vocabulary.id_of("lamp"), vocabulary.id_of("kite")
    before, without = logits(), logits(Edges(1, 3, -1))
    assert found["explained"] == "the logit of “lamp”, predicted after token 13"
    assert found["tokens"] == WORDS
    assert found["before"] == pytest.approx(float(before[lamp]), rel=1e-5)
    assert found["without"] == pytest.approx(float(without[lamp]), rel=1e-5)
    assert found["true"] == pytest.approx(float(before[lamp] - without[lamp]), rel=1e-5)
    ids = torch.tensor([vocabulary.encode(PROMPT)])
    effects = EdgeEffects(model, exact_norms=True).attribute(ids, (-1, lamp))
    assert found["estimated"] == pytest.approx(float(effects.of(Edges(1, 3, -1))), rel=1e-4)
    chances = {answer["label"]: answer for answer in found["answers"]}
    likeliest = {vocabulary.vocab[int(k)] for x in (before, without) for k in x.topk(3).indices}
    assert set(chances) == likeliest
    for word, answer in chances.items():
        for name, x in (("before", before), ("without", without)):
            chance = float(x.softmax(-1)[vocabulary.id_of(word)])
            assert answer[name] == pytest.approx(chance, abs=1e-6)
    printed = run("knockout", "recall-mamba", PROMPT, *asked, "--target", "kite")
    first, head, row, *_, last = printed.splitlines()
    assert first == "Explained is the logit of “kite”, predicted after token 13."
    assert head.split() == ["probability", "of", "as", "it", "is", "without"]
    said = [float(number) for number in row.removeprefix("  kite").split()]
    assert said == pytest.approx([float(x.softmax(-1)[kite]) for x in (before, without)], abs=1e-4)
    lost = float(before[kite] - without[kite])
    assert last.startswith(f"Its logit {'loses' if lost > 0 else 'gains'} {abs(lost):.3g}"[:-1])
    assert "the estimate beforehand was" in last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "edges", "replace"),
    [
        (["--to", "-1"], Edges(targets=[-1]), None),
        (["--from", "0:4", "--to", "4:"], Edges(None, slice(0, 4), slice(4, None)), None),
        (["--from", "lamp", "8", "--heads", "1", "5"], Edges(None, [3, 8], heads=[1, 5]), None),
        (["--from", ":", "--component", "conv"], Edges(None, slice(None), component="conv"), None),
        (["--from", "lamp", "--selection"], Edges(None, 3, selection=True), None),
        (["--from", "lamp", "--replace", "mean"], Edges(None, 3), "mean"),
        (["--from", "lamp", "--layers", "backbone.layers.1.mixer"], Edges(1, 3), None),
    ],
)
def test_options_are_those_of_edges(
    options: list[str], edges: Edges, replace: Any, answered: Any
) -> None:
    lamp = load_bundled()[1].id_of("lamp")
    found = answered(*options, "--target", "lamp")
    assert found["without"] == pytest.approx(float(logits(edges, replace=replace)[lamp]), rel=1e-5)
    assert (found["estimated"] is None) == (edges.selection or replace is not None)


@pytest.mark.slow
def test_messages_of_a_run_on_another_text(answered: Any, run: Any) -> None:
    other = PROMPT.replace("lamp", "drum")
    found = answered("--from", "lamp", "--to", "-1", "--replace", other)
    vocabulary = load_bundled()[1]
    patched = logits(Edges(None, 3, -1), replace=torch.tensor([vocabulary.encode(other)]))
    answers = {answer["label"]: answer["without"] for answer in found["answers"]}
    assert max(answers, key=lambda word: answers[word]) == "drum"
    chance = float(patched.softmax(-1)[vocabulary.id_of("drum")])
    assert answers["drum"] == pytest.approx(chance, abs=1e-5)
    asked = ["knockout", "recall-mamba", PROMPT, "--from", "lamp", "--replace", "anna owns"]
    assert "--replace 'anna owns' has 2 tokens, the text has 14" in run(*asked, code=1)


@pytest.mark.slow
def test_the_strongest_edges_each_cut_by_itself(answered: Any, run: Any) -> None:
    found, (model, vocabulary) = answered("--top", "4"), load_bundled()
    lamp, ids = vocabulary.id_of("lamp"), torch.tensor([vocabulary.encode(PROMPT)])
    top = EdgeEffects(model, exact_norms=True).attribute(ids, (-1, lamp)).top(4)[0]
    for edge, each in zip(top, found["edges"], strict=True):
        place = edge.layer, edge.source, edge.target
        assert (each["layer"], each["source"], each["target"]) == place
        assert each["effect"] == pytest.approx(edge.effect, rel=1e-4) and not each["first_order"]
        lost = logits() - logits(Edges(*place))
        assert each["true"] == pytest.approx(float(lost[lamp]), rel=1e-4)
    only = answered("--layers", "0")["edges"]
    assert len(only) == 8 and {each["layer"] for each in only} == {0}
    *_, head, row = run("knockout", "recall-mamba", PROMPT, "--top", "1").splitlines()
    assert head.split() == ["layer", "from", "to", "estimated", "true"]
    first = found["edges"][0]
    assert row.split()[:5] == ["1", "lamp", "(3)", "the", "(13)"]
    shown = [float(number) for number in row.split()[5:]]
    assert shown == pytest.approx([first["effect"], first["true"]], rel=1e-3)


@pytest.mark.slow
def test_classifiers_of_sentences_and_of_images(
    bert: Path, vim: Path, tmp_path: Path, answered: Any, run: Any
) -> None:
    assert "What it loses" in run("knockout", bert, "good film", "--top", "2")
    files = [tmp_path / "one.png", tmp_path / "other.png"]
    for file in files:
        file.write_bytes(png(torch.rand(24, 24, 3)))
    loaded = load(Source(str(vim)))
    model, images = loaded.model, loaded.prepared(files)

    def told(*options: object) -> Any:
        return answered(*options, "--target", "1", of=(vim, files[0]))

    def number(edges: Edges, **options: Any) -> float:
        with torch.no_grad(), knock_out(model, edges, **options):
            return float(model(images[:1])[0, 1])

    chosen = ["--from", "row 2, column 1", "--to", "0:9"]
    named = told(*chosen)
    edges = Edges(sources=named["tokens"].index("row 2, column 1"), targets=slice(9))
    assert named["without"] == pytest.approx(number(edges), rel=1e-4)
    patched = told(*chosen, "--replace", files[1])
    assert patched["without"] == pytest.approx(number(edges, replace=images[1:]), rel=1e-4)
    edge = told("--top", "1")["edges"][0]
    lost = named["before"] - number(Edges(edge["layer"], edge["source"], edge["target"]))
    assert edge["true"] == pytest.approx(lost, rel=1e-2, abs=1e-5)
    assert "a cat" in run("knockout", vim, "a cat", code=1)  # which is no file


MISTAKES = {
    "--from anna": "--from anna: the text has it 2 times, at 0 and 11",
    "--to cat": "--to cat: the text has no such word",
    "--from 99": "position 99",
    "--heads 1": "--heads says what is cut",
    "--from lamp --heads 9999": "heads names 9999",
    "--from lamp --layers 9": "layers names 9",
    "--top 0": "--top 0",
    "--from kite --to lamp": "Exchange them",
}


@pytest.mark.parametrize(("options", "said"), MISTAKES.items())
def test_mistakes_are_named(options: str, said: str, run: Any) -> None:
    assert said in run("knockout", "recall-mamba", PROMPT, *options.split(), code=1)
