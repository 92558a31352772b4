"""Scalings whose factors are common to examples, tokens, heads or channels."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from captum_ssm.operators import Diagonal, Shape, ShortConv

SHAPE = Shape(batch=2, tokens=7, heads=3, per_head=2)
SIZES = list(product(*((1, size) for size in SHAPE)))


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


@pytest.mark.parametrize("size", SIZES)
def test_some_tokens_at_a_time(size: tuple[int, ...]) -> None:
    weight, v = randn(*size), randn(*SHAPE)
    wanted = weight.expand(SHAPE) * v
    for transposed in (False, True):
        stream = Diagonal(weight, SHAPE).stream(transposed, 3)
        for part in (slice(4, 7), slice(1, 4), slice(0, 1)):
            assert torch.equal(stream(v[:, part], part), wanted[:, part])


@pytest.mark.parametrize("size", SIZES)
def test_what_differs_between_examples_or_tokens_follows_from_the_data(
    size: tuple[int, ...],
) -> None:
    weight = randn(*size)
    follows = size[0] > 1 or size[1] > 1
    assert Diagonal(weight, SHAPE).data_dependent == follows
    assert Diagonal(weight, SHAPE).select([2, 0]).data_dependent == follows
    for said in (True, False):
        assert Diagonal(weight, SHAPE, data_dependent=said).data_dependent == said


def test_a_convolution_fed_piece_by_piece_keeps_only_what_it_reads_again() -> None:
    lags = (0, 3)
    conv = ShortConv(randn(3, 2, len(lags)), SHAPE, lags=lags)
    v = randn(*SHAPE)
    for transposed in (False, True):
        stream = conv.stream(transposed, 2)
        assert stream is not None
        parts = [slice(t, min(t + 2, SHAPE.tokens)) for t in range(0, SHAPE.tokens, 2)]
        for part in parts[::-1] if transposed else parts:
            stream(v[:, part], part)
            assert stream.kept.shape == (2, max(lags), 3, 2)
