"""Operators fed a few tokens at a time equal operators that see all tokens at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import relative_error
from oracles.token_loops import Loop
from torch import Tensor
from zoo.chunked_kinds import Make, kinds

from captum_ssm.operators import (
    Chain,
    Diagonal,
    ElementwiseRecurrence,
    Operator,
    Permute,
    SelectiveScan,
    Shape,
    ShortConv,
    Sum,
    recurrences,
)
from captum_ssm.operators.kernels import portions
from captum_ssm.operators.kernels.chunks import CHUNK
from captum_ssm.operators.recurrences.base import Recurrent


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def mixer(tokens: int, groups: int = 0, lags: tuple[int, ...] = (0, 1, 2, 3)) -> Operator:
    """Everything that has a stream, as in a mixer, on 6 channels."""
    shape = Shape(2, tokens, 6, 1)
    vectors = (2, tokens, groups, 3) if groups else (2, tokens, 3)
    scan = SelectiveScan(
        randn(2, tokens, 6).exp(), -randn(6, 3).exp(), randn(*vectors), randn(*vectors)
    )
    return Chain(
        Diagonal(randn(*shape), shape),
        Sum(
            scan,
            Diagonal(randn(1, 1, 6, 1), shape),
            ElementwiseRecurrence(torch.rand_like(scan.dt)),
        ),
        Diagonal(randn(2, tokens, 1, 1), shape),
        ShortConv(randn(6, 1, len(lags)), shape, lags=lags),
    )


def streamed(operator: Operator, v: Tensor, size: int, transposed: bool) -> Tensor:
    """All tokens through a stream, ``size`` at a time."""
    stream = operator.stream(transposed, size)
    assert stream is not None
    parts = [slice(t, min(t + size, v.shape[1])) for t in range(0, v.shape[1], size)]
    outputs = {
        part.start: stream(v[:, part], part).clone()
        for part in (reversed(parts) if transposed else parts)
    }
    return torch.cat([outputs[part.start] for part in parts], 1)


@pytest.mark.parametrize("tokens", [1, 2, 9, 40])
@pytest.mark.parametrize("size", [1, 3, 32])
@pytest.mark.parametrize("groups", [0, 3])
def test_any_number_of_tokens_at_a_time(tokens: int, size: int, groups: int) -> None:
    operator = mixer(tokens, groups)
    v = randn(*operator.shape)
    assert relative_error(streamed(operator, v, size, False), operator.apply(v)) <= 1e-12
    assert relative_error(streamed(operator, v, size, True), operator.transpose(v)) <= 1e-12


def heads_of(make: Make, tokens: int) -> Operator:
    """Heads as in a mixer, between what tells their channels apart."""
    heads = make(tokens)
    shape = heads.shape
    return Chain(
        Diagonal(randn(*shape), shape),
        Sum(heads, Diagonal(randn(1, 1, shape.heads, 1), shape)),
        Diagonal(randn(*shape[:3], 1), shape),
        ShortConv(randn(*shape[2:], 3), shape),
    )


@pytest.mark.parametrize("size", [1, CHUNK, CHUNK + 3, 1000])
@kinds
def test_heads_any_number_of_tokens_at_a_time(make: Make, loop: Loop, size: int) -> None:
    operator = heads_of(make, 2 * CHUNK + 5)
    v = randn(*operator.shape)
    assert relative_error(streamed(operator, v, size, False), operator.apply(v)) <= 1e-12
    assert relative_error(streamed(operator, v, size, True), operator.transpose(v)) <= 1e-12


@pytest.mark.parametrize("tokens", [1, CHUNK + 1, 3 * CHUNK + 7])
@kinds
def test_means_of_heads_a_chunk_at_a_time(
    monkeypatch: pytest.MonkeyPatch, make: Make, loop: Loop, tokens: int
) -> None:
    monkeypatch.setattr(recurrences.base, "LARGE", portions.Portion(1, 4))
    operator = heads_of(make, tokens)
    mean, x = mean_matrix(operator), randn(2, tokens)
    assert relative_error(operator.mean_matvec(x), torch.einsum("bij,bj->bi", mean, x)) <= 1e-12
    assert relative_error(operator.mean_rmatvec(x), torch.einsum("bi,bij->bj", x, mean)) <= 1e-12


@pytest.mark.parametrize("lags", [(0, 1, 2), (3,), (-1, 0, 2), (4, 4), (50,)])
def test_convolutions_at_either_end_of_what_is_summed_up(lags: tuple[int, ...]) -> None:
    """They mix sums over channels; one that looks ahead is no obstacle there."""
    tokens, shape = 37, Shape(2, 37, 6, 1)
    conv = ShortConv(randn(6, 1, len(lags)), shape, lags=lags)
    scan = ElementwiseRecurrence(torch.rand(2, tokens, 6, dtype=torch.float64))
    gate = Diagonal(randn(*shape), shape)
    for operator in (Chain(gate, scan, conv), Chain(conv, scan, gate), Chain(conv, conv), conv):
        mean, x = mean_matrix(operator), randn(2, tokens)
        wanted, adjoint = torch.einsum("bij,bj->bi", mean, x), torch.einsum("bi,bij->bj", x, mean)
        assert relative_error(operator.mean_matvec(x), wanted) <= 1e-12
        assert relative_error(operator.mean_rmatvec(x), adjoint) <= 1e-12


@pytest.mark.parametrize(
    ("tokens", "most", "multiple", "size"),
    [(10, 4, 1, 4), (9, 4, 1, 3), (1024, 341, 1, 256), (130, 128, 64, 128), (5, 64, 64, 64)],
)
def test_parts_of_like_size(tokens: int, most: int, multiple: int, size: int) -> None:
    assert portions.evenly(tokens, most, multiple) == size


@pytest.mark.parametrize("lags", [(0,), (2,), (5, 1)])
def test_lags_longer_than_what_is_fed(lags: tuple[int, ...]) -> None:
    operator = mixer(11, lags=lags)
    v = randn(*operator.shape)
    assert relative_error(streamed(operator, v, 2, False), operator.apply(v)) <= 1e-12
    assert relative_error(streamed(operator, v, 2, True), operator.transpose(v)) <= 1e-12


def test_what_looks_ahead_has_no_stream() -> None:
    ahead = mixer(5, lags=(-1, 0))
    flipped = Chain(mixer(5), Permute(torch.arange(4, -1, -1), Shape(2, 5, 6, 1)))
    for operator in (ahead, flipped, Sum(mixer(5), flipped)):
        assert operator.stream(False, 3) is None
        assert operator.stream(True, 3) is None


@pytest.mark.parametrize("elements", [1, 100])
def test_products_with_the_mean_matrix(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    operator: Any = mixer(37)
    monkeypatch.setattr(Chain, "portion", portions.Portion(elements, 32))
    mean, x = operator.dense(), randn(2, 37)
    assert relative_error(operator.mean_matvec(x), torch.einsum("bij,bj->bi", mean, x)) <= 1e-12
    assert relative_error(operator.mean_rmatvec(x), torch.einsum("bi,bij->bj", x, mean)) <= 1e-12
    x.requires_grad_()
    assert torch.autograd.gradcheck(operator.mean_rmatvec, x, fast_mode=True)


def mean_matrix(operator: Operator) -> Tensor:
    """The mean over channels (B, L, L), one column at a time."""
    tokens = operator.shape.tokens
    unit = torch.eye(tokens, dtype=torch.float64)[:, None, :, None, None]
    return operator.apply(unit.expand(tokens, *operator.shape)).mean((-1, -2)).permute(1, 2, 0)


def reordering(tokens: int) -> Permute:
    return Permute(torch.randperm(tokens), Shape(2, tokens, 6, 1))


def scaling(*size: int) -> Diagonal:
    return Diagonal(randn(*size), Shape(2, size[1], 6, 1))


REORDERED: dict[str, Callable[[int], Operator]] = {
    "both ends": lambda n: Chain(reordering(n), mixer(n), reordering(n)),
    "front": lambda n: Chain(reordering(n), mixer(n)),
    "end": lambda n: Chain(mixer(n), reordering(n)),
    "several among scalings": lambda n: Chain(
        scaling(2, n, 6, 1),
        reordering(n),
        Diagonal(randn(1, 1, 6, 1), Shape(2, n, 6, 1)),
        reordering(n),
        mixer(n),
        scaling(1, n, 6, 1),
        reordering(n),
        scaling(2, n, 1, 1),
        reordering(n),
        scaling(1, n, 1, 1),
    ),
    "one of two directions": lambda n: Chain(
        scaling(2, n, 6, 1),
        Sum(mixer(n), Chain(reordering(n), mixer(n), reordering(n))),
        scaling(2, n, 1, 1),
    ),
    "sum in a sum": lambda n: Chain(
        Sum(mixer(n), Chain(Sum(Chain(mixer(n), reordering(n)), scaling(2, n, 6, 1))))
    ),
    "no mixing else": lambda n: Chain(reordering(n), scaling(2, n, 6, 1), reordering(n)),
    "nothing else": lambda n: Chain(reordering(n), reordering(n)),
}


@pytest.mark.parametrize("tokens", [1, 2, 37])
@pytest.mark.parametrize("name", REORDERED)
def test_reorderings_leave_a_stream(
    monkeypatch: pytest.MonkeyPatch, name: str, tokens: int
) -> None:
    """Vectors are reordered in place of channels, so that no scan sees all tokens at once."""
    operator = REORDERED[name](tokens)
    mean, x = mean_matrix(operator), randn(2, tokens)
    live = x.clone().requires_grad_()
    for method in ("apply", "transpose"):
        monkeypatch.delattr(Recurrent, method)
    assert relative_error(operator.mean_matvec(x), torch.einsum("bij,bj->bi", mean, x)) <= 1e-12
    assert relative_error(operator.mean_rmatvec(x), torch.einsum("bi,bij->bj", x, mean)) <= 1e-12
    assert torch.autograd.gradcheck(operator.mean_rmatvec, live, fast_mode=True)


@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_reorderings_between_mixers_and_scans(tokens: int) -> None:
    """What cannot be fed token by token sees all tokens at once."""
    turn = reordering(tokens)
    within = Chain(
        scaling(2, tokens, 6, 1),
        Sum(mixer(tokens), Chain(turn, mixer(tokens), turn)),
        mixer(tokens),
    )
    for operator in (within, Chain(turn, mixer(tokens), turn, mixer(tokens), turn)):
        mean, x = mean_matrix(operator), randn(2, tokens)
        wanted, adjoint = torch.einsum("bij,bj->bi", mean, x), torch.einsum("bi,bij->bj", x, mean)
        assert relative_error(operator.mean_matvec(x), wanted) <= 1e-12
        assert relative_error(operator.mean_rmatvec(x), adjoint) <= 1e-12
