"""Softmax attention of mamba_ssm's hybrids: the operator is the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import contract
from helpers.contract import check, record
from torch import Tensor, nn
from zoo.mamba import randomise
from zoo.mamba_ssm_cpu import MambaSSM

from captum_ssm import LatimFlow, StateMemory

pytestmark = pytest.mark.slow

WIDTH = 12
OPTIONS: list[dict[str, Any]] = [
    {"causal": False, "num_heads_kv": None},
    {"num_heads_kv": 1, "softmax_scale": 0.7},
    {"head_dim": 5, "qkv_proj_bias": False, "out_proj_bias": False, "d_conv": 3},
    {"d_conv": 4, "num_heads_kv": 1, "head_dim": 5},
    {"rotary_emb_dim": 2, "head_dim": 6, "mlp_dim": 8},
    {"rotary_emb_dim": 4, "rotary_emb_interleaved": True, "head_dim": 4},
    {"rotary_emb_dim": 4, "head_dim": 6, "d_conv": 2, "mlp_dim": 300},
]


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


@pytest.mark.parametrize("options", OPTIONS)
def test_contract(attention: Any, options: dict[str, Any]) -> None:
    contract.holds(attention(**options), WIDTH)


def test_a_hybrid(mamba_ssm: MambaSSM) -> None:
    model = randomise(mamba_ssm.make_hybrid(d_intermediate=4, d_conv=3, mlp_dim=8))
    ids = torch.randint(16, (2, 9))
    layers = record(model, ids)
    assert [type(layer.mixer.module).__name__ for layer in layers] == ["Mamba", "MHA"]
    for layer in layers:
        check(layer)
    assert [layer.is_cache for layer in StateMemory(model).of(ids)] == [False, True]
    roles = LatimFlow(model).decompose(ids, (-1, 3), rule="centered").roles
    assert roles is not None and roles["key"].any() and roles["query"].any()
