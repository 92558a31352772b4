"""MiniMax's lightning attention: the operator is the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import hybrid_checks as hybrid
from helpers.versions import VERSION_4
from oracles import diagonal_matrices, relative_error, times
from torch import Tensor
from zoo.mamba import randomise

from captum_ssm import ImplicitAttentionRollout
from captum_ssm.errors import CachedStateError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.minimax import lightning_attention

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


def config(**options: Any) -> Any:
    small = {
        "vocab_size": 19,
        "hidden_size": 11,
        "intermediate_size": 9,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "block_size": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",  # the other takes neither odd sizes nor float64
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    return transformers.MiniMaxConfig(**small | options)


def make_model(**options: Any) -> Any:
    return randomise(transformers.MiniMaxForCausalLM(config(**options)))


def mixer_class() -> Any:
    from transformers.models.minimax import modeling_minimax

    return modeling_minimax.MiniMaxLightningAttention


def make_mixer(**options: Any) -> Any:
    return randomise(mixer_class()(config(**options), 0))


def run(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> Any:
    return hybrid.record_one(mixer, hidden, None, mask)


def formula(module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> hybrid.Formula:
    hidden = hidden.detach().double()
    batch, tokens, _ = hidden.shape
    heads, per_head = module.num_attention_heads, module.head_dim
    keep = hybrid.keep_of(kwargs.get("attention_mask"), hidden)[..., None, None]
    u = hybrid.apply_linear(module.qkv_proj, hidden).view(batch, tokens, heads, 3 * per_head)
    ratio = module.act_fn(u) / u
    q, k, v = (keep * ratio * u).split(per_head, -1)
    if VERSION_4:  # padded tokens read
        q = (ratio * u)[..., :per_head]
    slope = module.slope_rate.double().flatten()
    core = torch.zeros(batch, heads, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i + 1):
            core[:, :, i, j] = (q[:, i] * k[:, j]).sum(-1) * torch.exp(-slope * (i - j))
    core = hybrid.per_value_channel(core, per_head)
    mixed = times(core, v)
    norm = module.norm
    rms = (mixed.pow(2).flatten(2).mean(-1) + norm.variance_epsilon).sqrt()[..., None, None]
    gate = 1 / (1 + torch.exp(-hybrid.apply_linear(module.output_gate, hidden)))
    outer = gate.view_as(mixed) * norm.weight.detach().double().view(heads, per_head) / rms
    inner = keep * ratio[..., -per_head:]
    alpha = diagonal_matrices(outer, v.shape) @ core @ diagonal_matrices(inner, v.shape)
    values = u[..., -per_head:]
    y = times(alpha, values)
    return hybrid.Formula(values, alpha, hybrid.apply_linear(module.out_proj, y.flatten(2)))


def test_scale_of_the_branch() -> None:
    """The stream is alpha h + beta mixer(h), and the norm after it removes a common factor."""
    linear = {"linear_attn_alpha_factor": 2.5, "linear_attn_beta_factor": 0.5}
    full = {"full_attn_alpha_factor": 3.0, "full_attn_beta_factor": 6.0}
    model = make_model(**linear, **full)
    ids = torch.randint(19, (2, 8))
    assert [x.linear.branch_scale for x in hybrid.record(model, ids)] == [0.2, 2.0, 0.2]
    assert run(make_mixer(**linear), torch.randn(1, 4, 11)).linear.branch_scale == 1

    row = torch.zeros(2, 8)
    row[:, -1] = 1
    for layer, scale in reversed(
        list(zip(hybrid.record(model, ids), (0.2, 2.0, 0.2), strict=True))
    ):
        row = row + scale * torch.einsum("bi,bij->bj", row, layer.operator.dense())
    found = ImplicitAttentionRollout(model).attribute(ids, query="last")
    assert relative_error(found, row) <= 1e-5

    linear = {name: 4 * value for name, value in linear.items()}
    full = {name: 4 * value for name, value in full.items()}
    other = make_model(**linear, **full)
    other.load_state_dict(model.state_dict())
    assert relative_error(other(ids).logits, model(ids).logits) <= 1e-4
    assert relative_error(ImplicitAttentionRollout(other).attribute(ids, query="last"), row) <= (
        1e-4
    )


def test_a_cache_is_refused() -> None:
    hidden = torch.randn(1, 4, 11)
    for args, kwargs in (
        ((hidden, None, None, object()), {}),
        ((hidden,), {"past_key_values": object()}),
    ):
        with pytest.raises(CachedStateError):
            lightning_attention(make_mixer(), Call(args, kwargs, hidden))


@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
def test_contract(act: str) -> None:
    mixer, rounded = make_mixer(hidden_act=act), {"bfloat16": "off by"}  # buffers of its decays
    hybrid.holds(mixer, 11, formula, rounded, tokens=20, position_embeddings=None)
