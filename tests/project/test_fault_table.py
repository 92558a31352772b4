"""Faults that are planted by hand, with ``python -m tests.faults``, still fit the package."""

from __future__ import annotations

from faults import FAULTS, ROOT, sources


def test_every_fault_can_be_planted() -> None:
    package = sources()
    for fault in FAULTS:
        path, text = fault.planted(package)
        assert text != package[path], fault.name
        assert all((ROOT / "tests" / name).exists() for name in fault.tests), fault.name


def test_faults_are_told_apart_by_name() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 40
