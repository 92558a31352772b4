"""The tables that pages read are those that were written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


def test_tables_are_kept_with_their_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    from keep_tables import main

    results, docs = tmp_path / "results", tmp_path / "docs"
    for folder in (results, docs):
        folder.mkdir()
    machine = {"date": "2020-02-29", "torch": "9.9"}
    (results / "machine.json").write_text(json.dumps(machine))
    (results / "copying.csv").write_text("new")
    for name in ("copying", "passkey"):
        (docs / f"{name}.csv").write_text("old")
    (docs / "measured.json").write_text(json.dumps({"passkey": {"date": "2019-01-01"}}))
    main(results, docs)
    kept = {path.name: path.read_text() for path in docs.glob("*.csv")}
    assert kept == {"copying.csv": "new", "passkey.csv": "old"}
    assert json.loads((docs / "measured.json").read_text()) == {
        "copying": machine,
        "passkey": {"date": "2019-01-01"},
    }
    del sys.modules["keep_tables"]
