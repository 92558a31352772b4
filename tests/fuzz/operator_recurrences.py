"""Recurrences with random coefficients, of which some forget everything and some nothing."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from fuzz.operator_leaves import Leafy, of_heads, sized
from fuzz.operator_nodes import Leaf, Node, products
from oracles import token_loops
from torch import Tensor
from torch.nn.functional import normalize

from captum_ssm.operators import (
    WKV,
    DeltaRule,
    ElementwiseRecurrence,
    ScalarDecayHeads,
    SelectiveScan,
    Shape,
    VectorDecayHeads,
)


@dataclass(frozen=True)
class ScalarFading(Leafy):
    """One decay per head; queries and keys are shared by groups of heads."""

    state: int
    groups: int  # which divisor of the heads
    scaled: bool
    decay: str
    name: str | None

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        batch, tokens, heads, per_head = shape
        groups = _divisor(heads, self.groups)
        q, k = torch.randn(2, batch, tokens, groups, self.state, dtype=dtype)
        log_decay = _fading(self.decay, batch, tokens, heads, dtype=dtype)
        scale = torch.randn(batch, tokens, heads, dtype=dtype) if self.scaled else None
        operator = ScalarDecayHeads(q, k, log_decay, scale, per_head, self.name)
        return _looped(operator, token_loops.scalar_decay, log_decay, query=q, key=k, scale=scale)


@dataclass(frozen=True)
class VectorFading(Leafy):
    """One decay per head and key channel."""

    state: int
    bonus: bool
    decay: str
    name: str | None

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        batch, tokens, heads, per_head = shape
        q, k = torch.randn(2, batch, tokens, heads, self.state, dtype=dtype)
        log_decay = _fading(self.decay, batch, tokens, heads, self.state, dtype=dtype)
        bonus = torch.randn(heads, self.state, dtype=dtype) if self.bonus else None
        operator = VectorDecayHeads(q, k, log_decay, per_head, bonus, self.name)
        return _looped(operator, token_loops.vector_decay, log_decay, query=q, key=k, bonus=bonus)


@dataclass(frozen=True)
class Correction(Leafy):
    """The delta rule, with a decay per head, per key channel, or none."""

    state: int
    kind: str
    decay: str
    name: str | None

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        batch, tokens, heads, per_head = shape
        q, k = torch.randn(2, batch, tokens, heads, self.state, dtype=dtype)
        k = normalize(k, dim=-1)
        beta = 2 * torch.rand(batch, tokens, heads, dtype=dtype)
        sizes = {"head": (heads,), "key": (heads, self.state)}
        log_decay = None
        if self.kind != "none":
            log_decay = _fading(self.decay, batch, tokens, *sizes[self.kind], dtype=dtype)
        operator = DeltaRule(q, k, beta, log_decay, per_head, self.name)
        given = SimpleNamespace(query=q, key=k, beta=beta, log_decay=log_decay, shape=shape)
        matrices = token_loops.matrices(token_loops.delta_rule, given)
        # no step makes the state larger: keys have length one, and beta is at most two
        size = q.double().norm(dim=-1).transpose(1, 2)[..., None] * beta.double().mT[:, :, None]
        return of_heads(operator, matrices, size.tril())


@dataclass(frozen=True)
class Scan(Leafy):
    """The selective scan; B and C are common to all heads or shared by groups of them."""

    state: int
    groups: int  # 0: common to all, else which divisor of the heads
    step: str
    rate: str
    name: str | None

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        batch, tokens, heads, _ = shape
        dt = sized(self.step, batch, tokens, heads, dtype=dtype)
        a = -sized(self.rate, heads, self.state, dtype=dtype)
        groups = _divisor(heads, self.groups - 1) if self.groups else 1
        b, c = torch.randn(2, batch, tokens, groups, self.state, dtype=dtype)
        given = (b, c) if self.groups else (b[:, :, 0], c[:, :, 0])
        operator = SelectiveScan(dt, a, *given, self.name)
        b, c = (x.double().repeat_interleave(heads // groups, 2) for x in (b, c))
        dt, a = dt.double(), a.double()
        left = products((dt[..., None] * a).exp().permute(0, 2, 3, 1))  # (B, H, N, L, L)
        written = dt[..., None] * b

        def matrices(read: Tensor, written: Tensor) -> Tensor:
            return torch.einsum("bihn,bhnij,bjhn->bhij", read, left, written)

        return Leaf(operator, matrices(c, written), matrices(c.abs(), written.abs()))


@dataclass(frozen=True)
class Recurrence(Leafy):
    """One number of state per channel."""

    decay: str
    name: str | None

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        decay = _fading(self.decay, *shape[:3], dtype=dtype).exp()
        matrices = products(decay.double().transpose(1, 2))
        return Leaf(ElementwiseRecurrence(decay, self.name), matrices, matrices)


@dataclass(frozen=True)
class Softmax(Leafy):
    """RWKV-4's time mixing."""

    key: str
    decay: str

    def grow(self, shape: Shape, dtype: torch.dtype) -> Node:
        batch, tokens, heads, _ = shape
        key = torch.randn(batch, tokens, heads, dtype=dtype).sign() * sized(
            self.key, batch, tokens, heads, dtype=dtype
        )
        log_decay = -sized(self.decay, heads, dtype=dtype)
        bonus = torch.randn(heads, dtype=dtype)
        steps = torch.arange(tokens, dtype=torch.float64)
        elapsed = (steps[:, None] - 1 - steps).clamp_min(0)
        scores = elapsed * log_decay.double()[:, None, None] + key.double().mT[:, :, None]
        own = (bonus + key).double().mT
        scores = scores.tril(-1) + torch.diag_embed(own)
        ahead = torch.ones(tokens, tokens).triu(1).bool()
        matrices = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        # an exponential is as exact as its exponent is large
        size = 1 + float(own.abs().max()) + float(scores[matrices > 1e-8].abs().max())
        return Leaf(WKV(key, log_decay, bonus), matrices, size * matrices)


def _divisor(heads: int, which: int) -> int:
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return divisors[which % len(divisors)]


def _fading(kind: str, *shape: int, dtype: torch.dtype) -> Tensor:
    """Logarithms of decays; of the mixed ones some forget everything."""
    log_decay = -sized(kind, *shape, dtype=dtype)
    if kind == "mixed":
        log_decay[torch.rand(shape) < 0.1] = -torch.inf
    return log_decay


def _looped(
    operator: Any, loop: token_loops.Loop, log_decay: Tensor, **signed: Tensor | None
) -> Leaf:
    """The matrices by a loop over tokens, and again with absolute values of what is signed."""
    given = SimpleNamespace(shape=operator.shape, log_decay=log_decay, **signed)
    sizes = {name: None if x is None else x.abs() for name, x in signed.items()}
    bound = SimpleNamespace(shape=operator.shape, log_decay=log_decay, **sizes)
    each = (token_loops.matrices(loop, x) for x in (given, bound))
    return of_heads(operator, *each)
