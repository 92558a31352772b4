"""The note that the tests of bench have passed is of its files as they are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "passed.py"


def test_any_change_is_told(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    def passed(*arguments: str) -> bool:
        command = [sys.executable, tmp_path / "passed.py", *arguments]
        return subprocess.run(command, capture_output=True).returncode == 0

    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "a").write_text("first")
    git("init")
    git("add", ".")
    assert not passed() and passed("--write") and passed()
    (tmp_path / "untracked").write_text("any")
    assert passed()
    (tmp_path / "a").write_text("second")
    assert not passed()
    (tmp_path / "a").write_text("first")
    assert passed()
    git("mv", "a", "b")
    assert not passed() and passed("--write")
    git("add", ".")
    assert not passed(), "a file more is tracked"
    assert passed("--write") and passed()
