"""Softmax attention of mamba_ssm's hybrids: the operator is the module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import contract
from helpers import hybrid_checks as hybrid
from oracles import relative_error
from torch import Tensor, nn
from zoo.mamba import randomise
from zoo.mamba_ssm_cpu import MambaSSM

from captum_ssm import LatimFlow, StateMemory, trace
from captum_ssm.errors import CachedStateError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.mamba_ssm_attention import mamba_ssm_attention

pytestmark = pytest.mark.slow

WIDTH = 12
FLOAT32 = 1e-6
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "both directions": {"causal": False},
    "as many keys as queries": {"num_heads_kv": None},
    "one key for all": {"num_heads_kv": 1, "softmax_scale": 0.7},
    "wide heads": {"head_dim": 5, "qkv_proj_bias": False, "out_proj_bias": False},
    "convolution": {"d_conv": 3},
    "convolution for one key": {"d_conv": 4, "num_heads_kv": 1, "head_dim": 5},
    "channels past it": {"mlp_dim": 8},
    "rotated": {"rotary_emb_dim": 2, "head_dim": 6},
    "rotated in pairs": {"rotary_emb_dim": 4, "rotary_emb_interleaved": True, "head_dim": 4},
    "everything": {"rotary_emb_dim": 4, "head_dim": 6, "d_conv": 2, "mlp_dim": 300},
}


class Rotary(nn.Module):
    """flash_attn's module, of which the package's needs these arguments and attributes.

    It turns by complex numbers: channels 2n and 2n + 1 if interleaved, else n and n + half.
    """

    def __init__(self, dim: int, base: float, interleaved: bool, device: Any = None) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved = dim, float(base), interleaved

    def forward(
        self, q: Tensor, kv: Tensor, seqlen_offset: int = 0, max_seqlen: int | None = None
    ) -> tuple[Tensor, Tensor]:
        assert seqlen_offset == 0 and max_seqlen is None
        key, value = kv.unbind(2)
        return self.turned(q), torch.stack([self.turned(key), value], 2)

    def turned(self, x: Tensor) -> Tensor:
        half = self.dim // 2
        speed = torch.tensor([self.base ** (-n / half) for n in range(half)]).double()
        angle = torch.arange(x.shape[1]).double()[:, None] * speed
        first = range(0, self.dim, 2) if self.interleaved else range(half)
        other = range(1, self.dim, 2) if self.interleaved else range(half, self.dim)
        out = x.clone()
        turned = torch.complex(x[..., list(first)].double(), x[..., list(other)].double())
        turned = turned * torch.polar(torch.ones_like(angle), angle)[:, None]
        out[..., list(first)] = turned.real.to(x)
        out[..., list(other)] = turned.imag.to(x)
        return out


@pytest.fixture
def attention(mamba_ssm: MambaSSM, monkeypatch: pytest.MonkeyPatch) -> Any:
    from mamba_ssm.modules import mha

    monkeypatch.setattr(mha, "RotaryEmbedding", Rotary)

    def make(**options: Any) -> Any:
        small = {"num_heads": 4, "num_heads_kv": 2, "causal": True}
        options = small | options
        if options["num_heads_kv"] is None:
            del options["num_heads_kv"]
        return randomise(mha.MHA(WIDTH, **options))

    return make


def by_hand(module: Any, x: Tensor) -> Tensor:
    """Query after query, key after key."""
    heads, groups = module.num_heads, module.num_heads // module.num_heads_kv
    width, batch, tokens = module.head_dim, *x.shape[:2]
    made = hybrid.apply_linear(module.in_proj, x)
    past = torch.zeros(*x.shape[:2], 0, dtype=x.dtype)
    if module.mlp_dim:
        made, beside = made[..., : -module.mlp_dim], made[..., -module.mlp_dim :]
        up, z = beside.chunk(2, -1)
        past = up * z / (1 + torch.exp(-z))
    if module.d_conv:
        taps, bias = module.conv1d.weight.detach().double()[:, 0], module.conv1d.bias.detach()
        mixed = torch.zeros_like(made) + bias
        for t in range(tokens):
            for back in range(min(t + 1, module.d_conv)):
                mixed[:, t] += taps[:, -1 - back] * made[:, t - back]
        made = mixed
    made = made.view(batch, tokens, -1, width)
    q, k, v = made.split([heads, module.num_heads_kv, module.num_heads_kv], 2)
    if module.rotary_emb_dim:
        q, k = module.rotary_emb.turned(q), module.rotary_emb.turned(k)
    scale = width**-0.5 if module.softmax_scale is None else module.softmax_scale
    out = torch.zeros(batch, tokens, heads, width, dtype=x.dtype)
    for h in range(heads):
        for i in range(tokens):
            seen = i + 1 if module.causal else tokens
            weight = torch.exp(scale * (k[:, :seen, h // groups] * q[:, i : i + 1, h]).sum(-1))
            taken = (weight[..., None] * v[:, :seen, h // groups]).sum(1)
            out[:, i, h] = taken / weight.sum(1, keepdim=True)
    return hybrid.apply_linear(module.out_proj, torch.cat([out.flatten(2), past], -1))


def test_a_hybrid(mamba_ssm: MambaSSM) -> None:
    model = randomise(mamba_ssm.make_hybrid(d_intermediate=4, d_conv=3, mlp_dim=8))
    ids = torch.randint(16, (2, 9))
    with torch.no_grad(), trace(model) as t:
        model(ids)
    kinds = [type(layer.mixer.module).__name__ for layer in t.layers]
    assert kinds == ["Mamba", "MHA"]
    for layer in t.layers:
        hybrid.check(layer, FLOAT32)
    memory = StateMemory(model).of(ids)
    assert [layer.is_cache for layer in memory] == [False, True]
    for rule in ("frozen", "centred"):
        method = LatimFlow(model)
        options: Any = {"target": (-1, 3), "rule": rule}
        relevance, delta = method.attribute(ids, **options, return_convergence_delta=True)
        assert delta.abs().max() <= 1e-5
        for row in range(2):  # an example alone
            alone = method.attribute(ids[row : row + 1], **options)
            assert relative_error(relevance[row], alone[0]) <= 1e-4
    roles = LatimFlow(model).decompose(ids, (-1, 3), rule="centred").roles
    assert roles is not None and roles["key"].any() and roles["query"].any()


def test_a_cache_is_refused(attention: Any) -> None:
    hidden, cache = torch.randn(1, 4, WIDTH), SimpleNamespace()
    with pytest.raises(CachedStateError, match="inference_params"):
        mamba_ssm_attention(attention(), Call((hidden, cache), {}, hidden))


@pytest.mark.parametrize("case", OPTIONS)
def test_contract(attention: Any, case: str) -> None:
    module, double = attention(**OPTIONS[case]), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    contract.holds(module, WIDTH)
    # angles are of single precision
    limit = 1e-6 if module.rotary_emb_dim else 1e-11
    assert relative_error(module.double()(double), by_hand(module, double)) <= limit
