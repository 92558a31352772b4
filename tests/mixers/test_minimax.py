"""MiniMax's lightning attention: the operator is the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import hybrid_checks as hybrid
from helpers.versions import VERSION_4
from oracles import diagonal_matrices, relative_error, times
from torch import Tensor
from zoo.mamba import padded_batch, randomise

from captum_ssm import ImplicitAttentionRollout
from captum_ssm.errors import CachedStateError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.minimax import lightning_attention

transformers = pytest.importorskip("transformers")

FLOAT32 = 1e-5  # for any draw; typical is 2e-7


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


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 13, 16, 37])
def test_reproduces_the_module(tokens: int, batch: int) -> None:
    mixer = make_mixer()
    hidden = torch.randn(batch, tokens, 11)
    layer = run(mixer, hidden)
    wanted = formula(mixer, hidden, {})
    assert relative_error(layer.output, wanted.output) <= 5e-6
    hybrid.check(layer, FLOAT32)
    hybrid.check_formula_output(wanted, mixer.out_proj)
    hybrid.check_formula(layer, wanted, 1e-5)


@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
def test_float64_against_the_formula(act: str) -> None:
    mixer = make_mixer(hidden_act=act).double()
    hidden = torch.randn(2, 11, 11, dtype=torch.float64)
    layer = run(mixer, hidden)
    assert layer.linear.operator.dtype == torch.float64
    hybrid.check_formula(layer, formula(mixer, hidden, {}), 1e-10)
    layer.verify()


@pytest.mark.parametrize("where", ["left", "right", "middle"])
def test_padding(where: str) -> None:
    mixer = make_mixer().double()
    hidden = torch.randn(2, 9, 11, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, {"left": slice(0, 4), "right": slice(6, 9), "middle": slice(3, 5)}[where]] = 0
    layer = run(mixer, hidden, mask)
    hybrid.check(layer, 1e-6)
    hybrid.check_formula(layer, formula(mixer, hidden, {"attention_mask": mask}), 1e-10)
    found = layer.linear.mask
    assert found is not None and torch.equal(found, mask.bool())
    assert not layer.operator.dense(None)[1][:, :, mask[1] == 0].any()


def test_typical_errors() -> None:
    errors, halves = [], []
    for _ in range(9):
        mixer, hidden = make_mixer(), torch.randn(3, 40, 11)
        errors.append(hybrid.check(run(mixer, hidden), FLOAT32))
        half = run(mixer.to(torch.bfloat16), hidden.to(torch.bfloat16))
        halves.append(hybrid.check_half(half, 8e-2))
    hybrid.check_typical(errors, 1e-6)
    hybrid.check_typical(halves, 2e-2)


def test_whole_model() -> None:
    model = make_model()
    ids, mask = padded_batch([70, 41, 1])
    layers = hybrid.record(model, ids, attention_mask=mask)
    assert [layer.architecture for layer in layers] == ["MiniMax"] * 3
    for layer in layers:
        hybrid.check(layer, FLOAT32)
    hybrid.check_same_logits(model, ids, attention_mask=mask)


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


def test_methods() -> None:
    hybrid.check_methods(make_model(linear_attn_alpha_factor=2.5), *padded_batch([12, 7]))


def test_attribution_by_hand() -> None:
    model = make_model(num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    hybrid.check_attribution_by_hand(model, mixer_class(), formula, torch.randint(19, (2, 9)))


def test_a_cache_is_refused() -> None:
    hidden = torch.randn(1, 4, 11)
    for args, kwargs in (
        ((hidden, None, None, object()), {}),
        ((hidden,), {"past_key_values": object()}),
    ):
        with pytest.raises(CachedStateError):
            lightning_attention(make_mixer(), Call(args, kwargs, hidden))
