"""Which characters a token stands for, and what each token adds to the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import TextTemplateInput
from tokenizers import Tokenizer
from transformers import ByT5Tokenizer
from zoo.language import byte_tokenizer, piece_tokenizer, word_piece_tokenizer, word_tokenizer

from captum_ssm import ImplicitAttention, SSMLLMAttribution
from captum_ssm.attr.text.codec import Codec, Span, find_spans
from captum_ssm.attr.text.prompt import read_prompt
from captum_ssm.attr.text.spans import read_spans, split_pieces
from captum_ssm.errors import InputError
from captum_ssm.models import WordVocabulary, load_bundled


class Slow:
    def __init__(self, fast: Any) -> None:
        self.encode, self.decode = fast.encode, fast.decode
        self.all_special_ids, self.unk_token_id = fast.all_special_ids, fast.unk_token_id


def inside(text: str, spans: list[Span]) -> list[str]:
    return [text[first:last].strip() for first, last in spans]


@pytest.mark.parametrize(("tokenizer", "text"), [
    (word_tokenizer, "anna owns the  $5 lamp .\nbob"),
    (word_piece_tokenizer, "going  home ."),
    (piece_tokenizer, "abba b$b ab"),
    (byte_tokenizer, "a \N{EURO SIGN}b \N{ROCKET}\N{ROCKET} c"),
])  # fmt: skip
def test_slow_tokenizers_find_what_fast_ones_tell(tokenizer: Any, text: str) -> None:
    fast = tokenizer()
    ids, told = Codec(fast).encode_with_spans(text)
    slow_ids, found = Codec(Slow(fast)).encode_with_spans(text)
    assert torch.equal(ids, slow_ids)
    assert inside(text, found) == inside(text, told)
    raw = Tokenizer.from_str(fast.backend_tokenizer.to_str())
    raw_ids, offsets = Codec(raw).encode_with_spans(text)
    assert torch.equal(ids, raw_ids)
    assert [tuple(span) for span in offsets] == [tuple(span) for span in told]


def test_bytes_of_one_character_share_it() -> None:
    text = "a \N{EURO SIGN}b\N{ROCKET}"
    ids, found = Codec(ByT5Tokenizer()).encode_with_spans(text)
    wanted = [(0, 1), (1, 2), *[(2, 3)] * 3, (3, 4), *[(4, 5)] * 4, (5, 5)]  # and </s>
    assert found == wanted
    shares = read_prompt(
        TextTemplateInput("a {}{}", ["\N{EURO SIGN}b", "\N{ROCKET}"]), Codec(ByT5Tokenizer())
    ).features(torch.eye(len(ids)))
    assert shares[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert shares[:, 1].tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0]


def pieces(*words: str) -> Any:
    return lambda ids: " ".join(words[i] for i in ids).replace(" ##", "")


@pytest.mark.parametrize(("text", "ids", "message"), [
    ("a lamp", [1, 1], "is 'a', but the text has 'lamp'"),
    ("a lamp a", [1, 2], "The 2 tokens end before ' a'"),
    ("a zebra", [1, 3], "is '<unk>', but the text has 'zebra'"),
    ("a", [1, 2], "is 'lamp', but the text has ''"),
])  # fmt: skip
def test_tokens_that_do_not_read_as_the_text(text: str, ids: list[int], message: str) -> None:
    vocabulary = WordVocabulary(["<pad>", "a", "lamp", "<unk>"])
    with pytest.raises(InputError, match=message):
        find_spans(text, ids, vocabulary.decode, set())


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


def test_bytes_that_are_no_text() -> None:
    codec = Codec(byte_tokenizer())
    assert codec.pieces(codec.encode("a好", special=False)[:-1]) == ["a", None, None]
    assert codec.pieces(codec.encode("好a好", special=False)[1:]) is None


def test_sentences_of_pieces() -> None:
    pieces = [None, "He", "llo.", " Go", "od.", "\n", "Bye", "。", "", "", "再", ""]
    found = split_pieces(pieces, "sentence")
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


@pytest.mark.parametrize("spans", ["word", "sentence", "paragraph"])
def test_words_fall_back_to_tokens(spans: str) -> None:
    codec = Codec(byte_tokenizer())
    assert len(read_spans("spans", spans, codec.encode("the é", special=False), codec)) < 3
    ids = codec.encode("the é", special=False)[:-1]
    assert codec.text_of(ids).endswith("\N{REPLACEMENT CHARACTER}")
    with pytest.warns(UserWarning, match="inside a character"):
        found = read_spans("spans", spans, ids, codec)
    assert found == [range(i, i + 1) for i in range(len(ids))]
