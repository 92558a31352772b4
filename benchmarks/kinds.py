"""Layers of kinds of operator that no package runs on a CPU, with random coefficients.

Their sizes are the defaults of flash-linear-attention at the width of Mamba 130M.  Decays are as
they are there at the beginning of training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.models import WIDTH
from captum_ssm.operators import (
    Chain,
    DeltaRule,
    Diagonal,
    Operator,
    ScalarDecayHeads,
    ShortConv,
    VectorDecayHeads,
)


def layer(kind: str, length: int) -> dict[str, Operator]:
    """The scan of one layer of the kind at a length, and the scan with all around it."""
    torch.manual_seed(0)
    return KINDS[kind](length)


def _gated(scan: Operator, *behind: Operator) -> dict[str, Operator]:
    """A scan between a gate and what comes before it."""
    gate = Diagonal(torch.randn(*scan.shape), scan.shape, "gate")
    return {"scan": scan, "unified": Chain(gate, scan, *behind)}


def _retnet(length: int) -> dict[str, Operator]:
    heads = WIDTH // 256
    decay = torch.log1p(-torch.exp2(-5 - torch.arange(heads, dtype=torch.float32)))
    scan = ScalarDecayHeads(
        *_vectors(2, length, heads, 256), decay.expand(1, length, heads), None, per_head=512
    )
    return _gated(scan)


def _gla(length: int) -> dict[str, Operator]:
    q, k, decay = _vectors(3, length, 4, 96)
    return _gated(VectorDecayHeads(q, k, F.logsigmoid(decay) / 16, per_head=192))


def _rwkv6(length: int) -> dict[str, Operator]:
    q, k, decay = _vectors(3, length, 4, 96)
    bonus = torch.randn(4, 96)
    return _gated(VectorDecayHeads(q, k, -torch.exp(decay - 2), per_head=192, bonus=bonus))


def _deltanet(length: int) -> dict[str, Operator]:
    q, k = _vectors(2, length, 6, 128)
    scan = DeltaRule(q, F.normalize(k, dim=-1), torch.rand(1, length, 6), None, per_head=128)
    return _gated(scan, ShortConv(torch.randn(6, 128, 4), scan.shape))


def _vectors(count: int, *size: int) -> Tensor:
    return torch.randn(count, 1, *size)


KINDS: dict[str, Callable[[int], dict[str, Operator]]] = {
    "RetNet": _retnet,
    "GLA": _gla,
    "RWKV-6": _rwkv6,
    "DeltaNet": _deltanet,
}
