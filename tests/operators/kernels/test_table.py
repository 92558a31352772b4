"""The kernels' table says which kernel serves which operation, and kernels say what they are."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import oracles
import pytest
import torch
from torch import Tensor

from captum_ssm.operators import (
    DeltaRule,
    ElementwiseRecurrence,
    Operator,
    ScalarDecayHeads,
    SelectiveScan,
    VectorDecayHeads,
    kernels,
)

FOLDER = Path(kernels.__path__[0])
MODULES = {info.name for info in pkgutil.iter_modules(kernels.__path__)}
#: What they share, in the words of the second table.
SHARED = {"arithmetic", "bands", "gpu", "portions", "rows", "truths"}
#: What no operator takes on a processor.
ON_A_GPU = {"fused_delta", "fused_fading", "fused_heads", "fused_scan", "fused_taps"}
BATCH, TOKENS, HEADS, STATES, VALUES = 1, 150, 4, 3, 2


def randn(*size: int) -> Tensor:
    return torch.randn(BATCH, TOKENS, *size)


def decays(*size: int) -> Tensor:
    return torch.rand(BATCH, TOKENS, *size).clamp_min(0.1)


MAKE: dict[str, Callable[[], Operator]] = {
    "ElementwiseRecurrence": lambda: ElementwiseRecurrence(decays(HEADS)),
    "SelectiveScan": lambda: SelectiveScan(
        decays(HEADS), -torch.rand(HEADS, STATES), randn(STATES), randn(STATES)
    ),
    "ScalarDecayHeads": lambda: ScalarDecayHeads(
        randn(1, STATES), randn(1, STATES), decays(HEADS).log(), None, VALUES
    ),
    "VectorDecayHeads": lambda: VectorDecayHeads(
        randn(HEADS, STATES), randn(HEADS, STATES), decays(HEADS, STATES).log(), VALUES
    ),
    "DeltaRule": lambda: DeltaRule(
        randn(HEADS, STATES), randn(HEADS, STATES), decays(HEADS), decays(HEADS).log(), VALUES
    ),
}


def maps(operator: Operator) -> None:
    """Of one vector, and of many."""
    for stack in (1, 9):
        v = torch.randn(stack, *operator.shape)
        operator.apply(v)
        operator.transpose(v)


def strips(operator: Operator) -> None:
    """The first rows and the last ones; factors common to all channels, and of their own."""
    one = torch.ones(1, 1, 1, 1)
    for factors in ((one, one), torch.randn(2, *operator.shape)):
        for rows in (range(3), range(TOKENS - 3, TOKENS)):
            operator.strip(*factors, rows)


def heads(operator: Operator) -> None:
    operator.contract_heads(*torch.randn(2, *operator.shape))


def gradients(operator: Operator) -> None:
    operator.backward(*torch.randn(2, *operator.shape))


OPERATIONS = (maps, strips, heads, gradients)


def entered(call: Callable[[], None]) -> set[str]:
    """The kernels that were called from elsewhere."""
    found = set()

    def is_kernel(frame: FrameType | None) -> bool:
        return frame is not None and Path(frame.f_code.co_filename).parent == FOLDER

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_kernel(frame) and not is_kernel(frame.f_back):
            found.add(Path(frame.f_code.co_filename).stem)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found - SHARED


def cells() -> dict[str, list[set[str]]]:
    """The kernels in each cell of the first table, by class."""
    assert kernels.__doc__ is not None
    lines = kernels.__doc__.splitlines()
    bars = [i for i, line in enumerate(lines) if line.startswith("====")][:3]
    edges = [match.span() for match in re.finditer("=+", lines[bars[0]])]
    table: dict[str, list[set[str]]] = {}
    kind = ""
    for line in lines[bars[1] + 1 : bars[2]]:
        name, *found = (line[start:end].strip() for start, end in edges)
        kind = name or kind
        row = table.setdefault(kind, [set() for _ in found])
        for cell, text in zip(row, found, strict=True):
            cell |= set(re.findall(r"\w+", text))
    return table


@pytest.mark.parametrize("kind", MAKE)
def test_the_table_tells_which_kernels_are_called(kind: str) -> None:
    operator = MAKE[kind]()
    for operation, told in zip(OPERATIONS, cells()[kind], strict=True):
        assert entered(partial(operation, operator)) == told, operation.__name__


def documentation(module: str) -> str:
    return importlib.import_module(f"{kernels.__name__}.{module}").__doc__ or ""


def test_every_kernel_is_in_the_tables() -> None:
    told = {name for row in cells().values() for cell in row for name in cell}
    assert told == MODULES - SHARED - ON_A_GPU
    for module in MODULES:
        assert re.search(rf"^{module}  |:mod:`\.{module}`", kernels.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("module", sorted(MODULES - SHARED))
def test_a_kernel_says_what_it_takes_and_costs_and_where_it_is_from(module: str) -> None:
    text = documentation(module)
    fields = re.findall(r"^:([\w ]+): \S", text, re.MULTILINE)
    assert fields == ["takes", "gives", "cost", "literature", "naive version"]
    assert re.search(r", (19|20)\d\d\b", text), "no reference has a year"


@pytest.mark.parametrize("module", sorted(MODULES - SHARED))
def test_a_kernel_has_a_naive_version(module: str) -> None:
    _, _, told = documentation(module).partition(":naive version:")
    names = re.findall(r"``([\w.]+)``", told)
    assert names
    for name in names:
        place, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(f"{oracles.__name__}.{place}"), function))
