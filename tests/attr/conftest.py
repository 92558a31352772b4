"""Puts the helper modules of this folder on the path; small tensors are fastest on one thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
