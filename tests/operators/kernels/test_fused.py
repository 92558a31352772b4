"""Kernels of Triton compile for GPUs, of which none is needed for that; where they serve."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.counts import Counts
from helpers.stand_in import StandIn
from zoo import triton_interpreter

from captum_ssm.operators import (
    DeltaRule,
    ElementwiseRecurrence,
    Operator,
    ScalarDecayHeads,
    SelectiveScan,
    Shape,
    ShortConv,
)
from captum_ssm.operators.kernels import (
    fused_delta,
    fused_fading,
    fused_heads,
    fused_scan,
    fused_taps,
    gpu,
)

BINARY = {"BINARY": fused_scan.BINARY}
#: Of a delta rule; what is erased is the key's, or of its own along steps of channels.
DELTA = {**BINARY, "DECAYING": True, "AHEAD": 4, "BLOCK": 16, "STATES": 128}
#: Each kernel, what it is made for, its flag, and the tensors that are no values.
KERNELS: dict[str, tuple[Callable[[], Any], dict[str, Any], str, tuple[str, ...]]] = {
    "scan": (fused_scan.compiled, {**BINARY, "T": 32, "BLOCK": 4, "STATES": 16}, "TRANSPOSED",
             ("dt", "a", "key", "read")),
    "gradients": (
        fused_scan.compiled_gradients, {**BINARY, "T": 16, "BLOCK": 16, "STATES": 16}, "BACK",
        ("dt", "a", "b", "c", "kept", "of_dt", "of_shared"),
    ),
    "fading": (fused_fading.compiled, {"T": 64, "BLOCK": 32}, "TRANSPOSED", ("decay",)),
    "taps": (fused_taps.compiled, {"TAPS": 4, "T": 16, "BLOCK": 64}, "TRANSPOSED", ("weight",)),
    "heads": (
        fused_heads.compiled, {**BINARY, "SCALED": True, "T": 16, "BLOCK": 32, "STATES": 128},
        "TRANSPOSED", ("read", "key", "decay", "scale"),
    ),
    **{
        name: (
            fused_delta.compiled, {**DELTA, "ERASING": two, "APART": two}, "TRANSPOSED",
            ("query", "key", "beta", "decay", "erase", "steps"),
        )
        for name, two in (("delta", False), ("delta of two keys", True))
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("values", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name: str, values: str, turned: bool) -> None:
    """For the oldest and a later generation of GPUs that packages' own kernels are made for."""
    triton = pytest.importorskip("triton")
    if triton_interpreter.is_on():
        pytest.skip("an interpreted kernel is not compiled")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wide = values == "fp64"
    compiled, own, flag, coefficients = KERNELS[name]
    kernel = compiled()
    names = list(inspect.signature(kernel.fn).parameters)
    constants = {**own, flag: turned} | ({"WIDE": wide} if "WIDE" in names else {})
    kinds = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr")
    kinds |= dict.fromkeys(coefficients, "*fp64" if wide else "*fp32")
    of_values = {"x", "out", "up", "of_x"}.intersection(names)
    kinds |= dict.fromkeys(of_values, f"*{values}")
    places = {(names.index(name),): value for name, value in constants.items()}
    for generation in (80, 90):
        source = ASTSource(fn=kernel, signature=kinds, constexprs=places)
        made = triton.compile(source, target=GPUTarget("cuda", generation, 32))
        assert made.asm["cubin"]


def scan(states: int) -> SelectiveScan:
    dt, a = torch.rand(2, 40, 3), -torch.rand(3, states)
    return SelectiveScan(dt, a, *torch.randn(2, 2, 40, states))


def conv() -> ShortConv:
    return ShortConv(torch.randn(3, 1, 4), Shape(2, 40, 3, 1))


def recurrence() -> ElementwiseRecurrence:
    return ElementwiseRecurrence(torch.rand(2, 40, 3))


def heads(states: int, tokens: int = 40) -> ScalarDecayHeads:
    """Of three heads, which share queries and keys."""
    query, key = torch.randn(2, 2, tokens, 1, states)
    decays, scale = torch.rand(2, 2, tokens, 3)
    return ScalarDecayHeads(query, key, decays.log(), scale, per_head=1)


def rule(states: int, tokens: int = 40, *, by_channel: bool = False) -> DeltaRule:
    """Of three heads; by channel it erases by keys of its own."""
    query, *keys = torch.randn(4, 2, tokens, 3, states)
    key, erase, logs = (F.normalize(x, dim=-1) for x in keys)
    beta, decays = torch.rand(2, 2, tokens, 3)
    if not by_channel:
        return DeltaRule(query, key, beta, decays.log(), 1)
    return DeltaRule(query, key, beta, -logs.abs(), 1, erase=erase, erase_step=logs.abs())


@pytest.mark.parametrize(("make", "each"), [
    (lambda: scan(4), 4), (conv, 4), (recurrence, 1), (lambda: heads(4), 8), (lambda: rule(4), 12),
    (lambda: rule(4, by_channel=True), 16),
], ids=["scan", "conv", "recurrence", "heads", "delta", "delta of two keys"])  # fmt: skip
def test_on_a_device_it_is_one_launch(make: Callable[[], Operator], each: int) -> None:
    """What is read and written are coefficients and values, and what is computed all the same.

    For each state or tap of a number more than one operation.
    """
    x, here = torch.randn(2, 40, 3, 1), make()
    with StandIn() as device:
        there = copy.copy(here)
        for name, value in vars(here).items():
            if isinstance(value, torch.Tensor):
                setattr(there, name, value.to("cuda"))
        for way in ("apply", "transpose"):
            given = x.to("cuda")
            device.counts = Counts()
            found = getattr(there, way)(given)
            assert device.counts.launches == 1
            assert device.counts.flops >= each * x.numel()
            moved = sum(y.nbytes for y in (*here.tensors().values(), x, x))
            assert device.counts.bytes == moved
            torch.testing.assert_close(found.cpu(), getattr(here, way)(x))


def test_gradients_on_a_device_take_no_launch_for_a_token() -> None:
    launches = []
    for tokens in (10, 40):
        given = [torch.rand(2, tokens, 3), -torch.rand(3, 4), *torch.randn(2, 2, tokens, 4)]
        x, up = torch.randn(2, 2, tokens, 3, 1)
        wanted = SelectiveScan(*given).backward(x, up)
        with StandIn() as device:
            there = SelectiveScan(*(y.to("cuda") for y in given))
            x, up = x.to("cuda"), up.to("cuda")
            device.counts = Counts()
            found = there.backward(x, up)
            launches.append(device.counts.launches)
            of_values, of_others = found[0].cpu(), {k: y.cpu() for k, y in found[1].items()}
        torch.testing.assert_close(of_values, wanted[0])
        torch.testing.assert_close(of_others, wanted[1])
    assert launches[0] == launches[1]


@pytest.mark.parametrize(("make", "most"), [(heads, 256), (rule, 512)], ids=["heads", "delta"])
def test_heads_on_a_device_take_as_few_launches_for_many_tokens(
    make: Callable[[int, int], Operator], most: int
) -> None:
    """Of maps, adjoints and their gradients; with too many states, they take more."""
    launches = []
    for tokens, states in ((40, 16), (400, 16), (400, most + 1)):
        here, v = make(states, tokens), torch.randn(5, 2, tokens, 3, 1)
        given = v.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(here.apply(given).square().sum(), given)
        with StandIn() as device:
            there = here.at({name: x.to("cuda") for name, x in here.tensors().items()})
            given = v.to("cuda").requires_grad_()
            device.counts = Counts()
            mapped = there.apply(given)
            launches.append(device.counts.launches)
            (found,) = torch.autograd.grad(mapped.square().sum(), given)
            found = found.cpu()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    assert launches[:2] == [1, 1] and launches[2] > 1


def test_where_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_triton", lambda: True)
    assert [fused_scan.serves(scan(n)) for n in (1, 64, 65)] == [True, True, False]
    assert [fused_heads.serves(heads(n)) for n in (1, 256, 257)] == [True, True, False]
    assert [fused_delta.serves(rule(n)) for n in (1, 512, 513)] == [True, True, False]
    double = {name: x.double() for name, x in heads(1).tensors().items()}
    assert not fused_heads.serves(heads(1).at(double))
    causal = tuple(range(17))
    assert [fused_taps.serves(lags) for lags in (causal[:4], causal, (1, 0), ((0, 1),))] == [
        True,
        False,
        False,
        False,
    ]
    monkeypatch.setattr(gpu, "has_triton", lambda: False)
    assert not fused_scan.serves(scan(1)) and not fused_taps.serves((0, 1))
    assert not fused_heads.serves(heads(1)) and not fused_delta.serves(rule(1))
