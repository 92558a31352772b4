"""What is explained, from what the user typed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from zoo.language import WORDS, word_tokenizer

from captum_ssm.attr.text.codec import Codec
from captum_ssm.errors import OptionError
from captum_ssm.explain.typed_target import read_target
from captum_ssm.viz.html.example import Subject


def subject(labels: list[str] | None = None, own: dict[int, str] | None = None) -> Subject:
    module: Any = nn.Identity()
    module.config = SimpleNamespace(id2label=own)
    return Subject(module, module, None, Codec(word_tokenizer()), labels)


def test_tokens_by_text_and_by_id() -> None:
    for text in ("lamp", "$5"):
        assert read_target(subject(), text, language=True) == (-1, WORDS.index(text))
    without = Subject(nn.Identity(), nn.Identity(), None, None, None)
    for given in (subject(), without):
        assert read_target(given, "id:3", language=True) == (-1, 3)
    with pytest.raises(OptionError, match="without a tokenizer"):
        read_target(without, "lamp", language=True)
    for text in ("anna owns", ""):
        with pytest.raises(OptionError, match=f"is {len(text.split())} tokens"):
            read_target(subject(), text, language=True)


def test_classes_by_name_and_number() -> None:
    own = {0: "cat", 1: "2"}
    assert read_target(subject(own=own), "cat", language=False) == 0
    assert read_target(subject(own=own), "2", language=False) == 1  # a name comes first
    assert read_target(subject(own=own), "id:2", language=False) == 2
    assert read_target(subject(["dog", "cat"], own), "cat", language=False) == 1
    assert read_target(subject(), "7", language=False) == 7
    with pytest.raises(OptionError, match=r"none of the classes \(cat, 2\)"):
        read_target(subject(own=own), "bird", language=False)
