"""LatimFlow on models that make it hard, none of which it changes."""

from __future__ import annotations

import copy
from typing import Any

import oracles
import pytest
import torch
from torch import Tensor, nn
from zoo import architectures, attention, mamba2
from zoo.mamba import randomise
from zoo.small import mamba_lm, token_ids

from captum_ssm import LatimFlow, MambaLRP
from captum_ssm.errors import GradientModeError

METHODS = pytest.mark.parametrize("method", [LatimFlow, MambaLRP])
TARGET = (-1, 3)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> bool:
    return oracles.relative_error(found, wanted) <= tolerance


def state(model: nn.Module) -> list[Any]:
    own = [(p.detach().clone(), p.grad, p.requires_grad) for p in model.parameters()]
    return [*own, architectures.hook_count(model), [m.training for m in model.modules()]]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


# --- the model is left as it was -----------------------------------------------------------------


@METHODS
def test_nothing_is_left_on_the_model(method):
    model, before_ids = mamba_lm(), token_ids()
    model.lm_head.weight.requires_grad_(False)
    before = state(model)
    method(model).attribute(before_ids, TARGET)
    assert same(state(model), before) and torch.is_grad_enabled()
    copy.deepcopy(model)


@METHODS
def test_nothing_is_left_after_an_exception(method):
    model = mamba_lm()
    broken, before = model.backbone.layers[1], state(model)

    class OwnError(Exception):
        pass

    def fail(*args: Any) -> None:
        raise OwnError

    for where in (broken, broken.mixer, broken.mixer.in_proj, model.lm_head):
        handle = where.register_forward_pre_hook(fail)
        with pytest.raises(OwnError):
            method(model).attribute(token_ids(), TARGET)
        handle.remove()
        assert same(state(model), before) and torch.is_grad_enabled()
    with torch.no_grad():
        assert not (torch.ones(1, requires_grad=True) * 2).requires_grad
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad


def test_an_interrupted_mixer_leaves_gradients_on():
    model = mamba_lm()

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.backbone.layers[1].mixer.in_proj.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        LatimFlow(model).attribute(token_ids(), TARGET)
    handle.remove()
    assert torch.is_grad_enabled() and (torch.ones(1, requires_grad=True) * 2).requires_grad
    assert LatimFlow(model).attribute(token_ids(), TARGET).any()


# --- gradient modes ------------------------------------------------------------------------------


@METHODS
def test_gradient_modes(method):
    model, ids = mamba_lm(), token_ids()
    wanted = method(model).attribute(ids, TARGET)
    with torch.no_grad():
        found = method(model).attribute(ids, TARGET)
        assert torch.equal(found, wanted) and not found.requires_grad
    with torch.inference_mode(), pytest.raises(GradientModeError, match="inference_mode"):
        method(model).attribute(ids, TARGET)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert torch.equal(method(model).attribute(ids, TARGET), wanted)
    with torch.inference_mode():
        made = ids.clone()
    assert torch.equal(method(model).attribute(made, TARGET), wanted)


def test_embeddings_that_require_gradients():
    model, ids = mamba_lm(), token_ids()
    embedded = model.get_input_embeddings()(ids)
    found = LatimFlow(model).attribute(embedded, TARGET)
    assert embedded.requires_grad and not found.requires_grad
    assert close(found.sum(-1), LatimFlow(model).attribute(ids, TARGET))


@pytest.mark.parametrize("reentrant", [True, False])
@METHODS
def test_gradient_checkpointing(method, reentrant):
    model, ids = mamba_lm(), token_ids()
    wanted = method(model).attribute(ids, TARGET)
    options = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.train()
    found, delta = method(model).attribute(ids, TARGET, return_convergence_delta=True)
    assert close(found, wanted) and delta.abs().max() <= 1e-4


# --- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mamba2", "bamba"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family, dtype):
    model, ids = mamba2.make_model(family), token_ids()
    wanted = LatimFlow(model).attribute(ids, TARGET)
    found, delta = LatimFlow(model.to(dtype)).attribute(ids, TARGET, return_convergence_delta=True)
    assert torch.isfinite(found).all() and torch.isfinite(delta).all()
    assert close(found, wanted, 0.2)
    assert delta.abs().max() <= 0.1 * wanted.abs().sum(1).max()


def test_autocast():
    model, ids = mamba_lm(), token_ids()
    wanted = LatimFlow(model).attribute(ids, TARGET)
    with torch.autocast("cpu", torch.bfloat16):
        found = LatimFlow(model).attribute(ids, TARGET)
    assert torch.isfinite(found).all() and close(found, wanted, 0.2)


# --- wrapped and unusual models ------------------------------------------------------------------


@METHODS
def test_compiled_models(method):
    model, ids = mamba_lm(), token_ids()
    wanted = method(model).attribute(ids, TARGET)
    compiled = torch.compile(model, backend="eager")
    assert close(method(compiled).attribute(ids, TARGET), wanted)
    for layer in model.backbone.layers:
        layer.mixer.compile(backend="eager")
    assert close(method(model).attribute(ids, TARGET), wanted)


@METHODS
def test_lora_is_the_merged_model(method):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["in_proj", "x_proj"], init_lora_weights=False)
    adapted, ids = peft.get_peft_model(mamba_lm(), config).double().eval(), token_ids()
    found = method(adapted).attribute(ids, TARGET)
    merged = copy.deepcopy(adapted).merge_and_unload()
    assert close(found, method(merged).attribute(ids, TARGET))


@METHODS
def test_a_function_that_slices_logits(method):
    model, ids = mamba_lm(), token_ids()
    found = method(lambda x: model(x).logits[:, -1, 2:9], model=model).attribute(ids, 1)
    assert close(found, method(model).attribute(ids, TARGET))


def test_experts_with_biases():
    """Tokens of several examples meet in an expert, whose bias belongs to them all."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(12, 3)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(12, 7), nn.SiLU(), nn.Linear(7, 12)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, x.shape[-1])
            weights, chosen = self.router(flat).softmax(-1).topk(2)
            out = torch.zeros_like(flat)
            for index, expert in enumerate(self.experts):
                token, rank = torch.where(chosen == index)
                part = expert(flat[token]) * weights[token, rank, None]
                out.index_add_(0, token, part)
            return out.view_as(x)

    model = mamba2.make_model("bamba")
    for layer in model.model.layers:
        layer.feed_forward = randomise(Experts())
    explain, ids = LatimFlow(model), token_ids(4)
    found = explain.decompose(ids, TARGET)
    assert (found.delta.abs() / found.inputs.abs().flatten(1).sum(1)).max() <= 1e-5
    alone = torch.cat([explain.attribute(row[None], TARGET) for row in ids])
    assert close(found.tokens, alone)


@pytest.mark.transformers5
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_of_transformers(implementation):
    model, ids = attention.attention_model("jamba"), token_ids(3)
    wanted = LatimFlow(model).attribute(ids, TARGET)
    model.set_experts_implementation(implementation)
    assert close(LatimFlow(model).attribute(ids, TARGET), wanted)


def test_a_residual_stream_that_is_changed_in_place():
    class InPlace(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            x = self.model.backbone.embeddings(ids)
            x *= 1.5
            for block in self.model.backbone.layers:
                x += block.mixer(block.norm(x))
            return self.model.lm_head(self.model.backbone.norm_f(x).mul_(2))

    model, ids = InPlace(mamba_lm()).eval(), token_ids()
    found = LatimFlow(model).decompose(ids, TARGET)
    assert (found.delta.abs() / found.inputs.abs().flatten(1).sum(1)).max() <= 1e-5
    with torch.no_grad():
        assert torch.allclose(found.output, model(ids)[:, -1, 3], rtol=1e-4, atol=1e-5)
    assert len(found.mixers) == 3 and found.inputs.any()


def test_parameters_made_in_inference_mode():
    model, ids = mamba_lm(), token_ids()
    wanted = LatimFlow(model).attribute(ids, TARGET)
    with torch.inference_mode():
        model = copy.deepcopy(model)
    assert model.lm_head.weight.is_inference()
    assert close(LatimFlow(model).attribute(ids, TARGET), wanted)
