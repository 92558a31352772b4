"""Do hops lead from the last word of a chained answer back to the facts that it is due to?

Shapes: F facts of one text, H hops.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....attr import LatimFlow, SSMLLMAttribution
from ...harness.experiment import Cell, Column, Subject
from ...harness.records import Numbers, Rows
from ...tasks.chains import LINKS, WORDS, ChainsTask
from ...tasks.linked import LinkedText
from ..linked_texts import LinkedTexts

#: The last word with hops, the last word as it stands, and what all words are due to, summed.
HOPS, ALONE, SUMMED = "by hops", "last word alone", "all words, summed"
#: Who names facts blindly.
CHANCE = Cell("any fact")
RULES = ("frozen", "half", "centred")
#: Two chains are among the facts.
_FEWEST = 2 * LINKS


@dataclass(frozen=True)
class ChainExample:
    """Facts with one question, and with two of which the second is explained.

    Attributes:
        task: what they were drawn for.
        texts: by the number of questions.
    """

    task: ChainsTask
    texts: dict[str, LinkedText]


class ChainedAnswers(LinkedTexts):
    """What the last answered word is due to, and through which words that went before it."""

    columns = (
        Column("last fact", ("last",)),
        Column("link", ("link",)),
        Column("root", ("root",)),
        Column("in order", ("order",)),
        Column("chain", ("chain",)),
    )
    examples = 200
    baselines = (ALONE, SUMMED, CHANCE.method)
    note = (
        "By hops the last fact is the one with most relevance before any hop, the link the one "
        "that gains most by the first, the root by the second; without hops they are the first, "
        "second and third by relevance. In order: all three are right. Chain: the three facts of "
        "most relevance in the end are those of the chain, in any order."
    )

    def cells(self) -> Sequence[Cell]:
        return [CHANCE, *(Cell(each, rule) for each in (ALONE, SUMMED, HOPS) for rule in RULES)]

    def example(self, subject: Subject, index: int, seed: int) -> ChainExample:
        task = cast(ChainsTask, self._tasks[subject.name])
        rng = random.Random(f"{seed}/{index}")
        one, two, *_ = task.questions(rng, rng.randint(_FEWEST, task.longest))
        return ChainExample(task, {"one question": one, "two questions": two})

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        if cell == CHANCE:
            return {row: _by_chance(len(facts_of(text))) for row, text in example.texts.items()}
        explain = SSMLLMAttribution(LatimFlow(model), example.task.vocabulary)
        return {
            row: _read[cell.method](relevance_of(explain, text, cell.formulation), links_of(text))
            for row, text in example.texts.items()
        }


def facts_of(text: LinkedText) -> list[range]:
    """The tokens of each fact."""
    return [range(at, at + WORDS) for at in text.context[::WORDS]]


def links_of(text: LinkedText) -> list[int]:
    """The facts of the chain that was asked for last, from its root on."""
    return [source // WORDS for _, source in text.sure]


def relevance_of(explain: SSMLLMAttribution, text: LinkedText, rule: str) -> Tensor:
    """Of each word that is written, what every fact has after 0, 1, ... hops, (H, words, F).

    Args:
        explain: what explains texts.
        text: facts, and questions; all behind the first asked symbol is written.
        rule: of the method.
    """
    start = text.context.stop + 2
    found = explain.attribute(
        " ".join(text.words[:start]),
        " ".join(text.words[start:]),
        spans="token",
        prompt_spans=facts_of(text),
        hops=LINKS - 1,
        contrast="all",
        rule=rule,
    )
    assert not isinstance(found, list) and found.spans is not None
    hops = [hop.prompt for hop in found.spans.hops]
    hops += hops[-1:] * (LINKS - len(hops))  # hops end where nothing is left to go on
    return torch.stack(hops)


def by_hops(relevance: Tensor, links: Sequence[int]) -> Numbers:
    """What hops name of the last word."""
    of_last = relevance[:, -1]
    gains = torch.cat([of_last[:1], of_last.diff(dim=0)])
    return _numbers(gains.argmax(-1).tolist(), of_last[-1], links)


def alone(relevance: Tensor, links: Sequence[int]) -> Numbers:
    """What the last word names by itself, without hops."""
    found = relevance[0, -1]
    return _numbers(found.topk(LINKS).indices.tolist(), found, links)


def summed(relevance: Tensor, links: Sequence[int]) -> Numbers:
    """What all words name, each explained by itself."""
    found = relevance[0].sum(0)
    return _numbers(found.topk(LINKS).indices.tolist(), found, links)


_read = {HOPS: by_hops, ALONE: alone, SUMMED: summed}


def _numbers(named: Sequence[int], whole: Tensor, links: Sequence[int]) -> Numbers:
    right = [float(one == other) for one, other in zip(named, reversed(links), strict=True)]
    chain = set(whole.topk(LINKS).indices.tolist()) == set(links)
    return {
        **dict(zip(("last", "link", "root"), right, strict=True)),
        "order": float(all(right)),
        "chain": float(chain),
    }


def _by_chance(facts: int) -> Numbers:
    one = 1 / facts
    return {
        "last": one,
        "link": one,
        "root": one,
        "order": 1 / math.perm(facts, LINKS),
        "chain": 1 / math.comb(facts, LINKS),
    }
