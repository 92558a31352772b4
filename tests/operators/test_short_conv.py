"""Short convolutions against torch's own, and by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import relative_error

from captum_ssm.errors import OptionError
from captum_ssm.mixers import Path
from captum_ssm.operators import ElementwiseRecurrence, HeadCentering, Shape, ShortConv


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("size", [(1, 4), (4, 1), (3, 5)])
def test_taps_over_a_map_are_a_padded_conv2d(kernel: int, size: tuple[int, int]) -> None:
    pad = kernel // 2
    weight = torch.randn(6, 1, kernel, kernel, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64)
    x = torch.randn(2, 6, *size, dtype=torch.float64, requires_grad=True)
    wanted = F.conv2d(x, weight, bias, padding=pad, groups=6)
    shape = Shape(2, size[0] * size[1], 3, 2)
    lags = [(pad - i, pad - j) for i in range(kernel) for j in range(kernel)]
    taps, constant = weight.view(3, 2, -1), bias.view(1, 1, 3, 2)
    operator = ShortConv(taps, shape, constant, lags, width=size[1])
    tokens = x.flatten(2).mT.unflatten(-1, (3, 2))
    assert relative_error(operator.affine(tokens).flatten(2), wanted.flatten(2).mT) <= 1e-13
    upstream = torch.randn_like(wanted)
    (pulled,) = torch.autograd.grad(wanted, x, upstream)
    found = operator.transpose(upstream.flatten(2).mT.unflatten(-1, (3, 2)))
    assert relative_error(found.flatten(2), pulled.flatten(2).mT) <= 1e-13
    assert operator.mixes_tokens == (kernel > 1)
    one = operator.select([2])
    assert relative_error(one.apply(tokens[:, :, 2:]), operator.apply(tokens)[:, :, 2:]) <= 1e-13


@pytest.mark.parametrize(("lags", "width"), [([(0, 0)], None), ([0], 2)])
def test_lags_that_do_not_fit_the_width_are_refused(lags: list[int], width: int | None) -> None:
    with pytest.raises(
        OptionError, match=rf"do not fit width={width}\. With a width, pass lags as"
    ):
        ShortConv(torch.ones(1, 1, 1), Shape(1, 4, 1, 1), lags=lags, width=width)


def test_a_path_is_not_narrowed_after_a_scan() -> None:
    path = Path(torch.ones(1, 3, 2)).scan(ElementwiseRecurrence(torch.ones(1, 3, 2)))
    with pytest.raises(TypeError, match=r"cannot cut ElementwiseRecurrence\. Call narrow"):
        path.narrow(0, 1, 1)


def test_centering_over_all_heads() -> None:
    shape = Shape(2, 3, 4, 1)
    x = torch.randn(shape, dtype=torch.float64)
    centering = HeadCentering(shape, x, across=True)
    wanted = F.layer_norm(x.flatten(2), (4,), eps=0) * x.flatten(2).std(-1, False, keepdim=True)
    assert relative_error(centering.apply(x).flatten(2), wanted) <= 1e-13
    assert torch.equal(centering.transpose(x), centering.apply(x))
    share = centering.per_channel().dense(None)
    assert torch.allclose(share, 0.75 * torch.eye(3, dtype=torch.float64))
    with pytest.raises(OptionError, match=r"heads=\[1\] cannot be selected from a norm"):
        centering.select([1])
