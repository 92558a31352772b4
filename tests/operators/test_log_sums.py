"""Fading log-sum-exps from run to run against the loop over tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import kernels as naive
from torch import Tensor

from captum_ssm.operators.kernels.arithmetic import fading_log_sums, fading_log_sums_at_once


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 15, 16, 17, 99, 150])
@pytest.mark.parametrize("scale", [1.0, 200.0, 1e4])
def test_equals_the_loop(tokens: int, scale: float) -> None:
    scores = scale * torch.randn(2, tokens, 5, dtype=torch.float64)
    log_decay = -torch.randn(5, dtype=torch.float64).exp()
    kept = scores.clone()
    found, wanted = fading_log_sums(scores, log_decay), naive.fading_log_sums(scores, log_decay)
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-13
    assert torch.equal(scores, kept), "the scores were overwritten"


@pytest.mark.parametrize("tokens", [1, 17, 3000])
@pytest.mark.parametrize("decay", [0.01, 1.0, 20.0])
def test_so_do_those_at_once(tokens: int, decay: float) -> None:
    """Relative to 1, for what matters are the exponentials of differences."""
    scores = 10 * torch.randn(2, tokens, 5, dtype=torch.float64)
    log_decay = -decay * torch.rand(5, dtype=torch.float64)
    found, wanted = (f(scores, log_decay) for f in (fading_log_sums_at_once, naive.fading_log_sums))
    assert float((found - wanted).abs().max()) <= 1e-15 * tokens * max(decay, 10)


@pytest.mark.parametrize("log_sums", [fading_log_sums, fading_log_sums_at_once])
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_tokens_that_add_nothing(log_sums: Callable[..., Tensor], tokens: int) -> None:
    """Before the first score there is nothing; later, what there was fades."""
    scores = torch.randn(3, tokens, 4, dtype=torch.float64)
    scores[0, : tokens // 2 + 1] = -torch.inf
    scores[1, tokens // 3 :] = -torch.inf
    scores[2] = -torch.inf
    log_decay = -torch.rand(4, dtype=torch.float64)
    found, wanted = log_sums(scores, log_decay), naive.fading_log_sums(scores, log_decay)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_a_distant_past_keeps_its_size() -> None:
    """What no exponential could hold: one score, fading by 50 with every token."""
    scores = torch.full((1, 100, 1), -torch.inf, dtype=torch.float64)
    scores[:, 0] = 3.0
    found = fading_log_sums(scores, torch.tensor([-50.0], dtype=torch.float64))
    assert torch.equal(found[0, :, 0], 3.0 - 50.0 * torch.arange(100, dtype=torch.float64))
