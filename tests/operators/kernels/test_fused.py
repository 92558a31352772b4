"""Kernels of Triton compile for GPUs, of which none is needed for that; where they serve."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.counts import Counts
from helpers.stand_in import StandIn
from torch import Tensor
from zoo import triton_interpreter

from captum_ssm.operators import ElementwiseRecurrence, Operator, SelectiveScan
from captum_ssm.operators.kernels import fused_scan

BINARY = {"BINARY": fused_scan.BINARY}
#: Each kernel, what it is made for, its flag, and the tensors that are no values.
KERNELS: dict[str, tuple[Callable[[], Any], dict[str, Any], str, tuple[str, ...]]] = {
    "scan": (fused_scan.compiled, {**BINARY, "T": 32, "BLOCK": 4, "STATES": 16}, "TRANSPOSED",
             ("dt", "a", "key", "read")),
    "gradients": (
        fused_scan.compiled_gradients, {**BINARY, "T": 16, "BLOCK": 16, "STATES": 16}, "BACK",
        ("dt", "a", "b", "c", "kept", "of_dt", "of_shared"),
    ),
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


def on_a_device(here: Operator, x: Tensor) -> list[Counts]:
    """What the map and its adjoint cost there; the results are those of the processor."""
    counts = []
    with StandIn() as device:
        there = copy.copy(here)
        for name, value in vars(here).items():
            if isinstance(value, torch.Tensor):
                setattr(there, name, value.to("cuda"))
        for way in ("apply", "transpose"):
            given = x.to("cuda")
            device.counts = Counts()
            found = getattr(there, way)(given)
            counts.append(device.counts)
            torch.testing.assert_close(found.cpu(), getattr(here, way)(x))
    return counts


def test_on_a_device_a_scan_is_one_launch() -> None:
    """What is read and written are coefficients and values; each state is an operation or more."""
    x, here = torch.randn(2, 40, 3, 1), scan(4)
    for counts in on_a_device(here, x):
        assert counts.launches == 1
        assert counts.flops >= 4 * x.numel()
        assert counts.bytes == sum(y.nbytes for y in (*here.tensors().values(), x, x))


def test_on_a_device_a_recurrence_takes_few_launches_more_for_twice_the_tokens() -> None:
    few, more = (
        on_a_device(ElementwiseRecurrence(torch.rand(2, n, 3)), torch.randn(2, n, 3, 1))
        for n in (600, 1200)
    )
    for one, other in zip(few, more, strict=True):
        assert one.launches < other.launches <= one.launches + 8


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


def test_where_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_scan, "has_triton", lambda: True)
    assert [fused_scan.serves(scan(n)) for n in (1, 64, 65)] == [True, True, False]
    monkeypatch.setattr(fused_scan, "has_triton", lambda: False)
    assert not fused_scan.serves(scan(1))
