"""What a trace must leave behind as it was."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.snapshots import Snapshot
from zoo.mamba import transformers_model


@pytest.fixture
def snapshot() -> type[Snapshot]:
    return Snapshot


@pytest.fixture
def model() -> Any:
    """A small Mamba of three blocks."""
    return transformers_model("mamba", num_hidden_layers=3)
