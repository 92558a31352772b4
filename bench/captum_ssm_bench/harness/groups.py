"""Tables of several models together, and of how much better each row is than one of them.

A group counts each of its models alike, however many examples and trainings each has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from captum_ssm.errors import OptionError

from .experiment import Column, Experiment, name_of
from .records import Key, Numbers, Rows
from .spread import alike
from .tables import Entry, Line, numbers_of
from .verdicts import Side, both_known, gain_of

#: The numbers of one row of an example, or of two that are compared.
_Example = Sequence[Numbers]
#: By model, by training, the examples.
_Models = Mapping[str, Mapping[str, Mapping[tuple[int, int], _Example]]]


def group_lines(experiment: Experiment, results: Iterable[tuple[Key, Rows]]) -> list[Line]:
    """The rows of each group of an experiment's models.

    Args:
        experiment: whose groups and columns are wanted.
        results: what was measured, as of :func:`.run`.

    Returns:
        Lines whose model is the group with the number of its models that were measured.  A row that
        one of them lacks is left out.
    """
    return list(_lines(experiment.columns, experiment.groups, _by_row(results), _counted))


def differences(
    experiment: Experiment, results: Iterable[tuple[Key, Rows]], against: Side
) -> tuple[Experiment, list[Line]]:
    """By how much each row is better than one of them, on the same examples.

    Args:
        experiment: whose columns are wanted.
        results: what was measured, as of :func:`.run`.
        against: the row that the others are held against.

    Returns:
        An experiment whose columns are the gains, each the higher the better, and its lines: of
        each group, then of each model.

    Raises:
        OptionError: when the row that is held against was not measured.
    """
    found = _by_row(results)
    if against not in found:
        measured = "; ".join(map(str, sorted(found)))
        raise OptionError(f"against={str(against)!r} was not measured. Use one of: {measured}.")
    held = copy(experiment)
    held.name = f"{experiment.name}-against"
    held.title = f"{experiment.title}: gain over {against}"
    held.columns = [replace(c, better="high" if c.better else "") for c in experiment.columns]
    single = {name: [name] for name in sorted({name for row in found.values() for name in row})}
    pairs = {side: _paired(own, found[against]) for side, own in found.items() if side != against}
    return held, [
        *_lines(experiment.columns, experiment.groups, pairs, _counted),
        *_lines(experiment.columns, single, pairs, lambda name, _: name),
    ]


def _counted(group: str, models: int) -> str:
    """What a group is called in a table."""
    return f"{group} ({models} model{'s' if models > 1 else ''})"


def _by_row(results: Iterable[tuple[Key, Rows]]) -> Mapping[Side, _Models]:
    found: dict[Side, dict[str, dict[str, dict[tuple[int, int], _Example]]]] = {}
    for key, rows in results:
        for row, numbers in rows.items():
            models = found.setdefault(Side(key.method, key.formulation, row), {})
            examples = models.setdefault(name_of(key.model), {}).setdefault(key.model, {})
            examples[key.seed, key.example] = [numbers]
    return found


def _paired(models: _Models, others: _Models) -> _Models:
    """The examples that two rows share, with the numbers of both."""
    found: dict[str, dict[str, dict[tuple[int, int], _Example]]] = {}
    for name, trainings in models.items():
        for label, examples in trainings.items():
            other = others.get(name, {}).get(label, {})
            both: dict[tuple[int, int], _Example] = {
                at: [*one, *other[at]] for at, one in examples.items() if at in other
            }
            if both:
                found.setdefault(name, {})[label] = both
    return found


def _lines(
    columns: Sequence[Column],
    groups: Mapping[str, Sequence[str]],
    found: Mapping[Side, _Models],
    called: Callable[[str, int], str],
) -> Iterator[Line]:
    """The rows that all measured models of a group have."""
    for group, names in groups.items():
        measured = {name for models in found.values() for name in models}.intersection(names)
        for side, models in sorted(found.items()):
            if measured and measured <= models.keys():
                own = [[[*e.values()] for e in models[name].values()] for name in sorted(measured)]
                count = sum(len(examples) for trainings in own for examples in trainings)
                entries = {column.name: _entry(column, own) for column in columns}
                trainings = max(map(len, own))
                yield Line(called(group, len(own)), *side, trainings, count, entries)


def _entry(column: Column, models: Sequence[Sequence[Sequence[_Example]]]) -> Entry:
    compared = len(models[0][0][0]) > 1
    statistic = gain_of(column) if compared else column.statistic
    found = alike(statistic, [[_numbers(column, each) for each in of] for of in models])
    return Entry(*(float(part[0]) for part in (found.value, found.low, found.high)))


def _numbers(column: Column, examples: Sequence[_Example]) -> Tensor:
    """What a column, or its gain, is made of, (n, k) or (n, 2 k)."""
    sides = zip(*examples, strict=True)
    numbers = torch.cat([numbers_of(column, side) for side in sides], 1)
    return both_known(numbers) if len(examples[0]) > 1 else numbers
