"""Sentences with the valence that people gave them (Hutto & Gilbert 2014).

VADER's ground truth: snippets of movie reviews, tweets, sentences of product reviews and of
editorials, each rated from -4 to 4 by some twenty people.  The texts are others' and are not part
of this package; of vaderSentiment, the source distribution of version 0.5 alone carries them::

    pip download vaderSentiment==0.5 --no-deps --no-binary :all:

The loader takes the file that this leaves, the archive inside it, or the folder that the
archive unpacks to; the environment variable ``CAPTUM_SSM_VALENCE`` may name it once for all.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from captum_ssm._files import broken_line
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

#: Names the file or folder where no path is passed.
VARIABLE = "CAPTUM_SSM_VALENCE"

#: Where the archive of the texts lies in the source distribution.
_INSIDE = "additional_resources/hutto_ICWSM_2014.tar.gz"
_DOWNLOAD = "pip download vaderSentiment==0.5 --no-deps --no-binary :all:"
_GREATEST = 4
#: Of an archive and of each file in it; the real ones take a few million.
_MOST_BYTES = 2**28


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


def load_valence(
    path: str | Path | None = None,
    split: str = "test",
    sources: Sequence[str] = ("movies",),
    least: float = 1.0,
) -> list[RatedText]:
    r"""The sentences of a split that people found negative or positive.

    Which split a sentence is in follows from its words alone: 80 % are for training, 5 % for
    validation, 15 % for tests, and the same sentence never is in two of them.

    Args:
        path: the source distribution, the archive or the folder. Default: None, as the
            environment variable ``CAPTUM_SSM_VALENCE`` says.
        split: ``"train"``, ``"validation"`` or ``"test"``. Default: ``"test"``.
        sources: some of ``"movies"``, ``"tweets"``, ``"products"`` and ``"editorials"``. Default:
            the movie reviews.
        least: of the absolute valence; what lies below is left out as neutral. Default: 1.

    Returns:
        The sentences in the order of their files.

    Raises:
        DataNotFoundError: when no path is passed or set, or it does not exist.
        DataError: when the file or folder does not hold the sentences; it names the line.
        OptionError: when a split or source is not known, or ``least`` is not above 0.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from captum_ssm_bench.data import load_valence
        >>> lines = "1\t3.2\tA joy.\n2\t-2.5\tDull.\n3\t0.2\tIt is a film.\n"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "movieReviewSnippets_GroundTruth.txt").write_text(lines)
        ...     texts = load_valence(folder, split="train")
        >>> [(text.name, text.words, text.label) for text in texts]  # the third is neutral
        [('movies/1', ('a', 'joy', '.'), 1), ('movies/2', ('dull', '.'), 0)]
    """
    for name, asked, known in (("split", [split], SPLITS), ("sources", sources, SOURCES)):
        for each in asked:
            if each not in known:
                raise OptionError(f"{name}: {each!r} is not known. Use some of {tuple(known)}.")
    if not least > 0:
        raise OptionError(f"least={least}: use a number above 0; 0 itself is neither sign.")
    place = _place(path)
    return [
        each
        for source in sources
        for each in _rated(place, source)
        if abs(each.valence) >= least and _fold(each.words) in SPLITS[split]
    ]


def _place(path: str | Path | None) -> Path:
    """The file or folder that is named, which must exist."""
    named = os.environ.get(VARIABLE) if path is None else path
    if not named:
        raise DataNotFoundError(
            f"No rated texts are named. Pass path=, or set {VARIABLE} to the file that "
            f"{_DOWNLOAD!r} leaves."
        )
    found = Path(named)
    if not found.exists():
        raise DataNotFoundError(f"{found} does not exist. {_DOWNLOAD!r} brings the rated texts.")
    return found.resolve()


def _fold(words: Sequence[str]) -> int:
    """One of twenty equal parts, by the words alone."""
    return int.from_bytes(hashlib.sha256(" ".join(words).encode()).digest()[:8], "big") % 20


@cache
def _rated(place: Path, source: str) -> tuple[RatedText, ...]:
    """All sentences of a source."""
    name = SOURCES[source]
    found = []
    for number, line in _lines(place, name):
        parts = line.split("\t")
        if len(parts) != 3 or not parts[2].strip():
            raise broken_line(place / name, number, "is not ID, valence and text with tabs between")
        valence = _valence(parts[1], place / name, number)
        found.append(RatedText(f"{source}/{parts[0]}", parts[2].strip(), valence))
    return tuple(found)


def _valence(written: str, path: Path, number: int) -> float:
    try:
        valence = float(written)
    except ValueError:
        valence = math.nan
    if not abs(valence) <= _GREATEST:
        raise broken_line(path, number, f"has the valence {written!r}, not one from -4 to 4")
    return valence


def _lines(place: Path, name: str) -> list[tuple[int, str]]:
    """The lines of a file with their numbers from 1, empty ones left out."""
    try:
        whole = _bytes(place, name).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place / name} is not UTF-8: byte {error.start} cannot be read."
        ) from None
    found = [(n, line.rstrip("\r")) for n, line in enumerate(whole.split("\n"), 1) if line.strip()]
    if not found:
        raise DataError(f"{place / name} is empty.")
    return found


def _bytes(place: Path, name: str) -> bytes:
    """A file of the folder or of the archive."""
    if place.is_dir():
        path = place / name
        if not path.is_file():
            raise DataNotFoundError(f"{path} does not exist. Pass the folder that holds it.")
        return path.read_bytes()
    try:
        with tarfile.open(fileobj=io.BytesIO(_archive(place))) as archive:
            member = next((m for m in _checked(place, archive) if Path(m.name).name == name), None)
            file = None if member is None else archive.extractfile(member)
            if file is None:
                raise DataError(f"{place} holds no {name}. {_DOWNLOAD!r} brings one that does.")
            return file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{place} is neither the source distribution nor its archive: {error}"
        ) from None


def _checked(place: Path, archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of an archive, each of a size that is worth unpacking."""
    for member in archive:
        _check_size(place, member.name, member.size)
        yield member


def _archive(place: Path) -> bytes:
    """The archive of the texts, out of the source distribution or as it is."""
    _check_size(place, place.name, place.stat().st_size)
    if not zipfile.is_zipfile(place):
        return place.read_bytes()
    try:
        with zipfile.ZipFile(place) as whole:
            names = (info for info in whole.infolist() if info.filename.endswith(_INSIDE))
            inside = next(names, None)
            if inside is None:
                raise DataError(
                    f"{place} holds no {_INSIDE}: wheels and later versions of vaderSentiment "
                    f"leave the texts out. {_DOWNLOAD!r} brings the one that carries them."
                )
            _check_size(place, inside.filename, inside.file_size)
            return whole.read(inside)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise DataError(f"{place} is a broken archive: {error}") from None


def _check_size(place: Path, name: str, size: int) -> None:
    """Raise before something is unpacked that is far larger than the texts are."""
    if size > _MOST_BYTES:
        raise DataError(
            f"{place}: {name} would take {size} bytes; at most {_MOST_BYTES} are unpacked. "
            f"{_DOWNLOAD!r} brings the archive with the texts."
        )
