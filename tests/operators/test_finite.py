"""Whether numbers are finite, from the least and the greatest of them."""

from __future__ import annotations

import pytest
import torch

from captum_ssm.operators.kernels.truths import all_finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(1,), (3, 5), (2, 67, 33)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_entry_anywhere_is_found(
    dtype: torch.dtype, size: tuple[int, ...], bad: float
) -> None:
    x = torch.randn(size).to(dtype)
    x.flatten()[0] = torch.finfo(dtype).max
    assert all_finite(x)
    for place in torch.randint(x.numel(), (20,)).tolist():
        found = x.flatten().clone()
        found[place] = bad
        assert not all_finite(found.view(size))
        assert not all_finite(found.view(size).movedim(0, -1))


def test_repeated_and_absent_entries() -> None:
    assert all_finite(torch.randn(3, 1).expand(3, 100))
    assert not all_finite(torch.full((1, 1), torch.nan).expand(3, 100))
    assert all_finite(torch.empty(2, 0))
    assert all_finite(torch.tensor([True, False]))
