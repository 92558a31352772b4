"""The paths taken on a CUDA device or on Apple's MPS, on a device that stands in for one."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.every_method import INSIDE, METHODS, call
from oracles import relative_error
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode
from zoo import architectures, networks
from zoo.adapters import ADAPTERS
from zoo.language import word_tokenizer

from benchmarks.counts import Counts
from benchmarks.stand_in import MixedDevicesError, StandIn
from captum_ssm import (
    EdgeEffects,
    Feature,
    ImplicitAttention,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    MambaAttribution,
    SSMLLMAttribution,
    attribution_graph,
)
from captum_ssm.operators import SelectiveScan
from captum_ssm.operators.kernels import truths

#: The page of a report is text, and ``compare`` calls the methods one by one.
NAMES = [*(method.__name__ for method in METHODS), "matrices", "norms", *INSIDE]
#: What is asked of every kind of mixer; of the others each kind is asked for some in its turn, so
#: that all are asked for on many.
ALWAYS = ("LatimFlow", "MambaAttribution", "LatimLogit", "LatimALTI")
IN_TURN = [name for name in NAMES if name not in ALWAYS]
AT_A_TIME = 2
#: What is found there and given back on the host.
ON_HOST = ("graph",)
#: Whose model cannot be on MPS; the same with attention is in float32.
IN_DOUBLE = "jamba"
#: Of 243 operators that any method asks for on any mixer, they do not ask for ``clamp_max`` and
#: ``special_entr`` alone.
ON_MPS = ("MambaAttribution", "LatimALTI")
NO_FAST_PATH = "is_fast_path_available", False
#: Models whose own code the zoo has told that a processor is the device that it needs.
TOLD = {
    "fla Mamba3": "fla.layers.mamba3.Mamba3",
    "fla LogLinearMamba2": "fla.layers.log_linear_mamba2.LogLinearMamba2",
}


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> architectures.Case:
    return ADAPTERS[request.param](monkeypatch)


def moved(case: architectures.Case, kind: str = "cuda") -> architectures.Case:
    return architectures.Case(copy.deepcopy(case.model).to(kind), case.inputs.to(kind))


def asked_of(key: str) -> list[str]:
    """The names of what a kind of mixer is asked for."""
    first = list(ADAPTERS).index(key) * AT_A_TIME
    return [*ALWAYS, *(IN_TURN[(first + i) % len(IN_TURN)] for i in range(AT_A_TIME))]


def target_of(case: architectures.Case) -> Any:
    return 1 if case.inputs.dim() == 4 else (-1, 3)


def found_or_refused(name: str, case: architectures.Case) -> list[Tensor] | str:
    """What a method finds, or by what name it refuses the model."""
    try:
        return call(name, case.model, case.inputs, target_of(case))
    except Exception as refused:
        return type(refused).__name__


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether what calls have noted held, one after the other; else they were made twice."""
    found: list[bool] = []
    all_hold = truths._all_hold
    monkeypatch.setattr(
        truths, "_all_hold", lambda noted: found.append(all_hold(noted)) or found[-1]
    )
    return found


def same(found: list[Tensor] | str, wanted: list[Tensor] | str) -> bool:
    if isinstance(found, str) or isinstance(wanted, str):
        return found == wanted
    return all(relative_error(a.cpu(), b) <= 1e-5 for a, b in zip(found, wanted, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("case", ADAPTERS, indirect=True)
def test_methods_on_every_kind_of_mixer(
    case: architectures.Case,
    held: list[bool],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It finds the same, no operation has met tensors of both devices, and results are there.

    No call is made twice but those that are refused, for all that is noted holds.
    """
    key = request.node.callspec.params["case"]
    wanted = {name: found_or_refused(name, case) for name in asked_of(key)}
    if key in TOLD:
        tell_of("cuda", TOLD[key], monkeypatch)
    if key == "fla Mamba2":  # whose kernels, where some of mamba_ssm's are, need the real device
        monkeypatch.setattr(importlib.import_module("fla.layers.mamba2"), *NO_FAST_PATH)
    with StandIn(counted=False) as device:
        there = moved(case)
        for name in wanted:
            held.clear()
            found = found_or_refused(name, there)
            assert isinstance(found, str) or all(held), name
            assert not device.mixed, (name, device.mixed)
            assert same(found, wanted[name]), (name, found, wanted[name])
            is_there = isinstance(found, str) or {x.is_cuda for x in found} <= {name not in ON_HOST}
            assert is_there, name


QUESTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "tokens in rising order": lambda method, ids: method.attribute_each(ids, [(2, 3), (6, 3)]),
    "an early token": lambda method, ids: method.attribute(ids, (1, 3)),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("method", [LatimALTI, LatimLogit, MambaAttribution])
@pytest.mark.parametrize("make", [architectures.mamba, networks.NETWORKS["gpt_neox"]])
def test_no_question_is_answered_twice(
    make: architectures.Make,
    method: Any,
    question: str,
    held: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make(monkeypatch)
    wanted = QUESTIONS[question](method(case.model), case.inputs)
    held.clear()
    with StandIn():
        there = moved(case)
        found = QUESTIONS[question](method(there.model), there.inputs)
        assert same([found], [wanted])
    assert held == [True]


class Returning(torch.nn.Module):
    """Returns what it is given, by a function after which it counts for something else."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) - torch.relu(-x)


def test_a_part_that_returns_the_stream_is_found(
    held: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device it is taken for another; that this does not hold is seen at the end."""
    case = networks.NETWORKS["gpt_neox"](monkeypatch)
    for layer in case.model.gpt_neox.layers:
        layer.post_attention_layernorm, layer.mlp = torch.nn.Identity(), Returning()
    wanted = LatimALTI(case.model).attribute(case.inputs, (-1, 3))
    held.clear()
    with StandIn():
        there = moved(case)
        assert same([LatimALTI(there.model).attribute(there.inputs, (-1, 3))], [wanted])
    assert held == [False]


def tell_of(kind: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = path.rpartition(".")
    forward = getattr(importlib.import_module(module), name).forward
    names = tuple(kind if x == "cpu" else x for x in forward.__code__.co_consts)
    monkeypatch.setattr(forward, "__code__", forward.__code__.replace(co_consts=names))


# --- MPS -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("case", [key for key in ADAPTERS if key != IN_DOUBLE], indirect=True)
def test_mps_has_what_it_is_asked_for(
    case: architectures.Case, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every kind of mixer the same is found, without an operator or a number that MPS lacks."""
    key = request.node.callspec.params["case"]
    with sdpa_kernel(SDPBackend.MATH):  # as there: some relevance is 0, and found as its rounding
        wanted = {name: found_or_refused(name, case) for name in ON_MPS}
    if key in TOLD:
        tell_of("mps", TOLD[key], monkeypatch)
    with StandIn(counted=False, kind="mps") as device:
        there = moved(case, "mps")
        for name in ON_MPS:
            found = found_or_refused(name, there)
            assert not device.lacking + device.mixed, (name, device.lacking, device.mixed)
            assert same(found, wanted[name]), (name, found, wanted[name])
            assert isinstance(found, str) or all(x.is_mps for x in found), name


def directions(model: nn.Module, ids: Tensor) -> Tensor:
    """What a graph says whose nodes are directions, of which one inverts the matrix."""
    nodes = [Feature("backbone.layers.0", torch.eye(5)[i] + 0.5, position=2) for i in (1, 2)]
    return attribution_graph(model, ids[:1], (-1, 3), nodes=nodes, contrast="mean").effects()


def over_spans(model: nn.Module, ids: Tensor) -> Tensor:
    explain = SSMLLMAttribution(LatimFlow(model), word_tokenizer())
    options = {"spans": "token", "prompt_spans": "token", "hops": 2}
    return explain.attribute("anna owns the lamp", target="owns the", **options).seq_attr


#: What is asked of a device beside what :data:`NAMES` name.
ELSE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "compare": lambda model, ids: torch.cat(call("compare", model, ids, (-1, 3))),
    "report": lambda model, ids: call("report", model, ids, (-1, 3))[-1],
    "factors": lambda model, ids: ImplicitAttention(model).factors(ids, channels=[0])[0].history,
    "cuts": lambda model, ids: EdgeEffects(model).against_truth(ids, (-1, 3), samples=4).true,
    "directions": directions,
    "spans": over_spans,
}


@pytest.mark.parametrize("name", ELSE)
def test_mps_has_what_else_it_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = architectures.mamba(monkeypatch)
    wanted = ELSE[name](case.model, case.inputs)
    with StandIn(counted=False, kind="mps") as device:
        there = moved(case, "mps")
        found = ELSE[name](there.model, there.inputs)
        assert not device.lacking + device.mixed
    assert relative_error(found, wanted) <= 1e-4


def test_a_torch_without_autocast_for_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.4, which refuses to say whether it is on, and to turn it off."""

    def without_mps(function: Callable[..., Any]) -> Callable[..., Any]:
        def asked(kind: str, *args: Any, **kwargs: Any) -> Any:
            if kind == "mps":
                raise RuntimeError("unsupported autocast device_type")
            return function(kind, *args, **kwargs)

        return asked

    for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):
        monkeypatch.setattr(torch, name, without_mps(getattr(torch, name)))
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: kind != "mps")
    case = architectures.mamba(monkeypatch)
    with StandIn(counted=False, kind="mps"):
        there = moved(case, "mps")
        for name in ("LatimFlow", "MambaAttribution"):
            call(name, there.model, there.inputs, (-1, 3))


@pytest.mark.parametrize(
    ("operation", "lacking"),
    [
        (torch.matrix_exp, "aten::linalg_matrix_exp"),
        (torch.frexp, "aten::frexp.Tensor_out"),  # of which the one that is asked for is made
        (lambda x: x.double(), "torch.float64"),
        (lambda x: torch.zeros(2, dtype=torch.complex128, device=x.device), "torch.complex128"),
        (lambda x: torch.zeros(2).double().to(x), None),
        (lambda x: torch.zeros(2).double().to(x.device), "torch.float64"),
        (lambda x: (x % 3).logsumexp(0).masked_fill(x > 0, 1) @ torch.fft.rfft(x).abs(), None),
    ],
)
def test_what_mps_lacks(operation: Callable[[Tensor], Any], lacking: str | None) -> None:
    with StandIn(kind="mps") as device:
        x = torch.randn(3, 3).to("mps")
        assert (str(x.device), x.is_mps, x.is_cuda) == ("mps:0", True, False)
        if lacking is None:
            operation(x)
        else:
            with pytest.raises((NotImplementedError, TypeError), match=lacking):
                operation(x)
    assert len(device.lacking) == (lacking is not None)
    assert all("test_stand_in.py" in found for found in device.lacking)


def test_a_method_that_asks_for_what_mps_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(right: Any, scan: Any, x: Tensor, transposed: bool) -> Tensor:
        return right(scan, torch.frexp(x).mantissa, transposed)

    broken(monkeypatch, run)
    with StandIn(counted=False, kind="mps") as device:
        there = moved(architectures.mamba(monkeypatch), "mps")
        found_or_refused("LatimFlow", there)
    assert "aten::frexp" in device.lacking[0]


# --- what it catches -----------------------------------------------------------------------------


def explained(length: int, monkeypatch: pytest.MonkeyPatch) -> Counts:
    """The counts of one call on a small Mamba, without those of its own loop."""
    case = architectures.mamba(monkeypatch)
    case.inputs = torch.randint(15, (1, length))
    with StandIn() as device:
        there = moved(case)
        device.counts = Counts()
        with torch.no_grad():
            there.model(there.inputs)
        own = device.counts.launches
        device.counts = Counts()
        LatimFlow(there.model).attribute(there.inputs, (-1, 3))
        device.counts.launches -= own
    return device.counts


def broken(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Tensor]) -> None:
    """Put another function in the place of the scan of Mamba-1."""
    right = SelectiveScan._run
    monkeypatch.setattr(
        SelectiveScan, "_run", lambda scan, x, transposed: run(right, scan, x, transposed)
    )


def test_a_tensor_left_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(right: Any, scan: Any, x: Tensor, transposed: bool) -> Tensor:
        return right(scan, x, transposed) * torch.ones(scan.shape.tokens)[:, None, None]

    broken(monkeypatch, run)
    with pytest.raises(MixedDevicesError, match=r"aten.mul.Tensor with \[\(9, 1, 1\)\]"):
        explained(9, monkeypatch)


@pytest.mark.full
def test_a_loop_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(right: Any, scan: Any, x: Tensor, transposed: bool) -> Tensor:
        out = torch.empty_like(x)
        steps = scan._steps(1, transposed)
        steps(x[None, ..., 0], slice(0, scan.shape.tokens), out[None, ..., 0])
        return out

    grown = [explained(length, monkeypatch).launches for length in (64, 128)]
    broken(monkeypatch, run)
    looped = [explained(length, monkeypatch).launches for length in (64, 128)]
    assert grown[1] - grown[0] < 64 < looped[1] - looped[0]


def test_an_extra_item(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(right: Any, scan: Any, x: Tensor, transposed: bool) -> Tensor:
        return right(scan, x, transposed) if x.sum().item() < 1e9 else x

    before = explained(9, monkeypatch).waits
    broken(monkeypatch, run)
    after = explained(9, monkeypatch).waits
    assert len(after) > len(before)
    assert any("test_stand_in.py" in place for place in after)
    assert not any("test_stand_in.py" in place for place in before)


# --- the device itself ---------------------------------------------------------------------------


def test_tensors_are_where_they_were_sent() -> None:
    with StandIn():
        x = torch.randn(2, 3).to("cuda").requires_grad_()
        (gradient,) = torch.autograd.grad((x[0] * 2).sum(), x)
        assert all(y.is_cuda for y in (x, x.detach(), x[0], x.T, gradient, torch.zeros_like(x)))
        assert torch.ones(2, device=x.device).device == torch.device("cuda:0")
        assert not any(y.is_cuda for y in (x.cpu(), torch.ones(2), x.detach().to("cpu")))
        with torch._C.DisableTorchFunction():  # out of sight of all modes of functions
            assert x.is_cuda
        with pytest.raises(TypeError, match="numpy"):
            x.detach().numpy()
    assert not x.is_cuda
    assert torch.arange(2).device.type == "cpu"


def test_two_devices() -> None:
    with StandIn() as device:
        x = torch.ones(2).to("cuda:0").requires_grad_()
        y = x.to("cuda:1")
        assert (y.device, y.get_device(), y.is_cuda) == (torch.device("cuda:1"), 1, True)
        assert torch.zeros_like(y).device == torch.ones(2, device="cuda:1").device == y.device
        with pytest.raises(MixedDevicesError, match=r"cuda:0 and cuda:1: aten\.mul"):
            x * y
        with pytest.raises(MixedDevicesError, match=r"cuda:1 and cpu: aten\.mul"):
            y * torch.ones(2)
        (gradient,) = torch.autograd.grad((y * y).sum(), x)
        assert gradient.device == x.device and gradient.tolist() == [2.0, 2.0]
        x.detach().copy_(y.detach() + 1)
        assert x.tolist() == [2.0, 2.0]
    assert len(device.mixed) == 2


@pytest.mark.parametrize(
    ("operation", "launches", "waits"),
    [
        (lambda x: x + 1, 1, 0),
        (lambda x: x.view(6)[0], 0, 0),
        (lambda x: x.sum().item(), 1, 1),
        (lambda x: bool((x > 0).any()), 2, 1),
        (lambda x: (x > 0).nonzero(), 2, 1),
        (lambda x: x[x > 0], 2, 1),
        (lambda x: x.masked_fill(x > 0, 0), 2, 0),
        (lambda x: x.cpu(), 0, 1),
        (lambda x: x.tolist(), 0, 1),
        (lambda x: x * torch.tensor(2.0), 1, 0),
        (lambda x: torch.equal(x, x), 1, 1),
    ],
)
def test_what_is_counted(operation: Callable[[Tensor], Any], launches: int, waits: int) -> None:
    with StandIn() as device:
        x = torch.randn(2, 3).to("cuda")
        device.counts = Counts()
        operation(x)
    assert (device.counts.launches, device.counts.synchronisations) == (launches, waits)


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.item, Tensor.cpu])
def test_a_wait_under_a_mode_is_one_and_the_callers(read: Callable[[Tensor], Any]) -> None:
    with StandIn() as device, BaseTorchFunctionMode():
        x = torch.ones((), device="cuda")
        device.counts = Counts()
        read(x)
    (place,) = device.counts.waits
    assert "test_stand_in.py" in place


def test_bytes_and_arithmetic() -> None:
    with StandIn() as device:
        x, y = torch.randn(4, 8).to("cuda"), torch.randn(8, 2).to("cuda")
        device.counts = Counts()
        x @ y
        x + x[:1].expand(4, 8)  # its one row is read once
    assert device.counts.flops == 2 * 4 * 8 * 2 + 4 * 8
    assert device.counts.bytes == 4 * (4 * 8 + 8 * 2 + 4 * 2) + 4 * (4 * 8 + 8 + 4 * 8)


def test_a_kernel_is_one_launch_and_one_more_for_its_backward() -> None:
    with StandIn() as device:
        kernel = device.kernel(lambda x, times: sum(x * n for n in range(times)))
        x = torch.randn(3).to("cuda").requires_grad_()
        device.counts = Counts()
        out = kernel(x, 5)
        assert (out.is_cuda, device.counts.launches) == (True, 1)
        (gradient,) = torch.autograd.grad(out, x, torch.ones(3, device="cuda"))
        assert gradient.is_cuda
        assert device.counts.launches == 3  # that of the ones too
        assert gradient.tolist() == [10.0] * 3
