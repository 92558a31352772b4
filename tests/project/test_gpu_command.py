"""``python -m benchmarks.gpu``; its rehearsal on a CPU is run by ``nox -s speed``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and not list(tmp_path.iterdir())
    assert "no CUDA device was found" in result.stderr and "--rehearse" in result.stderr


def row_of(name: str, other: Path | None, folder: Path) -> str:
    """What the page says of a case."""
    page = gpu.Page(folder, rehearse=True)
    gpu.Running(name, other, page, rehearse=True).wait(time.monotonic() + 120)
    assert page.failed
    return (folder / "gpu.md").read_text()


@pytest.mark.slow
def test_a_case_that_fails_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.CASES, "unknown", gpu.Case(gpu.tests, limit=120))
    text = row_of("unknown", None, tmp_path)
    assert "unknown: FAILED (2)" in text and "- torch: " in text
    assert "invalid choice" in (tmp_path / "gpu.log").read_text()


@pytest.mark.slow
def test_a_case_is_stopped_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.CASES, "tests", gpu.Case(gpu.tests, limit=0.1))
    assert "tests: FAILED: stopped at its limit" in row_of("tests", None, tmp_path)


def test_a_call_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(gpu.Interrupted, match="more than 0 s"), gpu.alarm(0.05):
        time.sleep(5)
