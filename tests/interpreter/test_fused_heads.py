"""The package's own kernel: linear attention in one launch is that in torch, at awkward sizes."""

from __future__ import annotations

import pytest
import torch
from oracles import kernels as naive
from oracles import relative_error
from torch import Tensor

from captum_ssm.operators import ScalarDecayHeads
from captum_ssm.operators.kernels import chunks, fused_heads

#: Examples, tokens, heads, groups, states and channels; of tokens, states and columns the last
#: block is not whole.
SIZES = [
    (1, 1, 1, 1, 3, 5),
    (2, 63, 4, 2, 16, 8),
    (1, 64, 2, 2, 17, 1),
    (1, 65, 3, 1, 3, 64),
    (2, 130, 2, 1, 17, 5),
    (1, 33, 1, 1, 256, 3),
]


def heads_of(
    batch: int,
    tokens: int,
    heads: int,
    groups: int,
    states: int,
    channels: int,
    *,
    scaled: bool = True,
) -> ScalarDecayHeads:
    """Decays from nothing to all, and both, laid out as views."""
    query, key = torch.randn(batch, tokens, groups, 2 * states).chunk(2, -1)
    log_decay = -(torch.rand(batch, heads, tokens).mT * 3).pow(4)
    log_decay[:, tokens // 2], log_decay[:, tokens // 3] = -torch.inf, 0
    scale = torch.rand(batch, heads, tokens).mT if scaled else None
    return ScalarDecayHeads(query, key, log_decay, scale, channels)


def fused(heads: ScalarDecayHeads, v: Tensor, transposed: bool) -> Tensor:
    coefficients = heads.query, heads.key, heads.log_decay, heads.scale
    return fused_heads.run(*coefficients, v, transposed=transposed)


def by_matrices(heads: ScalarDecayHeads, v: Tensor, transposed: bool) -> Tensor:
    """In float64 (S, B, L, H, P)."""
    each = heads.shape.heads // heads.query.shape[2]
    query, key = (
        x.double().repeat_interleave(each, 2).transpose(1, 2) for x in (heads.query, heads.key)
    )
    matrices = naive.decays_between(heads.log_decay.double().mT.exp()) * (query @ key.mT)
    if heads.scale is not None:
        matrices = matrices * heads.scale.double().mT[:, :, None]
    return ((matrices.mT if transposed else matrices) @ v.double().transpose(2, 3)).transpose(2, 3)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_heads(size: tuple[int, int, int, int, int, int], scaled: bool, transposed: bool) -> None:
    """Of two vectors, of which channels are every other number."""
    heads = heads_of(*size, scaled=scaled)
    v = torch.randn(2, *heads.shape[:3], 2 * heads.shape.per_head)[..., ::2]
    found = fused(heads, v, transposed)
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert relative_error(found, by_matrices(heads, v, transposed)) <= 1e-6
    in_torch = chunks.run_all(heads._steps, v, transposed)
    assert relative_error(found, in_torch) <= 1e-6


@pytest.mark.parametrize("log_decay", [-torch.inf, 0.0, -1e-3, -20.0])
def test_one_decay_for_all_tokens(log_decay: float) -> None:
    """As of layers that forget all, or nothing; repeated and not copied."""
    query, key = torch.randn(2, 1, 130, 2, 16)
    decays = torch.full((1, 1, 1), log_decay).expand(1, 130, 2)
    heads = ScalarDecayHeads(query, key, decays, None, 8)
    v = torch.randn(1, 1, 130, 1, 8).expand(1, *heads.shape)
    for transposed in (False, True):
        wanted = by_matrices(heads, v, transposed)
        assert relative_error(fused(heads, v, transposed), wanted) <= 1e-6


def test_weak_decays_after_strong_ones() -> None:
    """Differences of sums of logarithms would have lost the weak ones."""
    query, key = torch.randn(2, 1, 64, 1, 16)
    decays = torch.full((1, 64, 1), -1e-3)
    decays[:, :20] = -80
    heads, v = ScalarDecayHeads(query, key, decays, None, 8), torch.randn(1, 1, 64, 1, 8)
    for transposed in (False, True):
        wanted = by_matrices(heads, v, transposed)
        assert relative_error(fused(heads, v, transposed), wanted) <= 1e-6


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision(dtype: torch.dtype, bound: float, transposed: bool) -> None:
    """It is computed in float32: only what comes out is rounded."""
    heads = heads_of(1, 40, 2, 1, 4, 3)
    v = torch.randn(1, *heads.shape).to(dtype)
    found = fused(heads, v, transposed)
    assert found.dtype == dtype
    assert relative_error(found.double(), by_matrices(heads, v, transposed)) <= bound
