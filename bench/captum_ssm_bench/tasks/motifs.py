"""Motifs in DNA: which of two motifs a sequence holds says its class.

    ...CTTTCCGGTAAC...GTAGATAAGGTC...      the second motif, on the other strand, and the first

Each lies on either strand.  In place of a motif that a sequence lacks it holds, half of the time, a
spoiled one, so that the motif itself has to be known and not only what it is made of.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.errors import OptionError
from captum_ssm.models.dna import BASE_IDS

BASES = "ACGT"
_OTHER_STRAND = str.maketrans(BASES, BASES[::-1])
#: How many bases of a spoiled motif are others.
_SPOILED = 2


@dataclass(frozen=True)
class MotifBatch:
    """Sequences of one length.

    Attributes:
        ids: of the bases, (B, L).
        labels: the number of the class, (B,).
        gold: where the motifs lie that a sequence holds, (B, L).
    """

    ids: Tensor
    labels: Tensor
    gold: Tensor

    @property
    def one_hot(self) -> Tensor:
        """Which of A, C, G and T each base is, (B, 4, L)."""
        return torch.nn.functional.one_hot(self.ids - BASE_IDS[0], len(BASES)).mT.float()


@dataclass(frozen=True)
class MotifTask:
    """Which of two motifs a sequence of DNA holds, each on either strand.

    Attributes:
        length: bases of a sequence. Default: 64.
        motifs: the two. Default: ``("AGATAAG", "ACCGGAA")``, as GATA and ETS factors bind.

    Raises:
        OptionError: when the motifs are not two, or do not fit in the sequence.

    Example:
        >>> from captum_ssm_bench.tasks import MotifTask
        >>> batch = MotifTask().draw(4, seed=0)
        >>> batch.ids.shape, batch.labels.tolist(), batch.gold.sum(1).tolist()
        (torch.Size([4, 64]), [3, 3, 0, 2], [14, 14, 0, 7])
    """

    length: int = 64
    motifs: tuple[str, str] = ("AGATAAG", "ACCGGAA")

    #: By number.
    classes = ("neither motif", "the first", "the second", "both motifs")

    def __post_init__(self) -> None:
        if len(self.motifs) != 2 or 2 * sum(map(len, self.motifs)) > self.length:
            raise OptionError(
                f"motifs={self.motifs!r}, length={self.length}: use two motifs that fill at most "
                "half of a sequence."
            )

    def draw(self, count: int, seed: int | random.Random, label: int | None = None) -> MotifBatch:
        """Sequences at random.

        Args:
            count: how many.
            seed: a number, or a generator to go on with.
            label: of all of them. Default: None, each as likely.

        Returns:
            The batch.
        """
        rng = seed if isinstance(seed, random.Random) else random.Random(seed)
        labels = [
            rng.randrange(len(self.classes)) if label is None else label for _ in range(count)
        ]
        drawn = [self._sequence(rng, (bool(each & 1), bool(each & 2))) for each in labels]
        ids = [[BASE_IDS[BASES.index(base)] for base in bases] for bases, _ in drawn]
        gold = torch.zeros(count, self.length, dtype=torch.bool)
        for row, (_, places) in enumerate(drawn):
            gold[row, places] = True
        return MotifBatch(torch.tensor(ids), torch.tensor(labels), gold)

    def _sequence(self, rng: random.Random, held: tuple[bool, bool]) -> tuple[str, list[int]]:
        """Bases that hold some of the motifs, and where these lie."""
        spoiled = [rng.random() < 0.5 for _ in held]
        while True:  # until no motif lies where none was put
            bases = rng.choices(BASES, k=self.length)
            gold: list[int] = []
            places = zip(self.motifs, self._places(rng), held, spoiled, strict=True)
            for motif, start, here, instead in places:
                if here:
                    gold += range(start, start + len(motif))
                if here or instead:
                    put = motif if here else _spoil(motif, rng)
                    put = reverse_complement(put) if rng.random() < 0.5 else put
                    bases[start : start + len(motif)] = put
            sequence = "".join(bases)
            if self._held(sequence) == sum(held):
                return sequence, gold

    def _places(self, rng: random.Random) -> Sequence[int]:
        """Where the motifs begin, apart from each other."""
        one, other = map(len, self.motifs)
        while True:
            starts = rng.randrange(self.length - one + 1), rng.randrange(self.length - other + 1)
            if starts[0] + one <= starts[1] or starts[1] + other <= starts[0]:
                return starts

    def _held(self, sequence: str) -> int:
        """How many times a motif is in a sequence, on either strand."""
        strands = sequence, reverse_complement(sequence)
        return sum(
            strand.startswith(motif, start)
            for motif in self.motifs
            for strand in strands
            for start in range(self.length)
        )


def reverse_complement(sequence: str) -> str:
    """The other strand, in the direction in which it is read.

    Args:
        sequence: of the letters A, C, G and T.

    Example:
        >>> from captum_ssm_bench.tasks.motifs import reverse_complement
        >>> reverse_complement("AACG")
        'CGTT'
    """
    return sequence.translate(_OTHER_STRAND)[::-1]


def _spoil(motif: str, rng: random.Random) -> str:
    bases = list(motif)
    for place in rng.sample(range(len(motif)), _SPOILED):
        bases[place] = rng.choice([base for base in BASES if base != bases[place]])
    return "".join(bases)
