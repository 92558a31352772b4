"""``python -m benchmarks.gpu``; its rehearsal on a CPU is run by ``nox -s speed``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_a_step_that_fails_is_on_the_page(tmp_path: Path) -> None:
    steps = [("good", ("-c", "print('| a |')")), ("bad", ("-c", "1/0"))]
    program = f"""
import sys
from benchmarks import gpu
gpu.small = lambda folder: [gpu.Step(*step) for step in {steps!r}]
sys.argv = ["gpu", "--rehearse", "--out", {str(tmp_path)!r}]
gpu.main()
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    page = (tmp_path / "gpu.md").read_text()
    assert result.returncode == 1
    assert "| good |" in page and "| passed |" in page and "FAILED (1)" in page
    assert "| a |" in page and "ZeroDivisionError" in page and "- torch: " in page
