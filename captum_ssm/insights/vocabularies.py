"""Check that models on one page have the same vocabulary, because they get the same token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import OptionError

#: Vocabulary sizes that differ by less may be equal: embeddings are padded to a multiple of 128.
_PADDING = 128
#: Embeddings of vocabularies smaller than this are not padded.
_SMALL = 1024


def check_sizes(models: Sequence[Any]) -> None:
    """Raise if models have vocabularies of different sizes; functions are not checked.

    Example:
        >>> from captum_ssm.insights.vocabularies import check_sizes
        >>> from captum_ssm.models import load_bundled
        >>> check_sizes([load_bundled()[0], load_bundled()[0]])
    """
    sizes = {
        f"{type(model).__name__} (models[{index}])": size
        for index, model in enumerate(models)
        if (size := _vocabulary_size(model)) is not None
    }
    for name, size in list(sizes.items())[1:]:
        first, first_size = next(iter(sizes.items()))
        may_be_padded = min(size, first_size) >= _SMALL and abs(size - first_size) < _PADDING
        if size != first_size and not may_be_padded:
            raise OptionError(
                f"{first} has a vocabulary of {first_size} tokens, but {name} has {size}, so their "
                "token ids mean different words. Pass models with the same tokenizer to one "
                "visualizer, and the others to a second visualizer."
            )


def check_tokenizers(names: Sequence[str], tokenizers: Sequence[Any]) -> None:
    """Raise if tokenizers assign different ids to a word; ``names`` are the models' names."""
    first, *others = (_token_ids(tokenizer) for tokenizer in tokenizers)
    for name, words in zip(names[1:], others, strict=True):
        if first is None or words is None or words == first:
            continue
        word = next(w for w in (*first, *words) if first.get(w) != words.get(w))
        raise OptionError(
            f"{names[0]} and {name} have different vocabularies: {word!r} is "
            f"{_as_id(first.get(word))} in the first and {_as_id(words.get(word))} in the second. "
            "Name one tokenizer for both with --tokenizer, or serve the models one by one."
        )


def _as_id(number: int | None) -> str:
    return "no token" if number is None else f"token {number}"


def _vocabulary_size(model: Any) -> int | None:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if type(size) is int else None


def _token_ids(tokenizer: Any) -> dict[str, int] | None:
    """Return the id of each token, or None if the tokenizer has no list of tokens."""
    vocabulary = getattr(tokenizer, "get_vocab", lambda: None)()
    if vocabulary is not None:
        return dict(vocabulary)
    words = getattr(tokenizer, "vocab", None)
    return None if words is None else {str(word): i for i, word in enumerate(words)}
