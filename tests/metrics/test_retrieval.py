"""RULER's string matches, ranges of tokens, and AMPLIFY's prompts."""

from __future__ import annotations

import pytest
import torch

from captum_ssm.metrics import (
    Demonstration,
    amplify_prompt,
    answers_found,
    hardest_examples,
    key_words,
    misclassification_confidence,
    span_relevance,
)


def test_answers():
    said = ["The numbers are 12 and ABC.", "nothing", ""]
    wanted = [["12", "abc", "7"], ["Nothing"], ["x"]]
    assert answers_found(said, wanted).tolist() == pytest.approx([2 / 3, 1, 0])
    assert answers_found(said, wanted, "any").tolist() == [1, 1, 0]


def test_spans():
    relevance = torch.randn(2, 9)
    found = span_relevance(relevance, [(0, 3), (2, 9), (8, 9)])
    for b in range(2):
        row = relevance[b].tolist()
        expected = [sum(row[:3]) / 3, sum(row[2:]) / 7, row[8]]
        assert found[b].tolist() == pytest.approx(expected)


def test_confidence_by_loop():
    logits, labels = torch.randn(9, 4), torch.randint(4, (9,))
    found = misclassification_confidence(logits, labels)
    for row, label, confidence in zip(logits, labels.tolist(), found.tolist(), strict=True):
        chances = row.double().softmax(0).tolist()
        wrong = max(p for k, p in enumerate(chances) if k != label)
        assert confidence == pytest.approx(wrong - chances[label])
    hardest = hardest_examples(logits, labels.tolist(), 3).tolist()
    assert hardest == sorted(range(9), key=lambda i: -found[i].item())[:3]


def test_key_words():
    words = ["a", "fine", "film", "a", "fine", "end"]
    relevance = torch.tensor([0.1, 0.5, 0.9, 0.6, 0.7, 0.1])
    assert key_words(words, relevance, 3) == ("film", "fine", "a")
    assert key_words(words, relevance) == ("film", "fine", "a", "end")
    assert key_words(words, torch.zeros(6), 2) == ("a", "fine")


def test_prompt():
    shown = [
        Demonstration("Is it good?", ("fine", "film"), "yes"),
        Demonstration("And this?", ("dull",), "no"),
    ]
    assert amplify_prompt(shown, "What of that?") == (
        "Is it good?\nThe key words: fine, film are crucial clues for predicting yes as the "
        "correct answer.\nAnswer: yes\n\nAnd this?\nThe key words: dull are crucial clues for "
        "predicting no as the correct answer.\nAnswer: no\n\nWhat of that?\nAnswer:"
    )
