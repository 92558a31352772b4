"""Models inside wrappers, compiled models and inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracles import mamba1_parts, relative_error
from torch import Tensor, nn
from zoo.mamba import transformers_model

from captum_ssm import trace
from captum_ssm.tracing import find_model


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.compiler.set_stance("default"):
        yield
    torch._dynamo.reset()


class Net(nn.Module):
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
def test_compilation_goes_on_after_a_trace() -> None:
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
