"""What a trace must leave behind as it was."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
from snapshots import Snapshot

from captum_ssm.mixers import registry


@pytest.fixture
def snapshot() -> type[Snapshot]:
    return Snapshot


@pytest.fixture
def model() -> Any:
    """A small Mamba of three blocks."""
    return oracles.transformers_model("mamba", num_hidden_layers=3)


@pytest.fixture
def private_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_architectures", dict(registry._architectures))
    monkeypatch.setattr(registry, "_adapters", dict(registry._adapters))
