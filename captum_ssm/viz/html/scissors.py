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
from .page import Facts, short

#: The number of strongest messages that are also cut in pairs.
_NUMBER_PAIRED = 8
#: The number of likeliest classes that are stored for each run.
_LIKELIEST = 5
#: Of this number of cuts, one cuts all messages from a token.
_CUTS_PER_SENDER = 4
#: The largest numbers of copies, of tokens, and of output entries in one batch.
_COPIES, _TOKENS, _ENTRIES = 16, 256, 2**26
#: The keys of a row; the layer and the target are None for all messages from a token.
_ROW_KEYS = ("layer", "source", "target", "effect", "first_order", "call")
#: The indices of the edges that are cut.
State = tuple[int, ...]


def cuts_of(subject: Subject, example: ShownExample, outline: Outline, count: int) -> Facts:
    """Return the messages and senders of the largest effects, and the outputs without them.

    A state's name lists the indices of the cut messages, such as ``"0-3"``, or is ``""`` without
    cuts. Its value are the scores of the output, see :class:`_CutRuns`.
    """
    facts: Facts = {"rows": [], "states": {}, "labels": [], "classes": 0, "obstacle": None}
    if count == 0:
        return facts
    try:
        return facts | _cut_facts(subject, example, outline, count)
    except CaptumSSMError as error:  # the page then shows the other parts
        return facts | {"obstacle": str(error)}


def _cut_facts(subject: Subject, example: ShownExample, outline: Outline, count: int) -> Facts:
    """Select cuts by estimated effects, run each, and return the facts of :func:`cuts_of`."""
    method = EdgeEffects(subject.forward_func, subject.module, subject.layers)
    effects = method.attribute(example.inputs, outline.target, example.additional)
    position = {token: i for i, token in enumerate(outline.unpadded)}
    edges = [x for x in effects.top(count)[0] if x.source in position and x.target in position]
    if not edges:
        return {}
    # a sender is cut in all layers, which must all be explained and have the same tokens
    sent: dict[int, float] = {}
    same_tokens = len({layer.linear.operator.shape.tokens for layer in effects.layers}) == 1
    for edge in edges if same_tokens and subject.layers is None else ():
        if edge.source != edge.target:
            sent[edge.source] = sent.get(edge.source, 0.0) + abs(edge.effect)
    senders = sorted(sent, key=lambda token: -sent[token])[: count // _CUTS_PER_SENDER]
    del edges[count - len(senders) :]
    cuts: list[Edge | int] = [*edges, *senders]
    run = Interventions(
        *(subject.forward_func, subject.module, example.inputs, example.additional, outline.target),
        at_a_time=max(1, min(_COPIES, _TOKENS // effects.tokens)),
        tokens=effects.tokens,
    )
    runs = _CutRuns(subject, outline, run)
    states = runs.scores_by_state([], [()])  # sets runs.entries, which limit the batch
    run.at_a_time = max(1, min(run.at_a_time, _ENTRIES // runs.entries))
    singles = list(runs.scores_by_state(cuts, [(n,) for n in range(len(cuts))]).values())
    uncut = states[""][0]
    # edges before senders, the largest true effect first
    order = sorted(range(len(cuts)), key=lambda n: (n >= len(edges), -abs(uncut - singles[n][0])))
    cuts = [cuts[n] for n in order]
    states |= {str(i): singles[n] for i, n in enumerate(order)}
    in_pairs = min(_NUMBER_PAIRED, len(edges))
    pairs = [*combinations(range(in_pairs), 2), *((0, i) for i in range(in_pairs, len(cuts)))]
    states |= runs.scores_by_state(cuts, pairs)
    mixers = [mixer.name for mixer in find_mixers(subject.module)]
    rows: list[tuple[Any, ...]] = []
    for cut in cuts:
        if isinstance(cut, int):
            effect = float(effects.of(Edges(sources=cut, targets="other"))[0])
            call, estimated = f"Edges(sources={cut}, targets='other')", bool(effects.first_order)
            rows.append((None, position[cut], None, short(effect), estimated, call))
        else:
            ends = cut.layer, position[cut.source], position[cut.target]
            rows.append((*ends, short(cut.effect), cut.first_order, _call(cut, mixers)))
    facts = [dict(zip(_ROW_KEYS, row, strict=True)) for row in rows]
    return {"rows": facts, "states": states, "labels": runs.labels, "classes": runs.classes}


class _CutRuns:
    """Runs the model while messages are cut, and returns the scores that a page stores.

    The scores of an output are the explained number, its probability, and for each of the likeliest
    classes an index in ``labels`` and the probability.
    """

    def __init__(self, subject: Subject, outline: Outline, run: Interventions) -> None:
        self.subject, self.outline, self.run = subject, outline, run
        #: Names of classes, the explained class first, and the index of each class in the list.
        explained = outline.predictions[outline.explained_index :][:1]  # none if it is no class
        self.labels = [visible_text(prediction.label) for prediction in explained]
        self._index_by_class: dict[int, int] = {}
        self.classes, self.entries = 0, 1  # of one example's output; set by each run

    def scores_by_state(
        self, edges: Sequence[Edge | int], states: Sequence[State]
    ) -> dict[str, list[float]]:
        """Run the model in each state, with indices into ``edges``; return scores by state name."""
        cuts = [[edges[i] for i in state] for state in states]
        outputs = self.run.outputs(cuts) if any(cuts) else [([0], self.run.uncut().output)]
        scores: dict[int, list[float]] = {}
        for indices, output in outputs:
            scores |= zip(indices, self._scores(output), strict=True)
        return {"-".join(map(str, state)): scores[i] for i, state in enumerate(states)}

    def _scores(self, output: Tensor) -> Iterator[list[float]]:
        """Yield the scores of each copy of the example in a batch's output."""
        self.entries = output[0].numel()
        index = self.run.index(output[:1])  # of the explained class; the same for all copies
        for copy, value in enumerate(self.run.explained(output).tolist()):
            scores = [round(value, 4)]
            if index is not None and self.outline.predictions:
                *place, explained = index[0].tolist()
                self._index_by_class.setdefault(explained, 0)
                probabilities = output[(copy, *place)].cpu().double().softmax(-1)
                best = probabilities.topk(min(_LIKELIEST, len(probabilities)))
                self.classes = len(probabilities)
                scores.append(_rounded_probability(float(probabilities[explained])))
                for c, chance in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                    scores += [self._label_index(c, output), _rounded_probability(chance)]
            yield scores

    def _label_index(self, c: int, output: Tensor) -> int:
        """Return the index of class ``c`` in ``labels``, to which new classes are added."""
        if c not in self._index_by_class:
            self._index_by_class[c] = len(self.labels)
            self.labels.append(visible_text(label_of(self.subject, c, output)))
        return self._index_by_class[c]


def _rounded_probability(chance: float) -> float:
    """Round a probability to a few digits, but not to exactly 0 or 1."""
    if chance < 1e-4:
        return float(f"{chance:.2g}")
    return chance if chance == 1 else min(round(chance, 6), 1 - 1e-6)


def _call(edge: Edge, mixers: Sequence[str]) -> str:
    """Return Python code for an edge; layers that ran out of order are written by name."""
    in_order = edge.name in mixers[edge.layer : edge.layer + 1]
    return f"Edges({edge.layer if in_order else repr(edge.name)}, {edge.source}, {edge.target})"
