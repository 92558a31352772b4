"""Explaining in other processes: forks of a used process, and new ones."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from helpers.every_method import NAMES, OF_TEXTS, call, call_all
from oracles import relative_error
from torch import Tensor
from zoo import architectures

pytest.importorskip("transformers")

#: What takes images as well as texts, without what calls several of them.
COMMON = [name for name in NAMES if name not in ("compare", "report", *OF_TEXTS)]
STARTS = pytest.mark.parametrize("start", ["fork", "spawn"])
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


def close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(relative_error(a, b) <= 1e-5 for a, b in zip(found, wanted, strict=True))


@STARTS
def test_every_method(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent has used every method before, so that a fork takes along what it has set up."""
    cases = [
        make(monkeypatch) for make in (architectures.mamba, architectures.jamba, architectures.vim)
    ]
    given = [(case.model, case.inputs, case.target["target"]) for case in cases]
    wanted = [call(name, *each) for each in given for name in COMMON]
    found = in_a_process(start, COMMON, given)
    for one, other in zip(found, wanted, strict=True):
        assert close(one, other)
    again = [call(name, *each) for each in given for name in COMMON]
    assert all(map(close, again, wanted))
