"""Long convolutions by hand, against torch's own, and what they must not do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import relative_error
from torch import Tensor

from captum_ssm.errors import CaptumSSMError, OptionError
from captum_ssm.operators import Chain, Diagonal, LongConv, Shape

EXACT = 1e-12


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 7, 40])
@pytest.mark.parametrize("tokens", [1, 3, 19, 64])
def test_is_a_left_padded_conv1d(tokens: int, length: int) -> None:
    kernel, x = randn(6, length), randn(2, 6, tokens)
    wanted = F.conv1d(F.pad(x, (length - 1, 0)), kernel.flip(-1)[:, None], groups=6).mT
    operator = LongConv(kernel.view(3, 2, length), Shape(2, tokens, 3, 2))
    assert relative_error(operator.apply(x.mT.unflatten(-1, (3, 2))).flatten(2), wanted) <= EXACT


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


def test_autocast_is_kept_out() -> None:
    shape = Shape(1, 40, 4, 1)
    operator = LongConv(torch.randn(4, 1, 40), shape)
    gate, v = Diagonal(torch.randn(shape), shape), torch.randn(shape)
    plain = operator.apply(v), operator.dense(), Chain(gate, operator, gate).dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = operator.apply(v), operator.dense(), Chain(gate, operator, gate).dense()
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


@pytest.mark.parametrize(("kernel", "message"), [
    (torch.zeros(3, 2, 5, dtype=torch.complex64), "real kernel"),
    (torch.zeros(3, 5), r"\(3, 5\).*kernel\[:, None\]"),
    (torch.zeros(2, 3, 5), r"H = 3, P = 2 or 1"),
    (torch.zeros(1, 1, 5), r"H = 3, P = 2 or 1"),
    (torch.zeros(3, 2, 0), r"\(3, 2, 0\)"),
    (torch.zeros(3, 2, 5, 1), r"\(3, 2, 5, 1\)"),
])  # fmt: skip
def test_a_kernel_that_does_not_fit_is_refused(kernel: Tensor, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        LongConv(kernel, Shape(1, 4, 3, 2))
    assert isinstance(caught.value, CaptumSSMError) and isinstance(caught.value, ValueError)
