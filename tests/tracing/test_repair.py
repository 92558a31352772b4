"""The repaired scan computes what the reference scan of transformers computes, gradients too."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.versions import transformers5
from torch import Tensor
from transformers import RecurrentGemmaForCausalLM, RwkvConfig, RwkvForCausalLM
from transformers.models.falcon_mamba import modeling_falcon_mamba
from transformers.models.jamba import modeling_jamba
from transformers.models.mamba import modeling_mamba
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.models.rwkv import modeling_rwkv
from zoo.attention import attention_model
from zoo.mamba import randomise, transformers_model
from zoo.mamba_ssm_cpu import MambaSSM
from zoo.recurrent import griffin_config

from captum_ssm.operators.kernels.scan_backward import selective_scan
from captum_ssm.tracing import repaired_scans

pytestmark = pytest.mark.slow

#: In version 4 of transformers the loop is no function of its own, and is left as it is.
reference = getattr(modeling_mamba, "mamba_selective_scan", None)


def interface() -> Any:
    return importlib.import_module("mamba_ssm.ops.selective_scan_interface")


def arguments(
    tokens: int, dtype: torch.dtype, batch: int = 2, channels: int = 6
) -> dict[str, Tensor]:
    sizes = {
        "hidden_states": (batch, channels, tokens),
        "dt": (batch, channels, tokens),
        "A": (channels, 4),
        "B": (batch, 4, tokens),
        "C": (batch, 4, tokens),
        "D": (channels,),
        "z": (batch, channels, tokens),
        "delta_bias": (channels,),
    }
    drawn = {name: torch.randn(size, dtype=dtype) for name, size in sizes.items()}
    drawn["A"] = -drawn["A"].exp()
    # Steps stay positive without the softplus too: negative ones would make the state explode.
    drawn["dt"], drawn["delta_bias"] = drawn["dt"].abs(), drawn["delta_bias"].abs()
    return {name: value.requires_grad_() for name, value in drawn.items()}


@transformers5
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


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [5, 70, 200])
@pytest.mark.parametrize("time_first", [set[str](), {"dt"}, {"hidden_states", "dt", "z"}])
def test_any_layout_gives_the_same(batch: int, tokens: int, time_first: set[str]) -> None:
    given = arguments(tokens, torch.float64, batch=batch, channels=90)
    laid = {
        name: x.detach().mT.contiguous().mT.requires_grad_() if name in time_first else x
        for name, x in given.items()
    }
    seed = torch.randn(batch, 90, tokens, dtype=torch.float64)
    outputs, grads = [], []
    for named, weight in ((given, seed), (laid, seed.mT.contiguous().mT)):
        out = selective_scan(**named, delta_softplus=True)
        assert isinstance(out, Tensor)
        outputs.append(out)
        grads.append(torch.autograd.grad(out, list(named.values()), weight))
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_no_state_is_kept_for_a_backward_that_cannot_come() -> None:
    given = arguments(200, torch.float32)
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with torch.no_grad(), hooks:
        without = selective_scan(**given)
    assert not kept
    torch.testing.assert_close(without, selective_scan(**given))


#: By the name of a model: how it is made, and the loop of transformers that it calls.
MODELS: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "mamba": (transformers_model, modeling_mamba, "mamba_selective_scan"),
    "falcon_mamba": (
        lambda: transformers_model("falcon_mamba"), modeling_falcon_mamba, "mamba_selective_scan"
    ),
    "jamba": (lambda: attention_model("jamba"), modeling_jamba, "mamba_selective_scan"),
    "griffin": (
        lambda: RecurrentGemmaForCausalLM(griffin_config()), RecurrentGemmaRglru, "_rnn_scan"
    ),
    "rwkv": (
        lambda: RwkvForCausalLM(RwkvConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2)),
        modeling_rwkv, "rwkv_linear_attention_cpu",
    ),
}  # fmt: skip


@transformers5
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_and_their_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, holder, loop = MODELS[name]
    model, ids = randomise(make()).train(), torch.randint(3, 11, (2, 40))
    parameters = list(model.parameters())

    def gradients() -> list[Tensor]:
        loss = model(ids, use_cache=False).logits[:, -1].square().sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [loss.detach(), *(g for g in found if g is not None)]

    expected = gradients()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the reference loop ran")

    monkeypatch.setattr(holder, loop, refuse)
    with repaired_scans():
        found = gradients()
    assert getattr(holder, loop) is refuse
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5 * float(one.abs().max()) + 1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_of_mamba_ssm(mamba_ssm: MambaSSM, dtype: torch.dtype) -> None:
    original = interface().selective_scan_ref
    given = arguments(41, dtype)
    given["A"] = given["A"].detach().float().requires_grad_()
    named = {"hidden_states": "u", "dt": "delta"}
    renamed = {named.get(name, name): value for name, value in given.items()}
    results = []
    with repaired_scans():
        repaired = interface().selective_scan_ref
        assert repaired is not original
        assert interface().selective_scan_fn is not original
    for scan in (original, repaired):
        outputs = scan(**renamed, delta_softplus=True, return_last_state=True)
        seeds = [torch.ones_like(o) for o in outputs]
        results.append((*outputs, *torch.autograd.grad(outputs, list(given.values()), seeds)))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        scale = float(expected.detach().abs().max())
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)
    assert interface().selective_scan_ref is original


def test_a_kernel_of_fla_stays_out_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    reference = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)

    @functools.wraps(reference)
    def kernel(query: Tensor, *given: Any, **options: Any) -> Any:
        if query.device.type == "cpu":
            raise RuntimeError("0 active drivers")
        return "on another device"

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", kernel)
    vectors, scalars = [torch.rand(2, 5, 3, 4) for _ in range(3)], torch.rand(2, 2, 5, 3)
    given = (*vectors, -scalars[0], scalars[1])
    with repaired_scans():
        found, _ = modeling.torch_chunk_gated_delta_rule(*given)
        elsewhere = modeling.torch_chunk_gated_delta_rule(vectors[0].to("meta"))
    torch.testing.assert_close(found, reference(*given)[0], rtol=0, atol=0)
    assert elsewhere == "on another device"
    assert modeling.torch_chunk_gated_delta_rule is kernel


def test_undone_after_errors_and_when_nested() -> None:
    original = modeling_rwkv.rwkv_linear_attention_cpu
    with repaired_scans():
        inner = modeling_rwkv.rwkv_linear_attention_cpu
        assert inner is not original
        with pytest.raises(KeyboardInterrupt), repaired_scans():
            raise KeyboardInterrupt
        assert modeling_rwkv.rwkv_linear_attention_cpu is inner
    assert modeling_rwkv.rwkv_linear_attention_cpu is original
