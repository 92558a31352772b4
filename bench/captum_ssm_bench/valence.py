"""Sentences with the valence that people gave them (Hutto & Gilbert 2014).

VADER's ground truth: snippets of movie reviews, tweets, sentences of product reviews and of
editorials, each rated from -4 to 4 by some twenty people.  The texts are others' and are not part
of this package; of vaderSentiment, the source distribution of version 0.5 alone carries them::

    pip download vaderSentiment==0.5 --no-deps --no-binary :all:

The environment variable ``CAPTUM_SSM_VALENCE`` names the file that this leaves, or a folder with
the files of sentences.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from captum_ssm.errors import DataError, DataNotFoundError, OptionError
from captum_ssm.models.sentences import text_words

#: By the name of a source, the file with its sentences.
SOURCES = {
    "movies": "movieReviewSnippets_GroundTruth.txt",
    "tweets": "tweets_GroundTruth.txt",
    "products": "amazonReviewSnippets_GroundTruth.txt",
    "editorials": "nytEditorialSnippets_GroundTruth.txt",
}

#: By the name of a split, which of every twenty sentences are in it.
SPLITS = {"train": range(16), "validation": range(16, 17), "test": range(17, 20)}

#: Names the file or folder.
VARIABLE = "CAPTUM_SSM_VALENCE"

#: Where the archive of the texts lies in the source distribution.
_INSIDE = "additional_resources/hutto_ICWSM_2014.tar.gz"
_DOWNLOAD = "pip download vaderSentiment==0.5 --no-deps --no-binary :all:"
#: The greatest rating, and the least absolute one that is not neutral.
_GREATEST, _LEAST = 4, 1


@dataclass(frozen=True)
class RatedText:
    """A sentence and how people rated it.

    Attributes:
        name: its source and its number there, such as ``"movies/17"``.
        text: as it was rated.
        valence: the mean rating, from -4 to 4.
    """

    name: str
    text: str
    valence: float

    @property
    def label(self) -> int:
        """0 for negative, 1 for positive."""
        return int(self.valence > 0)

    @property
    def words(self) -> tuple[str, ...]:
        """The words and marks of the text, in small letters."""
        return text_words(self.text)


def load_valence(split: str = "test", sources: Sequence[str] = ("movies",)) -> list[RatedText]:
    """The sentences of a split that people found negative or positive.

    Which split a sentence is in follows from its words alone: 80 % are for training, 5 % for
    validation, 15 % for tests, and the same sentence never is in two of them.

    Args:
        split: ``"train"``, ``"validation"`` or ``"test"``. Default: ``"test"``.
        sources: some of ``"movies"``, ``"tweets"``, ``"products"`` and ``"editorials"``. Default:
            the movie reviews.

    Returns:
        The sentences in the order of their files.

    Raises:
        DataNotFoundError: when the environment names no file, or one that does not exist.
        DataError: when the file or folder does not hold the sentences; it names the line.
        OptionError: when a split or source is not known.
    """
    for name, asked, known in (("split", [split], SPLITS), ("sources", sources, SOURCES)):
        for each in asked:
            if each not in known:
                raise OptionError(f"{name}: {each!r} is not known. Use some of {tuple(known)}.")
    place = Path(os.environ.get(VARIABLE, ""))
    if not os.environ.get(VARIABLE) or not place.exists():
        raise DataNotFoundError(
            f"{VARIABLE}={os.environ.get(VARIABLE)!r} names no file of rated texts. Set it to the "
            f"file that {_DOWNLOAD!r} leaves."
        )
    return [
        each
        for source in sources
        for each in _rated(place.resolve(), source)
        if abs(each.valence) >= _LEAST and _fold(each.words) in SPLITS[split]
    ]


def _fold(words: Sequence[str]) -> int:
    """One of twenty equal parts, by the words alone."""
    return int.from_bytes(hashlib.sha256(" ".join(words).encode()).digest()[:8], "big") % 20


@cache
def _rated(place: Path, source: str) -> tuple[RatedText, ...]:
    """All sentences of a source."""
    name, found = SOURCES[source], []
    for count, line in enumerate(_bytes(place, name).decode("utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                number, written, text = line.strip().split("\t")
                valence = float(written)
            except ValueError:
                valence = float("nan")
            if not abs(valence) <= _GREATEST:
                raise DataError(
                    f"{place / name}, line {count} is not an ID, a valence from -{_GREATEST} to "
                    f"{_GREATEST} and a text, with tabs between."
                )
            found.append(RatedText(f"{source}/{number}", text.strip(), valence))
    return tuple(found)


def _bytes(place: Path, name: str) -> bytes:
    """A file of the folder or of the source distribution."""
    try:
        if place.is_dir():
            return (place / name).read_bytes()
        with zipfile.ZipFile(place) as whole:
            (inside,) = (each for each in whole.namelist() if each.endswith(_INSIDE))
            archive = io.BytesIO(whole.read(inside))
        with tarfile.open(fileobj=archive) as files:
            (member,) = (each for each in files.getnames() if Path(each).name == name)
            file = files.extractfile(member)
            assert file is not None
            return file.read()
    except (OSError, ValueError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise DataError(
            f"{place} does not hold {name}: {error}. {_DOWNLOAD!r} brings a file that does."
        ) from error
