"""Models side by side read the same examples: a token must be the same word to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import OptionError

#: Embeddings of large vocabularies are filled up to a multiple of this, at most.
_FILLED_UP = 128
#: Embeddings of vocabularies smaller than this are not padded.
_SMALL = 1024


def check_sizes(models: Sequence[Any]) -> None:
    """Raise if models have vocabularies of different sizes.

    Args:
        models: the models. Functions and models without a vocabulary pass.

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
                f"{first} reads a vocabulary of {wanted} tokens and {name} one of {size}, so a "
                "number is not the same word to both. Show models of one tokenizer side by side, "
                "and the others by another visualizer."
            )


def check_tokenizers(names: Sequence[str], tokenizers: Sequence[Any]) -> None:
    """Raise if tokenizers give words different numbers."""
    first, *others = (_words(tokenizer) for tokenizer in tokenizers)
    for name, words in zip(names[1:], others, strict=True):
        if first is None or words is None or words == first:
            continue
        word = next(w for w in (*first, *words) if first.get(w) != words.get(w))
        raise OptionError(
            f"{names[0]} and {name} have different vocabularies: {word!r} is "
            f"{_told(first.get(word))} to the one and {_told(words.get(word))} to the other. "
            "Models that are shown side by side must have the same tokenizer; name it with "
            "--tokenizer, or serve them one by one."
        )


def _told(number: int | None) -> str:
    return "no token" if number is None else f"token {number}"


def _size(model: Any) -> int | None:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if type(size) is int else None


def _words(tokenizer: Any) -> dict[str, int] | None:
    """Return the number of each token; None if the tokenizer does not list it."""
    found = getattr(tokenizer, "get_vocab", lambda: None)()
    if found is not None:
        return dict(found)
    listed = getattr(tokenizer, "vocab", None)
    return None if listed is None else {str(word): i for i, word in enumerate(listed)}
