"""The experiment on rated texts: its gold, its numbers by hand, which cells say something."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_helpers.valence_texts import BAD, GOOD, needs_real_texts, rated_texts, write_folder
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

pytest.importorskip("transformers")

from captum_ssm import ImplicitAttentionRollout, LatimALTI, LatimFlow, LatimLogit, MambaAttribution
from captum_ssm.models import class_vocabulary
from captum_ssm_bench import EXPERIMENTS, Cell, load_bundled
from captum_ssm_bench.data import RatedText, load_lexicon, load_valence
from captum_ssm_bench.data.valence import VARIABLE
from captum_ssm_bench.experiments.class_words import (
    RANDOM,
    WORD_WEIGHTS,
    RatedExample,
    TextClasses,
    components_of,
    example_of,
    says_more,
    text_scores,
)
from captum_ssm_bench.experiments.token_maps import STEPS, choice_maps, token_maps
from captum_ssm_bench.experiments.word_weights import TRUST, WordWeights
from captum_ssm_bench.training.text_recipes import TEXT_RECIPES

NAMES = tuple(TEXT_RECIPES)
TEXT = RatedText("movies/1", "A dull, tedious film; good actors cannot save its awful plot.", -2.0)
LEXICON = {"dull": -1.7, "tedious": -1.0, "awful": -2.0, "good": 1.9, "plot": 0.0}


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> tuple[Any, RatedExample]:
    """A shipped model and a text as it reads it."""
    model, vocabulary = load_bundled(request.param)
    reader = TEXT_RECIPES[request.param].reader(vocabulary)
    return model, example_of(TEXT, "0/0", reader, LEXICON)


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path, rated_texts(60, random.Random(random.random())))
    monkeypatch.setenv(VARIABLE, str(folder))


def test_the_gold_of_a_text(case: tuple[Any, RatedExample]) -> None:
    _, example = case
    reader = example.reader
    tokens = reader.vocabulary.tokens(example.ids[0].tolist())
    place = 0 if reader.encoder else len(tokens) - 1
    assert tokens[place] == "<cls>" and int((~example.words).sum()) == 1
    assert not example.words[0, place]
    named = [tokens[i] for i in example.reasons[0].nonzero()[:, 0].tolist()]
    assert named == ["dull", "tedious", "awful"]
    position, index = example.target
    assert position == place
    assert index == (0 if reader.encoder else reader.vocabulary.id_of("<negative>"))


def test_the_gold_of_the_other_class(case: tuple[Any, RatedExample]) -> None:
    reader = case[1].reader
    other = example_of(RatedText("movies/2", TEXT.text, 2.0), "0/1", reader, LEXICON)
    tokens = reader.vocabulary.tokens(other.ids[0].tolist())
    assert [tokens[i] for i in other.reasons[0].nonzero()[:, 0].tolist()] == ["good"]
    assert other.target[1] == reader.classes[1] and other.target[0] == case[1].target[0]


def numbers_by_hand(model: Any, example: RatedExample, relevance: Tensor) -> dict[str, float]:
    """One changed text after the other."""
    reader, label = example.reader, example.text.label
    unknown = reader.vocabulary.id_of("<unk>")
    places = example.words[0].nonzero()[:, 0].tolist()
    falling = sorted(places, key=lambda place: -float(relevance[place]))

    @torch.no_grad()
    def logits(hidden: list[int]) -> Tensor:
        ids = example.ids.clone()
        ids[0, hidden] = unknown
        return reader.logits(model, ids)[0].double()

    def area(values: list[float]) -> float:
        return float(np.trapezoid(values, dx=1 / (len(values) - 1)))

    shares = [math.floor(step * len(places) / 10) for step in range(11)]
    revealed = [logits(falling[count:]).softmax(-1)[label].item() for count in shares]
    whole = logits([])
    lost = [(logits(falling[::-1][:count]) - whole).square().mean().item() for count in shares]
    fifth = math.floor(0.2 * len(places) + 1e-9)
    gold = example.reasons[0, places].numpy(), relevance[places].numpy()
    return {
        "auac": area(revealed),
        "au_mse": area(lost),
        "hidden": float(logits(falling[:fifth]).argmax() == label),
        "auc": roc_auc_score(*gold),
        "ap": average_precision_score(*gold),
    }


def test_the_numbers_of_maps(case: tuple[Any, RatedExample]) -> None:
    model, example = case
    maps = {row: torch.randn(example.ids.shape[1]) for row in ("layer 0", "mean")}
    found = text_scores(model, example, maps)
    assert list(found) == list(maps)
    for row, relevance in maps.items():
        by_hand = numbers_by_hand(model, example, relevance)
        assert found[row] == pytest.approx(by_hand, rel=1e-4, abs=1e-6)


def test_a_perfect_map_and_its_opposite(case: tuple[Any, RatedExample]) -> None:
    model, example = case
    gold = example.reasons[0].float()
    found = text_scores(model, example, {"right": gold, "wrong": -gold})
    assert found["right"]["auc"] == found["right"]["ap"] == 1
    assert found["wrong"]["auc"] == 0
    nothing = example_of(TEXT, "0/0", example.reader, {})
    none = text_scores(model, nothing, {"": gold})[""]
    assert math.isnan(none["auc"]) and math.isnan(none["ap"]) and math.isfinite(none["auac"])


def test_a_cell_of_the_experiment(case: tuple[Any, RatedExample]) -> None:
    model, example = case
    found = TextClasses().measure(model, example, Cell("LatimFlow", "frozen"))
    position, index = example.target
    target = index if example.reader.encoder else (position, index)
    relevance = LatimFlow(model).attribute(example.ids, target, rule="frozen")[0]
    assert found[""] == pytest.approx(numbers_by_hand(model, example, relevance), rel=1e-4)


# --- maps of a classifier whose targets are classes ----------------------------------------------


@pytest.fixture(scope="module")
def bert() -> tuple[Any, RatedExample]:
    model, vocabulary = load_bundled("valence-bert")
    reader = TEXT_RECIPES["valence-bert"].reader(vocabulary)
    return model, example_of(TEXT, "0/0", reader, LEXICON)


def test_maps_of_a_classifier_are_those_of_the_methods(bert: tuple[Any, RatedExample]) -> None:
    model, example = bert
    targets = [(0, 1), (0, 0)]
    maps = token_maps()
    for cell, method, options in (
        (Cell("LatimFlow", "frozen"), LatimFlow, {"rule": "frozen"}),
        (Cell("LatimLogit", "linearized"), LatimLogit, {}),
        (Cell("MambaAttribution", "unified"), MambaAttribution, {}),
    ):
        found = maps[cell](model, example.ids, targets)[""]
        asked = method(model)
        alone = torch.cat([asked.attribute(example.ids, target=t, **options) for _, t in targets])
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)
    for cell, method in (
        (Cell("ImplicitAttentionRollout", "unified"), ImplicitAttentionRollout),
        (Cell("LatimALTI rollout", "linearized"), LatimALTI),
    ):
        found = maps[cell](model, example.ids, targets)[""]
        alone = method(model).attribute(example.ids)
        torch.testing.assert_close(found, alone.expand(2, -1), rtol=1e-4, atol=1e-6)


def test_captums_maps_of_a_classifier(bert: tuple[Any, RatedExample]) -> None:
    model, example = bert
    embedded = model.get_input_embeddings()(example.ids).detach()

    def logits(x: Tensor) -> Tensor:
        found: Tensor = model(inputs_embeds=x).logits
        return found

    maps = token_maps()
    for method, options in (
        (Saliency, {}),
        (InputXGradient, {}),
        (IntegratedGradients, {"n_steps": STEPS}),
    ):
        found = maps[Cell(method.__name__)](model, example.ids, [(0, 1), (0, 0)])[""]
        for row, target in zip(found, (1, 0), strict=True):
            by_captum = method(logits).attribute(embedded, target=target, **options).sum(-1)[0]
            torch.testing.assert_close(row, by_captum.to(row), rtol=1e-4, atol=1e-6)
    lost = maps[Cell("FeatureAblation")](model, example.ids, [(0, 1)])[""][0]
    with torch.no_grad():
        for place in range(example.ids.shape[1]):
            without = embedded.clone()
            without[0, place] = 0
            expected = logits(embedded)[0, 1] - logits(without)[0, 1]
            torch.testing.assert_close(lost[place], expected, rtol=1e-4, atol=1e-6)


# --- cells ---------------------------------------------------------------------------------------


def test_which_formulations_say_more(case: tuple[Any, RatedExample]) -> None:
    model, example = case
    components = components_of(model, example.ids)
    told = {
        method: [cell.formulation for cell in token_maps() if cell.method == method]
        for method in ("ImplicitAttention", "LatimNorm l2")
    }
    found = {
        method: [each for each in variants if says_more(Cell(method, each), components)]
        for method, variants in told.items()
    }
    kind = type(model).__name__
    assert (
        found["ImplicitAttention"]
        == {
            "MambaForCausalLM": told["ImplicitAttention"],
            "RwkvForCausalLM": ["s6", "unified"],
            "BertForSequenceClassification": ["unified"],
        }[kind]
    )
    everything = told["LatimNorm l2"] if kind == "MambaForCausalLM" else ["linearized"]
    assert found["LatimNorm l2"] == everything
    for cell in (Cell("LatimFlow", "frozen"), Cell("Saliency"), RANDOM, WORD_WEIGHTS):
        assert says_more(cell, components)
    for cell in choice_maps():
        assert says_more(cell, components) == (kind != "BertForSequenceClassification")


def test_what_says_nothing_more_has_no_row(bert: tuple[Any, RatedExample]) -> None:
    assert TextClasses().measure(*bert, Cell("ImplicitAttention", "s6")) == {}


def test_examples_follow_from_seed_and_index(made_up: None) -> None:
    valence = TextClasses()
    subjects = valence.subjects()
    texts = [valence.example(subjects[0], index, 3).text for index in range(10)]
    assert len({text.name for text in texts}) == 10
    for subject in subjects:
        again = TextClasses().example(subject, 4, 3)
        assert again.text == texts[4] and again.name == "3/4"
        assert again.reader.encoder == (subject.name == "valence-bert")
        signs = GOOD if again.text.label else BAD
        reasons = again.reasons[again.words]
        assert reasons.tolist() == [word in signs for word in again.text.words]
    assert texts != [valence.example(subjects[0], index, 4).text for index in range(10)]
    assert {text.name for text in texts} <= {text.name for text in load_valence(sources=sources())}


def sources() -> tuple[str, ...]:
    return TEXT_RECIPES["valence-mamba"].task.sources


def test_baselines_need_no_model(made_up: None) -> None:
    valence = TextClasses()
    maps = {}
    for subject in valence.subjects():
        example = valence.example(subject, 0, 0)
        for cell in (RANDOM, WORD_WEIGHTS):
            found = valence._relevance(torch.nn.Identity(), example, cell)[""]
            assert float(found[~example.words[0]]) == 0
            words = found[example.words[0]]
            torch.testing.assert_close(maps.setdefault(cell, words), words)
    assert len(set(maps[RANDOM].tolist())) == len(maps[RANDOM])
    other = valence.example(valence.subjects()[0], 1, 0)
    assert valence._relevance(torch.nn.Identity(), other, RANDOM)[""][0] != maps[RANDOM][0]


def test_word_weights_are_those_of_a_regression(made_up: None) -> None:
    texts = load_valence(split="train", sources=sources())
    vocabulary = class_vocabulary([text.words for text in texts])
    found = WordWeights.of(texts, vocabulary).weights

    counts: Any = TfidfVectorizer(
        tokenizer=lambda x: x, preprocessor=lambda x: x, token_pattern=None
    )
    rows = counts.fit_transform([text.words for text in texts])
    fitted = LogisticRegression(C=TRUST, tol=1e-8, max_iter=1000)
    fitted.fit(rows, [text.label for text in texts])
    for word, place in counts.vocabulary_.items():
        expected = fitted.coef_[0, place] * counts.idf_[place]
        assert float(found[vocabulary.id_of(word)]) == pytest.approx(expected, abs=1e-3)
    assert min(found[vocabulary.id_of(w)] for w in GOOD) > 0
    assert max(found[vocabulary.id_of(w)] for w in BAD) < 0


def test_it_is_among_the_experiments(made_up: None) -> None:
    valence = EXPERIMENTS["valence"]
    assert isinstance(valence, TextClasses)
    assert {RANDOM, WORD_WEIGHTS, Cell("LatimFlow", "frozen")} <= set(valence.cells())
    assert [subject.name for subject in valence.subjects()] == list(NAMES)


@needs_real_texts
def test_every_cell_has_its_numbers() -> None:
    valence = TextClasses()
    for subject in valence.subjects():
        model = subject.load(torch.device("cpu"))
        example = valence.example(subject, 0, 0)
        assert example.text in load_valence(sources=sources())
        assert bool(example.reasons.any()) == any(
            load_lexicon().get(word, 0) * example.text.valence > 0 for word in example.text.words
        )
        with valence.together():
            for cell in valence.cells():
                for numbers in valence.measure(model, example, cell).values():
                    assert set(numbers) == {name for c in valence.columns for name in c.numbers}
                    assert all(
                        math.isfinite(numbers[name]) for name in ("auac", "au_mse", "hidden")
                    ), cell
