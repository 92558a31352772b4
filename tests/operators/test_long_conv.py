"""Long convolutions by hand, against torch's own, and what they must not do."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles import conv_matrices, relative_error, times
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from captum_ssm.errors import CaptumSSMError, OptionError
from captum_ssm.operators import (
    Chain,
    Diagonal,
    LongConv,
    Permute,
    Shape,
    Sum,
    generic,
    long_conv,
)

EXACT = 1e-12


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def test_by_hand() -> None:
    """y[t] = 2 x[t] + 3 x[t - 1] + 5 x[t - 2]"""
    operator = LongConv(torch.tensor([[[2.0, 3.0, 5.0]]]), Shape(1, 4, 1, 1))
    wanted = [[2, 0, 0, 0], [3, 2, 0, 0], [5, 3, 2, 0], [0, 5, 3, 2]]
    assert operator.dense()[0].tolist() == wanted
    assert operator.rows([2])[0, 0].tolist() == pytest.approx(wanted[2])
    x = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 4, 1, 1)
    assert operator.apply(x).flatten().tolist() == pytest.approx([2, 23, 235, 2350])
    assert operator.transpose(x).flatten().tolist() == pytest.approx([532, 5320, 3200, 2000])


@pytest.mark.parametrize("length", [1, 2, 7, 19, 40])
@pytest.mark.parametrize("tokens", [1, 2, 3, 19, 64])
def test_is_a_left_padded_conv1d(tokens: int, length: int) -> None:
    kernel, x = randn(6, length), randn(2, 6, tokens)
    wanted = F.conv1d(F.pad(x, (length - 1, 0)), kernel.flip(-1)[:, None], groups=6).mT
    operator = LongConv(kernel.view(3, 2, length), Shape(2, tokens, 3, 2))
    assert relative_error(operator.apply(x.mT.unflatten(-1, (3, 2))).flatten(2), wanted) <= EXACT


def test_typical_error_in_float32() -> None:
    errors = []
    for _ in range(25):
        tokens, length = (int(torch.randint(1, 400, ())) for _ in range(2))
        shape = Shape(2, tokens, 3, 2)
        kernel, v = torch.randn(3, 2, length), torch.randn(shape)
        operator, exact = LongConv(kernel, shape), LongConv(kernel.double(), shape)
        forth = relative_error(operator.apply(v), exact.apply(v.double()))
        back = relative_error(operator.transpose(v), exact.transpose(v.double()))
        errors.append(max(forth, back))
    assert max(errors) <= 1e-6
    assert statistics.median(errors) <= 5e-7


def test_nothing_arrives_beyond_the_kernels_reach() -> None:
    """The rounding errors of a transform would make every row reach every token."""
    shape = Shape(2, 21, 3, 2)
    operator = LongConv(torch.randn(3, 2, 5), shape)
    rows = operator.rows(range(21), None)
    assert not rows.triu(1).any() and not rows.tril(-5).any()
    assert rows.diagonal(0, -2, -1).all() and rows.diagonal(-4, -2, -1).all()
    one = torch.zeros(shape)
    one[1, 9, 2, 0] = 1
    reached = operator.apply(one).nonzero()
    assert reached[:, 1].tolist() == [9, 10, 11, 12, 13]
    assert (reached[:, [0, 2, 3]] == torch.tensor([1, 2, 0])).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    shape = Shape(1, 17, 2, 2)
    kernel, v = torch.randn(2, 1, 17).to(dtype), torch.randn(shape).to(dtype)
    operator = LongConv(kernel, shape)
    assert operator.dtype == operator.apply(v).dtype == torch.float32
    wanted = LongConv(kernel.double(), shape)
    assert relative_error(operator.apply(v), wanted.apply(v.double())) <= 1e-6
    assert relative_error(operator.dense(), wanted.dense()) <= 1e-6


def test_autocast_is_kept_out() -> None:
    shape = Shape(1, 40, 4, 1)
    operator = LongConv(torch.randn(4, 1, 40), shape)
    gate, v = Diagonal(torch.randn(shape), shape), torch.randn(shape)
    plain = operator.apply(v), operator.dense(), Chain(gate, operator, gate).dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = operator.apply(v), operator.dense(), Chain(gate, operator, gate).dense()
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_heads_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(2, 9, 5, 2)
    operator = LongConv(randn(5, 2, 9), shape)
    v = randn(3, *shape)
    wanted = operator.apply(v), operator.transpose(v)
    for at_once in (1, 2, 4):
        monkeypatch.setattr(long_conv, "_SIGNAL_ELEMENTS", at_once * 6 * 32 * 2)
        for found, whole in zip((operator.apply(v), operator.transpose(v)), wanted, strict=True):
            assert relative_error(found, whole) <= EXACT


@pytest.mark.parametrize("kernels", [1, 2])
@pytest.mark.parametrize("length", [3, 11, 30])
def test_contract_with_factors_that_vary_or_not(length: int, kernels: int) -> None:
    """Three ways to compute it, by which of the factors vary over tokens."""
    shape = Shape(2, 11, 3, 2)
    kernel = randn(3, kernels, length)
    operator = LongConv(kernel, shape)
    matrices = conv_matrices(kernel.expand(3, 2, length), range(length), shape)
    common = (1, 1, 1, 1), (2, 1, 3, 2), (1, 1, 3, 1)
    varying = (2, 11, 3, 2), (1, 11, 1, 2), (2, 11, 1, 1)
    sizes = common + varying
    for left, right in [(randn(*a), randn(*b)) for a in sizes for b in sizes]:
        wanted = torch.einsum(
            "bic,bcij,bjc->bij",
            left.expand(shape).flatten(2),
            matrices.expand(2, -1, -1, -1),
            right.expand(shape).flatten(2),
        )
        for u, w in ((left, right), (left.expand(shape), right.expand(shape))):
            found = operator.contract(u, w)
            assert found.is_contiguous()
            assert relative_error(found, wanted) <= EXACT
            assert relative_error(generic.contract(operator, u, w), wanted) <= EXACT


def test_gates_at_one_end_cost_one_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain passes on that a factor is common to all tokens."""

    def refuse(*_: object) -> Tensor:
        raise AssertionError("computed lag by lag")

    shape = Shape(2, 8, 3, 1)
    monkeypatch.setattr(LongConv, "_lag_by_lag", refuse)
    gate, skip = Diagonal(randn(*shape), shape), Diagonal(randn(1, 1, 3, 1), shape)
    conv = LongConv(randn(3, 1, 8), shape)
    for chain in (Chain(conv, skip), Chain(gate, Sum(conv, skip)), Chain(skip, conv, skip, gate)):
        assert relative_error(chain.dense(), chain.dense(None).mean(1)) <= EXACT
    with pytest.raises(AssertionError, match="lag by lag"):
        Chain(gate, conv, gate).dense()


def test_both_ways() -> None:
    shape = Shape(2, 7, 3, 1)
    ahead, back, gate = randn(3, 1, 7), randn(3, 1, 4), randn(*shape)
    flip = Permute(torch.arange(6, -1, -1), shape)
    operator = Chain(
        Diagonal(gate, shape),
        Sum(LongConv(ahead, shape), Chain(flip, LongConv(back, shape), flip)),
    )
    both = torch.cat([back.flip(-1), ahead], -1)
    matrices = conv_matrices(both, [*range(-3, 1), *range(7)], shape)
    matrices = gate.squeeze(-1).mT[..., None] * matrices
    v = randn(*shape)
    assert relative_error(operator.apply(v), times(matrices, v)) <= EXACT
    assert relative_error(operator.transpose(v), times(matrices.mT, v)) <= EXACT
    assert relative_error(operator.dense(), matrices.mean(1)) <= EXACT
    assert relative_error(operator.dense(None), matrices) <= EXACT


def test_a_kernel_is_frozen() -> None:
    kernel = torch.randn(2, 1, 6, requires_grad=True)
    operator = LongConv(kernel, Shape(1, 5, 2, 1))
    assert not any(t.requires_grad for t in operator.tensors().values())
    assert operator.tensors()["kernel"].shape == (2, 1, 5)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (torch.zeros(3, 2, 5, dtype=torch.complex64), "real kernel"),
        (torch.zeros(3, 5), r"\(3, 5\).*kernel\[:, None\]"),
        (torch.zeros(2, 3, 5), r"H = 3 and P = 2 or 1"),
        (torch.zeros(1, 1, 5), r"H = 3 and P = 2 or 1"),
        (torch.zeros(3, 2, 0), r"\(3, 2, 0\)"),
        (torch.zeros(3, 2, 5, 1), r"\(3, 2, 5, 1\)"),
    ],
)
def test_a_kernel_that_does_not_fit_is_refused(kernel: Tensor, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        LongConv(kernel, Shape(1, 4, 3, 2))
    assert isinstance(caught.value, CaptumSSMError) and isinstance(caught.value, ValueError)


class Largest(TorchDispatchMode):
    """Notes the largest tensor computed."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // 8)
        return out


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_no_matrix_per_channel_is_formed(before: bool, after: bool) -> None:
    """C L^2 elements would be 64 times as many as C L."""
    shape = Shape(1, 64, 128, 1)
    gate = Diagonal(randn(*shape), shape)
    conv = LongConv(randn(128, 1, 64), shape)
    chain = Chain(*[gate] * after, conv, *[gate] * before)
    with Largest() as largest:
        chain.dense()
        chain.apply(gate.weight)
    assert shape.tokens * shape.heads <= largest.elements <= 4 * shape.tokens * shape.heads
