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

from captum_ssm.attr import LatimFlow, SSMLLMAttribution

from ...harness.experiment import Cell, Column, Subject
from ...harness.records import Numbers, Rows
from ...tasks.chains import LINKS, WORDS, ChainsTask
from ...tasks.linked import LinkedText
from ..linked_texts import LinkedTexts

#: The last word with hops, the last word as it stands, and what all words are due to, summed.
HOPS, ALONE, SUMMED = "by hops", "last word alone", "all words, summed"
#: Who names facts blindly.
CHANCE = Cell("any fact")
RULES = ("frozen", "half", "centered")
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
    examples = 500
    baselines = (CHANCE.method,)

    def cells(self) -> Sequence[Cell]:
        return [CHANCE, *(Cell(LatimFlow.__name__, rule) for rule in RULES)]

    def example(self, subject: Subject, index: int, seed: int) -> ChainExample:
        task = cast(ChainsTask, self._tasks[subject.name])
        rng = random.Random(f"{seed}/{index}")
        one, two, *_ = task.questions(rng, rng.randint(_FEWEST, task.longest))
        return ChainExample(task, {"one question": one, "two questions": two})

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        if cell == CHANCE:
            return {row: _by_chance(len(facts_of(text))) for row, text in example.texts.items()}
        explain = SSMLLMAttribution(LatimFlow(model), example.task.vocabulary)
        rows: dict[str, Numbers] = {}
        for row, text in example.texts.items():
            words, hops = relevance_of(explain, text, cell.formulation)
            links = links_of(text)
            rows |= {
                f"{row}, {HOPS}": by_hops(hops, links),
                f"{row}, {ALONE}": by_rank(hops[0], links),
                f"{row}, {SUMMED}": by_rank(words.sum(0), links),
            }
        return rows


def facts_of(text: LinkedText) -> list[range]:
    """The tokens of each fact."""
    return [range(at, at + WORDS) for at in text.context[::WORDS]]


def links_of(text: LinkedText) -> list[int]:
    """The facts of the chain that was asked for last, from its root on."""
    return [source // WORDS for _, source in text.sure]


def relevance_of(explain: SSMLLMAttribution, text: LinkedText, rule: str) -> tuple[Tensor, Tensor]:
    """The relevance of facts to every word (words, F), and to the last one after hops (H, F)."""
    start = text.context.stop + 2
    prompt, written = " ".join(text.words[:start]), " ".join(text.words[start:])
    last = len(text.words) - start - 1

    def hops_of(spans: Any, hops: int) -> list[Tensor]:
        found = explain.attribute(
            prompt,
            written,
            spans=spans,
            prompt_spans=facts_of(text),
            hops=hops,
            contrast="all",
            rule=rule,
        )
        assert not isinstance(found, list) and found.spans is not None
        return [hop.prompt for hop in found.spans.hops]

    (words,) = hops_of("token", 0)
    of_last = torch.cat(hops_of([(last, last + 1)], LINKS - 1))
    # hops end where nothing is left to go on
    return words, torch.cat([of_last, of_last[-1:].expand(LINKS - len(of_last), -1)])


def by_hops(relevance: Tensor, links: Sequence[int]) -> Numbers:
    """What hops (H, F) name: the first fact before any, then what gains most by each."""
    gains = torch.cat([relevance[:1], relevance.diff(dim=0)])
    return _numbers(gains.argmax(-1).tolist(), relevance[-1], links)


def by_rank(relevance: Tensor, links: Sequence[int]) -> Numbers:
    """What relevance (F,) names: the first fact by it, the second and the third."""
    return _numbers(relevance.topk(LINKS).indices.tolist(), relevance, links)


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
