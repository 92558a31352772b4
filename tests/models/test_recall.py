"""The recall task: gold sources, determinism, padding and the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_ssm.errors import CaptumSSMError, InputError, OptionError
from captum_ssm.models import WordVocabulary
from captum_ssm.models.recall import (
    ADJECTIVES,
    FILLERS,
    NAMES,
    OBJECTS,
    accuracy,
    generate,
    parse_prompt,
    recall_vocabulary,
)


def test_gold_follows_from_the_words() -> None:
    for example in generate(300, seed=5):
        body, question = example.text.split(" ? ")
        asked = question.split()[0]
        assert question == f"{asked} owns the"
        sentences = [s for s in body.split(" . ") if re.search(rf"\b{asked}\b", s)]
        assert len(sentences) == 1, "the asked name must be in State exactly one"
        object_ = sentences[0].removesuffix(" .").split()[-1]
        assert example.answer == object_
        assert recall_vocabulary().decode([example.answer_id]) == object_
        assert example.words[example.value_position] == object_
        assert example.words[example.name_position] == asked
        assert example.words.index(asked) == example.name_position
        assert "." not in example.words[example.name_position : example.value_position]
        assert example.words[example.question_name_position] == asked
        assert example.question_name_position == len(example.words) - 3
        assert example.source_positions == (example.value_position, example.name_position)


def test_parse_gives_back_what_was_generated() -> None:
    for example in generate(200, seed=9):
        assert parse_prompt(example.text) == example


@pytest.mark.parametrize(("text", "message"), [
    ("anna owns the spoon . ? anna owns the", "unknown word 'spoon'"),
    ("anna owns the lamp .", "one question"),
    ("anna owns the lamp . ? bob owns the", "State exactly one"),
    ("anna owns the lamp . anna owns the kite . ? anna owns the", "State exactly one"),
    ("anna owns the lamp ? anna owns the", "add the missing '.'"),
    ("anna the lamp . ? anna owns the", "Write each fact as"),
    ("anna owns the red . ? anna owns the", "Write each fact as"),
])  # fmt: skip
def test_malformed_prompts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_prompt(text)


def test_vocabulary() -> None:
    vocabulary = recall_vocabulary()
    assert len(vocabulary) == 5 + len(NAMES) + len(OBJECTS) + len(ADJECTIVES) + len(FILLERS)
    text = "anna owns the lamp . ? anna owns the"
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert vocabulary.tokens(torch.tensor(ids)) == text.split()
    assert vocabulary.vocab[vocabulary.pad_id] == "<pad>"
    assert "lamp" in vocabulary
    assert "spoon" not in vocabulary
    with pytest.raises(ValueError, match="outside the vocabulary"):
        vocabulary.decode([-1])

    with pytest.raises(ValueError, match="'a' more than once"):
        WordVocabulary(["a", "a"])
    for word in ("", "a b", " a"):
        with pytest.raises(ValueError, match="whitespace"):
            WordVocabulary(["x", word])


# --- in batches ----------------------------------------------------------------------------------


class Echo(torch.nn.Module):
    """Says the word of the last fact, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.rows: list[int] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        self.rows.append(len(input_ids))
        assert bool(input_ids[:, -1].all())
        assert torch.equal(attention_mask, (input_ids > 0).long())
        return SimpleNamespace(
            logits=self.scale * torch.nn.functional.one_hot(input_ids[:, :-5], 55)
        )


def test_batches_change_nothing(seed: int) -> None:
    model, examples = Echo(), generate(7, seed)
    right = sum(example.answer_id == example.tokens[-6] for example in examples) / 7
    assert accuracy(model, examples, batch_size=7) == right
    assert accuracy(model, examples, batch_size=3) == right
    assert model.rows == [7, 3, 3, 1]


EXAMPLE = parse_prompt("anna owns the lamp . ? anna owns the")


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: accuracy(Echo(), []), InputError, "examples is empty.*at least one"),
    (lambda: accuracy(Echo(), [EXAMPLE], 0), OptionError, "batch_size=0: use 1 or more"),
    (lambda: generate(-1, 0), OptionError, "count=-1: use 0 or more"),
    (lambda: generate(1, 0, 21), OptionError, "n_facts=21: use 1 to 20"),
    (lambda: parse_prompt("lamp . ? anna owns the"), InputError, "text has the fact 'lamp .'"),
])  # fmt: skip
def test_bad_calls(call: Callable[[], object], error: type[CaptumSSMError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError)
