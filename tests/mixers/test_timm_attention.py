"""Softmax attention of timm's vision transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracles import relative_error
from torch import Tensor, nn
from zoo.mamba import randomise

from captum_ssm import trace
from captum_ssm.errors import UnsupportedMixerError
from captum_ssm.tracing import Layer, find_mixers

pytestmark = pytest.mark.timm

FLOAT32 = 1e-5


def attention(timm: Any, *, fused: bool = True, **options: Any) -> Any:
    from timm.layers import Attention

    module = randomise(Attention(12, num_heads=3, **options))
    module.fused_attn = fused
    return module


def vision_transformer(timm: Any, *, fused: bool = True, **options: Any) -> Any:
    """ViT of two blocks and 3 x 3 patches."""
    small = {
        "img_size": 12,
        "patch_size": 4,
        "embed_dim": 12,
        "depth": 2,
        "num_heads": 3,
        "num_classes": 5,
    }
    model = randomise(timm.models.vision_transformer.VisionTransformer(**small | options))
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return model


def record(model: Any, *args: Any, **kwargs: Any) -> list[Layer]:
    """The layers of a run, whose operators are made where a test asks for them."""
    with torch.no_grad(), trace(model, operators=False) as t:
        model(*args, **kwargs)
    return t.layers


def probabilities(module: Any, hidden: Tensor, added: Tensor | None = None) -> Tensor:
    """(B, H, L, L), head by head in float64."""
    module = copy.deepcopy(module).double()
    qkv = module.qkv(hidden.double())
    out = []
    for h in range(module.num_heads):
        query, key = (
            norm(
                qkv[..., (part * module.num_heads + h) * module.head_dim :][..., : module.head_dim]
            )
            for part, norm in ((0, module.q_norm), (1, module.k_norm))
        )
        scores = query @ key.mT / module.head_dim**0.5
        out.append((scores if added is None else scores + added).softmax(-1))
    return torch.stack(out, 1)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", [
    {},
    {"qkv_bias": True},
    {"qk_norm": True, "norm_layer": nn.LayerNorm},
    {"attn_head_dim": 5, "proj_bias": False},
    {"gated": True, "qkv_bias": True},
    {"dim_out": 7},
])  # fmt: skip
def test_reproduces_the_module(timm: Any, options: dict[str, Any], fused: bool) -> None:
    module = attention(timm, fused=fused, **options)
    for batch, tokens in ((1, 1), (2, 2), (1, 3), (3, 70)):
        hidden = torch.randn(batch, tokens, 12)
        (layer,) = record(module, hidden)
        assert layer.reconstruction_error() <= FLOAT32
        assert layer.linear.mask is None
        found = layer.linear.restrict({"scan"}).operator.dense("heads")
        with torch.no_grad():
            assert relative_error(found, probabilities(module, hidden)) <= FLOAT32


@pytest.mark.parametrize("fused", [False, True])
def test_masks(timm: Any, fused: bool) -> None:
    module = attention(timm, fused=fused)
    hidden = torch.randn(2, 6, 12)
    keep = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    pairs = keep[:, None, None].expand(2, 1, 6, 6)
    added = torch.zeros(2, 1, 6, 6).masked_fill(~pairs, -torch.inf)
    for mask in (added, pairs) if fused else (added,):
        (layer,) = record(module, hidden, attn_mask=mask)
        assert layer.reconstruction_error() <= FLOAT32
        assert layer.linear.mask is not None and torch.equal(layer.linear.mask, keep)
        assert not layer.operator.dense("heads")[1, :, :, 4:].any()
    (layer,) = record(module, hidden, is_causal=True)
    assert layer.reconstruction_error() <= FLOAT32
    assert layer.linear.mask is None
    assert not layer.operator.dense("heads").triu(1).any()


def test_gate(timm: Any) -> None:
    module = attention(timm, gated=True)
    hidden = torch.randn(2, 6, 12)
    (layer,) = record(module, hidden)
    with torch.no_grad():
        gate = torch.sigmoid(module.gate(hidden)).view(2, 6, 3, 4).double()
        wanted = torch.einsum("bihp,bhij->bhpij", gate, probabilities(module, hidden))
    assert relative_error(layer.operator.dense(None), wanted.flatten(1, 2)) <= FLOAT32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_precision(timm: Any, dtype: torch.dtype) -> None:
    model = vision_transformer(timm).to(dtype)
    for layer in record(model, torch.randn(2, 3, 12, 12, dtype=dtype)):
        half = dtype == torch.bfloat16
        assert layer.operator.dtype == (torch.float32 if half else torch.float64)
        assert layer.reconstruction_error() <= (2e-2 if half else 1e-13)
        module = copy.deepcopy(layer.mixer.module).double()
        with torch.no_grad():
            exact = module(layer.call.args[0].double())
        assert relative_error(layer.linear.output(), exact) <= (FLOAT32 if half else 1e-13)


def test_norm_behind_attention_is_refused(timm: Any) -> None:
    module = attention(timm, scale_norm=True, norm_layer=nn.LayerNorm)
    (layer,) = record(module, torch.randn(1, 4, 12))
    with pytest.raises(UnsupportedMixerError, match="scale_norm"):
        _ = layer.operator


def test_distilled_transformer(timm: Any) -> None:
    model = randomise(
        timm.models.deit.VisionTransformerDistilled(
            img_size=12, patch_size=4, embed_dim=12, depth=2, num_heads=3, num_classes=5
        )
    )
    images = torch.randn(1, 3, 12, 12)
    assert len(find_mixers(model)) == 2
    assert all(layer.reconstruction_error() <= FLOAT32 for layer in record(model, images))
