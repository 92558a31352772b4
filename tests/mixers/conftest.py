"""Packages whose layers run on the CPU here."""

from __future__ import annotations

import fla_cpu
import pytest


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> fla_cpu.FLA:
    """flash-linear-attention on the CPU."""
    return fla_cpu.install(monkeypatch)
