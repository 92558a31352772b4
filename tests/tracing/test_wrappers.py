"""Models inside wrappers, compiled models and inference mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import oracles
import pytest
import torch
from oracles import mamba1_parts, relative_error
from torch import Tensor, nn
from zoo.mamba import randomise, transformers_model

from captum_ssm import trace
from captum_ssm.tracing import find_model, unwrap

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.compiler.set_stance("default"):
        yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Two real mixers with residuals, small enough to compile quickly."""

    def __init__(self) -> None:
        super().__init__()
        blocks = transformers_model("mamba").backbone.layers
        self.blocks = nn.ModuleList(Block(block.mixer) for block in blocks)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mixer(hidden.tanh())


def check(model: Any, hidden: Tensor, net: Net) -> list[str]:
    """Trace one run; every layer must hold this run, and the output must be unchanged."""
    with torch.no_grad():
        wanted = hidden
        mixers = [m for m in net.modules() if type(m).__name__ == "MambaMixer"]
        inputs = []
        for mixer in mixers:
            inputs.append(wanted.tanh())
            wanted = wanted.double() + mamba1_parts(mixer, inputs[-1]).output
        with trace(model) as t:
            out = model(hidden)
    assert relative_error(out, wanted) <= 2e-5
    assert len(t.layers) == len(mixers) == 2
    for layer, mixer, entering in zip(t.layers, mixers, inputs, strict=True):
        assert layer.mixer.module is mixer
        assert relative_error(layer.call.hidden_states, entering) <= 2e-5
        assert layer.reconstruction_error() <= 2e-5
        assert layer.block is not None
        assert type(layer.block) is Block
    return [layer.name for layer in t.layers]


NAMES = ["blocks.0.mixer", "blocks.1.mixer"]


def test_data_parallel() -> None:
    net = Net()
    wrapped = nn.DataParallel(net)
    assert find_model(wrapped) is net
    assert check(wrapped, torch.randn(2, 4, 5), net) == NAMES


@pytest.mark.slow
def test_compiled_model_that_already_ran() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    hidden = torch.randn(2, 4, 5)
    with torch.no_grad():
        compiled(hidden)
    assert find_model(compiled) is net
    assert check(compiled, hidden, net) == NAMES
    assert check(net, torch.randn(2, 3, 5), net) == NAMES
    with torch.no_grad():
        assert relative_error(compiled(hidden), net(hidden)) <= 2e-5


@pytest.mark.slow
def test_the_original_is_named_and_the_compiled_one_called() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    hidden = torch.randn(2, 4, 5)
    with torch.no_grad():
        compiled(hidden)
        with trace(net) as t:
            compiled(hidden)
    assert [layer.name for layer in t.layers] == NAMES


def test_compiled_model_that_never_ran() -> None:
    net = Net()
    assert check(torch.compile(net, backend="eager"), torch.randn(2, 4, 5), net) == NAMES


def test_compiled_data_parallel_of_compiled() -> None:
    net = Net()
    wrapped = torch.compile(nn.DataParallel(torch.compile(net, backend="eager")), backend="eager")
    assert unwrap(wrapped) is net
    assert check(wrapped, torch.randn(2, 4, 5), net) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("what", ["block", "mixer"])
def test_compiled_part(what: str) -> None:
    net = Net()
    if what == "block":
        net.blocks[1] = torch.compile(net.blocks[1], backend="eager")
    else:
        net.blocks[1].mixer = torch.compile(net.blocks[1].mixer, backend="eager")
    hidden = torch.randn(2, 4, 5)
    with torch.no_grad():
        net(hidden)
    first, second = check(net, hidden, net)
    assert first == NAMES[0]
    assert second.replace("._orig_mod", "") == NAMES[1]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", "blocks.1", "blocks.1.mixer"])
def test_compiled_in_place(part: str) -> None:
    net = Net()
    net.get_submodule(part).compile(backend="eager")
    hidden = torch.randn(2, 4, 5)
    with torch.no_grad():
        net(hidden)
    assert check(net, hidden, net) == NAMES


@pytest.mark.slow
def test_compilation_goes_on_after_a_trace() -> None:
    """The compiled code runs again, and a frame is not compiled anew for having been traced."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()  # other tests may have used up the recompilations of this code
    net, counter = Net(), CompileCounter()
    compiled = torch.compile(net, backend=counter)
    hidden = torch.randn(2, 4, 5)
    with torch.no_grad():
        compiled(hidden)
        before = counter.frame_count
        assert before > 0
        with trace(compiled) as t:
            compiled(hidden)
        assert len(t.layers) == 2, "the trace ran compiled code"
        assert counter.frame_count == before
        compiled(torch.randn(2, 4, 5))
    assert counter.frame_count == before


@pytest.mark.slow
def test_compilation_goes_on_after_traces_in_two_threads() -> None:
    """The first to begin is the first to end, so that the two are not nested."""
    from torch._dynamo.testing import CompileCounter

    net, counter = Net(), CompileCounter()
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def one() -> None:
        with trace(net):
            first_is_in.set()
            second_is_in.wait(20)

    thread = threading.Thread(target=one)
    thread.start()
    first_is_in.wait(20)
    with trace(net):
        second_is_in.set()
        thread.join()
    with torch.no_grad():
        torch.compile(net, backend=counter)(torch.randn(2, 4, 5))
    assert counter.frame_count > 0, "everything runs uncompiled from now on"


@pytest.mark.slow
def test_compiled_transformers_model() -> None:
    model = transformers_model("mamba")
    compiled = torch.compile(model, backend="eager")
    tokens = torch.randint(19, (2, 4))
    with torch.no_grad():
        plain = model(tokens, use_cache=False).logits
        compiled(tokens, use_cache=False)
        with trace(compiled) as t:
            out = compiled(tokens)
    assert relative_error(out.logits, plain) <= 2e-5
    assert out.cache_params is None
    assert [layer.name for layer in t.layers] == [f"backbone.layers.{i}.mixer" for i in range(2)]
    assert all(layer.reconstruction_error() <= 2e-5 for layer in t.layers)


def test_peft_model() -> None:
    peft = pytest.importorskip("peft")
    model = transformers_model("mamba")
    config = peft.LoraConfig(r=2, target_modules=["in_proj", "x_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).eval()
    tokens = torch.randint(19, (2, 5))
    with torch.no_grad(), trace(wrapped) as t:
        out = wrapped(input_ids=tokens, use_cache=True)
    assert out.cache_params is None
    assert [layer.name.rpartition("backbone")[2] for layer in t.layers] == [
        ".layers.0.mixer",
        ".layers.1.mixer",
    ]
    for i, layer in enumerate(t.layers):
        assert layer.block is model.backbone.layers[i]
        assert layer.reconstruction_error() <= 2e-5


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_inference_mode(family: str, act: str) -> None:
    model = transformers_model(family, hidden_act=act)
    tokens = torch.randint(19, (2, 6))
    with torch.inference_mode():
        with trace(model) as t:
            model(tokens)
        inside = [layer.operator.dense() for layer in t.layers]
        assert all(layer.reconstruction_error() <= 2e-5 for layer in t.layers)
    outside = [layer.operator.dense() for layer in t.layers]
    assert all(layer.reconstruction_error() <= 2e-5 for layer in t.layers)
    for found, wanted in zip(inside, outside, strict=True):
        assert relative_error(found, wanted) <= 1e-6
    for layer, found in zip(t.layers, inside, strict=True):
        parts = mamba1_parts(layer.mixer.module, layer.call.hidden_states)
        assert relative_error(found, oracles.alpha(parts, "exact").mean(1)) <= 2e-5


def test_mamba_ssm_model(mamba_ssm: Any) -> None:
    model = randomise(mamba_ssm.make_lm(6, n_layer=3))
    with torch.no_grad(), trace(model) as t:
        model(torch.randint(16, (2, 5)))
    assert [layer.name for layer in t.layers] == [f"backbone.layers.{i}.mixer" for i in range(3)]
    for i, layer in enumerate(t.layers):
        assert layer.block is model.backbone.layers[i]


@pytest.mark.parametrize("add_norm", [False, True])
def test_streams_of_mamba_ssm(mamba_ssm: Any, add_norm: bool) -> None:
    """A block takes the last mixer's output and the residual; the first is one term of it."""
    model = randomise(mamba_ssm.make_lm(6, n_layer=3, fused_add_norm=add_norm))
    with trace(model, graph="all") as t:
        logits = model(torch.randint(16, (2, 5))).logits
    for layer in t.layers:
        assert layer.stream is not None
    gradients = torch.autograd.grad(
        logits[:, -1].sum(), [layer.stream for layer in t.layers], materialize_grads=True
    )
    assert all(bool(g.any()) for g in gradients)
