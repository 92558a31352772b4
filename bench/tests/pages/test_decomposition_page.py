"""The page of decomposition errors is what its generator measures now."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("safetensors")


ROOT = Path(__file__).resolve().parents[3]
MEASURED = re.compile(r"\b\d+\.\d{3}\b")

Errors = Mapping[str, Mapping[str, list[float]]]


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("page", ROOT / "tools" / "decomposition_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def errors(tool: Any) -> Errors:
    return {name: tool.measured(name) for name in tool.LANGUAGE_RECIPES}


def test_the_page_is_current(tool: Any, errors: Errors) -> None:
    page = (ROOT / "docs" / tool.PAGE).read_text(encoding="utf-8")
    again = tool.page(errors)
    assert MEASURED.sub("?", page) == MEASURED.sub("?", again)
    found, wanted = (list(map(float, MEASURED.findall(text))) for text in (page, again))
    assert len(found) == sum(len(row) for rows in errors.values() for row in rows.values())
    assert found == pytest.approx(wanted, rel=0.02, abs=0.002)


def test_linearised_nothing_is_missing_and_else_much(errors: Errors) -> None:
    for found in errors.values():
        assert max(found["linearized"]) <= 1e-5
        assert min(min(row) for name, row in found.items() if name != "linearized") >= 0.01


def test_the_best_stand_in_is_counted_by_layers(tool: Any) -> None:
    first = {"linearized": [0.0, 0.0], "silu": [0.1, 0.2], "relu": [0.3, 0.1], "identity": [2, 2]}
    second = {"linearized": [0.0], "silu": [0.4], "relu": [0.5], "identity": [0.6]}
    found = tool.best({"one": first, "two": second})
    assert found == '`"silu"` in 2, `"relu"` in 1 of 3 layers'


def test_the_picture_shows_the_errors(tool: Any, tmp_path: Path) -> None:
    errors = {
        name: {activation: [0.1 * i + 0.01 * j for j in range(3)] for i, activation in rows}
        for name, rows in (("one", [*enumerate(tool.ACTIVATIONS)]), ("two", [(7, "silu")]))
    }
    figure = tool.picture(errors)
    for axis, (name, rows) in zip(figure.axes, errors.items(), strict=True):
        assert axis.get_title() == name
        drawn = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axis.containers}
        assert drawn == {activation: pytest.approx(row) for activation, row in rows.items()}
        places = sorted(bar.get_x() for bars in axis.containers for bar in bars)
        width = axis.containers[0][0].get_width()
        assert min(b - a for a, b in pairwise(places)) >= 0.99 * width


def test_it_writes_where_it_is_told(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "LANGUAGE_RECIPES", {"some-model": None})
    monkeypatch.setattr(tool, "measured", lambda name: {"silu": [0.25, 12.5]})
    tool.main(tmp_path)
    assert '| `"silu"` | 0.250 | 12.500 |' in (tmp_path / tool.PAGE).read_text(encoding="utf-8")
    for docs in (tmp_path, ROOT / "docs"):
        picture = (docs / tool.PICTURE).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) < 100_000
