"""The repaired scan computes what the reference scan of transformers computes, gradients too."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    ZambaConfig,
    ZambaForCausalLM,
)
from transformers.models.falcon_mamba import modeling_falcon_mamba
from transformers.models.jamba import modeling_jamba
from transformers.models.mamba import modeling_mamba
from transformers.models.zamba import modeling_zamba

from captum_ssm.tracing import repaired_scans
from captum_ssm.tracing.repair import selective_scan

reference = modeling_mamba.mamba_selective_scan


def arguments(tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    sizes = {
        "hidden_states": (2, 6, tokens),
        "dt": (2, 6, tokens),
        "A": (6, 4),
        "B": (2, 4, tokens),
        "C": (2, 4, tokens),
        "D": (6,),
        "z": (2, 6, tokens),
        "delta_bias": (6,),
    }
    drawn = {name: torch.randn(size, dtype=dtype) for name, size in sizes.items()}
    drawn["A"] = -drawn["A"].exp()
    # Steps stay positive without the softplus too: negative ones would make the state explode.
    drawn["dt"], drawn["delta_bias"] = drawn["dt"].abs(), drawn["delta_bias"].abs()
    return {name: value.requires_grad_() for name, value in drawn.items()}


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 70])
@pytest.mark.parametrize("softplus", [True, False])
def test_equals_the_reference(tokens: int, softplus: bool) -> None:
    given = arguments(tokens, torch.float32)
    results = []
    for scan in (reference, selective_scan):
        outputs = scan(**given, delta_softplus=softplus, return_last_state=True)
        seeds = [torch.ones_like(o) for o in outputs]
        results.append((*outputs, *torch.autograd.grad(outputs, list(given.values()), seeds)))
    for expected, found in zip(*results, strict=True):
        scale = float(expected.detach().abs().max())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * scale + 1e-7)


def test_gradcheck() -> None:
    given = arguments(37, torch.float64)
    names = list(given)

    def scan(*values: Tensor) -> Any:
        named: dict[str, Any] = dict(zip(names, values, strict=True))
        return selective_scan(**named, delta_softplus=True, return_last_state=True)

    assert torch.autograd.gradcheck(scan, tuple(given.values()))


def test_optional_parts_can_be_left_out() -> None:
    given = arguments(9, torch.float32)
    core: dict[str, Any] = {k: given[k] for k in ("hidden_states", "dt", "A", "B", "C")}
    torch.testing.assert_close(selective_scan(**core), reference(**core))


@pytest.mark.parametrize(
    ("model_class", "config_class", "module", "options"),
    [
        (MambaForCausalLM, MambaConfig, modeling_mamba, {"state_size": 3}),
        (FalconMambaForCausalLM, FalconMambaConfig, modeling_falcon_mamba, {"state_size": 3}),
        (
            JambaForCausalLM,
            JambaConfig,
            modeling_jamba,
            {
                "mamba_d_state": 3,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "intermediate_size": 8,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "num_experts": 1,
            },
        ),
        (
            ZambaForCausalLM,
            ZambaConfig,
            modeling_zamba,
            {
                "mamba_d_state": 3,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "intermediate_size": 8,
                "layers_block_type": ["hybrid", "hybrid"],
            },
        ),
    ],
)
def test_whole_models_and_their_gradients(
    model_class: Any,
    config_class: Any,
    module: Any,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_class(vocab_size=11, hidden_size=8, num_hidden_layers=2, **options)
    model = model_class(config)
    ids = torch.randint(0, 11, (2, 40))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    parameters = list(model.parameters())

    def gradients() -> list[Tensor]:
        loss = model(ids, attention_mask=mask).logits[:, -1].square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    expected = gradients()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the reference scan ran")

    monkeypatch.setattr(module, "mamba_selective_scan", refuse)
    with repaired_scans():
        found = gradients()
    assert module.mamba_selective_scan is refuse
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5 * float(one.abs().max()) + 1e-8)


def test_undone_after_errors_and_when_nested() -> None:
    with repaired_scans():
        inner = modeling_mamba.mamba_selective_scan
        assert inner is not reference
        with pytest.raises(KeyboardInterrupt), repaired_scans():
            raise KeyboardInterrupt
        assert modeling_mamba.mamba_selective_scan is inner
    assert modeling_mamba.mamba_selective_scan is reference


def test_threads_share_it() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with repaired_scans():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    with repaired_scans():
        pass
    assert modeling_mamba.mamba_selective_scan is not reference
    leave.set()
    thread.join()
    assert modeling_mamba.mamba_selective_scan is reference
