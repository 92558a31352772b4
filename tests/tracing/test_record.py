"""What a trace records: which calls, in which order, with what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.versions import VERSION_4
from oracles import mamba1_parts, relative_error
from torch import Tensor, nn
from zoo.mamba import padded_batch, transformers_model

from captum_ssm import trace
from captum_ssm.errors import NoMixerError
from captum_ssm.tracing import require_layers


def ids(batch: int = 2, tokens: int = 5) -> Tensor:
    return torch.randint(19, (batch, tokens))


def names(t: Any) -> list[str]:
    return [layer.name for layer in t.layers]


class Residual(nn.Module):
    def __init__(self, blocks: list[nn.Module], order: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.order = order

    def forward(self, hidden: Tensor) -> Tensor:
        for i in self.order:
            hidden = hidden + self.blocks[i](hidden)
        return hidden


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mixer(2 * hidden)


def mixers(count: int) -> list[Any]:
    model = transformers_model("mamba", num_hidden_layers=count)
    return [block.mixer for block in model.backbone.layers]


# --- order and names -------------------------------------------------------------------------


def test_names_architectures_and_order(model: Any) -> None:
    with torch.no_grad(), trace(model) as t:
        model(ids())
    assert names(t) == [f"backbone.layers.{i}.mixer" for i in range(3)]
    assert {layer.architecture for layer in t.layers} == {"Mamba"}
    for i, layer in enumerate(t.layers):
        assert layer.mixer.module is model.backbone.layers[i].mixer
        assert layer.block is model.backbone.layers[i]
        assert layer.name in repr(layer) and "Mamba" in repr(layer)


def test_the_order_is_that_of_the_run() -> None:
    model = Residual(mixers(3), [2, 0, 1])
    with torch.no_grad(), trace(model) as t:
        model(torch.randn(1, 4, 5))
    assert names(t) == ["blocks.2", "blocks.0", "blocks.1"]


@pytest.mark.parametrize("graph", ["none", "tail", "outputs", "all"])
def test_a_module_called_twice_is_recorded_twice(graph: Any) -> None:
    model = Residual(mixers(2), [0, 1, 0, 0])
    hidden = torch.randn(2, 4, 5)
    with torch.no_grad(), trace(model, graph=graph) as t:
        out = model(hidden)
    assert names(t) == ["blocks.0", "blocks.1", "blocks.0", "blocks.0"]
    stream = hidden
    for i, layer in zip([0, 1, 0, 0], t.layers, strict=True):
        assert torch.equal(layer.call.hidden_states, stream)
        parts = mamba1_parts(model.blocks[i], stream)
        assert relative_error(layer.values.flatten(2), parts.values) <= 2e-5
        assert layer.reconstruction_error() <= 2e-5
        stream = stream + layer.output
    assert torch.equal(stream, out)


def test_the_stream_of_a_shared_mixer_is_that_of_its_own_block() -> None:
    mixer, other = mixers(2)
    model = Residual([Block(mixer), Block(other), Block(mixer)], [0, 1, 2])
    with trace(model, graph="all") as t:
        model(torch.randn(1, 4, 5))
    for layer in t.layers:
        assert layer.stream is not None
        assert torch.equal(2 * layer.stream, layer.call.hidden_states)


def test_some_layers_only(model: Any) -> None:
    chosen: list[Any]
    for chosen in (["backbone.layers.1.mixer"], [model.backbone.layers[1].mixer]):
        with torch.no_grad(), trace(model, layers=chosen) as t:
            model(ids())
        assert names(t) == ["backbone.layers.1.mixer"]
    both = [model.backbone.layers[2].mixer, "backbone.layers.0.mixer"]
    with torch.no_grad(), trace(model, layers=both) as t:
        model(ids())
    assert names(t) == ["backbone.layers.0.mixer", "backbone.layers.2.mixer"]


def test_the_mixer_itself_as_the_model() -> None:
    (mixer,) = mixers(1)
    hidden = torch.randn(2, 6, 5)
    with torch.no_grad(), trace(mixer) as t:
        out = mixer(hidden)
    assert names(t) == [""]
    assert t.layers[0].block is None
    assert torch.equal(t.layers[0].output, out)
    assert torch.equal(t.layers[0].call.hidden_states, hidden)


def test_nothing_ran(model: Any) -> None:
    with trace(model) as t:
        pass
    assert t.layers == [] and t.mask is None
    with pytest.raises(NoMixerError, match=r"backbone\.layers\.0\.mixer"):
        require_layers(t, model)


# --- what a call holds -----------------------------------------------------------------------


def test_arguments_are_recorded(model: Any) -> None:
    tokens, mask = padded_batch([5, 3])
    with torch.no_grad(), trace(model) as t:
        model(tokens, attention_mask=mask)
    for layer in t.layers:
        assert torch.equal(layer.call.kwargs["attention_mask"], mask)
        assert torch.equal(layer.call.argument("attention_mask", 2), mask)
        assert layer.call.argument("cache_params", 1) is None
        assert layer.call.argument("nothing") is None
        assert len(layer.call.args) == 1
    assert torch.equal(t.mask, mask.bool())


def test_arguments_by_position_and_by_name() -> None:
    (mixer,) = mixers(1)
    hidden = torch.randn(2, 4, 5)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    before = (None,) * (2 if VERSION_4 else 1)  # a cache and, in version 4, positions
    outputs = []
    for args, kwargs in [
        ((hidden, *before, mask), {}),
        ((hidden,), {"attention_mask": mask}),
        ((), {"attention_mask": mask, "hidden_states": hidden}),
    ]:
        with torch.no_grad(), trace(mixer) as t:
            mixer(*args, **kwargs)
        (layer,) = t.layers
        assert torch.equal(layer.call.hidden_states, hidden)
        assert torch.equal(layer.linear.mask, mask.bool())
        assert layer.reconstruction_error() <= 2e-5
        outputs.append(layer.linear.output())
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_the_record_keeps_no_graph(model: Any) -> None:
    with trace(model) as t:
        out = model(ids())
    assert out.logits.requires_grad, "the model's own graph stays"
    for layer in t.layers:
        assert not layer.output.requires_grad
        assert not layer.call.hidden_states.requires_grad
        assert layer.stream is None


# --- graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_every_mixer(model: Any, frozen: bool) -> None:
    model.requires_grad_(not frozen)
    tokens = ids()
    with trace(model, graph="all") as t:
        score = model(tokens).logits[:, -1, 3].sum()
    outputs = [layer.output for layer in t.layers]
    streams = [layer.stream for layer in t.layers]
    found = torch.autograd.grad(score, [*outputs, *streams])

    leaves = [layer.output.detach().clone().requires_grad_() for layer in t.layers]
    handles = [
        block.mixer.register_forward_hook(lambda m, a, out, leaf=leaf: leaf + (out - out.detach()))
        for block, leaf in zip(model.backbone.layers, leaves, strict=True)
    ]
    again = model(tokens).logits[:, -1, 3].sum()
    for got, wanted in zip(found, torch.autograd.grad(again, leaves), strict=False):
        assert relative_error(got, wanted) <= 1e-5
    for handle in handles:
        handle.remove()

    for i, stream in enumerate(streams):
        replaced = stream.detach().clone().requires_grad_()
        handle = model.backbone.layers[i].register_forward_pre_hook(
            lambda m, a, new=replaced: (new, *a[1:])
        )
        again = model(tokens).logits[:, -1, 3].sum()
        (wanted,) = torch.autograd.grad(again, replaced)
        assert relative_error(found[3 + i], wanted) <= 1e-5
        handle.remove()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_of_outputs_begins_at_the_first_one(model: Any, frozen: bool) -> None:
    model.requires_grad_(not frozen)
    tokens, found = ids(), []
    for graph in ("all", "outputs"):
        with trace(model, graph=graph) as t:
            score = model(tokens).logits[:, -1, 3].sum()
        outputs = [layer.output for layer in t.layers]
        found.append(torch.autograd.grad(score, outputs, retain_graph=True))
    for of_all, of_outputs in zip(*found, strict=True):
        assert bool(of_all.any()) and torch.equal(of_all, of_outputs)
    assert [layer.stream for layer in t.layers] == [None] * 3
    if not frozen:
        weights = [block.mixer.in_proj.weight for block in model.backbone.layers]
        first, *others = torch.autograd.grad(score, weights, allow_unused=True)
        assert first is None and all(bool(other.any()) for other in others)


def test_gradient_of_the_last_mixer_inside_no_grad(model: Any) -> None:
    tokens = ids()
    with torch.no_grad(), trace(model, graph="tail") as t:
        score = model(tokens).logits[:, -1, 3].sum()
    assert not torch.is_grad_enabled() or score.requires_grad
    last = t.layers[-1].output
    (found,) = torch.autograd.grad(score, last)
    leaf = last.detach().clone().requires_grad_()
    model.backbone.layers[-1].mixer.register_forward_hook(lambda *_: leaf)
    (wanted,) = torch.autograd.grad(model(tokens).logits[:, -1, 3].sum(), leaf)
    assert relative_error(found, wanted) <= 1e-5
    assert not t.layers[0].output.requires_grad


# --- operators on demand ---------------------------------------------------------------------


# --- from what the user passes to the model -----------------------------------------------------
