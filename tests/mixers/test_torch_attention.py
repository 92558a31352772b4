"""Torch's own attention, by itself and in its encoders."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo.mamba import randomise

from captum_ssm import ImplicitAttentionRollout, LatimFlow, MambaLRP, trace
from captum_ssm.errors import UnsupportedMixerError

pytestmark = pytest.mark.slow

WIDTH, HEADS, TOKENS = 8, 2, 6
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[False] * TOKENS, [True, True] + [False] * (TOKENS - 2)])


def attention(**options: Any) -> Any:
    return randomise(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options).double())


@torch.no_grad()
def by_tokens(module: Any, x: Tensor, hidden: Tensor) -> Tensor:
    """One token, one head at a time."""
    out, size = torch.zeros_like(x), WIDTH // HEADS
    bias = torch.zeros(3 * WIDTH).double() if module.in_proj_bias is None else module.in_proj_bias
    parts = zip(module.in_proj_weight.chunk(3), bias.chunk(3), strict=True)
    q, k, v = (x @ weight.T + shift for weight, shift in parts)
    for b in range(len(x)):
        for h in range(HEADS):
            part = slice(h * size, (h + 1) * size)
            for i in range(TOKENS):
                read = [j for j in range(TOKENS) if not hidden[b, i, j]]
                scores = [float(q[b, i, part] @ k[b, j, part]) / math.sqrt(size) for j in read]
                weights = [math.exp(score - max(scores)) for score in scores]
                for j, weight in zip(read, weights, strict=True):
                    out[b, i, part] += weight / sum(weights) * v[b, j, part]
    return module.out_proj(out)


#: By name: options of the module, arguments of the call, which pairs are hidden.
NONE = torch.zeros(2, TOKENS, TOKENS, dtype=torch.bool)
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], Tensor]] = {
    "plain": ({}, {}, NONE),
    "without weights": ({}, {"need_weights": False}, NONE),
    "weights by head": ({}, {"average_attn_weights": False}, NONE),
    "without a bias": ({"bias": False}, {}, NONE),
    "causal": ({}, {"attn_mask": CAUSAL}, CAUSAL.expand(2, -1, -1)),
    "causal, said twice": (
        {},
        {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
        CAUSAL.expand(2, -1, -1),
    ),
    "added": (
        {},
        {"attn_mask": torch.zeros(TOKENS, TOKENS).masked_fill(CAUSAL, -math.inf).double()},
        CAUSAL.expand(2, -1, -1),
    ),
    "by head": ({}, {"attn_mask": CAUSAL.expand(2 * HEADS, -1, -1)}, CAUSAL.expand(2, -1, -1)),
    "padded": ({}, {"key_padding_mask": PADDED}, PADDED[:, None].expand(-1, TOKENS, -1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_reproduces_the_module(name: str) -> None:
    options, arguments, hidden = CALLS[name]
    module, x = attention(**options), torch.randn(2, TOKENS, WIDTH).double()
    with torch.no_grad(), trace(module) as record:
        out, _ = module(x, x, x, **arguments)
    (layer,) = record.layers
    assert layer.reconstruction_error() <= 1e-11
    assert torch.allclose(layer.linear.output(), by_tokens(module, x, hidden), atol=1e-11)
    assert torch.equal(out, layer.output)
    wanted = None if name != "padded" else ~PADDED
    assert record.mask is wanted or torch.equal(record.mask, wanted)


def test_a_sequence_without_a_batch() -> None:
    module, x = randomise(nn.MultiheadAttention(WIDTH, HEADS).double()), torch.randn(TOKENS, WIDTH)
    with torch.no_grad(), trace(module) as record:
        module(*3 * [x.double()], key_padding_mask=PADDED[1])
    (layer,) = record.layers
    wanted = by_tokens(module, x[None].double(), PADDED[1:, None].expand(-1, TOKENS, -1))
    assert layer.reconstruction_error() <= 1e-11
    assert torch.allclose(layer.linear.output(), wanted, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    module, x = attention().to(dtype), torch.randn(2, TOKENS, WIDTH).to(dtype)
    with torch.no_grad(), trace(module, verify=True) as record:
        module(x, x, x)
    record.layers[0].verify()


class Encoder(nn.Module):
    """Torch's encoder, and a head."""

    def __init__(self, norm_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 10, activation="gelu", batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding))


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder(norm_first: bool) -> None:
    """Whose fast path calls no attention at all where nobody looks on."""
    model, x = randomise(Encoder(norm_first).double()), torch.randn(2, TOKENS, WIDTH).double()
    for method in (LatimFlow, MambaLRP):
        relevance, delta = method(model).attribute(
            x, (-1, 3), PADDED, return_convergence_delta=True
        )
        assert delta.abs().max() <= 1e-10
        assert not relevance[PADDED].any() and relevance[~PADDED].all()
        alone = method(model).attribute(x[1:, 2:], (-1, 3))
        assert torch.allclose(relevance[1:, 2:], alone)
    rows = ImplicitAttentionRollout(model).attribute(
        x, additional_forward_args=PADDED, per_token=True
    )
    assert not rows[PADDED].any()
    assert torch.allclose(
        rows[1:, 2:], ImplicitAttentionRollout(model).attribute(x[1:, 2:], per_token=True)
    )


def test_what_is_refused() -> None:
    x, other = torch.randn(2, 2, TOKENS, WIDTH).double()
    last = randomise(nn.MultiheadAttention(WIDTH, HEADS).double())
    calls: list[tuple[Any, tuple[Tensor, ...], str]] = [
        (attention(), (x, other, other), "queries that are not its keys"),
        (attention(), (x[:, :1], x, x), "queries that are not its keys"),
        (last, (x, x, x), "batch_first=False"),
        (attention(add_bias_kv=True), (x, x, x), "add_bias_kv"),
        (attention(add_zero_attn=True), (x, x, x), "add_zero_attn"),
    ]
    for module, given, message in calls:
        with pytest.raises(UnsupportedMixerError, match=message), torch.no_grad(), trace(module):
            module(*given)
