"""Tables that are kept."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

MAIN = runpy.run_path(str(Path(__file__).parents[1] / "keep_tables.py"))["main"]
HEAD = "model,method,formulation,row,x\n"


def test_lines_are_added_or_the_table_is_another_one(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept", tmp_path / "new"
    for folder, text in ((kept, "m,a,,,1\nm,b,,,2\n"), (new, "m,b,,,3\nm,c,,,4\n")):
        folder.mkdir()
        (folder / "t.csv").write_text(HEAD + text, "utf-8")
    (new / "machine.json").write_text(json.dumps({"date": "2026-11-28"}), "utf-8")
    MAIN(new, kept, add=True)
    assert (kept / "t.csv").read_text("utf-8") == f"{HEAD}m,a,,,1\nm,b,,,3\nm,c,,,4\n"
    assert json.loads((kept / "measured.json").read_text("utf-8"))["t"] == {"added": "2026-11-28"}
    MAIN(new, kept)
    assert (kept / "t.csv").read_text("utf-8") == (new / "t.csv").read_text("utf-8")
    (new / "t.csv").write_text(HEAD.replace("x", "y"), "utf-8")
    with pytest.raises(SystemExit, match="other columns"):
        MAIN(new, kept, add=True)
