"""An answer that ends inside a character is explained by token, with a warning."""

from __future__ import annotations

import pytest
from zoo.language import byte_tokenizer

from captum_ssm.attr.text.codec import Codec
from captum_ssm.attr.text.spans import read_spans


@pytest.mark.parametrize("spans", ["word", "sentence", "paragraph"])
def test_words_fall_back_to_tokens(spans: str) -> None:
    codec = Codec(byte_tokenizer())
    ids = codec.encode("the é", special=False)[:-1]
    assert codec.text_of(ids).endswith("\N{REPLACEMENT CHARACTER}")
    with pytest.warns(UserWarning, match="inside a character"):
        found = read_spans("spans", spans, ids, codec)
    assert found == [range(i, i + 1) for i in range(len(ids))]


def test_whole_texts_do_not() -> None:
    codec = Codec(byte_tokenizer())
    ids = codec.encode("the é é", special=False)
    assert len(read_spans("spans", "word", ids, codec)) == 3
