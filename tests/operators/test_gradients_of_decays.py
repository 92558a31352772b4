"""Gradients of decays are exact, and take little memory, as strips and long convolutions do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles import relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from captum_ssm.operators import (
    Chain,
    DeltaRule,
    Diagonal,
    LongConv,
    Operator,
    ScalarDecayHeads,
    Shape,
    VectorDecayHeads,
)

pytestmark = pytest.mark.slow

HEADS, STATE, WIDTH = 2, 16, 16


def made(kind: str, tokens: int, log: float) -> Operator:
    """Decays of about ``log``, which are common to key channels or their own."""
    torch.manual_seed(0)
    size = 1, tokens, HEADS
    query, key, free = torch.randn(3, *size, STATE)
    apart, unit, beta = log * free.sigmoid(), F.normalize(key, dim=-1), torch.rand(size)
    alike, steps = torch.full(size, log), torch.rand(*size, STATE)
    if kind in ("scalar", "scalar alike"):
        logs = alike if kind == "scalar alike" else log * torch.rand(size)
        return ScalarDecayHeads(query, key, logs, None, WIDTH)
    if kind == "grouped":
        return ScalarDecayHeads(query[:, :, :1], key[:, :, :1], alike, beta, WIDTH)
    if kind in ("vector", "RWKV-6"):
        bonus = torch.rand(HEADS, STATE) if kind == "RWKV-6" else None
        return VectorDecayHeads(query, key, apart, WIDTH, bonus)
    if kind == "RWKV-7":
        return DeltaRule(query, key, beta, apart, WIDTH, None, unit, steps)
    return DeltaRule(query, unit, beta, alike if kind == "gated delta" else apart, WIDTH)


SCALAR = "scalar", "scalar alike", "grouped", "gated delta"
VECTOR = "vector", "RWKV-6", "KDA", "RWKV-7"


def values(tokens: int) -> Tensor:
    return torch.randn(2, 1, tokens, HEADS, WIDTH)


@pytest.mark.parametrize("log", [-0.3, -8.0, -16.0])
@pytest.mark.parametrize("kind", SCALAR + VECTOR)
def test_steps_have_exact_gradients_at_strong_decays(kind: str, log: float) -> None:
    """Those in float32, and those in float64, which the contract compares with the matrices."""
    tokens = 256 if kind in SCALAR else 100
    operator, (v, g) = made(kind, tokens, log), values(tokens)
    zeros = torch.rand_like(operator.tensors()["key"]) > 0.1  # zeros have gradients, too
    operator = operator.at({"key": operator.tensors()["key"] * zeros})
    wide = operator.at({name: x.double() for name, x in operator.tensors().items()})
    found, wanted = operator.backward(v, g)[1], wide.backward(v.double(), g.double())[1]
    for name, gradient in found.items():
        assert relative_error(gradient.double(), wanted[name]) <= 1e-5, name


class Written(TorchDispatchMode):
    """Counts the numbers that functions of torch write, and the denormal ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.denormal = self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.dtype == torch.float32 and not x._is_view():
                self.numbers += x.numel()
                self.largest = max(self.largest, x.numel())
                tiny = torch.finfo(x.dtype).tiny
                self.denormal += int(((x != 0) & (x.abs() < tiny)).sum())
        return out


@pytest.mark.parametrize("log", [-0.3, -8.0])
@pytest.mark.parametrize("kind", VECTOR)
def test_they_hold_no_product_for_each_pair_of_tokens_and_channel(kind: str, log: float) -> None:
    tokens = 1024
    operator, (v, g) = made(kind, tokens, log), values(tokens)
    with Written() as back:
        operator.backward(v, g)
    size = tokens * HEADS * STATE
    assert back.largest <= 8 * size
    assert back.denormal <= 0.002 * back.numbers


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_no_matrix_of_a_long_convolution_per_channel_is_formed(before: bool, after: bool) -> None:
    """C L^2 elements would be 64 times as many as C L."""
    shape = Shape(1, 64, 128, 1)
    gate, conv = Diagonal(torch.randn(shape), shape), LongConv(torch.randn(128, 1, 64), shape)
    chain = Chain(*[gate] * after, conv, *[gate] * before)
    with Written() as made:
        chain.dense()
        chain.apply(gate.weight)
    assert shape.tokens * shape.heads <= made.largest <= 4 * shape.tokens * shape.heads


@pytest.mark.parametrize("groups", [1, HEADS])
def test_a_strip_of_rows_takes_memory_of_rows(groups: int) -> None:
    torch.manual_seed(0)
    tokens, rows = 4096, range(4000, 4008)
    query, key = torch.randn(2, 1, tokens, groups, STATE)
    decay, left, right = torch.randn(3, 1, tokens, HEADS)
    operator = ScalarDecayHeads(query, key, -decay.abs(), None, WIDTH)
    with Written() as made:
        operator.entries(left[..., None], {0: right[..., None]}, rows)
    assert made.largest <= HEADS * STATE * tokens
    assert made.numbers <= 50 * len(rows) * tokens
