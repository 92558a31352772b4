"""Hops from the last word of a chained answer back to its facts."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from captum_ssm import LatimFlow, SSMLLMAttribution
from captum_ssm_bench import EXPERIMENTS, Cell, load_bundled
from captum_ssm_bench.experiments.answers.hops import (
    CHANCE,
    by_hops,
    by_rank,
    facts_of,
    links_of,
    relevance_of,
)
from captum_ssm_bench.tasks import CHAINS

ANSWERS = EXPERIMENTS["answers"]


def test_facts_and_links_of_a_text(seed: int) -> None:
    for text in CHAINS.questions(random.Random(seed), 8):
        facts = [[text.words[at] for at in fact] for fact in facts_of(text)]
        assert len(facts) == 8 and all(fact[2] == "." for fact in facts)
        words = [text.words[text.answer - 1], *text.completion.split()]
        chain = [facts[link][:2] for link in links_of(text)]
        assert chain == [words[:2], words[1:3], words[2:]]


def test_hops_are_read_by_what_gains() -> None:
    relevance = torch.tensor([[1.0, 0.0, 5.0, 2.0], [4.0, 0.0, 5.0, 2.0], [4.0, 1.0, 4.9, 2.0]])
    found = by_hops(relevance, links=[1, 0, 2])
    assert found == {"last": 1, "link": 1, "root": 1, "order": 1, "chain": 0}
    found = by_hops(relevance, links=[3, 0, 2])
    assert found == {"last": 1, "link": 1, "root": 0, "order": 0, "chain": 1}


def test_without_hops_facts_are_read_by_rank() -> None:
    relevance = torch.tensor([1.0, 0.0, 5.0, 2.0])
    assert by_rank(relevance, [0, 3, 2])["order"] == 1
    found = by_rank(relevance, [3, 0, 2])
    assert found == {"last": 1, "link": 0, "root": 0, "order": 0, "chain": 1}


def test_relevance_is_that_of_the_method(seed: int) -> None:
    model, vocabulary = load_bundled("chains-mamba2")
    _, text = CHAINS.questions(random.Random(seed), 6)
    explain = SSMLLMAttribution(LatimFlow(model), vocabulary)
    words, hops = relevance_of(explain, text, "half")
    assert words.shape == (8, 6) and hops.shape == (3, 6)
    ids = torch.tensor([vocabulary.encode(" ".join(text.words[:-1]))])
    for word in (3, 7):
        position = text.context.stop + 1 + word
        target = (position, vocabulary.id_of(text.words[position + 1]))
        found = LatimFlow(model).attribute(ids, target, contrast="all", rule="half")[0]
        sums = torch.stack([found[fact.start : fact.stop].sum() for fact in facts_of(text)])
        torch.testing.assert_close(words[word].float(), sums, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(hops[0], words[-1])


@pytest.mark.parametrize("name", ["chains-mamba", "chains-mamba2"])
def test_hops_lead_from_the_last_word_to_the_root(name: str, seed: int) -> None:
    subject = next(each for each in ANSWERS.subjects() if each.name == name)
    model = subject.load(torch.device("cpu"))
    examples = [ANSWERS.example(subject, index, seed) for index in range(8)]
    right = dict.fromkeys(("half", "frozen"), 0.0)
    for rule in right:
        for example in examples:
            rows = ANSWERS.measure(model, example, Cell("LatimFlow", rule))
            assert len(rows) == 6
            assert rows["two questions, by hops"]["last"] == 1
            right[rule] += rows["one question, by hops"]["order"] / len(examples)
    assert right["half"] > 0.8, "each hop goes to the fact before"
    assert right["frozen"] < 0.5, "nothing goes on from tokens that ask"


def test_who_names_blindly(seed: int) -> None:
    example = ANSWERS.example(ANSWERS.subjects()[0], 1, seed)
    found = ANSWERS.measure(torch.nn.Identity(), example, CHANCE)["one question"]
    facts = len(facts_of(example.texts["one question"]))
    assert found["link"] == 1 / facts and found["chain"] == pytest.approx(6 * found["order"])
