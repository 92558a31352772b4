"""The weight of a mixer's output projection, whatever it is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.latim_vectors import layer_of
from oracles import relative_error
from torch import Tensor

from captum_ssm.attr.vectors.contributions import Contributions
from captum_ssm.operators import DenseHeads


def in_place(y: Tensor, weight: Tensor) -> Tensor:
    return F.linear(y.flatten(2), weight).mul_(3)


#: Projections with one call of ``linear`` that is not all of them: of values (B, L, 3, 2).
NOT_ONE_PRODUCT = {
    "scaled before": lambda y, w: F.linear(2 * y.flatten(2), w),
    "scaled after": lambda y, w: F.linear(y.flatten(2), w) * 2,
    "scaled in place": in_place,
    "one channel for all": lambda y, w: F.linear(y.flatten(2)[..., :1].expand(-1, -1, 6), w),
    "some channels": lambda y, w: F.linear(y.flatten(2)[..., :4], w[:, :4]),
    "channels in another order": lambda y, w: F.linear(y.transpose(2, 3).flatten(2), w),
    "two products": lambda y, w: F.linear(F.linear(y.flatten(2), w), w[:, :5]),
    "by name": lambda y, w: F.linear(input=y.flatten(2), weight=w),
    "none": lambda y, w: y.flatten(2) @ w.T,
}


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("name", NOT_ONE_PRODUCT)
def test_projections_that_are_not_one_product(name: str, tokens: int) -> None:
    """Single tokens among them, of which a slice of the channels lies in memory as the whole."""
    weight, bias = torch.randn(5, 6), torch.randn(5)
    layer = layer_of(DenseHeads(torch.rand(1, 3, tokens, tokens), 2), None)
    product = NOT_ONE_PRODUCT[name]
    layer.linear = replace(layer.linear, project=lambda y: product(y, weight) + bias)
    wanted = product(torch.eye(6).view(6, 1, 3, 2), weight)[:, 0]
    assert relative_error(Contributions(layer).weight, wanted) <= 1e-6
    layer.linear = replace(layer.linear, project=lambda y: product(y, weight))
    assert relative_error(Contributions(layer).weight, wanted) <= 1e-6


def test_one_product_is_read_off() -> None:
    """To the last digit, whatever the bias is."""
    weight, bias = torch.randn(5, 6), 1e4 * torch.randn(5)
    layer = layer_of(DenseHeads(torch.rand(2, 3, 4, 4), 2), None)
    layer.linear = replace(layer.linear, project=lambda y: F.linear(y.flatten(2), weight, bias))
    parts = Contributions(layer)
    assert torch.equal(parts.weight, weight.T)
    assert torch.equal(parts.constant(), bias.expand(2, 4, 5))
