"""Check that models on one page have the same vocabulary, because they get the same token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import OptionError

#: Vocabulary sizes that differ by less may be equal: embeddings are padded to a multiple of 128.
_FILLED_UP = 128
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
        if (size := _size(model)) is not None
    }
    for name, size in list(sizes.items())[1:]:
        first, wanted = next(iter(sizes.items()))
        filled_up = min(size, wanted) >= _SMALL and abs(size - wanted) < _FILLED_UP
        if size != wanted and not filled_up:
            raise OptionError(
                f"{first} has a vocabulary of {wanted} tokens, but {name} has {size}, so their "
                "token ids mean different words. Pass models with the same tokenizer to one "
                "visualizer, and the others to a second visualizer."
            )


def check_tokenizers(names: Sequence[str], tokenizers: Sequence[Any]) -> None:
    """Raise if tokenizers assign different ids to a word; ``names`` are the models' names."""
    first, *others = (_words(tokenizer) for tokenizer in tokenizers)
    for name, words in zip(names[1:], others, strict=True):
        if first is None or words is None or words == first:
            continue
        word = next(w for w in (*first, *words) if first.get(w) != words.get(w))
        raise OptionError(
            f"{names[0]} and {name} have different vocabularies: {word!r} is "
            f"{_label(first.get(word))} in the first and {_label(words.get(word))} in the second. "
            "Name one tokenizer for both with --tokenizer, or serve the models one by one."
        )


def _label(number: int | None) -> str:
    return "no token" if number is None else f"token {number}"


def _size(model: Any) -> int | None:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if type(size) is int else None


def _words(tokenizer: Any) -> dict[str, int] | None:
    """Return the id of each token, or None if the tokenizer has no list of tokens."""
    found = getattr(tokenizer, "get_vocab", lambda: None)()
    if found is not None:
        return dict(found)
    listed = getattr(tokenizer, "vocab", None)
    return None if listed is None else {str(word): i for i, word in enumerate(listed)}
