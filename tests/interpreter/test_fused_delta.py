"""The package's own kernel: a delta rule in one launch is that in torch, at awkward sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import relative_error, token_loops
from torch import Tensor

from captum_ssm.operators import DeltaRule
from captum_ssm.operators.kernels import chunks, fused_delta

#: Examples, tokens, heads, states and channels; of states and columns the last block is not whole.
SIZES = [
    (2, 1, 4, 3, 5),
    (2, 15, 2, 16, 3),
    (1, 17, 1, 17, 9),
    (1, 63, 1, 5, 3),
    (1, 65, 1, 12, 8),
    (1, 130, 1, 33, 2),
    (1, 3, 1, 512, 3),
]
#: Whether there are decays, and of what: from nothing to all, and both.
DECAYS = ["none", "of heads", "of channels"]
#: Whether the key is erased, or what another finds, or that along channels with steps of their own.
ERASED = ["key", "another", "two keys"]


def rule_of(
    batch: int,
    tokens: int,
    heads: int,
    states: int,
    channels: int,
    *,
    decays: str = "of heads",
    erased: str = "key",
) -> DeltaRule:
    """Keys of unit length, as those of layers are, and everything laid out as views."""
    query, key, erase = torch.randn(batch, tokens, heads, 3 * states).chunk(3, -1)
    key, erase = F.normalize(key, dim=-1), F.normalize(erase, dim=-1)
    logs = -(torch.rand(batch, heads, tokens, states).transpose(1, 2) * 3).pow(4)
    logs[:, tokens // 2], logs[:, tokens // 3] = -torch.inf, 0
    steps = torch.rand(states, batch, heads, tokens).permute(1, 3, 2, 0)
    return DeltaRule(
        query,
        key,
        torch.rand(batch, heads, tokens).mT,
        {"none": None, "of heads": logs[..., 0], "of channels": logs}[decays],
        channels,
        erase=None if erased == "key" else erase,
        erase_step=steps if erased == "two keys" else None,
    )


def fused(rule: DeltaRule, v: Tensor, transposed: bool) -> Tensor:
    coefficients = rule.query, rule.key, rule.beta, rule.log_decay, rule.erase, rule.erase_step
    return fused_delta.run(*coefficients, v, transposed=transposed)


def by_matrices(rule: DeltaRule, v: Tensor, transposed: bool) -> Tensor:
    """In float64 (S, B, L, H, P)."""
    matrices = token_loops.matrices(token_loops.delta_rule, rule)
    return ((matrices.mT if transposed else matrices) @ v.double().transpose(2, 3)).transpose(2, 3)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("decays", "erased"), [*zip(DECAYS * 2, ERASED + ERASED[1:] + ERASED[:1], strict=True)]
)
@pytest.mark.parametrize("size", SIZES)
def test_a_rule(
    size: tuple[int, int, int, int, int], decays: str, erased: str, transposed: bool
) -> None:
    """Of two vectors, of which channels are every other number.

    In float32 what is in torch rounds more than the kernel, and is no measure of it.
    """
    rule = rule_of(*size, decays=decays, erased=erased)
    v = torch.randn(2, *rule.shape[:3], 2 * rule.shape.per_head)[..., ::2]
    found = fused(rule, v, transposed)
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert relative_error(found, by_matrices(rule, v, transposed)) <= 1e-6
    double = rule.at({name: x.double() for name, x in rule.tensors().items()})
    in_torch = chunks.run_all(double._steps, v.double(), transposed)
    assert relative_error(found, in_torch) <= 1e-6


@pytest.mark.parametrize("decays", DECAYS)
def test_the_key_with_steps_of_channels(decays: str) -> None:
    """It asks the state after its decay."""
    rule = rule_of(1, 9, 2, 3, 2, decays=decays, erased="two keys")
    ours = rule.at({"erase": rule.key})
    ours.erase, asked = None, rule.key
    if rule.log_decay is not None:
        logs = rule.log_decay if rule.log_decay.dim() == 4 else rule.log_decay[..., None]
        asked = asked * logs.exp()
    v = torch.randn(1, *rule.shape)
    for transposed in (False, True):
        wanted = by_matrices(rule.at({"erase": asked}), v, transposed)
        assert relative_error(fused(ours, v, transposed), wanted) <= 1e-6


@pytest.mark.parametrize("log_decay", [-torch.inf, 0.0, -1e-3, -20.0])
def test_one_decay_for_all_tokens(log_decay: float) -> None:
    """As of layers that forget all, or nothing; repeated and not copied."""
    rule = rule_of(1, 40, 1, 16, 8)
    rule = rule.at({"log_decay": torch.full((1, 1, 1), log_decay).expand(1, 40, 1)})
    v = torch.randn(1, 1, 40, 1, 8)
    for transposed in (False, True):
        wanted = by_matrices(rule, v, transposed)
        assert relative_error(fused(rule, v, transposed), wanted) <= 1e-6


def test_weak_decays_after_strong_ones() -> None:
    """Quotients of products would have lost the weak ones."""
    decays = torch.full((1, 64, 1), -1e-3)
    decays[:, :20] = -80
    rule, v = rule_of(1, 64, 1, 16, 8).at({"log_decay": decays}), torch.randn(1, 1, 64, 1, 8)
    for transposed in (False, True):
        wanted = by_matrices(rule, v, transposed)
        assert relative_error(fused(rule, v, transposed), wanted) <= 1e-6


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision(dtype: torch.dtype, bound: float, transposed: bool) -> None:
    """It is computed in float32: only what comes out is rounded."""
    rule = rule_of(1, 40, 1, 4, 3)
    v = torch.randn(1, *rule.shape).to(dtype)
    found = fused(rule, v, transposed)
    assert found.dtype == dtype
    assert relative_error(found.double(), by_matrices(rule, v, transposed)) <= bound
