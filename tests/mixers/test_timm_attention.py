"""Softmax attention of timm's vision transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.contract import check, record_one
from torch import Tensor, nn
from zoo.mamba import randomise

from captum_ssm.errors import UnsupportedMixerError
from captum_ssm.tracing import find_mixers

pytestmark = pytest.mark.timm


def attention(timm: Any, *, fused: bool = True, **options: Any) -> Any:
    from timm.layers import Attention

    module = randomise(Attention(12, num_heads=3, **options))
    module.fused_attn = fused
    return module


@torch.no_grad()
def matrices(module: Any, hidden: Tensor, _: Any) -> dict[str, Tensor]:
    """Head by head in float64; with a gate of channels, if there is one."""
    module = copy.deepcopy(module).double()
    qkv, heads, size = module.qkv(hidden.double()), module.num_heads, module.head_dim
    out = []
    for h in range(heads):
        query, key = (
            norm(qkv[..., (part * heads + h) * size :][..., :size])
            for part, norm in ((0, module.q_norm), (1, module.k_norm))
        )
        out.append((query @ key.mT / size**0.5).softmax(-1))
    found = torch.stack(out, 1).repeat_interleave(size, 1)
    gate = getattr(module, "gate", None)
    whole = found if gate is None else torch.sigmoid(gate(hidden)).mT[..., None] * found
    return {"s6": found, "exact": whole}


@pytest.mark.parametrize("options", [
    {"qkv_bias": True, "qk_norm": True, "norm_layer": nn.LayerNorm, "fused": False},
    {"attn_head_dim": 5, "proj_bias": False, "dim_out": 7},
    {"gated": True, "qkv_bias": True},
])  # fmt: skip
def test_contract(timm: Any, options: dict[str, Any]) -> None:
    contract.holds(attention(timm, **options), 12, matrices, masked=False)


@pytest.mark.parametrize("fused", [False, True])
def test_masks(timm: Any, fused: bool) -> None:
    module, hidden = attention(timm, fused=fused), torch.randn(2, 6, 12)
    keep = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    pairs = keep[:, None, None].expand(2, 1, 6, 6)
    added = torch.zeros(2, 1, 6, 6).masked_fill(~pairs, -torch.inf)
    for mask in (added, pairs) if fused else (added,):
        layer = record_one(module, hidden, attn_mask=mask)
        check(layer)
        assert layer.linear.mask is not None and torch.equal(layer.linear.mask, keep)
        assert not layer.operator.dense("heads")[1, :, :, 4:].any()
    layer = record_one(module, hidden, is_causal=True)
    check(layer)
    assert layer.linear.mask is None
    assert not layer.operator.dense("heads").triu(1).any()


def test_norm_behind_attention_is_refused(timm: Any) -> None:
    module = attention(timm, scale_norm=True, norm_layer=nn.LayerNorm)
    with pytest.raises(UnsupportedMixerError, match="scale_norm"):
        _ = record_one(module, torch.randn(1, 4, 12)).operator


def test_distilled_transformer(timm: Any) -> None:
    small = {"img_size": 12, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3}
    model = randomise(timm.models.deit.VisionTransformerDistilled(**small, num_classes=5))
    assert len(find_mixers(model)) == 2
    for layer in contract.record(model, torch.randn(1, 3, 12, 12)):
        check(layer)
