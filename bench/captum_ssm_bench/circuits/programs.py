"""The circuits by name, and the programs that they compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from .games import ANSWER, KEYS, MIDDLE, VALUES, WIDTH, Circuit, Letters, Roles, Words
from .modules import (
    PLAIN,
    Dense,
    Layer,
    MambaLayer,
    SoftmaxLayer,
    Wire,
    delta_rule,
    mamba,
    mamba2,
    rwkv,
)

Found = tuple[int, Roles]
#: The words of recall, and their pairs and question.
_RECALL = Words({"key": KEYS, "value": VALUES, "query": KEYS})
_PAIRS = ("key", "value") * 3 + ("query",)
_DENSE = Dense(seed=0)


def _wires(words: Words, kind: str, lag: int = 0) -> list[Wire]:
    return [Wire(feature, letter, lag) for letter, feature in enumerate(words.ids(kind))]


def _recalling(words: Words, out: int = ANSWER) -> Layer:
    """Write values under the key before them, and read by the query."""
    query, key, value = _wires(words, "query"), _wires(words, "key", 1), _wires(words, "value")
    return Layer(query, key, value, words.kind("query"), words.kind("value"), out)


def _summing(words: Words) -> Layer:
    """Write all values under one key, and read it where the query is."""
    asked, written = words.kind("query"), words.kind("value")
    return Layer([Wire(asked, 0)], [Wire(written, 0)], _wires(words, "value"), asked, written)


# --- programs ------------------------------------------------------------------------------------


def recalled(letters: Letters, kinds: Sequence[str], start: int = 0) -> Found:
    """The last value under the key that is asked for, from a place on."""
    last = len(kinds) - 1
    where = [
        place
        for place, kind in enumerate(kinds)
        if kind == "value" and place > start and letters[place - 1] == letters[last]
    ]
    roles = {last: "query"}
    for place in where:
        roles[place], roles[place - 1] = "stale", "stale key"
    if not where:
        return -1, roles
    roles[where[-1]], roles[where[-1] - 1] = "content", "key"
    return letters[where[-1]], roles


def most(letters: Sequence[int]) -> int:
    """The most frequent letter; -1 where several are."""
    counts = np.bincount(np.array(letters, int), minlength=1)
    return int(counts.argmax()) if (counts == counts.max()).sum() == 1 else -1


def _added(letters: Letters) -> Found:
    """The most frequent value under the key that is asked for."""
    where = [place for place in (1, 3, 5) if letters[place - 1] == letters[-1]]
    best = most([letters[place] for place in where]) if where else -1
    return best, recalled(letters, _PAIRS)[1]


def _once(letters: Letters, roles: Roles) -> bool:
    return "stale" not in roles.values()


def _overwritten(letters: Letters, roles: Roles) -> bool:
    (valid,) = (place for place, role in roles.items() if role == "content")
    stale = (place for place, role in roles.items() if role == "stale")
    return any(letters[place] != letters[valid] for place in stale)


def _hops(letters: Letters) -> Found:
    link, roles = recalled(letters, _PAIRS)
    if link < 0:
        return -1, {6: "query"}
    answer, again = recalled([*letters[:-1], link], _PAIRS)
    at = next(place for place, role in roles.items() if role == "content")
    found = {at: "link", at - 1: "key", 6: "query"}
    named = {"content": "content", "key": "second key"}
    for place, role in again.items():
        if role in named and place not in found:
            found[place] = named[role]
    return answer, found


def _clean(letters: Letters, roles: Roles) -> bool:
    return len(roles) == 5 and len({letters[0], letters[2], letters[4]}) == 3


def _counted(letters: Letters) -> Found:
    """The most frequent letter of all but the last token."""
    best = most(letters[:-1])
    roles = {i: "content" if x == best else "rival" for i, x in enumerate(letters[:-1])}
    return best, roles if best >= 0 else {}


def _balance(letters: Letters) -> Found:
    """Whether there are more opening brackets (0) than closing ones (1)."""
    count = list(letters[:-1]).count(0)
    answer = int(count <= len(letters[:-1]) - count)
    return answer, {i: "content" if x == answer else "rival" for i, x in enumerate(letters[:-1])}


def _gated(letters: Letters) -> Found:
    best, roles = _counted(letters)
    return (best, {**roles, 6: "gate"}) if best >= 0 and letters[-1] else (-1, {})


_WIPED = ("value",) * 3 + ("slot",) + ("value",) * 3 + ("query",)


def _since(letters: Letters) -> Found:
    """The most frequent value since the eraser."""
    erased, kept = bool(letters[3]), [0, 1, 2, 4, 5, 6]
    best = most([letters[i] for i in kept if i > 3 or not erased])
    if best < 0:
        return -1, {}
    roles = {3: "eraser" if erased else "no eraser"}
    for i in kept:
        right = "stale" if erased and i < 3 else "content"
        roles[i] = right if letters[i] == best else "rival"
    return best, roles


def _marked(letters: Letters) -> Found:
    """The most frequent of the values behind a mark."""
    places = [place for place in (1, 3, 5, 7) if letters[place - 1]]
    best = most([letters[place] for place in places]) if places else -1
    roles = dict.fromkeys((1, 3, 5, 7), "rival")
    for place in places:
        if letters[place] == best:
            roles[place], roles[place - 1] = "content", "mark"
    return best, roles


# --- circuits ------------------------------------------------------------------------------------


def _recall(dense: Dense = PLAIN, hard: float | None = None) -> Any:
    options: dict[str, Any] = {} if hard is None else {"hard": hard}
    return delta_rule(_RECALL, [_recalling(_RECALL)], dense=dense, **options)


def _of_pairs(model: Any, chosen: Callable[[Letters, Roles], bool] = _once) -> Circuit:
    return Circuit(model, _RECALL, _PAIRS, lambda x: recalled(x, _PAIRS), chosen)


def _two_hops() -> Circuit:
    first, second = _recalling(_RECALL, MIDDLE), _recalling(_RECALL)
    linked = Layer(
        [Wire(MIDDLE + i, i) for i in range(KEYS)],
        second.key,
        second.value,
        second.open,
        second.write,
    )
    return Circuit(delta_rule(_RECALL, [first, linked]), _RECALL, _PAIRS, _hops, _clean)


def _erasable(erased: bool) -> Circuit:
    words = Words({**_RECALL.kinds, "slot": 2})
    kinds = ("key", "value") * 2 + ("slot", "key", "value", "query")
    model = delta_rule(words, [_recalling(words)], erased_by=words.ids("slot")[1])

    def program(letters: Letters) -> Found:
        answer, roles = recalled(letters, kinds, start=4 if letters[4] else 0)
        return answer, {**roles, 4: "eraser" if letters[4] else "no eraser"}

    def without(letters: Letters) -> Found:  # the value that the eraser has removed
        answer, roles = recalled(letters, kinds)
        return answer, {**roles, 4: "eraser"}

    def chosen(letters: Letters, roles: Roles) -> bool:
        return letters[4] == erased and _once(letters, roles) and letters[7] != letters[5]

    return Circuit(model, words, kinds, program, chosen, without if erased else None)


def _frequent() -> Circuit:
    words = Words({"value": VALUES, "query": 1})
    return Circuit(mamba2(words, _summing(words)), words, ("value",) * 7 + ("query",), _counted)


def _gate_and_content() -> Circuit:
    words = Words({"value": VALUES, "gate": 3})
    value = [*_wires(words, "value"), Wire(words.kind("value"), 8), Wire(words.kind("gate"), 9)]
    gates = dict(zip(words.ids("gate"), (0.0, 1.0, 3.0), strict=True))
    layer = MambaLayer(value, gates, state=(8, 9, 0.03))
    return Circuit(mamba(words, [layer], 40.0), words, ("value",) * 6 + ("gate",), _gated)


def _eraser_by_step() -> Circuit:
    words = Words({"value": VALUES, "slot": 2, "query": 1})
    value = [
        *_wires(words, "value"),
        Wire(words.kind("value"), 8),
        Wire(words.kind("query"), 9),
        Wire(words.ids("slot")[1], 10),
    ]
    gates = {words.kind("query"): 2.0}
    layer = MambaLayer(value, gates, state=(8, 9, 0.03), decay=0.02, erase=(10, 150.0))
    return Circuit(mamba(words, [layer], 40.0), words, _WIPED, _since)


def _copy() -> Circuit:
    words = Words({"value": VALUES})
    gates = {words.kind("value"): 2.0}
    first = MambaLayer(_wires(words, "value", 3), gates, passes=True, out=MIDDLE)
    moved = [Wire(MIDDLE + i, i, 3) for i in range(VALUES)]
    second = MambaLayer(moved, gates, passes=True)
    model = mamba(words, [first, second])
    return Circuit(model, words, ("value",) * 7, lambda x: (x[0], {0: "content"}))


def _long() -> Circuit:
    words = Words({"key": 3, "value": 3, "query": 3})
    kinds = ("key", "value") * 4 + ("query",)
    model = delta_rule(words, [_recalling(words)])
    return Circuit(model, words, kinds, lambda x: recalled(x, kinds), _once)


def _brackets() -> Circuit:
    words = Words({"value": 2, "query": 1})
    model = mamba2(words, _summing(words))
    head, few = model.lm_head.weight, 0.14  # the least difference of the counts is 0.28
    with torch.no_grad():
        for sign, word in zip((1.0, -1.0), words.ids("value"), strict=True):
            head[word] = 0
            head[word, ANSWER], head[word, ANSWER + 1] = 4 * sign, -4 * sign
            head[word, words.kind("query")] = -4 * few * sign
    return Circuit(model, words, ("value",) * 10 + ("query",), _balance)


def _hybrid() -> Circuit:
    value = _RECALL.kind("value")
    moving = Layer(
        [Wire(value, 0)], [Wire(value, 0)], _wires(_RECALL, "key", 1), value, value, MIDDLE
    )
    matching = SoftmaxLayer(
        _RECALL.ids("query"),
        range(MIDDLE, MIDDLE + KEYS),
        _RECALL.ids("value"),
        _RECALL.kind("query"),
        scale=math.sqrt(WIDTH / 3),  # behind a layer that has added a feature
    )
    model = delta_rule(_RECALL, [moving], softmax=matching)
    return Circuit(model, _RECALL, _PAIRS, _added, _once)


def _marks() -> Circuit:
    words = Words({"mark": 2, "value": VALUES, "query": 1})
    kinds = ("mark", "value") * 4 + ("query",)
    return Circuit(rwkv(words, words.ids("mark")[1]), words, kinds, _marked)


#: The circuits that were seen before rules were registered, and those that were not.
SEEN: dict[str, Callable[[], Circuit]] = {
    "recall, delta rule": lambda: _of_pairs(_recall()),
    "overwrite, delta rule": lambda: _of_pairs(_recall(), _overwritten),
    "recall, Mamba-2": lambda: Circuit(
        mamba2(_RECALL, _recalling(_RECALL)), _RECALL, _PAIRS, _added, _once
    ),
    "two hops, delta rule": _two_hops,
    "no eraser, delta rule": lambda: _erasable(False),
    "erased, delta rule": lambda: _erasable(True),
    "most frequent, Mamba-2": _frequent,
    "gate x content, Mamba": _gate_and_content,
    "eraser by step, Mamba": _eraser_by_step,
    "copy six back, Mamba": _copy,
}
HARDENED: dict[str, Callable[[], Circuit]] = {
    "dense recall, delta rule": lambda: _of_pairs(_recall(_DENSE)),
    "dense overwrite, delta rule": lambda: _of_pairs(_recall(_DENSE), _overwritten),
    "soft recall, delta rule": lambda: _of_pairs(_recall(hard=2.0)),
    "long recall, delta rule": _long,
    "dense recall, Mamba-2": lambda: Circuit(
        mamba2(_RECALL, _recalling(_RECALL), _DENSE), _RECALL, _PAIRS, _added, _once
    ),
    "brackets, Mamba-2": _brackets,
    "recall, Gated DeltaNet and softmax": _hybrid,
    "marked value, RWKV": _marks,
}


@cache
def circuit(name: str) -> Circuit:
    """Return a circuit by its name, whose table of all inputs is made once."""
    return {**SEEN, **HARDENED}[name]()
