"""Fixtures of the examples in docstrings, which are run as tests too."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def forgotten_mixers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example registers is forgotten after it."""
    if isinstance(request.node, pytest.DoctestItem):
        from captum_ssm import register_mixer

        # not the module by its name, of which pytest may have loaded a copy
        held = register_mixer.__globals__
        for name in ("_architectures", "_adapters"):
            monkeypatch.setitem(held, name, dict(held[name]))
