"""Steps of fading recurrences against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error
from oracles.kernels import recurrence
from torch import Tensor

from captum_ssm.operators.kernels.odd_even import FadingSteps

STACK, BATCH, HEADS = 3, 2, 5


def fed(x: Tensor, decay: Tensor, transposed: bool, size: int, in_place: bool) -> Tensor:
    """The same by steps, ``size`` tokens at a time, always in the same memory."""
    tokens = x.shape[2]
    steps = FadingSteps(lambda part: decay[:, part], decay, transposed)
    held: dict[int, Tensor] = {}
    parts = [slice(t, min(t + size, tokens)) for t in range(0, tokens, size)]
    found = {}
    for part in reversed(parts) if transposed else parts:
        length = part.stop - part.start
        out = held.setdefault(length, x.new_empty(STACK, BATCH, length, HEADS))
        given = out.copy_(x[:, :, part]) if in_place else x[:, :, part]
        steps(given, part, out)
        found[part.start] = out.clone()
    return torch.cat([found[part.start] for part in parts], 2)


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("transposed", [False, True], ids=["map", "adjoint"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 17, 18, 31, 100, 200])
def test_any_number_of_tokens_at_a_time(size: int, transposed: bool, in_place: bool) -> None:
    tokens = 141
    x = torch.randn(STACK, BATCH, tokens, HEADS, dtype=torch.float64)
    decay = torch.rand(BATCH, tokens, HEADS, dtype=torch.float64)
    decay = decay.where(torch.rand_like(decay) > 0.1, 0)
    given = x.clone()
    found = fed(given, decay, transposed, size, in_place)
    assert relative_error(found, recurrence(decay, x, transposed)) <= 1e-13
    assert torch.equal(given, x)


@pytest.mark.parametrize("transposed", [False, True], ids=["map", "adjoint"])
def test_one_number_for_all_channels(transposed: bool) -> None:
    tokens = 19
    x = torch.randn(STACK, BATCH, tokens, 1, dtype=torch.float64).expand(-1, -1, -1, HEADS)
    decay = torch.rand(BATCH, tokens, HEADS, dtype=torch.float64)
    found = fed(x, decay, transposed, 6, in_place=False)
    assert relative_error(found, recurrence(decay, x, transposed)) <= 1e-13


def test_what_decays_to_nothing_stays_finite() -> None:
    """No quotient of decays, and no sum of their logarithms, is ever formed."""
    decay = torch.full((BATCH, 300, HEADS), 1e-30)
    decay[:, ::7] = 1.0
    x = torch.randn(STACK, BATCH, 300, HEADS)
    found = fed(x, decay, False, 128, in_place=False)
    assert relative_error(found, recurrence(decay.double(), x.double(), False)) <= 1e-6
