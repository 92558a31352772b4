"""What a trace must leave behind as it was."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.snapshots import Snapshot
from zoo.mamba import transformers_model

from captum_ssm.mixers import registry


@pytest.fixture
def snapshot() -> type[Snapshot]:
    return Snapshot


@pytest.fixture
def model() -> Any:
    """A small Mamba of three blocks."""
    return transformers_model("mamba", num_hidden_layers=3)


@pytest.fixture
def private_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_architectures", dict(registry._architectures))
    monkeypatch.setattr(registry, "_adapters", dict(registry._adapters))
