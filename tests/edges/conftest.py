"""A model of every architecture, and cuts made by hand."""

from __future__ import annotations

import pytest
from zoo.architectures import ZOO, Case


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    return ZOO[request.param](monkeypatch)
