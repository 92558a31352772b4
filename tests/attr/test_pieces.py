"""What each token adds to the text: joined, they are the text, whatever the tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo.language import byte_tokenizer, piece_tokenizer, word_piece_tokenizer, word_tokenizer

from captum_ssm import ImplicitAttention, SSMLLMAttribution
from captum_ssm.attr.text.codec import Codec
from captum_ssm.attr.text.spans import stretches
from captum_ssm.models import WordVocabulary, load_bundled


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        (piece_tokenizer, "ab abb a$ aab", ["ab", " abb", " a", "$", " a", "ab"]),
        (byte_tokenizer, "é好 a\nb", ["é", "", "好", "", "", " ", "a", "\n", "b"]),
        (word_tokenizer, "anna owns the lamp .", [None, "anna", " owns", " the", " lamp", " ."]),
        (word_piece_tokenizer, "going home .", ["go", "ing", " home", " ."]),
        (lambda: WordVocabulary(["<pad>", "a", "lamp"]), "a lamp a", ["a", " lamp", " a"]),
    ],
    ids=["sentence-piece", "bytes", "words", "word-piece", "vocabulary"],
)
def test_pieces_are_the_text(tokenizer: Any, text: str, expected: list[str | None]) -> None:
    codec = Codec(tokenizer())
    ids = codec.encode(text, special=True)
    found = codec.pieces(ids)
    assert found == expected
    assert "".join(piece or "" for piece in found) == codec.text_of(ids)


def test_a_character_that_is_cut_off_is_no_text() -> None:
    codec = Codec(byte_tokenizer())
    ids = codec.encode("a好", special=False)[:-1]
    assert codec.pieces(ids) == ["a", None, None]


def test_bytes_that_are_no_text_have_no_pieces() -> None:
    codec = Codec(byte_tokenizer())
    ids = codec.encode("好a好", special=False)
    assert codec.pieces(ids[1:]) is None


def test_sentences_of_pieces() -> None:
    pieces = [None, "He", "llo.", " Go", "od.", "\n", "Bye", "。", "", "", "再", ""]
    found = stretches(pieces, "sentence")
    assert found == [range(0, 3), range(3, 6), range(6, 10), range(10, 12)]


def test_results_know_their_text() -> None:
    model, vocabulary = load_bundled()
    explain = SSMLLMAttribution(ImplicitAttention(model), vocabulary)
    found = explain.attribute("anna owns the", "lamp . ? anna", spans="sentence")
    assert found.input_pieces == ["anna", " owns", " the"]
    assert found.output_pieces == ["lamp .", " ?", " anna"]
    skipped = explain.attribute("anna owns the", torch.tensor([3]), skip_tokens=["owns"])
    assert skipped.input_pieces == ["anna", " the"]
    masked = explain.attribute(
        "anna owns the", "lamp", spans="all", prompt_spans=torch.tensor([0, 1, 0])
    )
    assert masked.input_pieces is None
