"""Denormal numbers are flushed for a while; parts are halved where memory runs out."""

from __future__ import annotations

import pytest
import torch

from captum_ssm.operators.kernels.arithmetic import underflow_flushed
from captum_ssm.operators.kernels.portions import as_memory_allows


def flushes() -> bool:
    tiny = torch.finfo(torch.float32).tiny
    return float(torch.tensor(tiny, dtype=torch.float32, device="cpu").mul(0.5)) == 0


def test_denormal_numbers_are_flushed_inside_and_nowhere_else() -> None:
    """Whatever tensors are made of by default, and on which device."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    kept = torch.get_default_dtype()
    try:
        for before in (True, False):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                torch.set_flush_denormal(before)
                torch.set_default_dtype(dtype)
                with pytest.raises(KeyError), torch.device("meta"), underflow_flushed():
                    with underflow_flushed():
                        pass
                    assert flushes()
                    raise KeyError
                assert flushes() == before
    finally:
        torch.set_default_dtype(kept)
        torch.set_flush_denormal(False)


def test_nothing_but_memory_is_recognized() -> None:
    def form(part: range) -> object:
        return torch.empty(2**55 if len(part) > 1 else 1, dtype=torch.uint8)

    assert len(list(as_memory_allows(range(3), 3, form))) == 3
    for error in (torch.cuda.OutOfMemoryError("out of memory"), RuntimeError("mat1 and mat2")):

        def fails(part: range, error: RuntimeError = error) -> object:
            raise error

        with pytest.raises(RuntimeError, match=str(error)):
            list(as_memory_allows(range(9), 4, fails))
