"""The papers' tables, by the commands that docs/howto/papers.md shows, on stand-ins of the data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("h5py")

from bench_helpers import papers_data
from helpers.documents import Command, commands
from transformers import AutoTokenizer, MambaForCausalLM

from captum_ssm import LatimFlow, MambaAttribution
from captum_ssm.metrics import (
    AlignmentScores,
    SegmentationScores,
    Texts,
    best_links,
    pixel_relevance,
    text_activation,
    text_pruning,
    words_of_tokens,
)
from captum_ssm.models import load_vim
from captum_ssm_bench import Cell, Line, Plan, lines, run
from captum_ssm_bench.cli import main
from captum_ssm_bench.data import load_arc, load_gold_alignment, load_imagenet_segmentation
from captum_ssm_bench.papers import PAPER_TABLES, Alignment, beside

PAGE = "docs/howto/papers.md"
COMMANDS = [each for each in commands(PAGE) if "--data" in each.arguments]
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("papers")
    papers_data.make(made)
    return made


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    yield


def data_of(command: Command) -> str:
    return command.arguments[command.arguments.index("--data") + 1]


def test_every_table_has_its_command() -> None:
    assert {data_of(command) for command in COMMANDS} == set(PAPER_TABLES)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_measure_the_tables(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = command.arguments.index("--out")
    arguments = [*command.arguments[:out], "--examples", "3", "--out", str(tmp_path)]
    if "imagenet" in data_of(command):  # many rows
        arguments[-3] = "1"
    assert main(arguments) == 0
    said = capsys.readouterr().out
    name = data_of(command)
    table = PAPER_TABLES[name]
    models = [each.partition("=")[0] for each in arguments[arguments.index("--models") + 1 : out]]
    for ending in (".md", ".csv", "-beside.md"):
        assert (tmp_path / f"{name}{ending}").stat().st_size
    whole = (tmp_path / f"{name}.md").read_text("utf-8")
    assert all(f"## {model}," in whole for model in models)
    compared = (tmp_path / f"{name}-beside.md").read_text("utf-8")
    assert compared.strip() in said
    if not table.published:
        assert table.sources in compared
    for side, figures in table.published.items():
        for figure in figures.values():
            row = f"| {side} |"
            assert any(row in line and f"| {figure} |" in line for line in compared.splitlines())


def measured(name: str, paths: list[str], model: str, *cells: Cell) -> dict[tuple[str, str], Line]:
    """The lines of some cells, by method and row."""
    table = PAPER_TABLES[name](paths, {"model": model})
    where = Path("measured") / name
    found = lines(table, run(Plan(table, cells, table.examples), where))
    return {(line.method, line.row): line for line in found}


def test_segmentation_is_what_the_parts_say() -> None:
    cell = Cell("MambaAttribution", "unified, published code")
    found = measured(
        "imagenet-segmentation", ["data/gtsegs_ijcv.mat"], "models/vim_small.pth", cell
    )
    model, wanted = load_vim("models/vim_small.pth"), SegmentationScores(ranking="together")
    for example in load_imagenet_segmentation("data/gtsegs_ijcv.mat"):
        pixels = F.interpolate(
            example.image[None] / 255, size=(224, 224), mode="bilinear", antialias=True
        )
        image = (pixels - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1)
        maps = MambaAttribution(model).attribute(
            image,
            int(model(image).argmax()),
            recipe="published_code",
            start_layer=10,  # of 17, as 15 of 24
            per_token=True,
        )
        gold = F.interpolate(example.labels[None, None].float(), size=(224, 224))[0].long()
        wanted.update(pixel_relevance(maps, (224, 224)), gold)
    entries = found["MambaAttribution", ""].entries
    assert [entries[name].value for name in ("pixel accuracy", "mIoU", "mAP", "mF1")] == (
        pytest.approx(list(wanted.compute()), abs=1e-6)
    )


def text_model() -> tuple[Any, Any]:
    model = MambaForCausalLM.from_pretrained("models/mamba").eval()
    return model, AutoTokenizer.from_pretrained("models/mamba")


def test_questions_are_what_the_parts_say() -> None:
    cell = Cell("LatimFlow", "frozen")
    found = measured("arc", ["data/ARC-Easy-Test.jsonl"], "models/mamba", cell)
    model, tokenizer = text_model()
    (question,) = load_arc("data/ARC-Easy-Test.jsonl")
    ids = torch.tensor([tokenizer.encode(question.prompt)])
    labels = [tokenizer.encode(f" {label}")[-1] for label in question.labels]
    relevance = LatimFlow(model).attribute(ids, target=(-1, labels[question.answer]), rule="frozen")
    texts = Texts(lambda given: model(given).logits[:, -1, labels], ids, tokenizer.unk_token_id)
    with torch.no_grad():
        wanted = [
            float(text_activation(texts, relevance, question.answer).area()),
            float(text_pruning(texts, relevance).area()),
        ]
    entries = found["LatimFlow", ""].entries
    assert [entries[name].value for name in ("AUAC", "AU-MSE")] == pytest.approx(wanted, abs=1e-6)


def test_alignment_is_what_the_parts_say() -> None:
    files = [f"data/alignment/{name}" for name in ("de", "en", "links.talp")]
    found = measured("alignment", files, "models/mamba", Cell("LatimFlow", "frozen"))
    model, tokenizer = text_model()
    scores = AlignmentScores()
    for pair in load_gold_alignment(*files):  # type: ignore[arg-type]
        source, target = (
            [tokenizer.encode(f" {word}")[0] for word in words]
            for words in (pair.source, pair.target)
        )
        ids = torch.tensor([[*source, *tokenizer.encode(" ="), *target]])
        asked = [(len(source) + i, token) for i, token in enumerate(target)]
        maps = LatimFlow(model).attribute_each(ids[:, :-1], asked, rule="frozen")[:, 0]
        linked = words_of_tokens(
            maps[None, :, : len(source)].detach(), range(len(target)), range(len(source))
        )
        sure, possible = (links[None] for links in pair.matrices())
        scores.update(best_links(linked), sure, possible)
    entry = found["LatimFlow", ""].entries["AER"]
    assert entry.value == pytest.approx(float(scores.compute().error_rate))


def test_beside_a_best_layer_stands_the_best_one() -> None:
    files = [f"data/alignment/{name}" for name in ("de", "en", "links.talp")]
    table = Alignment(files, {"m": "models/mamba"})
    results = run(Plan(table, [Cell("LatimNorm l2", "silu")], table.examples), Path("layers"))
    found = lines(table, results)
    best = min(line.entries["AER"].value for line in found if line.row.startswith("layer"))
    assert f"| m | LatimNorm l2, silu, best layer | AER | 0.35-0.52 | {best:.3f} " in beside(
        table, found
    )


def test_fewer_examples_are_drawn_by_the_seed() -> None:
    files = [f"data/alignment/{name}" for name in ("de", "en", "links.talp")]
    table = Alignment(files, {"m": "models/mamba"})
    (subject,) = table.subjects()
    orders = {
        tuple(table.example(subject, i, seed).source for i in range(table.examples))
        for seed in range(20)
    }
    assert len(orders) == 2 and table.examples == 2, "of two examples, either comes first"


BAD: dict[str, tuple[list[str], str]] = {
    "another name": (["--data", "imagenet21k", "x"], r"--data: 'imagenet21k' is not known.*arc"),
    "too few paths": (["--data", "alignment", "data/alignment/de"], "needs 3 paths"),
    "no model": (["--data", "arc", "data/ARC-Easy-Test.jsonl"], "--models NAME=PATH"),
    "a model without a path": (
        ["--data", "arc", "data/ARC-Easy-Test.jsonl", "--models", "mamba"],
        "--models mamba: with --data",
    ),
    "no weights": (
        ["--data", "arc", "data/ARC-Easy-Test.jsonl", "--models", "m=data"],
        "m=data: there are no weights",
    ),
    "no data": (["--data", "arc", "nothing", "--models", "m=models/mamba"], "nothing"),
    "an experiment, too": (
        ["copying", "--data", "arc", "x", "--models", "m=models/mamba"],
        "leave out copying",
    ),
    "no translation": (
        ["--data", "arc", "x", "--models", "m=models/mamba", "--between", "="],
        "--between is for --data alignment",
    ),
    "nothing between": (["copying", "--between", "="], "--between is for --data alignment"),
}


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    for name, (arguments, message) in BAD.items():
        assert main(["evaluate", *arguments]) != 0
        assert re.search(message, capsys.readouterr().err), name
