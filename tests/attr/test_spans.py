"""Which characters a token stands for: of real tokenizers, the same as fast ones tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import TextTemplateInput
from tokenizers import Tokenizer
from transformers import ByT5Tokenizer
from zoo import language

from captum_ssm import LatimFlow, SSMLLMAttribution
from captum_ssm.attr.text.codec import Codec, Span, find_spans
from captum_ssm.attr.text.prompt import read_prompt
from captum_ssm.errors import InputError
from captum_ssm.models import WordVocabulary, load_bundled


class Slow:
    """A tokenizer of transformers that keeps the characters of its tokens to itself."""

    def __init__(self, fast: Any) -> None:
        self.encode, self.decode = fast.encode, fast.decode
        self.all_special_ids, self.unk_token_id = fast.all_special_ids, fast.unk_token_id


def inside(text: str, spans: list[Span]) -> list[str]:
    return [text[first:last].strip() for first, last in spans]


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (language.word_tokenizer, "anna owns the  $5 lamp .\nbob"),
        (language.piece_tokenizer, "abba b$b ab"),
        (language.byte_tokenizer, "a \N{EURO SIGN}b \N{ROCKET}\N{ROCKET} c"),
    ],
)
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
    """A slow tokenizer of transformers, which reads parts of characters as nothing."""
    text = "a \N{EURO SIGN}b\N{ROCKET}"
    ids, found = Codec(ByT5Tokenizer()).encode_with_spans(text)
    wanted = [(0, 1), (1, 2), *[(2, 3)] * 3, (3, 4), *[(4, 5)] * 4, (5, 5)]  # and </s>
    assert found == wanted
    shares = read_prompt(
        TextTemplateInput("a {}{}", ["\N{EURO SIGN}b", "\N{ROCKET}"]), Codec(ByT5Tokenizer())
    ).features(torch.eye(len(ids)))
    assert shares[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert shares[:, 1].tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0]


def test_pieces_that_read_otherwise_by_themselves() -> None:
    words = ["[CLS]", "play", "##ing", "the", "##n"]

    def read(ids: Any) -> str:
        return " ".join(words[i] for i in ids).replace(" ##", "")

    spans = find_spans("Playing  then", [0, 1, 2, 3, 4], read, {0})
    assert spans == [(0, 0), (0, 4), (4, 7), (9, 12), (12, 13)]


def test_a_text_that_is_tidied_when_more_is_read() -> None:
    """Decoding takes away the space before a stop, so that the text before changes."""
    words = ["", "go ", "."]

    def read(ids: Any) -> str:
        return "".join(words[i] for i in ids).replace(" .", ".")

    assert find_spans("go.", [1, 2], read, set()) == [(0, 2), (2, 3)]


def test_nothing_is_read_across_a_mark() -> None:
    words = ["[SEP]", "play", "##ing"]

    def read(ids: Any) -> str:
        return " ".join(words[i] for i in ids).replace(" ##", "")

    assert find_spans("play ##ing", [1, 0, 2], read, {0}) == [(0, 4), (4, 4), (5, 10)]


def test_spaces_that_the_text_does_not_have() -> None:
    """Some tokenizers begin with one, and drop those at the end."""
    words = [" ", "go", "on"]
    spans = find_spans("go on ", [0, 1, 2], lambda ids: "".join(words[i] for i in ids), set())
    assert spans == [(0, 0), (0, 2), (3, 5)]


@pytest.mark.parametrize(
    ("text", "ids", "message"),
    [
        ("a lamp", [1, 1], "reads 'a' where the text is 'lamp'"),
        ("a lamp a", [1, 2], "Its 2 tokens end before ' a'"),
        ("a zebra", [1, 3], "reads '<unk>' where the text is 'zebra'"),
        ("a", [1, 2], "reads 'lamp' where the text is ''"),
    ],
)
def test_tokens_that_do_not_read_as_the_text(text: str, ids: list[int], message: str) -> None:
    vocabulary = WordVocabulary(["<pad>", "a", "lamp", "<unk>"])
    with pytest.raises(InputError, match=message):
        find_spans(text, ids, vocabulary.decode, set())


def test_templates_of_a_bundled_model() -> None:
    model, vocabulary = load_bundled()
    explain = SSMLLMAttribution(LatimFlow(model), vocabulary)
    whole = explain.attribute("anna owns the red lamp . ? anna owns the", "lamp")
    template = TextTemplateInput("{who} owns {what} . ? {who} owns the",
                                 values={"who": "anna", "what": "the red lamp"})  # fmt: skip
    found = explain.attribute(template, "lamp")
    columns = [whole.token_attr[:, places].sum(1) for places in ([0, 7], [2, 3, 4])]
    torch.testing.assert_close(found.token_attr, torch.stack(columns, 1), rtol=1e-5, atol=1e-6)
