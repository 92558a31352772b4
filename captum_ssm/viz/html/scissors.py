"""Run a report's example while its strongest messages are cut, one by one and in pairs.

A page without a server can only show stored runs. These are single cuts, the strongest message with
each other one, and pairs of the strongest few. If the answer is almost certain, its probability
often changes only after the strongest message is cut. A quarter of the cuts remove all messages
from one token to others, for the tokens whose listed messages have the largest effects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor

from ...edges import EdgeEffects, Edges
from ...edges.effects import Edge
from ...edges.truth import Interventions
from ...errors import CaptumSSMError
from ...tracing import find_mixers
from ..labels import visible_text
from .example import ShownExample, Subject
from .outline import Outline, label_of
from .page import short

#: The number of strongest messages that are also cut in pairs.
_PAIRED = 8
#: The number of likeliest classes that are stored for each run.
_NAMED = 5
#: Of this number of cuts, one cuts all messages from a token.
_WHOLE = 4
#: The largest numbers of copies, of tokens, and of output entries in one batch.
_COPIES, _TOKENS, _ENTRIES = 16, 256, 2**26
#: The keys of a row; the layer and the target are None for all messages from a token.
_ROW = ("layer", "source", "target", "effect", "first_order", "call")
#: The indices of the edges that are cut.
State = tuple[int, ...]


def cuts_of(subject: Subject, example: ShownExample, known: Outline, count: int) -> dict[str, Any]:
    """Return the messages and senders of the largest effects, and the outputs without them.

    A state has the output without some messages: the explained number, its probability, and the
    likeliest answers' label indices and probabilities. A state's name lists the indices of the cut
    messages, such as ``"0-3"``, or is ``""`` without cuts.
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
    edges = [x for x in effects.top(count)[0] if x.source in real and x.target in real]
    if not edges:
        return {}
    sent: dict[int, float] = {}
    alike = len({layer.linear.operator.shape.tokens for layer in effects.layers}) == 1
    for x in edges if alike and subject.layers is None else ():  # a dot cuts in all layers
        if x.source != x.target:
            sent[x.source] = sent.get(x.source, 0.0) + abs(x.effect)
    senders = sorted(sent, key=lambda token: -sent[token])[: count // _WHOLE]
    del edges[count - len(senders) :]
    found: list[Edge | int] = [*edges, *senders]
    run = Interventions(
        *(subject.forward_func, subject.module, example.inputs, example.additional, known.target),
        at_a_time=max(1, min(_COPIES, _TOKENS // effects.tokens)),
        tokens=effects.tokens,
    )
    runs = _CutRuns(subject, known, run)
    states = runs.of([], [()])
    run.at_a_time = max(1, min(run.at_a_time, _ENTRIES // runs.entries))
    singles = list(runs.of(found, [(n,) for n in range(len(found))]).values())
    whole = states[""][0]
    order = sorted(range(len(found)), key=lambda n: (n >= len(edges), -abs(whole - singles[n][0])))
    found = [found[n] for n in order]
    states |= {str(n): singles[old] for n, old in enumerate(order)}
    paired = min(_PAIRED, len(edges))
    pairs = [*combinations(range(paired), 2), *((0, n) for n in range(paired, len(found)))]
    states |= runs.of(found, pairs)
    mixers = [mixer.name for mixer in find_mixers(subject.module)]
    told: list[tuple[Any, ...]] = []
    for cut in found:
        if isinstance(cut, int):
            effect = float(effects.of(Edges(sources=cut, targets="other"))[0])
            call, rough = f"Edges(sources={cut}, targets='other')", bool(effects.first_order)
            told.append((None, real[cut], None, short(effect), rough, call))
        else:
            ends = cut.layer, real[cut.source], real[cut.target]
            told.append((*ends, short(cut.effect), cut.first_order, _call(cut, mixers)))
    rows = [dict(zip(_ROW, row, strict=True)) for row in told]
    return {"rows": rows, "states": states, "labels": runs.labels, "classes": runs.classes}


class _CutRuns:
    """Runs the model while messages are cut, and returns the scores that a page stores."""

    def __init__(self, subject: Subject, known: Outline, run: Interventions) -> None:
        self.subject, self.known, self.run = subject, known, run
        #: Names of classes, the explained class first, and the index of each class in the list.
        self.labels = (
            [visible_text(known.predictions[known.asked].label)] if known.predictions else []
        )
        self._places: dict[int, int] = {}
        self.classes, self.entries = 0, 1

    def of(self, edges: Sequence[Edge | int], states: Sequence[State]) -> dict[str, list[float]]:
        """Run the model for each set of cut edges; return the stored scores by state name."""
        cuts = [[edges[n] for n in state] for state in states]
        outputs = self.run.outputs(cuts) if any(cuts) else [([0], self.run.uncut().output)]
        said = {n: row for some, x in outputs for n, row in zip(some, self._rows(x), strict=True)}
        return {"-".join(map(str, state)): said[n] for n, state in enumerate(states)}

    def _rows(self, output: Tensor) -> Iterator[list[float]]:
        """Yield scores to store for each output: explained number, probability, best classes."""
        self.entries = output[0].numel()
        index = self.run.index(output[:1])
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
        """Return the index of class ``k`` in ``labels``, to which new classes are added."""
        if k not in self._places:
            self._places[k] = len(self.labels)
            self.labels.append(visible_text(label_of(self.subject, k, output)))
        return self._places[k]


def _chance(chance: float) -> float:
    """Round a probability to a few digits, but not to exactly 0 or 1."""
    if chance < 1e-4:
        return float(f"{chance:.2g}")
    return chance if chance == 1 else min(round(chance, 6), 1 - 1e-6)


def _call(edge: Edge, mixers: Sequence[str]) -> str:
    """Return Python code for an edge; layers that ran out of order are written by name."""
    in_order = edge.name in mixers[edge.layer : edge.layer + 1]
    return f"Edges({edge.layer if in_order else repr(edge.name)}, {edge.source}, {edge.target})"
