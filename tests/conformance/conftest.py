"""Models that are watched while Captum's tools run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.snapshots import Snapshot
from torch import nn


@pytest.fixture
def watched() -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Hands a model on, and in the end finds it as it was, but for the random numbers drawn."""
    seen: list[Snapshot] = []

    def watch(model: nn.Module) -> nn.Module:
        seen.append(Snapshot(model))
        return model

    yield watch
    for snapshot in seen:
        snapshot.check(random_numbers=False)
    assert torch.is_grad_enabled()
