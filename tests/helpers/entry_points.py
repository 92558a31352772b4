"""Installed packages that declare entry points."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def declare(
    folder: Path, patch: pytest.MonkeyPatch, group: str, entry: str, code: str = ""
) -> None:
    """Install a package that declares ``entry``, and has one module named ``declaring``."""
    (folder / "declaring.py").write_text(code)
    info = folder / "declaring-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declaring\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    patch.syspath_prepend(folder)
    patch.delitem(sys.modules, "declaring", raising=False)
