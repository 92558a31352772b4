"""Torch's own attention, by itself and in its encoders."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.contract import check, record_one
from oracles import relative_error
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


ADDED = torch.zeros(TOKENS, TOKENS).masked_fill(CAUSAL, -math.inf).double()
#: By name: options of the module and arguments of the call.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without weights": ({}, {"need_weights": False}),
    "weights by head": ({}, {"average_attn_weights": False}),
    "without a bias": ({"bias": False}, {}),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "added": ({}, {"attn_mask": ADDED}),
    "by head": ({}, {"attn_mask": CAUSAL.expand(2 * HEADS, -1, -1)}),
    "padded": ({}, {"key_padding_mask": PADDED}),
}


@pytest.mark.parametrize("name", CALLS)
def test_reproduces_the_module(name: str) -> None:
    options, arguments = CALLS[name]
    module, x = attention(**options), torch.randn(2, TOKENS, WIDTH).double()
    layer = record_one(module, x, x, x, **arguments)
    check(layer, 1e-11)
    with torch.no_grad():
        _, weights = module(
            x, x, x, **arguments | {"need_weights": True, "average_attn_weights": False}
        )
    assert relative_error(layer.operator.dense("heads"), weights) <= 1e-11
    found = layer.linear.mask
    assert found is None if name != "padded" else torch.equal(found, ~PADDED)


def test_a_sequence_without_a_batch() -> None:
    module, x = randomise(nn.MultiheadAttention(WIDTH, HEADS).double()), torch.randn(TOKENS, WIDTH)
    layer = record_one(module, *3 * [x.double()], key_padding_mask=PADDED[1])
    check(layer, 1e-11)
    assert not layer.operator.dense("heads")[..., :2].any()


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
        (attention(), (x, other, other), "differs from its keys or values"),
        (attention(), (x[:, :1], x, x), "differs from its keys or values"),
        (last, (x, x, x), "batch_first=False"),
        (attention(add_bias_kv=True), (x, x, x), "add_bias_kv"),
        (attention(add_zero_attn=True), (x, x, x), "add_zero_attn"),
    ]
    for module, given, message in calls:
        with pytest.raises(UnsupportedMixerError, match=message), torch.no_grad(), trace(module):
            module(*given)
