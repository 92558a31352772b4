"""captum-ssm knockout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_ssm import EdgeEffects, Edges, knock_out
from captum_ssm.explain.knockout import Cut, cut_edges
from captum_ssm.explain.loading import Source, load
from captum_ssm.models import load_bundled
from captum_ssm.viz.html.pictures import png

PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"
WORDS, OTHER = PROMPT.split(), PROMPT.replace("lamp", "drum")


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


def ids_of(text: str = PROMPT) -> Tensor:
    return torch.tensor([load_bundled()[1].encode(text)])


def cut(edges: Edges, target: str, **options: Any) -> Cut:
    """What the package finds of bundled recall-mamba, after the prompt."""
    model, vocabulary = load_bundled()
    place, label = (-1, vocabulary.id_of(target)), lambda index, output: vocabulary.vocab[index]
    return cut_edges(EdgeEffects(model), ids_of(), place, edges, label, **options)


def test_the_prediction_with_and_without_an_edge(answered: Any, run: Any) -> None:
    asked = ["--layers", "1", "--from", "lamp", "--to", "-1"]
    found, wanted, vocabulary = answered(*asked), cut(Edges(1, 3, -1), "lamp"), load_bundled()[1]
    assert found["explained"] == "the logit of “lamp”, predicted after token 13"
    assert found["tokens"] == WORDS and found["true"] == pytest.approx(wanted.true, rel=1e-5)
    before, without = logits(), logits(Edges(1, 3, -1))
    likeliest = {vocabulary.vocab[int(k)] for x in (before, without) for k in x.topk(3).indices}
    assert {answer["label"] for answer in found["answers"]} == likeliest
    for name, x in (("before", before), ("without", without)):
        assert found[name] == pytest.approx(float(x[vocabulary.id_of("lamp")]), rel=1e-5)
        for answer in found["answers"]:
            chance = float(x.softmax(-1)[vocabulary.id_of(answer["label"])])
            assert answer[name] == pytest.approx(chance, abs=1e-6)
    printed = run("knockout", "recall-mamba", PROMPT, *asked, "--target", "kite")
    first, head, row, *_, last = printed.splitlines()
    assert first == "Explained: the logit of “kite”, predicted after token 13."
    assert head.split() == ["probability", "of", "before", "after"]
    wanted = cut(Edges(1, 3, -1), "kite")
    said = [float(number) for number in row.removeprefix("  kite").split()]
    kite = wanted.answers[0]
    assert said == pytest.approx([kite.before, kite.without], abs=1e-4)
    assert (
        last.startswith(f"The logit changes by {-wanted.true:+.3g}"[:-1])
        and "the estimate was" in last
    )


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
        (["--from", "lamp", "--replace", OTHER], Edges(None, 3), ids_of(OTHER)),
    ],
)
def test_options_are_those_of_edges(
    options: list[str], edges: Edges, replace: Any, answered: Any
) -> None:
    found = answered(*options, "--target", "lamp")
    wanted = cut(edges, "lamp", replace=replace)
    for name in ("before", "without", "estimated"):
        number = getattr(wanted, name)
        assert found[name] == (number and pytest.approx(number, rel=1e-4))
    best = max(found["answers"], key=lambda answer: answer["without"])["label"]
    assert best == max(wanted.answers, key=lambda answer: answer.without).label


@pytest.mark.slow
def test_the_strongest_edges_each_cut_by_itself(
    answered: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, effects = answered("--top", "4")["edges"], EdgeEffects(load_bundled()[0])
    target = (-1, load_bundled()[1].id_of("lamp"))
    top = effects.attribute(ids_of(), target).top(4)[0]
    for edge, each in zip(top, found, strict=True):
        place = edge.layer, edge.source, edge.target
        assert (each["layer"], each["source"], each["target"]) == place
        numbers = pytest.approx([edge.effect, cut(Edges(*place), "lamp").true], rel=1e-4)
        assert [each["effect"], each["true"]] == numbers and not each["first_order"]
    only = answered("--layers", "0")["edges"]
    assert len(only) == 8 and {each["layer"] for each in only} == {0}
    *_, head, row = run("knockout", "recall-mamba", PROMPT, "--top", "1").splitlines()
    assert head.split() == ["layer", "from", "to", "estimated", "measured"]
    assert row.split()[:5] == ["1", "lamp", "(3)", "the", "(13)"]
    shown = [float(number) for number in row.split()[5:]]
    assert shown == pytest.approx([found[0]["effect"], found[0]["true"]], rel=1e-3)
    monkeypatch.setattr("captum_ssm.edges.EdgeEffects", partial(EdgeEffects, exact_norms=False))
    assert run("knockout", "recall-mamba", PROMPT, "--top", "1").count("≈") == 2  # with a note


@pytest.mark.slow
def test_classifiers_of_sentences_and_of_images(
    bert: Path, vim: Path, tmp_path: Path, answered: Any, run: Any
) -> None:
    assert "The output falls" in run("knockout", bert, "good film", "--top", "2")
    files = [tmp_path / "one.png", tmp_path / "other.png"]
    for file in files:
        file.write_bytes(png(torch.rand(24, 24, 3)))
    loaded = load(Source(str(vim)))
    model, images = loaded.model, loaded.read_images(files)

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
    "--from anna": "--from anna: the word occurs 2 times, at 0 and 11",
    "--to cat": "--to cat: the text does not contain",
    "--from 99": "position 99",
    "--heads 1": "--heads selects parts of the messages",
    "--from lamp --heads 9999": "heads contains 9999",
    "--from lamp --layers 9": "layers contains 9",
    "--top 0": "--top 0",
    "--from kite --to lamp": "Exchange sources and targets",
    "--from lamp --replace anna": "--replace 'anna' has 1 tokens (anna), but the text has 14",
}


@pytest.mark.parametrize(("options", "said"), MISTAKES.items())
def test_mistakes_are_named(options: str, said: str, run: Any) -> None:
    assert said in run("knockout", "recall-mamba", PROMPT, *options.split(), code=1)
