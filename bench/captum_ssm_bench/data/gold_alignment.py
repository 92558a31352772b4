"""Gold word alignments: sentences, translations, and which words are linked, surely or possibly.

Links are in the format Talp: a line for each sentence, such as ``1-1 2p3``, with ``-`` for a sure
link and ``p`` for a possible one (Vilar et al. 2006).  The source word comes first, and words count
from 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import Tensor

from captum_ssm._files import broken_line, existing_file, read_lines
from captum_ssm.errors import DataError

#: A source word and a target word, from 0.
Link = tuple[int, int]

_TALP = re.compile(r"(\d+)([-p])(\d+)")


@dataclass(frozen=True)
class AlignedPair:
    """A sentence, its translation, and the links between their words.

    Attributes:
        source: the words of the sentence.
        target: the words of its translation.
        sure: links that every annotator would draw.
        possible: all links, the sure ones among them.
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
    source: str | Path, target: str | Path, links: str | Path
) -> list[AlignedPair]:
    """Sentences with their gold links.

    Args:
        source: sentences, one a line, words apart by spaces; or a file ``.xml`` of IWSLT17
            (Cettolo et al. 2017), whose sentences are its elements ``<seg>``.
        target: their translations, line by line.
        links: the links.

    Returns:
        The sentences in the order of their lines; their links count words from 0.

    Raises:
        DataNotFoundError: when one of the files does not exist.
        DataError: when lines do not match, or a link cannot be read or names a word that is not
            there; it names the line.

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
    named = {"source sentences": source, "target sentences": target, "links": links}
    paths = [existing_file(path, f"the {what}") for what, path in named.items()]
    texts = [[tuple(line.split()) for line in _sentences(path)] for path in paths[:2]]
    if len(texts[0]) != len(texts[1]) or not texts[0]:
        raise DataError(
            f"{paths[0]} has {len(texts[0])} sentences, {paths[1]} {len(texts[1])}: each line "
            "needs its translation."
        )
    rows = read_lines(paths[2])
    if len(rows) != len(texts[0]):
        raise DataError(
            f"{paths[2]} has {len(rows)} lines for {len(texts[0])} sentences; one each is needed."
        )
    return [
        _pair(both[0], both[1], row, paths[2], number)
        for number, (both, row) in enumerate(zip(zip(*texts, strict=True), rows, strict=True), 1)
    ]


def _pair(
    source: tuple[str, ...], target: tuple[str, ...], row: str, path: Path, number: int
) -> AlignedPair:
    sure, possible = set(), set()
    for written in row.split():
        parts = _TALP.fullmatch(written)
        if parts is None:
            raise broken_line(
                path, number, f"holds {written!r}; links read 1-2 if sure, 1p2 if possible"
            )
        link = int(parts[1]) - 1, int(parts[3]) - 1
        if not (0 <= link[0] < len(source) and 0 <= link[1] < len(target)):
            raise broken_line(
                path,
                number,
                f"holds {written!r}, but the sentence has {len(source)} words and its translation "
                f"{len(target)}, counted from 1",
            )
        possible.add(link)
        if parts[2] == "-":
            sure.add(link)
    return AlignedPair(source, target, frozenset(sure), frozenset(possible))


def _sentences(path: Path) -> list[str]:
    if path.suffix != ".xml":
        return read_lines(path)
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"{path} is not XML ({error}).") from None
    texts = ["".join(segment.itertext()).strip() for segment in root.iter("seg")]
    if not texts:
        raise DataError(f"{path} holds no <seg>: is it a file of IWSLT17's sentences?")
    return texts
