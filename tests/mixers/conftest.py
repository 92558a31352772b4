"""Packages whose layers run on the CPU here."""

from __future__ import annotations

from typing import Any

import pytest
from zoo import timm_cpu


@pytest.fixture(scope="session")
def timm() -> Any:
    """timm beside a CPU build of torch."""
    return timm_cpu.timm()


@pytest.fixture
def mambavision(timm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """mambavision's models on the CPU, with the reference scan of mamba_ssm."""
    return timm_cpu.mambavision(monkeypatch)
