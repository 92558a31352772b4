"""xLSTM's mLSTM layer: the operator is the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import contract
from helpers import hybrid_checks as hybrid
from helpers.versions import VERSION_4
from oracles import diagonal_matrices, times
from torch import Tensor
from zoo.mamba import randomise

from captum_ssm.errors import CachedStateError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.xlstm import mlstm

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

KINDS = [("single", False), ("single", True), ("fused", False), ("fused", True)]


def config(**options: Any) -> Any:
    small = {
        "vocab_size": 19,
        "hidden_size": 16,
        "num_heads": 2,
        "num_hidden_layers": 2,
        "use_bias": True,
        "chunk_size": 16,
        "ffn_round_up_to_multiple_of": 8,
        "norm_eps": 1e-3,
    }
    # past one chunk the layers of version 4 fail by themselves
    one_chunk = {"chunk_size": 128} if VERSION_4 else {}
    return transformers.xLSTMConfig(**small | options | one_chunk)


def mixer_class() -> Any:
    from transformers.models.xlstm import modeling_xlstm

    return modeling_xlstm.xLSTMLayer


def make_mixer(**options: Any) -> Any:
    return randomise(mixer_class()(config(**options)))


def formula(module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> hybrid.Formula:
    """The output exactly; alpha with each channel's own share of the centering."""
    hidden = hidden.detach().double()
    batch, tokens, _ = hidden.shape
    heads, cap = module.config.num_heads, module.config.gate_soft_cap
    if module.config.weight_mode == "fused":
        n, p = module.qk_dim, module.v_dim
        q, k, v, o = hybrid.apply_linear(module.qkv_opreact, hidden).split([n, n, p, p], -1)
        i_gate, f_gate = hybrid.apply_linear(module.ifgate_preact, hidden).split([heads, heads], -1)
    else:
        q, k, v, o, i_gate, f_gate = (
            hybrid.apply_linear(getattr(module, name), hidden)
            for name in ("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact")
        )
    q, k, v, o = (x.view(batch, tokens, heads, -1) for x in (q, k, v, o))
    i_gate, f_gate = cap * torch.tanh(i_gate / cap), cap * torch.tanh(f_gate / cap)
    log_f = -torch.log(1 + torch.exp(-f_gate))
    core = torch.zeros(batch, heads, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        d = torch.stack(
            [log_f[:, j + 1 : i + 1].sum(1) + i_gate[:, j] for j in range(i + 1)], -1
        )  # (B, H, i + 1)
        m = torch.maximum(d.amax(-1), log_f[:, : i + 1].sum(1))[..., None]
        products = torch.einsum("bhn,bjhn->bhj", q[:, i], k[:, : i + 1]) / q.shape[-1] ** 0.5
        row = torch.exp(d - m) * products
        normaliser = torch.maximum(row.sum(-1, keepdim=True).abs(), torch.exp(-m))
        core[:, :, i, : i + 1] = row / (normaliser + module.config.eps)
    core = hybrid.per_value_channel(core, v.shape[-1])
    h = times(core, v)
    norm = module.multihead_norm
    weight = norm.weight.detach().double().view(heads, -1)
    shift = 0.0 if norm.bias is None else norm.bias.detach().double().view(heads, -1)
    gate = 1 / (1 + torch.exp(-o))
    mean = h.mean(-1, keepdim=True)
    sigma = ((h - mean).pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    y = gate * (weight * (h - mean) / sigma + shift)
    own_share = gate * weight / sigma * (1 - 1 / v.shape[-1])
    alpha = diagonal_matrices(own_share, v.shape) @ core
    offset = gate * shift + torch.zeros_like(v)
    return hybrid.Formula(v, alpha, hybrid.apply_linear(module.out_proj, y.flatten(2)), offset)


def test_large_gates_do_not_overflow() -> None:
    """exp of the input gate alone would be infinite."""
    mixer = make_mixer(gate_soft_cap=300.0)
    with torch.no_grad():
        mixer.igate_preact.weight.mul_(300)
    layer = hybrid.record_one(mixer, torch.randn(2, 20, 16))
    assert torch.isfinite(layer.output).all()
    hybrid.check(layer, 1e-4)


@pytest.mark.parametrize("by_position", [False, True])
def test_a_state_is_refused(by_position: bool) -> None:
    hidden = torch.randn(1, 4, 16)
    args, kwargs = ((hidden, (hidden,)), {}) if by_position else ((hidden,), {"state": (hidden,)})
    with pytest.raises(CachedStateError):
        mlstm(make_mixer(), Call(args, kwargs, hidden))


@pytest.mark.parametrize(
    "options",
    [
        *({"weight_mode": mode, "use_bias": bias} for mode, bias in KINDS),
        {"num_heads": 1, "chunk_size": 64},
        {"num_heads": 4, "v_dim_factor": 2.0},
        {"v_dim_factor": 0.5},
    ],
)
def test_contract(options: dict[str, Any]) -> None:
    clauses = set(contract.CORE)
    if "chunk_size" not in options:
        clauses -= {"bfloat16"}  # which the model's chunks do not take
    hybrid.holds(make_mixer(**options), 16, formula, tokens=20, clauses=clauses)
