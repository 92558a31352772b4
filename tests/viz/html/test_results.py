"""Pages of results: what they hold, and how notebooks show them."""

from __future__ import annotations

import html
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pages import addresses, read_page
from zoo.small import images, mamba_lm, token_ids, vision

from captum_ssm import ImplicitAttentionRollout, LatimFlow, LatimLogit, MambaAttribution, compare
from captum_ssm.attr import Comparison

WORDS = ["anna", "owns", "<script>", "lamp", "."]


def written(found: Any, tmp_path: Path, **options: Any) -> dict[str, Any]:
    """The facts of a result's page."""
    path = tmp_path / "new" / "found.html"
    assert found.to_html(path, **options) == path
    page = read_page(path)
    assert addresses(page) == []
    return page.facts


def test_methods_side_by_side(tmp_path: Path) -> None:
    found = compare(
        mamba_lm(), [LatimFlow, ImplicitAttentionRollout], token_ids(2, 5), target=(-1, 3)
    )
    facts = written(found.named([WORDS, WORDS[::-1]]), tmp_path, title="T & U")
    assert read_page(tmp_path / "new" / "found.html").texts("h1") == ["T & U"]
    assert [e["words"]["labels"] for e in facts["examples"]] == [WORDS, WORDS[::-1]]
    for number, example in enumerate(facts["examples"]):
        assert [row["name"] for row in example["rows"]] == list(found)
        for row, relevance in zip(example["rows"], found.values(), strict=True):
            np.testing.assert_allclose(row["values"], relevance[number], rtol=1e-4, atol=1e-9)
            assert row["scale"] == max(map(abs, row["values"]))
        assert "identity" not in example["rows"][0]["note"]
        assert "identity" in example["rows"][1]["note"]


def test_a_decomposition_is_written_out(tmp_path: Path) -> None:
    found = LatimFlow(mamba_lm()).decompose(token_ids(1, 5), (-1, 3), rule="centred")
    (example,) = written(found, tmp_path)["examples"]
    assert example["words"]["labels"] == list("01234")
    assert [row["name"] for row in example["rows"]][:2] == ["relevance", "as content"]
    np.testing.assert_allclose(example["rows"][0]["values"], found.tokens[0], rtol=1e-4)
    np.testing.assert_allclose(example["rows"][1]["values"], found.roles["content"][0], rtol=1e-4)
    assert len({row["scale"] for row in example["rows"]}) == 1
    parts = dict(example["sum"]["parts"])
    assert sum(parts.values()) == pytest.approx(example["sum"]["output"], abs=1e-4)
    np.testing.assert_allclose(example["layers"][1], found.streams[1][0], rtol=1e-4, atol=1e-9)
    assert len(example["layers"]) == 3


@pytest.mark.slow
def test_decompositions_of_logits_and_of_images(tmp_path: Path) -> None:
    logits = LatimLogit(mamba_lm()).decompose(token_ids(1, 5), (-1, 3))
    (example,) = written(logits, tmp_path)["examples"]
    np.testing.assert_allclose(example["rows"][0]["values"], logits.tokens[0], rtol=1e-4)
    pixels = LatimFlow(vision("middle", (3, 4))).decompose(images(1), 0)
    (example,) = written(pixels, tmp_path)["examples"]
    (shown,) = example["maps"]
    assert example["rows"] == []
    wanted = pixels.inputs[0].sum(0)
    assert shown["size"] == list(wanted.shape)
    np.testing.assert_allclose(shown["values"], wanted.flatten(), rtol=1e-3, atol=1e-7)


def test_what_says_nothing_says_so(tmp_path: Path) -> None:
    rows = {
        MambaAttribution.get_name(): torch.tensor([[1e-5, 2e-5, 1.0]]),
        ImplicitAttentionRollout.get_name(): torch.tensor([[0.2, 0.0, 1.0]]),
        "zero": torch.zeros(1, 3),
    }
    (example,) = written(Comparison(rows), tmp_path)["examples"]
    silent = ["says nothing" in row["note"] for row in example["rows"]]
    assert silent == [True, False, True]


def test_notebooks_show_a_frame_that_is_whole_by_itself() -> None:
    shown = Comparison({"one": torch.tensor([[0.5, -1.0]])}).named(["</iframe>", "b"])._repr_html_()
    (frame,) = re.findall(r"<iframe ([^>]*)></iframe>", shown)
    assert 'sandbox="allow-scripts"' in frame
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1])
    assert page.startswith("<!doctype html>") and "default-src" in page
    assert not re.search(r"https?://", page)


def test_show_is_below_the_cell_or_in_a_browser(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, opened = Comparison({"one": torch.tensor([[0.5]])}), []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found.show()
    (file,) = tmp_path.iterdir()
    assert opened == [file.as_uri()] and f"wrote {file}" in capsys.readouterr().out
    assert "<!doctype html>" in file.read_text()
    displayed: list[Comparison] = []
    shell = types.SimpleNamespace(kernel=object())
    python = types.SimpleNamespace(get_ipython=lambda: shell)
    display = types.SimpleNamespace(display=displayed.append)
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    found.show()
    assert displayed[0] is found and len(opened) == 1
