"""Gold word alignments: sentences, translations, and which words are linked, surely or possibly.

Two formats of links are read.  Talp has a line for each sentence, such as ``1-1 2p3``, with ``-``
for a sure link and ``p`` for a possible one (Vilar et al. 2006).  NAACL has a line for each link,
``1 2 3 P`` for sentence, source word, target word and kind; without a kind it is sure.  In both the
source word comes first, and words and sentences count from 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from captum_ssm._files import Where, broken_line, existing_file, read_lines
from captum_ssm.errors import DataError, OptionError

from .iwslt17 import sentences_of

FORMATS = ("talp", "naacl")
KINDS = ("S", "P")

#: A source word and a target word, from 0.
Link = tuple[int, int]

_TALP = re.compile(r"(\d+)([-p])(\d+)")
_SENTENCE_TAG = re.compile(r"</?s\b[^>]*>")


@dataclass(frozen=True)
class AlignedPair:
    """A sentence, its translation, and the links between their words.

    Attributes:
        source: the words of the sentence.
        target: the words of its translation.
        sure: links that every annotator would draw.
        possible: all links, the sure ones among them.

    Example:
        >>> from captum_ssm_bench.data import AlignedPair
        >>> sure, possible = frozenset({(1, 0)}), frozenset({(0, 0), (1, 0)})
        >>> pair = AlignedPair(("to", "go"), ("gehen",), sure, possible)
        >>> [links.int().tolist() for links in pair.matrices()]
        [[[0, 1]], [[1, 1]]]
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    sure: frozenset[Link]
    possible: frozenset[Link]

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Sure and possible links, (target words, source words) of booleans each."""
        return self._matrix(self.sure), self._matrix(self.possible)

    def _matrix(self, links: Iterable[Link]) -> Tensor:
        found = torch.zeros(len(self.target), len(self.source), dtype=torch.bool)
        for source, target in links:
            found[target, source] = True
        return found


def load_gold_alignment(
    source: str | Path,
    target: str | Path,
    links: str | Path,
    *,
    format: str = "talp",
    first: int = 1,
    reverse: bool = False,
    encoding: str = "utf-8",
) -> list[AlignedPair]:
    """Sentences with their gold links.

    Args:
        source: sentences, one a line, words apart by spaces; NAACL's tags ``<s snum=1>`` are left
            out. Files ``.xml`` are read as IWSLT17's; see :func:`load_iwslt17`.
        target: their translations, line by line.
        links: the links.
        format: of the links, ``"talp"`` or ``"naacl"``. Default: ``"talp"``.
        first: the number of a sentence's first word. Default: 1.  Under NAACL, word 0 of a sentence
            that counts from 1 stands for no word, and its links are left out.
        reverse: whether links name the target word first. Default: False.
        encoding: of the three files; Vilar's are in ``"latin-1"``. Default: ``"utf-8"``.

    Returns:
        The sentences in the order of their lines; their links count words from 0.

    Raises:
        DataNotFoundError: when one of the files does not exist.
        DataError: when lines do not match, or a link cannot be read or names a word that is not
            there; it names the line.
        OptionError: when ``format`` or ``first`` is not known.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from captum_ssm_bench.data import load_gold_alignment
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = [Path(folder, name) for name in ("source", "target", "links")]
        ...     for file, line in zip(files, ("a red lamp", "rote Lampe", "1p2 2-1 3-2")):
        ...         _ = file.write_text(line)
        ...     (pair,) = load_gold_alignment(*files)
        >>> sorted(pair.sure), sorted(pair.possible - pair.sure)
        ([(1, 0), (2, 1)], [(0, 1)])
    """
    if format not in FORMATS:
        raise OptionError(f"format={format!r}: use one of {FORMATS}.")
    if first not in (0, 1):
        raise OptionError(f"first={first!r}: words count from 0 or from 1.")
    paths = [
        existing_file(path, f"the {what}")
        for path, what in (
            (source, "source sentences"),
            (target, "target sentences"),
            (links, "links"),
        )
    ]
    texts = [[_words(line) for line in _sentences(path, encoding)] for path in paths[:2]]
    if len(texts[0]) != len(texts[1]) or not texts[0]:
        raise DataError(
            f"{paths[0]} has {len(texts[0])} sentences, {paths[1]} {len(texts[1])}: each line "
            "needs its translation."
        )
    read = _talp if format == "talp" else _naacl
    found = read(paths[2], read_lines(paths[2], encoding), len(texts[0]), first)
    pairs = []
    for words, translation, named in zip(*texts, found, strict=True):
        sure, possible = set(), set()
        for where, one, other, certain in named:
            link = (other, one) if reverse else (one, other)
            _check_inside(where, link, (len(words), len(translation)), first)
            possible.add(link)
            if certain:
                sure.add(link)
        pairs.append(AlignedPair(words, translation, frozenset(sure), frozenset(possible)))
    return pairs


#: Where it is written, its two words from 0, and whether it is sure.
_Written = tuple[Where, int, int, bool]


def _talp(path: Path, rows: list[str], sentences: int, first: int) -> list[list[_Written]]:
    """The links of each sentence, from a line for each."""
    if len(rows) != sentences:
        raise DataError(
            f"{path} has {len(rows)} lines for {sentences} sentences; one each is needed."
        )
    found = []
    for number, row in enumerate(rows, start=1):
        named = []
        for word in row.split():
            parts = _TALP.fullmatch(word)
            if parts is None:
                raise broken_line(
                    path, number, f"holds {word!r}; links read 1-2 if sure, 1p2 if possible"
                )
            one, other = int(parts[1]) - first, int(parts[3]) - first
            named.append(((path, number), one, other, parts[2] == "-"))
        found.append(named)
    return found


def _naacl(path: Path, rows: list[str], sentences: int, first: int) -> list[list[_Written]]:
    """The links of each sentence, from a line for each link."""
    found: list[list[_Written]] = [[] for _ in range(sentences)]
    for number, row in enumerate(rows, start=1):
        parts = row.split()
        if not parts:
            continue
        kind = parts[3] if len(parts) > 3 else "S"
        if (
            not 3 <= len(parts) <= 5
            or not all(p.isdecimal() for p in parts[:3])
            or kind not in KINDS
        ):
            raise broken_line(
                path, number, f"reads {row!r}; a link reads SENTENCE SOURCE TARGET [S|P]"
            )
        sentence, one, other = (int(part) for part in parts[:3])
        if not 1 <= sentence <= sentences:
            raise broken_line(path, number, f"names sentence {sentence}, but there are {sentences}")
        if min(one, other) >= first:
            found[sentence - 1].append(((path, number), one - first, other - first, kind == "S"))
    return found


def _check_inside(where: Where, link: Link, sizes: tuple[int, int], first: int) -> None:
    for word, size, side in zip(link, sizes, ("source", "target"), strict=True):
        if not 0 <= word < size:
            raise broken_line(
                *where,
                f"links {side} word {word + first}, but the {side} sentence has {size} words, "
                f"counted from {first}",
            )


def _sentences(path: Path, encoding: str) -> list[str]:
    return sentences_of(path) if path.suffix == ".xml" else read_lines(path, encoding)


def _words(line: str) -> tuple[str, ...]:
    return tuple(_SENTENCE_TAG.sub(" ", line).split())
