"""Runs of a report's example without its strongest messages, one at a time and two.

A page without a server can only show runs that were made for it. So single cuts go with the pairs
that a reader tries: the strongest message with all others, and the strongest few with each other.
Where an answer is all but certain, its probability moves only once the strongest message is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor

from ...attr.call.targets import target_index
from ...edges import EdgeEffects
from ...edges.effects import Edge
from ...edges.truth import Interventions
from ...errors import CaptumSSMError
from ...tracing import find_mixers
from ..labels import spelled
from .example import ShownExample, Subject
from .outline import Outline, label_of
from .page import short

#: The number of strongest messages that are also cut in pairs.
_PAIRED = 8
#: The number of likeliest classes that are stored for each run.
_NAMED = 5
#: At most so many copies run together, so many tokens, and so many entries of outputs.
_COPIES, _TOKENS, _ENTRIES = 16, 256, 2**26
#: The edges that are cut, by their numbers.
State = tuple[int, ...]


def cuts_of(subject: Subject, example: ShownExample, known: Outline, count: int) -> dict[str, Any]:
    """Return the messages of the largest effects, and the model's outputs without them.

    A state is the output without some messages: the explained number, its probability, and the
    likeliest answers' label numbers and probabilities. Its name is the rows' numbers, as ``"0-3"``;
    without any cut it is ``""``.
    """
    told: dict[str, Any] = {"rows": [], "states": {}, "labels": [], "classes": 0, "obstacle": None}
    if count == 0:
        return told
    try:
        return told | _cut(subject, example, known, count)
    except CaptumSSMError as error:  # which leaves all else to be shown
        return told | {"obstacle": str(error)}


def _cut(subject: Subject, example: ShownExample, known: Outline, count: int) -> dict[str, Any]:
    given = example.inputs, known.target, example.additional
    effects = EdgeEffects(subject.forward_func, subject.module, subject.layers).attribute(*given)
    real = {token: place for place, token in enumerate(known.real)}
    found = [x for x in effects.top(count)[0] if x.source in real and x.target in real]
    if not found:
        return {}
    run = Interventions(
        *(subject.forward_func, subject.module, example.inputs, example.additional, known.target),
        at_a_time=max(1, min(_COPIES, _TOKENS // effects.tokens)),
        tokens=effects.tokens,
    )
    says = _Says(subject, known, run)
    states = says.of([], [()])
    run.at_a_time = max(1, min(run.at_a_time, _ENTRIES // says.entries))
    singles = list(says.of(found, [(n,) for n in range(len(found))]).values())
    whole = states[""][0]
    order = sorted(range(len(found)), key=lambda n: -abs(whole - singles[n][0]))
    found = [found[n] for n in order]
    states |= {str(n): singles[old] for n, old in enumerate(order)}
    pairs = list(combinations(range(min(_PAIRED, len(found))), 2))
    pairs += [(0, n) for n in range(_PAIRED, len(found))]
    states |= says.of(found, pairs)
    mixers = [mixer.name for mixer in find_mixers(subject.module)]
    rows = [
        {
            "layer": edge.layer,
            "source": real[edge.source],
            "target": real[edge.target],
            "effect": short(edge.effect),
            "first_order": edge.first_order,
            "call": _call(edge, mixers),
        }
        for edge in found
    ]
    return {"rows": rows, "states": states, "labels": says.labels, "classes": says.classes}


class _Says:
    """The model's outputs without messages, as a page stores them."""

    def __init__(self, subject: Subject, known: Outline, run: Interventions) -> None:
        self.subject, self.known, self.run = subject, known, run
        #: Names of classes, the explained one first, and the place of each in the list.
        self.labels = [spelled(known.predictions[known.asked].label)] if known.predictions else []
        self._places: dict[int, int] = {}
        self.classes, self.entries = 0, 1

    def of(self, edges: Sequence[Edge], states: Sequence[State]) -> dict[str, list[float]]:
        """Run the model in each state."""
        cuts = [[edges[n] for n in state] for state in states]
        outputs = self.run.outputs(cuts) if cuts else ()
        said = [row for output in outputs for row in self._rows(output)]
        return {"-".join(map(str, state)): row for state, row in zip(states, said, strict=True)}

    def _rows(self, output: Tensor) -> Iterator[list[float]]:
        """Yield the stored numbers of each of a batch of outputs."""
        self.entries = output[0].numel()
        index = target_index(self.known.target, output[:1])
        scores = self.run.explained(output).tolist()
        for copy, score in enumerate(scores):
            row = [round(score, 4)]
            if index is not None and self.known.predictions:
                *place, asked = index[0].tolist()
                self._places.setdefault(asked, 0)
                chances = output[(copy, *place)].cpu().double().softmax(-1)
                best = chances.topk(min(_NAMED, len(chances)))
                self.classes = len(chances)
                row.append(_chance(float(chances[asked])))
                for k, chance in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                    row += [self._place(k, output), _chance(chance)]
            yield row

    def _place(self, k: int, output: Tensor) -> int:
        """Return a class's place among the labels."""
        if k not in self._places:
            self._places[k] = len(self.labels)
            self.labels.append(spelled(label_of(self.subject, k, output)))
        return self._places[k]


def _chance(chance: float) -> float:
    """Return a probability in few digits; neither 0 nor 1 unless it is."""
    if chance < 1e-4:
        return float(f"{chance:.2g}")
    return chance if chance == 1 else min(round(chance, 6), 1 - 1e-6)


def _call(edge: Edge, mixers: Sequence[str]) -> str:
    """Return an edge in Python: its layer by number, if layers ran in order."""
    in_order = edge.name in mixers[edge.layer : edge.layer + 1]
    return f"Edges({edge.layer if in_order else repr(edge.name)}, {edge.source}, {edge.target})"
