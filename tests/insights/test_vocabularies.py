"""Models of different vocabularies are not shown side by side."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from zoo.small import mamba_lm

from captum_ssm.errors import OptionError
from captum_ssm.insights import AttributionVisualizer, EmptyFeature
from captum_ssm.insights.vocabularies import check_sizes, check_tokenizers


def reader(size):
    return SimpleNamespace(config=SimpleNamespace(vocab_size=size))


def test_a_visualizer_of_models_of_different_vocabularies_is_refused():
    models = [mamba_lm(vocab_size=17), mamba_lm(vocab_size=17), mamba_lm(vocab_size=18)]
    for kept in (models[:1], models[:2], [models[0], lambda ids: ids]):
        AttributionVisualizer(kept, ["a"], EmptyFeature(), [])
    with pytest.raises(OptionError, match=r"\(models\[0\]\).* 17 .*\(models\[2\]\) one of 18"):
        AttributionVisualizer(models, ["a"], EmptyFeature(), [])


def test_large_embeddings_may_be_filled_up():
    for sizes in ((50280, 50304), (50280, 50257)):
        check_sizes([reader(size) for size in sizes])
    for sizes in ((50280, 50560), (60, 64)):
        with pytest.raises(OptionError, match="Show models of one tokenizer"):
            check_sizes([reader(size) for size in sizes])


def test_tokenizers_are_compared_word_by_word():
    words = ["a", "b", "c"]
    first, same, other = (SimpleNamespace(vocab=list(w)) for w in (words, words, "abd"))
    check_tokenizers(["a", "b"], [first, same])
    with pytest.raises(OptionError, match="one and two have different vocabularies: '"):
        check_tokenizers(["one", "two"], [first, other])
    listed = SimpleNamespace(get_vocab=lambda: {word: i for i, word in enumerate(words)})
    check_tokenizers(["a", "b"], [first, listed])
    with pytest.raises(OptionError, match=r"'c' is token .* to the one and no token to the"):
        check_tokenizers(["a", "b"], [first, SimpleNamespace(vocab=words[:-1])])
    check_tokenizers(["a", "b"], [first, SimpleNamespace()])  # which does not say
