"""Random operators beside their matrices, which are built without the package."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import oracles
import pytest
import torch
from torch import Tensor

from captum_ssm.operators import (
    Chain,
    Diagonal,
    LongConv,
    Operator,
    SelectiveScan,
    Shape,
    ShortConv,
    Sum,
)
from captum_ssm.operators.combine import DirectSum
from captum_ssm.operators.reorder import Windowed, Windows


class Case:
    """An operator, its matrices (B, C, L, L) and its constant term (B, L, H, P), by need."""

    def __init__(
        self,
        operator: Operator,
        matrices: Callable[[], Tensor],
        offset: Callable[[], Tensor] | None = None,
    ) -> None:
        self.operator = operator
        self._matrices, self._offset = matrices, offset

    @property
    def shape(self) -> Shape:
        return self.operator.shape

    @cached_property
    def matrices(self) -> Tensor:
        return self._matrices()

    @cached_property
    def offset(self) -> Tensor:
        if self._offset is None:
            return torch.zeros(self.shape, dtype=torch.float64)
        return self._offset()


Build = Callable[[int], Case]


def _randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def diagonal(tokens: int, heads: int = 3, per_head: int = 2, name: str | None = None) -> Case:
    shape = Shape(2, tokens, heads, per_head)
    weight = _randn(*shape)
    return Case(Diagonal(weight, shape, name), lambda: oracles.diagonal_matrices(weight, shape))


def broadcast_diagonal(*size: int) -> Build:
    def build(tokens: int) -> Case:
        shape = Shape(2, tokens, 3, 2)
        weight = _randn(*(full if keep else 1 for full, keep in zip(shape, size, strict=True)))
        return Case(Diagonal(weight, shape), lambda: oracles.diagonal_matrices(weight, shape))

    return build


def conv(
    tokens: int,
    heads: int = 3,
    per_head: int = 2,
    taps: int = 4,
    lags: tuple[int, ...] | None = None,
    bias: tuple[int, int, int, int] | None = None,
    batch: int = 2,
) -> Case:
    """``bias`` says with 0 and 1 over which dimensions the bias varies."""
    shape = Shape(batch, tokens, heads, per_head)
    weight = _randn(heads, per_head, taps if lags is None else len(lags))
    term = None
    if bias is not None:
        term = _randn(*(full if keep else 1 for full, keep in zip(shape, bias, strict=True)))
    reach = range(taps) if lags is None else lags
    return Case(
        ShortConv(weight, shape, term, lags),
        lambda: oracles.conv_matrices(weight, reach, shape),
        None if term is None else lambda: term.expand(shape),
    )


def map_conv(tokens: int, heads: int = 3, per_head: int = 2, bias: bool = False) -> Case:
    """Over a map of the tokens, as nearly square as their number allows."""
    width = max(w for w in range(1, tokens + 1) if tokens % w == 0 and w * w <= tokens)
    shape = Shape(2, tokens, heads, per_head)
    lags = [(-1, 0), (0, -1), (0, 0), (1, 2), (1, -1), (0, -1)]
    weight = _randn(heads, per_head, len(lags))
    term = _randn(1, 1, heads, per_head) if bias else None
    return Case(
        ShortConv(weight, shape, term, lags, width=width),
        lambda: oracles.map_conv_matrices(weight, lags, width, shape),
        None if term is None else lambda: term.expand(shape),
    )


def long_conv(tokens: int, heads: int = 3, kernels: int = 2, length: int | None = None) -> Case:
    """``kernels`` per head: as many as it has channels, or 1."""
    shape = Shape(2, tokens, heads, 2)
    kernel = _randn(heads, kernels, tokens if length is None else length)
    return Case(
        LongConv(kernel, shape),
        lambda: oracles.conv_matrices(kernel.expand(-1, 2, -1), range(kernel.shape[-1]), shape),
    )


def scan(tokens: int, heads: int = 5, state: int = 3, batch: int = 2) -> Case:
    dt = 0.5 * _randn(batch, tokens, heads).exp()
    a = -0.7 * _randn(heads, state).exp()
    b, c = _randn(batch, tokens, state), _randn(batch, tokens, state)
    return Case(SelectiveScan(dt, a, b, c), lambda: oracles.scan_matrices(dt, a, b, c))


def chain(*cases: Case) -> Case:
    """The product; an offset passes through everything that acts later."""

    def matrices() -> Tensor:
        product = cases[-1].matrices
        for case in cases[-2::-1]:
            product = case.matrices @ product
        return product

    def offset() -> Tensor:
        constant = cases[-1].offset
        for case in cases[-2::-1]:
            constant = oracles.times(case.matrices, constant) + case.offset
        return constant

    return Case(Chain(*(case.operator for case in cases)), matrices, offset)


def total(*cases: Case) -> Case:
    return Case(
        Sum(*(case.operator for case in cases)),
        lambda: torch.stack([case.matrices for case in cases]).sum(0),
        lambda: torch.stack([case.offset for case in cases]).sum(0),
    )


def side_by_side(*cases: Case) -> Case:
    """Each operator on heads of its own."""
    return Case(
        DirectSum(*(case.operator for case in cases)),
        lambda: torch.cat([case.matrices for case in cases], 1),
        lambda: torch.cat([case.offset for case in cases], 2),
    )


def _places(tokens: int, padded: bool) -> Tensor:
    """Windows of 3 places: which token is in each, or -1.

    Where there are places to spare, a token comes after an empty one, whose content it receives.
    """
    while True:
        places = torch.full((3 * (-(-tokens // 3) + padded),), -1)
        places[torch.randperm(len(places))[:tokens]] = torch.arange(tokens)
        places = places.view(-1, 3)
        if not padded or ((places[:, :-1] < 0) & (places[:, 1:] >= 0)).any():
            return places


def windowed(tokens: int, inside: Callable[[int, int], Case], padded: bool) -> Case:
    """``inside`` (of tokens and batch) within windows of 3, the tokens in random places of them.

    What is in places without a token contributes to the constant term.
    """
    places = _places(tokens, padded)
    count = len(places)
    held = [(w, i, int(t)) for w, row in enumerate(places) for i, t in enumerate(row) if t >= 0]
    inner = inside(3, 2 * count)
    windows = Windows(places)
    values = _randn(*inner.shape)
    empty = (places < 0).double().repeat(2, 1)[:, :, None, None]

    def matrices() -> Tensor:
        out = torch.zeros(2, inner.matrices.shape[1], tokens, tokens, dtype=torch.float64)
        for window, i, row in held:
            for other, j, column in held:
                if window == other:
                    out[:, :, row, column] = inner.matrices[window::count, :, i, j]
        return out

    def offset() -> Tensor:
        constant = oracles.times(inner.matrices, values * empty) + inner.offset
        out = torch.zeros(2, tokens, *inner.shape[2:], dtype=torch.float64)
        for window, i, token in held:
            out[:, token] = constant[window::count, i]
        return out

    return Case(Windowed(inner.operator, windows, windows.padding(values)), matrices, offset)


def scan_and_conv(tokens: int, batch: int = 2) -> Case:
    """Channels that a scan mixes beside channels that a convolution mixes."""
    ahead = conv(tokens, 2, 1, lags=(1, 0, -1), bias=(0, 0, 1, 1), batch=batch)
    return side_by_side(scan(tokens, heads=3, batch=batch), ahead)


def mamba(tokens: int) -> Case:
    """gate . (scan + skip) . mask . activation . conv . mask"""
    return chain(
        diagonal(tokens, 5, 1),
        total(scan(tokens), diagonal(tokens, 5, 1)),
        diagonal(tokens, 5, 1),
        diagonal(tokens, 5, 1),
        conv(tokens, 5, 1, taps=4, bias=(0, 0, 1, 1)),
        diagonal(tokens, 5, 1),
    )


CASES: dict[str, Build] = {
    "diagonal": diagonal,
    "diagonal per head": broadcast_diagonal(0, 0, 1, 0),
    "diagonal per token": broadcast_diagonal(1, 1, 0, 0),
    "diagonal per channel": broadcast_diagonal(0, 0, 1, 1),
    "conv": conv,
    "conv of one tap": lambda n: conv(n, taps=1),
    "conv with bias": lambda n: conv(n, taps=3, bias=(0, 0, 1, 1)),
    "conv with a bias per token": lambda n: conv(n, taps=2, bias=(1, 1, 1, 0)),
    "conv with one bias": lambda n: conv(n, taps=2, bias=(0, 1, 0, 1)),
    "conv both ways": lambda n: conv(n, lags=(-2, 0, 1, 3), bias=(0, 0, 1, 1)),
    "conv forward only": lambda n: conv(n, lags=(-1, -4)),
    "conv with one far lag": lambda n: conv(n, lags=(7,)),
    "conv over a map": lambda n: map_conv(n, bias=True),
    "scan after a conv over a map": lambda n: chain(
        diagonal(n, 5, 1), total(scan(n), diagonal(n, 5, 1)), map_conv(n, 5, 1)
    ),
    "conv over a map in diagonals": lambda n: chain(
        diagonal(n), map_conv(n), diagonal(n), map_conv(n, bias=True)
    ),
    "long conv": long_conv,
    "long conv shared by heads": lambda n: long_conv(n, kernels=1),
    "long conv of a short kernel": lambda n: long_conv(n, length=4),
    "long conv of a long kernel": lambda n: long_conv(n, kernels=1, length=2 * n + 3),
    "long conv in gates": lambda n: chain(
        broadcast_diagonal(1, 1, 1, 0)(n), conv(n, taps=2), long_conv(n), diagonal(n)
    ),
    "scan": scan,
    "scan of one state": lambda n: scan(n, heads=2, state=1),
    "scan of many channels": lambda n: scan(n, heads=130, state=1),
    "chain of heads": lambda n: chain(
        diagonal(n), conv(n, taps=3), diagonal(n), conv(n, lags=(1, -1), bias=(0, 0, 1, 1))
    ),
    "chain ending in a diagonal": lambda n: chain(
        conv(n, bias=(0, 0, 1, 1)), diagonal(n), conv(n, taps=2, bias=(1, 1, 1, 1)), diagonal(n)
    ),
    "chain of diagonals": lambda n: chain(diagonal(n), broadcast_diagonal(0, 1, 1, 0)(n)),
    "chain of one": lambda n: chain(scan(n)),
    "conv after scan": lambda n: chain(conv(n, 5, 1, bias=(0, 0, 1, 1)), scan(n)),
    "scan after scan": lambda n: chain(scan(n), diagonal(n, 5, 1), scan(n), conv(n, 5, 1)),
    "diagonal after two scans": lambda n: chain(diagonal(n, 5, 1), scan(n), scan(n)),
    "diagonal after sum after conv after scan": lambda n: chain(
        diagonal(n, 5, 1), total(scan(n), diagonal(n, 5, 1)), conv(n, 5, 1), scan(n), conv(n, 5, 1)
    ),
    "scan after sum": lambda n: chain(scan(n), total(diagonal(n, 5, 1), conv(n, 5, 1))),
    "chain in a chain": lambda n: chain(
        chain(diagonal(n, 5, 1), scan(n)), chain(diagonal(n, 5, 1), conv(n, 5, 1, taps=3))
    ),
    "sum": lambda n: total(
        scan(n), diagonal(n, 5, 1), conv(n, 5, 1, lags=(-1, 2), bias=(0, 0, 1, 1))
    ),
    "sum without offset": lambda n: total(scan(n), scan(n)),
    "sum of chains": lambda n: total(
        chain(scan(n), conv(n, 5, 1, bias=(0, 0, 1, 1))),
        chain(diagonal(n, 5, 1), conv(n, 5, 1, bias=(1, 1, 1, 1)), diagonal(n, 5, 1)),
    ),
    "sum of heads": lambda n: total(conv(n), chain(diagonal(n), conv(n, lags=(-2, 5)))),
    "scan beside conv": scan_and_conv,
    "scan beside scan": lambda n: side_by_side(scan(n, heads=1), scan(n, heads=4, state=1)),
    "three side by side": lambda n: side_by_side(
        conv(n), diagonal(n, 1), conv(n, 2, bias=(1,) * 4)
    ),
    "conv after scan beside conv": lambda n: chain(
        conv(n, 5, 1, lags=(2, -1)), scan_and_conv(n), diagonal(n, 5, 1)
    ),
    "scan in windows": lambda n: windowed(n, lambda t, b: scan(t, batch=b), padded=True),
    "conv in windows": lambda n: windowed(
        n, lambda t, b: conv(t, bias=(0, 0, 1, 1), batch=b), padded=False
    ),
    "scan beside conv in windows": lambda n: chain(
        diagonal(n, 5, 1), windowed(n, scan_and_conv, padded=True), conv(n, 5, 1)
    ),
    "mamba": mamba,
}


@pytest.fixture(params=CASES)
def build(request: pytest.FixtureRequest) -> Build:
    """A function of the number of tokens that makes an operator of one kind."""
    return CASES[request.param]


@pytest.fixture
def make() -> type[Make]:
    """The makers of operators by kind."""
    return Make


class Make:
    """The makers above, for tests that need particular ones."""

    diagonal = staticmethod(diagonal)
    conv = staticmethod(conv)
    scan = staticmethod(scan)
    chain = staticmethod(chain)
    total = staticmethod(total)
    mamba = staticmethod(mamba)
