"""The package's own kernel: the recurrence in one launch is that token by token."""

from __future__ import annotations

import pytest
import torch
from oracles import kernels as naive
from oracles import relative_error
from torch import Tensor

from captum_ssm.operators.kernels import chunks, fused_fading

#: Examples, tokens and channels; of tokens and channels the last block is not whole.
SIZES = [(1, 1, 3), (3, 3, 5), (1, 65, 33), (2, 127, 2)]


def drawn(size: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Decays from all to nothing, and two vectors, laid out as views."""
    batch, tokens, channels = size
    decay = torch.rand(batch, channels, tokens).mT.pow(0.2)
    decay[:, tokens // 2] = 0
    return decay, torch.randn(2, batch, tokens, 2 * channels)[..., ::2]


def by_loop(decay: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """In float64 (S, B, L, H)."""
    return naive.recurrence(decay.double(), x.double(), transposed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_recurrences(size: tuple[int, int, int], transposed: bool) -> None:
    decay, x = drawn(size)
    found = fused_fading.run(decay, x, transposed=transposed)
    assert found.dtype == torch.float32
    assert relative_error(found, by_loop(decay, x, transposed)) <= 1e-6


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype: torch.dtype, transposed: bool) -> None:
    """Float64 is kept, and half precision computed in float32: only what comes out is rounded."""
    decay, x = drawn((1, 17, 3))
    decay, x = decay.double() if dtype == torch.float64 else decay, x.to(dtype)
    found = fused_fading.run(decay, x, transposed=transposed)
    assert found.dtype == dtype
    bound = {torch.float64: 1e-14, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert relative_error(found.double(), by_loop(decay, x, transposed)) <= bound


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("carried", [1, 3])
def test_states_of_chunks(carried: int, backwards: bool, begun: bool) -> None:
    """They are those that one chunk after the other leaves, whose carries are numbers or vectors.

    Of two examples, two groups, four chunks, three states, two vectors, two heads, four channels.
    """
    written = torch.randn(2, 2, 4, 3, 2, 2, 4)
    carry = torch.rand(2, 2, 4, carried, 1, 2, 1)
    state = torch.randn(2, 2, 3, 2, 2, 4) if begun else None
    given = written.clone(), carry, state, backwards
    found, wanted = chunks._states_together(*given), chunks._states(written, *given[1:])
    for own, other in zip(found, wanted, strict=True):
        assert relative_error(own, other) <= 1e-6
