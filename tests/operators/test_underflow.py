"""Denormal numbers are flushed inside the ``with``, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from captum_ssm.operators.kernels.arithmetic import underflow_flushed

TINY = torch.finfo(torch.float32).tiny


@pytest.fixture(autouse=True)
def unflushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


def half_of_the_smallest() -> float:
    return float(torch.tensor(TINY).mul(0.5))


def test_flushed_inside_only() -> None:
    assert half_of_the_smallest() > 0
    with underflow_flushed():
        assert half_of_the_smallest() == 0
        with underflow_flushed():
            pass
        assert half_of_the_smallest() == 0
    assert half_of_the_smallest() > 0


def test_undone_after_an_error() -> None:
    with pytest.raises(KeyError), underflow_flushed():
        raise KeyError
    assert half_of_the_smallest() > 0


def test_whatever_tensors_are_made_of_by_default() -> None:
    """Of float32 on the CPU it is told, where most tensors may be wider or on no device at all."""
    before = torch.get_default_dtype()
    torch.set_flush_denormal(True)
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"), underflow_flushed():
                pass
        finally:
            torch.set_default_dtype(before)
        assert half_of_the_smallest() == 0, "it was on"


def test_left_on_where_it_was_on() -> None:
    torch.set_flush_denormal(True)
    with underflow_flushed():
        pass
    assert half_of_the_smallest() == 0
