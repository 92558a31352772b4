"""On a CUDA device as on the CPU: methods, architectures, kernels, precisions, streams, devices."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from helpers.every_method import INSIDE, NAMES, OF_TEXTS, call
from oracles import relative_error
from torch import Tensor
from zoo import architectures, extreme

from captum_ssm.mixers import run
from captum_ssm.tracing.verification import TOLERANCES

pytestmark = pytest.mark.gpu

DEVICE = "cuda"

#: The page of a report is text, whose numbers differ in their last digits.
COMPARED = [name for name in NAMES if name != "report"]


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN would else convolve float32 with ten bits of mantissa."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> architectures.Case:
    return architectures.ZOO[request.param](monkeypatch)


def moved(case: architectures.Case, device: str) -> architectures.Case:
    return architectures.Case(
        copy.deepcopy(case.model).to(device), case.inputs.to(device), case.silent
    )


def called(name: str, case: architectures.Case) -> list[Tensor]:
    return call(name, case.model, case.inputs, case.target["target"])


def close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(relative_error(a.cpu(), b.cpu()) <= 1e-5 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", COMPARED)
def test_every_method(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (
        (architectures.mamba, architectures.jamba)
        if name in OF_TEXTS
        else (architectures.mamba, architectures.jamba, architectures.vim)
    ):
        case = make(monkeypatch)
        found = called(name, moved(case, DEVICE))
        assert name in OF_TEXTS or {tensor.device.type for tensor in found} == {DEVICE}
        assert close(found, called(name, case))


@pytest.mark.parametrize("name", INSIDE)
def test_inside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (architectures.mamba, architectures.mamba2, architectures.qwen3_next):
        case = make(monkeypatch)
        assert close(called(name, moved(case, DEVICE)), called(name, case))


@architectures.every()
def test_every_architecture(case: architectures.Case) -> None:
    there = moved(case, DEVICE)
    found = architectures.explain(there.model, there).tensors()
    assert close(found, architectures.explain(case.model, case).tensors())


@pytest.mark.parametrize("family", extreme.FAMILIES)
@pytest.mark.parametrize("method", ["rollout", "norm", "alti", "flow"])
def test_bfloat16(method: str, family: str) -> None:
    explain = extreme.METHODS[method]
    ids = extreme.token_ids()
    half = extreme.language_model(family).bfloat16()
    found = explain(copy.deepcopy(half).to(DEVICE), ids.to(DEVICE))
    wanted = explain(extreme.in_double(half), ids)
    assert relative_error(found.cpu(), wanted) <= 2 * TOLERANCES[torch.bfloat16]


def test_products_with_bfloat16_weights() -> None:
    module = torch.nn.Linear(512, 2048).bfloat16().to(DEVICE)
    x = torch.randn(1, 64, 512, device=DEVICE, requires_grad=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = run(module, x)
    assert torch.cuda.max_memory_allocated() - before < 2 * module.weight.numel()
    (gradient,) = torch.autograd.grad(found.sum(), x)
    weight = module.weight.double()
    exact = x.double() @ weight.T + module.bias.double()
    assert relative_error(found.cpu(), exact.cpu()) <= 1e-5
    assert relative_error(gradient.cpu(), weight.sum(0).expand_as(x).cpu()) <= 1e-5


@pytest.mark.parametrize("name", COMPARED)
def test_on_another_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = moved(architectures.mamba(monkeypatch), DEVICE)
    wanted = called(name, case)
    inputs, case.inputs = case.inputs, torch.zeros_like(case.inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)  # cycles, some 50 ms
        case.inputs.copy_(inputs)
        found = called(name, case)
    stream.synchronize()
    assert close(found, wanted)
