"""IMDB's movie reviews (Maas et al. 2011), laid out as ``aclImdb/test/pos/127_10.txt``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from captum_ssm._files import Lazy, existing_folder, read_text
from captum_ssm.errors import DataError, OptionError

SPLITS = ("train", "test")

#: The folders, in the order of their labels.
SENTIMENTS = ("neg", "pos")

_NAME = re.compile(r"(\d+)_(\d+)\.txt")


@dataclass(frozen=True)
class Review:
    """A review and what its writer thought.

    Attributes:
        name: which file it is from.
        text: as it is written, with HTML's line breaks.
        label: 0 for negative, 1 for positive.
        rating: 1 to 10 stars.
    """

    name: str
    text: str
    label: int
    rating: int


def load_imdb(root: str | Path, split: str = "test") -> Lazy[tuple[Path, int, int], Review]:
    """The labelled reviews of a split.

    Args:
        root: the folder ``aclImdb``.
        split: ``"train"`` or ``"test"``. Default: ``"test"``.

    Returns:
        The negative reviews, then the positive ones, by number; read when they are asked for.

    Raises:
        DataNotFoundError: when a folder is missing.
        DataError: when there is no review, or a file is not named ``NUMBER_RATING.txt``.
        OptionError: when there is no such split.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from captum_ssm_bench.data import load_imdb
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name, text in (("neg/0_2.txt", "Dull."), ("pos/0_9.txt", "A joy.")):
        ...         Path(root, "test", name).parent.mkdir(parents=True)
        ...         _ = Path(root, "test", name).write_text(text)
        ...     reviews = list(load_imdb(root))
        >>> [(review.text, review.label, review.rating) for review in reviews]
        [('Dull.', 0, 2), ('A joy.', 1, 9)]
    """
    if split not in SPLITS:
        raise OptionError(f"split={split!r}: use one of {SPLITS}.")
    top = existing_folder(
        existing_folder(root, "IMDB's train and test") / split, "the split's neg and pos"
    )
    found = []
    for label, sentiment in enumerate(SENTIMENTS):
        inside = existing_folder(top / sentiment, f"the {sentiment} reviews")
        keys = [_key(path, label) for path in inside.glob("*.txt")]
        found += sorted(keys, key=lambda key: int(key[0].name.partition("_")[0]))
    if not found:
        raise DataError(f"{top} holds no review: neg and pos have no file *.txt.")
    return Lazy(found, _read)


def _key(path: Path, label: int) -> tuple[Path, int, int]:
    parts = _NAME.fullmatch(path.name)
    rating = int(parts[2]) if parts else 0
    if not 1 <= rating <= 10:
        raise DataError(f"{path} is not named NUMBER_RATING.txt with a rating from 1 to 10.")
    return path, label, rating


def _read(key: tuple[Path, int, int]) -> Review:
    path, label, rating = key
    return Review(str(path), read_text(path), label, rating)
