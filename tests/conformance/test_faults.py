"""A call that fails or is interrupted, wherever it is, leaves everything as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.every_method import MODELS, NAMES, OF_TEXTS, call
from helpers.snapshots import Snapshot, process_state
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from captum_ssm.errors import AdapterError
from captum_ssm.tracing import structure

pytestmark = pytest.mark.slow

#: Every method on every model; what calls several on the first alone.
CASES = [
    (make, name)
    for make in MODELS
    for name in NAMES
    if make is MODELS[0] or name not in ("compare", "report", *OF_TEXTS)
]


class Planned(Exception):
    """No error that any code expects."""


class Fault(TorchDispatchMode):
    """Counts the operations of torch, forward and backward, and raises at one of them.

    Args:
        at: how many operations run before. Default: None, all.
        error: what is raised then. Default: :class:`Planned`.
    """

    def __init__(self, at: int | None = None, error: type[BaseException] = Planned) -> None:
        super().__init__()
        self.count, self._at, self._error = 0, at, error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.count == self._at:
            raise self._error
        self.count += 1
        return func(*args, **(kwargs or {}))


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def call_anew(*given: Any) -> list[Tensor]:
    """A call of as many operations each time: what is known of a model saves some."""
    structure._arrangements.clear()
    return call(*given)


def check(make: Any, name: str, monkeypatch: pytest.MonkeyPatch, draws: int) -> None:
    case = make(monkeypatch)
    given = (name, case.model, case.inputs, case.target["target"])
    call(*given)  # what is imported and cached on first use comes now
    with Fault() as counted:
        wanted = call_anew(*given)
    places = [0, counted.count - 1, *(random.randrange(counted.count) for _ in range(draws))]
    errors = [random.choice([Planned, KeyboardInterrupt]) for _ in places]
    before, process = Snapshot(case.model), process_state(case.model)
    for at, error in zip(places, errors, strict=True):
        with pytest.raises((error, AdapterError)) as caught, Fault(at, error):
            call_anew(*given)
        # what an adapter raises names the adapter, and keeps its cause; an interrupt stays one
        assert error in (type(caught.value), type(caught.value.__cause__))
        before.check()
        assert process_state(case.model) == process, (at, counted.count)
    assert same(call_anew(*given), wanted)
    before.check()
    assert process_state(case.model) == process


@pytest.mark.parametrize(("make", "name"), CASES)
def test_after_a_failure_anywhere(make: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(make, name, monkeypatch, draws=1 if name == "report" else 4)
