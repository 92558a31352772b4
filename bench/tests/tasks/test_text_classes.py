"""How classifiers read texts: the mark, padding, and where the classes are told."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from captum_ssm.errors import InputError
from captum_ssm.models import CLASS_WORDS, CLS, TextReader, class_vocabulary

TEXTS = [("good", "film"), ("a", "bad", "bad", "film", "!"), ("good",)]


def readers() -> tuple[TextReader, TextReader]:
    words = class_vocabulary(TEXTS)
    return TextReader(words, encoder=False), TextReader(words, encoder=True)


def test_the_vocabulary_keeps_what_occurs_often_enough() -> None:
    every = class_vocabulary(TEXTS)
    assert every.vocab == ["<pad>", "<unk>", CLS, *CLASS_WORDS, "!", "a", "bad", "film", "good"]
    assert class_vocabulary(TEXTS, 2).vocab[5:] == ["bad", "film", "good"]
    assert class_vocabulary(TEXTS, 3).vocab[5:] == []


def test_the_mark_is_last_or_first() -> None:
    language, encoder = readers()
    id_of = language.vocabulary.id_of
    for reader in (language, encoder):
        ids = reader.ids([*TEXTS, ()])
        assert ids.shape == (4, 6)
        for row, words in zip(ids.tolist(), [*TEXTS, ()], strict=True):
            known = [id_of(word) for word in words]
            read = [id_of(CLS), *known] if reader.encoder else [*known, id_of(CLS)]
            assert row == read + [0] * (6 - len(read))
        lengths = [0] * 4 if reader.encoder else [2, 5, 1, 0]
        assert reader.mark(ids).tolist() == lengths
        assert reader.words(ids).sum(-1).tolist() == [2, 5, 1, 0]
    assert encoder.classes == (0, 1)
    assert language.classes == tuple(map(id_of, CLASS_WORDS))


def test_long_texts_are_cut_and_new_words_unknown() -> None:
    for encoder in (False, True):
        reader = TextReader(class_vocabulary(TEXTS), encoder, longest=3)
        ids = reader.ids([("film", "noir", "good", "good", "good")])
        unknown = reader.vocabulary.id_of("<unk>")
        assert ids.shape == (1, 4) and int((ids == reader.mark_id).sum()) == 1
        assert int((ids == unknown).sum()) == 1 and "noir" not in reader.vocabulary


@pytest.mark.parametrize("encoder", [False, True])
def test_the_classes_are_read_at_the_mark(encoder: bool) -> None:
    reader = TextReader(class_vocabulary(TEXTS), encoder)
    ids = reader.ids(random.sample(TEXTS, 3))
    table = torch.randn(len(reader.vocabulary), 2 if encoder else len(reader.vocabulary))

    def model(**given: Any) -> Any:
        assert torch.equal(given["input_ids"], ids)
        if encoder:
            mask = given["attention_mask"]
            assert torch.equal(mask.bool(), ids != 0)
            return SimpleNamespace(logits=(table[ids] * mask[..., None]).sum(1))
        assert not given["use_cache"]
        return SimpleNamespace(logits=table[ids].cumsum(1))

    found = reader.logits(model, ids)
    for row, told in zip(ids, found, strict=True):
        sums = table[row[row != 0]].sum(0)
        torch.testing.assert_close(told, sums[list(reader.classes)])


def test_no_text_is_an_error() -> None:
    with pytest.raises(InputError, match="texts is empty"):
        readers()[0].ids([])
