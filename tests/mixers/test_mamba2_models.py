"""Whole models with Mamba-2 mixers, and calls of mamba_ssm's that cannot be explained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracles import relative_error
from oracles.mamba2_formula import alpha, form_of, mamba2_parts
from torch import Tensor
from zoo.mamba2 import FAMILIES, make_model, mixer_names

from captum_ssm import ImplicitAttentionRollout, MambaAttribution, trace
from captum_ssm.attr.call.components import parse_components
from captum_ssm.errors import CachedStateError, InputError
from captum_ssm.tracing import Layer

pytestmark = pytest.mark.slow

# float32 against float32 or float64, for any draw of the parameters
FLOAT32 = 1e-5


def record(model: Any, *args: Any, **kwargs: Any) -> list[Layer]:
    with torch.no_grad(), trace(model, operators=False) as t:
        model(*args, **kwargs)
    return t.layers


#: The module whose input is the stream after a block's mixers.
_AFTER = {"falcon_h1": "pre_ff_layernorm", "granitemoehybrid": "post_attention_layernorm"}


@pytest.mark.parametrize("family", _AFTER)
def test_scale_of_branches(family: str) -> None:
    """The stream grows by branch_scale times what each mixer of the block returns."""
    model = make_model(family)
    entering: list[Tensor] = []
    leaving: list[Tensor] = []
    for block in model.model.layers:
        block.input_layernorm.register_forward_pre_hook(lambda _, a: entering.append(a[0]))
        after = block.get_submodule(_AFTER[family])
        after.register_forward_pre_hook(lambda _, a: leaving.append(a[0]))
    with torch.no_grad(), trace(model) as t:
        model(torch.randint(19, (2, 7)))
    assert {layer.linear.branch_scale for layer in t.layers} == (
        {0.6, 0.5} if family == "falcon_h1" else {0.4}
    )
    per_block = len(t.layers) // len(entering)
    for i, (before, after) in enumerate(zip(entering, leaving, strict=True)):
        layers = t.layers[per_block * i : per_block * (i + 1)]
        assert {layer.joins for layer in layers} == (
            {"parallel"} if family == "falcon_h1" else {"residual"}
        )
        grown = sum(layer.linear.branch_scale * layer.output for layer in layers)
        assert relative_error(after - before, torch.as_tensor(grown)) <= FLOAT32


def dense_stages(model: Any, ids: Tensor, token: int | None) -> Tensor:
    """The last row of the product over blocks by dense float64 matrices of every mixer.

    With ``token``, Mamba-Attribution: matrices weighted by the gradient of its logit.
    """
    model = copy.deepcopy(model).double()
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    ssm = mixer_names(model)

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            inputs[name] = (args[0] if args else kwargs["hidden_states"]).detach()
            outputs[name] = output if isinstance(output, Tensor) else output[0]

        return hook

    with trace(model) as t:
        model(ids)
    attention = {layer.name: layer for layer in t.layers if layer.name not in ssm}
    for name in [*ssm, *attention]:
        model.get_submodule(name).register_forward_hook(keep(name), with_kwargs=True)
    logits = model(ids, use_cache=False).logits
    names = list(outputs)  # in the order of computation
    gradients = dict(
        zip(
            names,
            torch.autograd.grad(logits[:, -1, token or 0].sum(), list(outputs.values())),
            strict=True,
        )
    )
    eye = torch.eye(ids.shape[1]).double()
    product, fed, beside = eye, eye, torch.zeros_like(eye)
    family = type(model).__name__
    for name in names:
        if name in attention:
            components = parse_components("unified")
            mean = attention[name].linear.restrict(components).operator.dense(None).mean(1)
        else:
            mixer = model.get_submodule(name)
            parts = mamba2_parts(mixer, inputs[name], form_of(mixer, model.config))
            mean = alpha(parts, "unified").mean(1)
        if token is not None:
            mean = (gradients[name].mean(-1)[..., None] * mean).clamp_min(0)
        elif family.startswith("FalconH1"):
            mean = mean * (0.6 if name in ssm else 0.5)
        elif family.startswith("Granite"):
            mean = mean * 0.4
        if family.startswith("FalconH1") and name in ssm:  # the mixer of the block that runs first
            beside = mean
        elif family.startswith("FalconH1"):
            product = (eye + beside + mean) @ product
        elif family.startswith("Zamba2") and name in attention:
            fed = eye + mean
        else:
            product, fed = (eye + mean @ fed) @ product, eye
    return product[:, -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_attribution_by_dense_matrices(family: str) -> None:
    model = make_model(family)
    ids = torch.randint(19, (2, 8))
    found = MambaAttribution(model).attribute(ids, target=(-1, 4))
    assert relative_error(found, dense_stages(model, ids, 4)) <= 2e-5
    found = ImplicitAttentionRollout(model).attribute(ids, query="last")
    assert relative_error(found, dense_stages(model, ids, None)) <= 2e-5


@pytest.mark.parametrize("name", ["seq_idx", "cu_seqlens"])
def test_packed_sequences_are_refused(mamba_ssm: Any, name: str) -> None:
    from captum_ssm.mixers.base import Call
    from captum_ssm.mixers.mamba2_ssm import mamba_ssm_mamba2

    mixer, x = mamba_ssm.make_mamba2(12), torch.randn(1, 4, 12)
    packed = torch.zeros(1, 4, dtype=torch.int32)
    by_position = (x, None, *((packed,) if name == "seq_idx" else (None, packed)))
    for call in (Call((x,), {name: packed}, x), Call(by_position, {}, x)):
        with pytest.raises(InputError, match=name):
            mamba_ssm_mamba2(mixer, call)


def test_flattened_batches_are_refused(mamba_ssm: Any) -> None:
    layer, *_ = record(mamba_ssm.make_mamba2(12), torch.randn(8, 12), seqlen=4)
    with pytest.raises(InputError, match="seqlen"):
        _ = layer.operator


@pytest.mark.parametrize("by_position", [False, True])
def test_caches_are_refused(mamba_ssm: Any, by_position: bool) -> None:
    from mamba_ssm.utils.generation import InferenceParams

    mixer = mamba_ssm.make_mamba2(12, layer_idx=0)
    cache = InferenceParams(max_seqlen=8, max_batch_size=1)
    cache.key_value_memory_dict[0] = mixer.allocate_inference_cache(1, 8)
    cache.seqlen_offset = 4
    args, kwargs = (
        ((None, None, None, cache), {}) if by_position else ((), {"inference_params": cache})
    )
    layer, *_ = record(mixer, torch.randn(1, 1, 12), *args, **kwargs)
    with pytest.raises(CachedStateError, match="inference_params"):
        _ = layer.operator
