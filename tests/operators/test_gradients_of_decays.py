"""Gradients of decays are exact, and take little memory, as strips of rows do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from captum_ssm.operators import DeltaRule, Operator, ScalarDecayHeads, VectorDecayHeads
from tests.oracles import relative_error

pytestmark = pytest.mark.slow

HEADS, STATE, WIDTH = 2, 16, 16


def scalar(tokens: int, log: float) -> Operator:
    query, key = torch.randn(2, 1, tokens, HEADS, STATE)
    return ScalarDecayHeads(query, key, log * torch.rand(1, tokens, HEADS), None, WIDTH)


def scalar_alike(tokens: int, log: float) -> Operator:
    query, key = torch.randn(2, 1, tokens, HEADS, STATE)
    return ScalarDecayHeads(query, key, torch.full((1, tokens, HEADS), log), None, WIDTH)


def grouped(tokens: int, log: float) -> Operator:
    query, key = torch.randn(2, 1, tokens, 1, STATE)
    logs, scale = torch.full((1, tokens, HEADS), log), torch.rand(1, tokens, HEADS)
    return ScalarDecayHeads(query, key, logs, scale, WIDTH)


def gated_delta(tokens: int, log: float) -> Operator:
    query, key = torch.randn(2, 1, tokens, HEADS, STATE)
    beta, logs = torch.rand(1, tokens, HEADS), torch.full((1, tokens, HEADS), log)
    return DeltaRule(query, F.normalize(key, dim=-1), beta, logs, WIDTH)


def vector(tokens: int, log: float) -> Operator:
    query, key, decay = torch.randn(3, 1, tokens, HEADS, STATE)
    return VectorDecayHeads(query, key, log * decay.sigmoid(), WIDTH)


def rwkv6(tokens: int, log: float) -> Operator:
    query, key, decay = torch.randn(3, 1, tokens, HEADS, STATE)
    return VectorDecayHeads(query, key, log * decay.sigmoid(), WIDTH, torch.rand(HEADS, STATE))


def kda(tokens: int, log: float) -> Operator:
    query, key, decay = torch.randn(3, 1, tokens, HEADS, STATE)
    beta = torch.rand(1, tokens, HEADS)
    return DeltaRule(query, F.normalize(key, dim=-1), beta, log * decay.sigmoid(), WIDTH)


def rwkv7(tokens: int, log: float) -> Operator:
    query, key, decay = torch.randn(3, 1, tokens, HEADS, STATE)
    erase, steps = F.normalize(key, dim=-1), torch.rand(1, tokens, HEADS, STATE)
    beta = torch.rand(1, tokens, HEADS)
    return DeltaRule(query, key, beta, log * decay.sigmoid(), WIDTH, None, erase, steps)


Make = Callable[[int, float], Operator]
SCALAR: tuple[Make, ...] = (scalar, scalar_alike, grouped, gated_delta)
VECTOR: tuple[Make, ...] = (vector, rwkv6, kda, rwkv7)


def values(tokens: int) -> Tensor:
    return torch.randn(2, 1, tokens, HEADS, WIDTH)


def by_tokens(make: Make, log: float, tokens: int) -> tuple[Any, Any]:
    """Gradients in float32, and those that autograd takes of the dense matrix in float64."""
    torch.manual_seed(0)
    operator, (v, g) = make(tokens, log), values(tokens)
    found = operator.backward(v, g)[1]
    leaves = {name: x.double().requires_grad_() for name, x in operator.tensors().items()}
    out = dense(operator, leaves, v.double())
    wanted = torch.autograd.grad(out, list(leaves.values()), g.double())
    return found, dict(zip(leaves, wanted, strict=True))


def dense(operator: Operator, named: dict[str, Tensor], v: Tensor) -> Tensor:
    """The recurrence of ScalarDecayHeads, or of DeltaRule with scalar decays, token by token."""
    q, k = (x.expand(-1, -1, HEADS, -1) for x in (named["query"], named["key"]))
    state, out = v.new_zeros(1, HEADS, STATE, WIDTH), []
    for t in range(v.shape[1]):
        state = named["log_decay"][:, t, :, None, None].exp() * state
        new, key = v[:, t], k[:, t]
        if "beta" in named:
            new = new - (key[..., None, :] @ state)[..., 0, :]
            new = named["beta"][:, t, :, None] * new
        if "scale" in named:
            new = named["scale"][:, t, :, None] * new
        state = state + key[..., None] * new[..., None, :]
        out.append((q[:, t, :, None] @ state)[..., 0, :])
    return torch.stack(out, 1)


@pytest.mark.parametrize("log", [-0.3, -2.0, -8.0, -16.0])
@pytest.mark.parametrize("make", SCALAR)
def test_steps_have_exact_gradients_at_strong_decays(make: Make, log: float) -> None:
    found, wanted = by_tokens(make, log, 256)
    for name, gradient in found.items():
        assert relative_error(gradient.double(), wanted[name]) <= 1e-5, name


@pytest.mark.parametrize("log", [-0.3, -8.0])
@pytest.mark.parametrize("make", VECTOR)
def test_vector_decays_have_exact_gradients(make: Make, log: float) -> None:
    torch.manual_seed(0)
    operator, (v, g) = make(100, log), values(100)
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
@pytest.mark.parametrize("make", VECTOR)
def test_they_hold_no_product_for_each_pair_of_tokens_and_channel(make: Make, log: float) -> None:
    torch.manual_seed(0)
    tokens = 1024
    operator, (v, g) = make(tokens, log), values(tokens)
    with Written() as back:
        operator.backward(v, g)
    size = tokens * HEADS * STATE
    assert back.largest <= 8 * size
    assert back.denormal <= 0.02 * back.numbers


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_a_strip_of_rows_is_that_of_the_matrix(groups: int) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 200, groups, 5, dtype=torch.float64)
    decay, scale, left, right = torch.randn(4, 2, 200, 6, dtype=torch.float64)
    operator = ScalarDecayHeads(query, key, -3 * decay.abs(), scale, 4)
    heads = operator.head_matrices()  # (B, H, L, L)
    wanted = 4 * torch.einsum("bih,bhij,bjh->bij", left, heads, right)  # of all channels
    for rows in (range(0, 8), range(1, 9), range(100, 164), range(192, 200)):
        strip = operator.strip(left[..., None], right[..., None], rows).whole(200)
        assert relative_error(strip, wanted[:, rows.start : rows.stop]) <= 1e-12


@pytest.mark.parametrize("groups", [1, HEADS])
def test_a_strip_of_rows_takes_memory_of_rows(groups: int) -> None:
    torch.manual_seed(0)
    tokens, rows = 4096, range(4000, 4008)
    query, key = torch.randn(2, 1, tokens, groups, STATE)
    decay, left, right = torch.randn(3, 1, tokens, HEADS)
    operator = ScalarDecayHeads(query, key, -decay.abs(), None, WIDTH)
    with Written() as made:
        operator.strip(left[..., None], right[..., None], rows)
    assert made.largest <= HEADS * STATE * tokens
    assert made.numbers <= 50 * len(rows) * tokens
