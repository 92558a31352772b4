"""Motifs in DNA: drawn as told, learned, and found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_ssm import variant_effects
from captum_ssm.edges import mutagenesis
from captum_ssm.errors import OptionError
from captum_ssm.models import OneHot
from captum_ssm.models.folders import load_folder
from captum_ssm_bench import Cell, load_bundled
from captum_ssm_bench.bundled import weights_of
from captum_ssm_bench.experiments.motifs import TRUTH, Motifs, position_scores
from captum_ssm_bench.tasks import MotifTask
from captum_ssm_bench.tasks.motifs import BASES, reverse_complement
from captum_ssm_bench.training.dna_recipes import DNA_RECIPES, DNAModelSize
from captum_ssm_bench.training.loop import train_model

#: The least accuracy on fresh sequences, a little below what the cards tell.
LEAST = {"motifs-caduceus": 0.98, "motifs-hyenadna": 0.94}


def letters(ids: Tensor) -> str:
    return "".join(BASES[i - 7] for i in ids.tolist())


# --- the sequences --------------------------------------------------------------------------


@pytest.mark.parametrize("label", range(4))
def test_motifs_lie_where_gold_says_and_nowhere_else(label: int) -> None:
    task = MotifTask()
    batch = task.draw(40, seed=label, label=label)
    assert batch.labels.tolist() == [label] * 40
    for ids, gold in zip(batch.ids, batch.gold, strict=True):
        places = gold.nonzero().flatten().tolist()
        held = [motif for bit, motif in enumerate(task.motifs) if label & (1 << bit)]
        found = []
        for start in range(task.length):
            for motif in task.motifs:
                part = letters(ids[start : start + len(motif)])
                if part in (motif, reverse_complement(motif)):
                    found.append(motif)
                    assert set(range(start, start + len(motif))) <= set(places)
        assert sorted(found) == sorted(held)
        assert len(places) == sum(map(len, held))


def test_both_strands_and_classes_are_drawn() -> None:
    task = MotifTask()
    batch = task.draw(400, seed=0)
    assert batch.labels.bincount().min() > 70
    texts = list(map(letters, batch.ids))
    for motif in task.motifs:
        for strand in (motif, reverse_complement(motif)):
            assert sum(strand in text for text in texts) > 60
    assert torch.equal(task.draw(400, seed=0).ids, batch.ids)
    assert torch.equal(batch.one_hot.argmax(1) + 7, batch.ids)
    assert batch.one_hot.shape == (400, 4, 64) and bool((batch.one_hot.sum(1) == 1).all())


def test_motifs_that_do_not_fit() -> None:
    for options in ({"motifs": ("ACGT",)}, {"length": 20}):
        with pytest.raises(OptionError, match="use two motifs that fill at most half"):
            MotifTask(**options)  # type: ignore[arg-type]


# --- the models -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DNA_RECIPES)
def test_training_saving_and_loading(name: str, tmp_path: Path) -> None:
    recipe = replace(DNA_RECIPES[name], steps=(3,), batch_size=4)
    model = train_model(recipe, log=lambda line: None)
    recipe.save(model, tmp_path)
    loaded, classes = load_folder(tmp_path)
    assert classes == MotifTask.classes
    ids = MotifTask().draw(2, seed=1).ids
    assert torch.equal(loaded(ids), model(ids))


@pytest.mark.parametrize("name", DNA_RECIPES)
def test_the_shipped_models_do_what_their_cards_say(name: str) -> None:
    model, classes = load_bundled(name)
    recipe, card = DNA_RECIPES[name], (weights_of(name).parent / "README.md").read_text("utf-8")
    assert recipe.accuracy(model, 256) >= LEAST[name]
    assert classes == MotifTask.classes
    words = " ".join(card.split())
    count = f"{sum(p.numel() for p in model.parameters()):,}".replace(",", " ")
    assert words.startswith(f"# {name} ") and f"{count} parameters" in words
    assert f"{recipe.size.layers} layers, width {recipe.size.hidden}" in words
    assert f"{recipe.steps[0]} steps" in words and " and ".join(MotifTask().motifs) in words


def test_an_architecture_that_is_not_known() -> None:
    with pytest.raises(OptionError, match="Use 'caduceus' or 'hyenadna'"):
        DNAModelSize("lstm")  # type: ignore[arg-type]


# --- the experiment -------------------------------------------------------------------------


class Known(nn.Module):
    """Counts some bases, each with a weight of its own; what it is asked for is read last."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(torch.eye(16))
        self.weight = nn.Parameter(weight)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        found = (inputs_embeds[..., 7:11] * self.weight).sum((1, 2))
        return found[:, None] * torch.arange(4)


def test_the_numbers_of_a_model_that_counts_the_motifs() -> None:
    experiment = Motifs()
    (subject, *_) = experiment.subjects()
    example = experiment.example(subject, 0, 0)
    again = experiment.example(subject, 0, 0)
    assert torch.equal(example.ids, again.ids) and example.labels.tolist() == [3]
    weight = (example.one_hot[0] * (1 + torch.rand(4, 64)) * example.gold).T.contiguous()
    model = Known(weight)
    for cell in (Cell("Gradient"), Cell("IntegratedGradients"), Cell(TRUTH)):
        with experiment.together():
            numbers = experiment.measure(model, example, cell)[""]
        assert numbers == pytest.approx(
            {"ap": 1.0, "pointing": 1.0, "positions": 1.0, "variants": 1.0}, abs=1e-3
        )
    ablated = experiment.measure(model, example, Cell("FeatureAblation"))[""]
    assert ablated["ap"] == 1.0 and ablated["positions"] == pytest.approx(1, abs=1e-3)
    assert ablated["variants"] != ablated["variants"]
    hidden = Known((torch.rand(64, 4) - 0.5) * ~example.gold[0, :, None])
    assert experiment.measure(hidden, example, Cell(TRUTH))[""]["ap"] < 0.5


def test_the_truth_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return mutagenesis(*args)

    monkeypatch.setattr("captum_ssm_bench.experiments.motifs.mutagenesis", counted)
    experiment = Motifs()
    example, model = experiment.example(experiment.subjects()[0], 0, 0), Known(torch.rand(64, 4))
    with experiment.together():
        for method in ("Gradient", TRUTH):
            experiment.measure(model, example, Cell(method))
    assert len(calls) == 1
    experiment.measure(model, example, Cell("Gradient"))
    assert len(calls) == 2


def test_rules_on_a_shipped_model() -> None:
    model, _ = load_bundled("motifs-caduceus")
    x = MotifTask().draw(2, seed=5, label=3).one_hot
    reader = OneHot(model)
    effects = {rule: variant_effects(reader, x, 3, rule=rule) for rule in ("frozen", "centred")}
    experiment = Motifs()
    for rule, found in effects.items():
        example = MotifTask().draw(2, seed=5, label=3)
        one = replace(
            example, ids=example.ids[:1], labels=example.labels[:1], gold=example.gold[:1]
        )
        numbers = experiment.measure(model, one, Cell("LatimFlow", rule))[""]
        best = int(position_scores(found)[0].argmax())
        assert numbers["pointing"] == float(example.gold[0, best])
