"""Every kind of operator with random coefficients, at the sizes of models in use.

Where decays matter there are two rows: those of a model that remembers, and those of one that
forgets within a few tokens, whose products fall below the smallest normal numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm.operators import (
    WKV,
    DeltaRule,
    DenseHeads,
    ElementwiseRecurrence,
    LongConv,
    Operator,
    ScalarDecayHeads,
    SelectiveScan,
    Shape,
    ShortConv,
    VectorDecayHeads,
)

#: Logarithms of decays of a model that remembers, and of one that forgets.
MILD, STRONG = -0.3, -8.0


def _vectors(count: int, *size: int) -> Tensor:
    return torch.randn(count, 1, *size)


def _scan(log: float, tokens: int, width: int) -> Operator:
    dt, a = torch.full((1, tokens, 16 * width), -log), -torch.rand(16 * width, 16)
    return SelectiveScan(dt, a, *_vectors(2, tokens, 16))


def _elementwise(log: float, tokens: int, width: int) -> Operator:
    return ElementwiseRecurrence((log * torch.rand(1, tokens, 16 * width)).exp())


def _scalar(log: float, tokens: int, width: int) -> Operator:
    query, key = _vectors(2, tokens, 4, width)
    return ScalarDecayHeads(query, key, log * torch.rand(1, tokens, 4), None, width)


def _vector(log: float, tokens: int, width: int, bonus: bool = False) -> Operator:
    query, key, decay = _vectors(3, tokens, 4, width)
    extra = torch.rand(4, width) if bonus else None
    return VectorDecayHeads(query, key, log * decay.sigmoid(), width, extra)


def _delta(log: float | None, tokens: int, width: int, keys: int = 1) -> Operator:
    query, key, decay = _vectors(3, tokens, 4, width)
    unit, beta = F.normalize(key, dim=-1), torch.rand(1, tokens, 4)
    decays = None if log is None else log * decay.sigmoid()
    if keys == 1:
        return DeltaRule(query, unit, beta, decays, width)
    steps = torch.rand(1, tokens, 4, width)
    return DeltaRule(query, key, beta, decays, width, None, unit, steps)


def _gated_delta(log: float, tokens: int, width: int) -> Operator:
    query, key = _vectors(2, tokens, 4, width)
    decays = log * torch.rand(1, tokens, 4)
    return DeltaRule(query, F.normalize(key, dim=-1), torch.rand(1, tokens, 4), decays, width)


def _wkv(tokens: int, width: int) -> Operator:
    return WKV(torch.randn(1, tokens, 16 * width), -torch.rand(16 * width), torch.rand(16 * width))


def _softmax(tokens: int, width: int) -> Operator:
    scores = torch.randn(1, 4, tokens, tokens)
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return DenseHeads(scores.masked_fill(hidden, -torch.inf).softmax(-1), width)


def _short(tokens: int, width: int) -> Operator:
    shape = Shape(1, tokens, 16 * width, 1)
    return ShortConv(torch.randn(16 * width, 1, 4), shape)


def _long(tokens: int, width: int) -> Operator:
    return LongConv(torch.randn(16 * width, 1, tokens), Shape(1, tokens, 16 * width, 1))


Kind = Callable[[int, int], Operator]
#: By name, functions of how many tokens there are, and channels of a head.
KINDS: dict[str, Kind] = {
    f"{name}{'' if log == MILD else ', forgetting'}": partial(make, log)
    for name, make in {
        "selective scan (Mamba)": _scan,
        "decays of channels (RG-LRU)": _elementwise,
        "one decay a head (Mamba-2)": _scalar,
        "decays of keys (GLA)": _vector,
        "decays of keys, bonus (RWKV-6)": partial(_vector, bonus=True),
        "gated delta rule": _gated_delta,
        "delta rule, decays of keys (KDA)": _delta,
        "delta rule of two keys (RWKV-7)": partial(_delta, keys=2),
    }.items()
    for log in (MILD, STRONG)
} | {
    "delta rule": partial(_delta, None),
    "WKV (RWKV-4)": _wkv,
    "softmax attention": _softmax,
    "short convolution": _short,
    "long convolution (Hyena)": _long,
}
#: Those whose every entry is given, so that nothing is linear in the length.
QUADRATIC = ("softmax attention",)
