"""Explaining in other processes: forks of a used process, and new ones."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from helpers.every_method import NAMES, OF_TEXTS, call, call_all, close
from torch import Tensor
from zoo import architectures

#: Methods that take all inputs, without calls of several methods.
COMMON = [name for name in NAMES if name not in ("compare", "report", *OF_TEXTS)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="the system has no fork"
    ),
]


def in_a_process(start: str, names: list[str], cases: list[Any]) -> list[list[Tensor]]:
    context = multiprocessing.get_context(start)
    queue = context.Queue()
    process = context.Process(target=call_all, args=(queue, names, cases))
    process.start()
    found = queue.get(timeout=100)
    process.join(20)
    assert process.exitcode == 0
    assert not isinstance(found, str), found
    return [[torch.from_numpy(x) for x in each] for each in found]


@pytest.mark.parametrize(
    ("start", "make"), [("fork", architectures.mamba), ("spawn", architectures.jamba)]
)
def test_every_method(start: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent has used every method before, so that a fork takes along what it has set up."""
    case = make(monkeypatch)
    given = case.model, case.inputs, case.target["target"]
    wanted = [call(name, *given) for name in COMMON]
    found = in_a_process(start, COMMON, [given])
    assert len(found) == len(wanted) and all(map(close, found, wanted))
    assert all(map(close, [call(name, *given) for name in COMMON], wanted))
