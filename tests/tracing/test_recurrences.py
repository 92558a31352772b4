"""The repaired loops compute what those of transformers compute, gradients too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

from captum_ssm.tracing.repair.loops import rg_lru, wkv

BATCH, WIDTH = 2, 6


def with_gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    seeds = [torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view(o.shape) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, seeds)]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("tokens", [2, 3, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("continued", [False, True])
def test_rg_lru(tokens: int, dtype: torch.dtype, continued: bool) -> None:
    inputs = torch.randn(BATCH, tokens, WIDTH, dtype=dtype, requires_grad=True)
    gate = torch.rand(BATCH, tokens, WIDTH, dtype=dtype, requires_grad=True)
    reset = torch.rand(BATCH, tokens, 1) < 0.2
    before = torch.randn(BATCH, WIDTH) if continued else None
    results = []
    for scan in (rg_lru, lambda *given: RecurrentGemmaRglru._rnn_scan(None, *given)):
        results.append(with_gradients(scan(inputs, gate, reset, before), [inputs, gate]))
    assert_same(*results)


@pytest.mark.parametrize("tokens", [1, 2, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("continued", [False, True])
def test_wkv(tokens: int, dtype: torch.dtype, continued: bool) -> None:
    decay, first = (torch.randn(WIDTH, requires_grad=True) for _ in range(2))
    key, value = (
        torch.randn(BATCH, tokens, WIDTH, dtype=dtype).mul(3).requires_grad_() for _ in range(2)
    )
    state = [torch.rand(BATCH, WIDTH) for _ in range(3)] if continued else None
    results = []
    for attention in (wkv, rwkv_linear_attention_cpu):
        out, after = attention(decay, first, key, value, state, return_state=True)
        results.append(with_gradients([out, *after], [decay, first, key, value]))
    assert_same(*results)
