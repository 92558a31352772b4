"""The kernels' tables name every kernel, and kernels say what they are."""

from __future__ import annotations

import importlib
import pkgutil
import re

import oracles
import pytest

from captum_ssm.operators import kernels

MODULES = {info.name for info in pkgutil.iter_modules(kernels.__path__)}
#: What they share, in the words of the second table.
SHARED = {"arithmetic", "bands", "gpu", "portions", "rows", "truths"}


def documentation(module: str) -> str:
    return importlib.import_module(f"{kernels.__name__}.{module}").__doc__ or ""


def test_every_kernel_is_in_the_tables() -> None:
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
