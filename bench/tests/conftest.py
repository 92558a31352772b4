"""Fixtures and hooks shared by the tests of experiments."""

from __future__ import annotations

import os
import random
from collections.abc import Generator, Iterator

import numpy as np
import pytest
import torch

#: "1": every skip is a failure.
NO_SKIPS = os.environ.get("CAPTUM_SSM_NO_SKIPS", "")
FIXED_SEED = os.environ.get("CAPTUM_SSM_SEED")


@pytest.fixture(autouse=True)
def seed() -> int:
    """The fresh seed this test runs with; CAPTUM_SSM_SEED fixes it."""
    seed = int(FIXED_SEED) if FIXED_SEED else int.from_bytes(os.urandom(4), "big")
    print(f"CAPTUM_SSM_SEED={seed}")  # shown of what fails
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if NO_SKIPS == "1" and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr} (CAPTUM_SSM_NO_SKIPS counts a skip as a failure)"
    return report
