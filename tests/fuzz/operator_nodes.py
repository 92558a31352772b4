"""Operators beside what they should do, by their matrices in float64; no package code computes it.

A node holds an operator and knows its matrices.  Nodes of nodes multiply, add or put side by side
the matrices of their parts, and know nothing of how operators are combined.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from oracles import times
from torch import Tensor

from captum_ssm.operators import Operator


class Node:
    """An operator beside its matrices, C = H P channels.

    Attributes:
        operator: the operator; None for what is only compared with a part of one.
        matrices: one for each channel (B, C, L, L), of what mixes channels its own share.
        bound: the same with every factor's absolute value, the size of what may cancel.
        mixes_channels: whether outputs read other channels than their own.
    """

    operator: Any
    matrices: Tensor
    bound: Tensor
    mixes_channels: bool = False

    def map(self, v: Tensor, absolute: bool = False) -> Tensor:
        """What the operator makes of ``v`` (..., B, L, H, P), without constants.

        Args:
            v: values.
            absolute: whether every factor counts by its absolute value. Default: False.
        """
        raise NotImplementedError

    def adjoint(self, u: Tensor, absolute: bool = False) -> Tensor:
        """The transposed map."""
        raise NotImplementedError

    def constant(self, absolute: bool = False) -> Tensor:
        """What the operator adds to its output, (B, L, H, P)."""
        raise NotImplementedError

    def affine(self, v: Tensor, absolute: bool = False) -> Tensor:
        """The map with its constant."""
        return self.map(v, absolute) + self.constant(absolute)

    def restrict(self, names: Collection[str]) -> Node | None:
        """What is left if only the named components are kept; None if only the identity is."""
        raise NotImplementedError


@dataclass
class Leaf(Node):
    """An elementary operator, given by its matrices."""

    operator: Operator
    matrices: Tensor
    bound: Tensor
    term: Tensor | None = None  # (B, L, H, P), broadcastable

    def map(self, v: Tensor, absolute: bool = False) -> Tensor:
        return times(self.bound if absolute else self.matrices, v)

    def adjoint(self, u: Tensor, absolute: bool = False) -> Tensor:
        return times((self.bound if absolute else self.matrices).mT, u)

    def constant(self, absolute: bool = False) -> Tensor:
        shape = self.operator.shape
        if self.term is None:
            return torch.zeros(shape, dtype=torch.float64)
        term = self.term.double().expand(shape)
        return term.abs() if absolute else term

    def restrict(self, names: Collection[str]) -> Node | None:
        # all elementary parts of a leaf bear one name
        name = next(iter(self.operator.leaves())).component
        return self if name is None or name in names else None


@dataclass
class Centred(Leaf):
    """Values less the mean over their head's channels."""

    mixes_channels = True

    def map(self, v: Tensor, absolute: bool = False) -> Tensor:
        mean = v.double().mean(-1, keepdim=True)
        return v.double() + mean if absolute else v.double() - mean

    adjoint = map


class Composed(Node):
    """A node of nodes."""

    def __init__(self, parts: Sequence[Node], operator: Operator | None = None) -> None:
        self.parts, self.operator = parts, operator
        self.mixes_channels = any(part.mixes_channels for part in parts)
        self.matrices = self._combined([part.matrices for part in parts])
        self.bound = self._combined([part.bound for part in parts])

    def _combined(self, matrices: list[Tensor]) -> Tensor:
        raise NotImplementedError

    def _kept(self, names: Collection[str]) -> list[Node]:
        return [kept for part in self.parts if (kept := part.restrict(names)) is not None]

    def restrict(self, names: Collection[str]) -> Node | None:
        kept = self._kept(names)
        return type(self)(kept) if kept else None


class Product(Composed):
    """The last part acts first."""

    def _combined(self, matrices: list[Tensor]) -> Tensor:
        out = matrices[-1]
        for matrix in matrices[-2::-1]:
            out = matrix @ out
        return out

    def map(self, v: Tensor, absolute: bool = False) -> Tensor:
        for part in reversed(self.parts):
            v = part.map(v, absolute)
        return v

    def adjoint(self, u: Tensor, absolute: bool = False) -> Tensor:
        for part in self.parts:
            u = part.adjoint(u, absolute)
        return u

    def constant(self, absolute: bool = False) -> Tensor:
        out = self.parts[-1].constant(absolute)
        for part in self.parts[-2::-1]:
            out = part.affine(out, absolute)
        return out


class Total(Composed):
    """The parts act on the same values."""

    def _combined(self, matrices: list[Tensor]) -> Tensor:
        return torch.stack(matrices).sum(0)

    def map(self, v: Tensor, absolute: bool = False) -> Tensor:
        return torch.stack([part.map(v, absolute) for part in self.parts]).sum(0)

    def adjoint(self, u: Tensor, absolute: bool = False) -> Tensor:
        return torch.stack([part.adjoint(u, absolute) for part in self.parts]).sum(0)

    def constant(self, absolute: bool = False) -> Tensor:
        return torch.stack([part.constant(absolute) for part in self.parts]).sum(0)


class Beside(Composed):
    """Each part acts on heads of its own."""

    def _combined(self, matrices: list[Tensor]) -> Tensor:
        return torch.cat(matrices, 1)

    def _shares(self, v: Tensor) -> list[tuple[Node, Tensor]]:
        counts = [part.constant().shape[2] for part in self.parts]
        return list(zip(self.parts, v.split(counts, -2), strict=True))

    def map(self, v: Tensor, absolute: bool = False) -> Tensor:
        return torch.cat([part.map(x, absolute) for part, x in self._shares(v)], -2)

    def adjoint(self, u: Tensor, absolute: bool = False) -> Tensor:
        return torch.cat([part.adjoint(x, absolute) for part, x in self._shares(u)], -2)

    def constant(self, absolute: bool = False) -> Tensor:
        return torch.cat([part.constant(absolute) for part in self.parts], 2)

    def restrict(self, names: Collection[str]) -> Node | None:
        kept = [part.restrict(names) for part in self.parts]
        if all(part is None for part in kept):
            return None
        shares = zip(kept, self.parts, strict=True)
        return Beside([_identity(part) if left is None else left for left, part in shares])


def _identity(like: Node) -> Node:
    eye = torch.eye(like.matrices.shape[-1], dtype=torch.float64).expand_as(like.matrices)
    # only its shape is asked for
    return Leaf(like.operator, eye, eye)


class InWindows(Node):
    """A node within windows of tokens.

    Args:
        inner: the node, on windows in place of examples (B W, T, H, P).
        places: the token in each place (W, T), -1 for padding.
        padding: what stands in the places of padding (B W, T, H, P).
        operator: the operator over all tokens; None for none.
    """

    def __init__(
        self, inner: Node, places: Tensor, padding: Tensor, operator: Operator | None = None
    ) -> None:
        self.inner, self.places, self.padding, self.operator = inner, places, padding, operator
        self.mixes_channels = inner.mixes_channels
        self.matrices, self.bound = self._placed(inner.matrices), self._placed(inner.bound)

    def _placed(self, blocks: Tensor) -> Tensor:
        """Matrices within windows (B W, C, T, T) as those of all tokens."""
        windows, tokens = len(self.places), int((self.places >= 0).sum())
        out = blocks.new_zeros(len(blocks) // windows, blocks.shape[1], tokens, tokens)
        for w, row in enumerate(self.places.tolist()):
            for i, j in ((i, j) for i in range(len(row)) for j in range(len(row))):
                if row[i] >= 0 and row[j] >= 0:
                    out[:, :, row[i], row[j]] = blocks[w::windows, :, i, j]
        return out

    def _cut(self, x: Tensor) -> Tensor:
        """(..., B, L, H, P) to (..., B W, T, H, P), padding being zero."""
        windows = [[self._token(x, t) for t in row] for row in self.places.tolist()]
        stacked = torch.stack([torch.stack(row, -3) for row in windows], -4)  # (.., B, W, T, H, P)
        return stacked.flatten(-5, -4)

    @staticmethod
    def _token(x: Tensor, t: int) -> Tensor:
        return torch.zeros_like(x[..., 0, :, :]) if t < 0 else x[..., t, :, :]

    def _merged(self, x: Tensor) -> Tensor:
        """(..., B W, T, H, P) to (..., B, L, H, P)."""
        x = x.unflatten(-4, (-1, len(self.places)))
        at = {
            t: (w, i)
            for w, row in enumerate(self.places.tolist())
            for i, t in enumerate(row)
            if t >= 0
        }
        return torch.stack([x[..., at[t][0], at[t][1], :, :] for t in range(len(at))], -3)

    def map(self, v: Tensor, absolute: bool = False) -> Tensor:
        return self._merged(self.inner.map(self._cut(v), absolute))

    def adjoint(self, u: Tensor, absolute: bool = False) -> Tensor:
        return self._merged(self.inner.adjoint(self._cut(u), absolute))

    def constant(self, absolute: bool = False) -> Tensor:
        empty = (self.places < 0).repeat(len(self.padding) // len(self.places), 1)
        values = self.padding.double() * empty[:, :, None, None]
        return self._merged(self.inner.affine(values.abs() if absolute else values, absolute))

    def restrict(self, names: Collection[str]) -> Node | None:
        inner = self.inner.restrict(names)
        return None if inner is None else InWindows(inner, self.places, self.padding)


def products(decay: Tensor) -> Tensor:
    """Those of the decays (..., L) after j up to i, in row i and column j <= i; (..., L, L)."""
    tokens = decay.shape[-1]
    out = decay.new_zeros(*decay.shape, tokens)
    for i in range(tokens):
        out[..., i, :i] = out[..., i - 1, :i] * decay[..., i, None]
        out[..., i, i] = 1
    return out
