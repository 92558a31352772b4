"""The fused scan compiles for GPUs, of which none is needed for that; where it serves."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from zoo import triton_interpreter

from benchmarks.counts import Counts
from benchmarks.stand_in import StandIn
from captum_ssm.operators import SelectiveScan
from captum_ssm.operators.kernels import fused_scan

CONSTANTS: dict[str, Any] = {"BINARY": fused_scan.BINARY, "T": 32, "BLOCK": 4, "STATES": 16}


@pytest.mark.full
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("values", ["fp32", "bf16", "fp64"])
def test_it_compiles(values: str, transposed: bool) -> None:
    """For the oldest and a later generation of GPUs that packages' own kernels are made for."""
    triton = pytest.importorskip("triton")
    if triton_interpreter.is_on():
        pytest.skip("an interpreted kernel is not compiled")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wide = values == "fp64"
    constants = {**CONSTANTS, "TRANSPOSED": transposed, "WIDE": wide}
    names = list(inspect.signature(fused_scan._scan).parameters)
    kinds = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr")
    kinds |= dict.fromkeys(("dt", "a", "key", "read"), "*fp64" if wide else "*fp32")
    kinds |= dict.fromkeys(("x", "out"), f"*{values}")
    places = {(names.index(name),): value for name, value in constants.items()}
    for generation in (80, 90):
        source = ASTSource(fn=fused_scan.compiled(), signature=kinds, constexprs=places)
        made = triton.compile(source, target=GPUTarget("cuda", generation, 32))
        assert made.asm["cubin"]


def scan(states: int) -> SelectiveScan:
    dt, a = torch.rand(2, 40, 3), -torch.rand(3, states)
    return SelectiveScan(dt, a, *torch.randn(2, 2, 40, states))


def test_on_a_device_it_is_one_launch() -> None:
    x = torch.randn(2, 40, 3, 1)
    here = scan(4)
    with StandIn() as device:
        there = SelectiveScan(*(y.to("cuda") for y in here.tensors().values()))
        for way in ("apply", "transpose"):
            device.counts = Counts()
            given = x.to("cuda")
            found = getattr(there, way)(given)
            assert device.counts.launches == 1
            states = 2 * 40 * 3 * 4  # a decay, a written number, a sum of two and a read one each
            assert device.counts.flops >= 4 * states
            moved = sum(y.nbytes for y in (*here.tensors().values(), x, x))
            assert device.counts.bytes == moved
            torch.testing.assert_close(found.cpu(), getattr(here, way)(x))


def test_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_scan, "_has_triton", lambda: True)
    assert [fused_scan.serves(scan(n)) for n in (1, 64, 65)] == [True, True, False]
    monkeypatch.setattr(fused_scan, "_has_triton", lambda: False)
    assert not fused_scan.serves(scan(1))
