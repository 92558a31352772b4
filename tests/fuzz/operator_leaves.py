"""Elementary operators with random coefficients, of which some are zero, tiny or huge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import oracles
import torch
from fuzz.operator_nodes import Centred, Leaf, Node
from torch import Tensor

from captum_ssm.operators import (
    DenseHeads,
    Diagonal,
    HeadCentering,
    LongConv,
    Operator,
    Permute,
    Shape,
    ShortConv,
)

#: By dimension, whether coefficients vary along it.
Varies = tuple[bool, bool, bool, bool]


def sized(kind: str, *shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers of at least zero, of the kind of size named."""
    noise = torch.randn(shape, dtype=torch.float64)
    found = {
        "mild": 0.5 * noise.exp(),
        "zero": torch.zeros_like(noise),
        "huge": 1e3 * noise.abs(),
        "tiny": 1e-9 * noise.abs(),
    }
    if kind != "mixed":
        return found[kind].to(dtype)
    every = torch.stack([*found.values()])
    which = torch.randint(len(found), shape)
    return every.gather(0, which[None])[0].to(dtype)


class Leafy:
    """An elementary operator before it has a size."""

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        """The operator with random coefficients, and its matrices."""
        raise NotImplementedError


@dataclass(frozen=True)
class Scale(Leafy):
    """A diagonal, whose factors vary along some dimensions."""

    varies: Varies
    size: str
    name: str | None

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        weight = _varying(self.varies, shape, dtype).sign() * sized(
            self.size, *_varying(self.varies, shape, dtype).shape, dtype=dtype
        )
        matrices = oracles.diagonal_matrices(weight, shape)
        return Leaf(Diagonal(weight, shape, self.name), matrices, matrices.abs())


@dataclass(frozen=True)
class Taps(Leafy):
    """A short convolution, which may read ahead, and read one lag twice."""

    lags: Sequence[int]
    bias: Varies | None
    name: str | None

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        weight = torch.randn(shape.heads, shape.per_head, len(self.lags), dtype=dtype)
        bias = None if self.bias is None else _varying(self.bias, shape, dtype)
        operator = ShortConv(weight, shape, bias, tuple(self.lags), self.name)
        return Leaf(
            operator,
            oracles.conv_matrices(weight, self.lags, shape),
            oracles.conv_matrices(weight.abs(), self.lags, shape),
            bias,
        )


@dataclass(frozen=True)
class Kernel(Leafy):
    """A long convolution."""

    length: str
    shared: bool
    name: str | None

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        tokens = shape.tokens
        size = {"one": 1, "short": -(-tokens // 3), "whole": tokens, "long": tokens + 3}
        own = 1 if self.shared else shape.per_head
        kernel = torch.randn(shape.heads, own, size[self.length], dtype=dtype)
        lag = torch.arange(tokens)[:, None] - torch.arange(tokens)
        # what is ahead, or further back than the kernel reaches, finds the zero at its end
        known = torch.nn.functional.pad(kernel.double(), (0, 1))
        by_lag = known[..., lag.where((lag >= 0) & (lag < kernel.shape[-1]), -1)]
        every = by_lag.expand(-1, shape.per_head, -1, -1).flatten(0, 1)
        matrices = every.expand(shape.batch, -1, -1, -1)
        # a Fourier transform's rounding errors are those of its largest sums
        bound = matrices.abs() + kernel.double().abs().max()
        return Leaf(LongConv(kernel, shape, self.name), matrices, bound)


@dataclass(frozen=True)
class Reorder(Leafy):
    """A permutation of the tokens."""

    order: str
    name: str | None

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        tokens = torch.arange(shape.tokens)
        order = {
            "flip": tokens.flip(0),
            "shift": tokens.roll(shape.tokens // 3),
            "any": torch.randperm(shape.tokens),
        }[self.order]
        matrix = torch.eye(shape.tokens, dtype=torch.float64)[order]
        matrices = matrix.expand(shape.batch, shape.heads * shape.per_head, -1, -1)
        return Leaf(Permute(order, shape, self.name), matrices, matrices)


@dataclass(frozen=True)
class Given(Leafy):
    """Matrices of heads."""

    kind: str
    name: str | None

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        matrices = torch.randn(shape.batch, shape.heads, shape.tokens, shape.tokens, dtype=dtype)
        if self.kind == "softmax":
            matrices = (3 * matrices).softmax(-1)
        if self.kind == "causal":
            matrices = matrices.tril()
        return of_heads(DenseHeads(matrices, shape.per_head, self.name), matrices.double())


@dataclass(frozen=True)
class Centre(Leafy):
    """The centering of a norm."""

    name: str | None

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        eye = torch.eye(shape.tokens, dtype=torch.float64)
        matrices = eye.expand(shape.batch, shape.heads * shape.per_head, -1, -1)
        operator = HeadCentering(shape, torch.zeros((), dtype=dtype), self.name)
        return Centred(operator, (1 - 1 / shape.per_head) * matrices, 2 * matrices)


def _varying(varies: Varies, shape: Shape, dtype: torch.dtype) -> Tensor:
    size = (full if along else 1 for full, along in zip(shape, varies, strict=True))
    return torch.randn(*size, dtype=dtype)


def of_heads(operator: Operator, matrices: Tensor, bound: Tensor | None = None) -> Leaf:
    """A leaf of one matrix per head (B, H, L, L), common to the head's channels."""
    size = matrices.abs() if bound is None else bound
    every = (x.repeat_interleave(operator.shape.per_head, 1) for x in (matrices, size))
    return Leaf(operator, *every)
