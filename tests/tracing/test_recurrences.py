"""The repaired loops compute what those of transformers compute, gradients too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.models.rwkv import modeling_rwkv
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

from captum_ssm.tracing import repaired_scans
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


def griffin() -> tuple[Any, Any, str]:
    config = RecurrentGemmaConfig(
        vocab_size=11,
        hidden_size=8,
        lru_width=8,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=3,
    )
    return RecurrentGemmaForCausalLM(config), RecurrentGemmaRglru, "_rnn_scan"


def rwkv() -> tuple[Any, Any, str]:
    config = RwkvConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2)
    return RwkvForCausalLM(config).train(), modeling_rwkv, "rwkv_linear_attention_cpu"


@pytest.mark.parametrize("make", [griffin, rwkv])
def test_whole_models_and_their_gradients(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, holder, name = make()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(3, 11, (BATCH, 23))
    parameters = list(model.parameters())

    def gradients() -> list[Tensor]:
        for module in model.modules():
            if hasattr(module, "recurrent_states"):  # in version 4 the next call goes on from them
                module.recurrent_states = None
        loss = model(ids, use_cache=False).logits[:, -1].square().sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [loss.detach(), *(g for g in found if g is not None)]

    expected = gradients()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the reference loop ran")

    monkeypatch.setattr(holder, name, refuse)
    with repaired_scans():
        found = gradients()
    assert getattr(holder, name) is refuse
    assert_same(found, expected)
