"""Recurrent mixers of transformers other than Mamba's: the operator is the module."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.contract import check, record, record_one
from oracles import causal_taps, diagonal_matrices, keep_of, linear, relative_error, times
from oracles.frozen_mixers import frozen, griffin_scan
from torch import Tensor
from zoo.mamba import randomise
from zoo.recurrent import (
    griffin_block,
    griffin_config,
    griffin_model,
    minimax_mixer,
    minimax_model,
    modeling,
    rwkv_mixer,
    rwkv_model,
    xlstm_mixer,
)
from zoo.short_conv import FAMILIES as SHORT_CONVOLUTIONS
from zoo.short_conv import make_config

from captum_ssm import ImplicitAttentionRollout

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


# --- Griffin ---------------------------------------------------------------------------------


def griffin_formula(module: Any, hidden: Tensor, kwargs: Any) -> Tensor:
    hidden = hidden.detach().double()
    batch, tokens, _ = hidden.shape
    reset = (kwargs["position_ids"] == 0).expand(batch, tokens)
    values = linear(module.linear_x, hidden)
    conv = causal_taps(module.conv_1d, tokens)
    u = torch.einsum("xcij,bjc->bic", conv, values) + module.conv_1d.bias.detach().double()
    core = griffin_scan(module.rg_lru, u, reset)
    z = linear(module.linear_y, hidden)
    gate = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return diagonal_matrices(gate[..., None], (*values.shape, 1)) @ core @ conv


@pytest.mark.parametrize(
    ("kernel", "heads", "start"), [(4, 5, 0), (1, 1, 0), (2, 2, 3), (7, 10, 0)]
)
def test_contract_of_griffin(kernel: int, heads: int, start: int) -> None:
    block = griffin_block(conv1d_width=kernel, num_attention_heads=heads, head_dim=2, lru_width=10)
    # nearer to a decay of one, 1 - a^2 is rounded to nothing by bfloat16 itself
    block.rg_lru.recurrent_param.data.clamp_(min=-3)

    def positions(hidden: Tensor) -> Tensor:
        return torch.arange(start, start + hidden.shape[1])[None]

    own = {"attention_mask": None, "use_cache": False}
    contract.holds(block, 12, griffin_formula, masked=False, position_ids=positions, **own)


def test_resets_separate_packed_sequences() -> None:
    block, hidden = griffin_block().double(), torch.randn(2, 10, 12, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]])
    layer = record_one(block, hidden, positions, None, use_cache=False)
    check(layer)
    wanted = griffin_formula(block, hidden, {"position_ids": positions})
    assert relative_error(layer.operator.dense(None), wanted) <= 1e-12
    core = layer.linear.restrict({"scan"}).operator.dense()
    assert not core[0, 4:, :4].any() and not core[0, 7:, :7].any() and not core[1, 2:, :2].any()
    assert core[0, 3, 0] != 0


def test_initialised_decays() -> None:
    """Near a decay of one, where the model's sqrt(1 - a^2) cancels."""
    model = transformers.RecurrentGemmaForCausalLM(griffin_config()).eval()
    for layer in record(model, torch.randint(3, 19, (2, 40))):
        check(layer)


def test_runs_before_leave_no_trace() -> None:
    """A block carries the state of cached runs itself."""
    model = griffin_model()
    ids, later = torch.randint(3, 19, (4, 9)), torch.arange(3, 12)[None]
    with torch.no_grad():
        fresh = model(ids, use_cache=False).logits
        model(ids[:1, :5], use_cache=True)
    states = {m: m.recurrent_states for m in model.modules() if hasattr(m, "recurrent_states")}
    for batch in (3, 2):
        for layer in record(model, ids[:batch]):
            check(layer)
    for layer in record(model, ids[:2], position_ids=later):  # no reset at the beginning
        check(layer)
    assert all(module.recurrent_states is state for module, state in states.items())
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, fresh)


# --- RWKV-4 ----------------------------------------------------------------------------------


def test_contract_of_rwkv() -> None:
    contract.holds(
        rwkv_mixer(), 7, lambda module, hidden, _: frozen(module, hidden.double(), half=False).exact
    )


def test_large_keys_do_not_overflow() -> None:
    mixer = rwkv_mixer()
    with torch.no_grad():
        mixer.key.weight.mul_(300)  # exponents of some hundreds, themselves rounded to 1e-5
    check(record_one(mixer, torch.randn(2, 20, 7)), 2e-4)


def test_rescaled_weights() -> None:
    """The first run rescales projections, once; rollouts do not depend on it."""
    plain = rwkv_model()
    traced, other = copy.deepcopy(plain), copy.deepcopy(plain)
    other.config.rescale_every = other.rwkv.config.rescale_every = 0
    ids = torch.randint(19, (2, 12))
    with torch.no_grad():
        wanted = plain(ids, use_cache=False).logits
    record(traced, ids)
    for (name, a), b in zip(plain.named_parameters(), traced.parameters(), strict=True):
        assert torch.equal(a, b), name
    with torch.no_grad():
        assert torch.equal(traced(ids, use_cache=False).logits, wanted)
    first, second = (
        ImplicitAttentionRollout(x).attribute(ids, query="last") for x in (plain, other)
    )
    assert relative_error(first, second) <= 1e-5
    for layer in record(traced.train(), ids):
        check(layer)


# --- MiniMax ---------------------------------------------------------------------------------


def minimax_formula(module: Any, hidden: Tensor, kwargs: Any) -> Tensor:
    hidden = hidden.detach().double()
    batch, tokens, _ = hidden.shape
    heads, per_head = module.num_attention_heads, module.head_dim
    keep = keep_of(kwargs.get("attention_mask"), hidden)[..., None, None]
    u = linear(module.qkv_proj, hidden).view(batch, tokens, heads, 3 * per_head)
    ratio = module.act_fn(u) / u
    q, k, v = (keep * ratio * u).split(per_head, -1)
    slope = module.slope_rate.double().flatten()
    core = torch.zeros(batch, heads, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i + 1):
            core[:, :, i, j] = (q[:, i] * k[:, j]).sum(-1) * torch.exp(-slope * (i - j))
    core = core.repeat_interleave(per_head, 1)
    mixed, norm = times(core, v), module.norm
    rms = (mixed.pow(2).flatten(2).mean(-1) + norm.variance_epsilon).sqrt()[..., None, None]
    gate = torch.sigmoid(linear(module.output_gate, hidden)).view_as(mixed)
    outer = gate * norm.weight.detach().double().view(heads, per_head) / rms
    inner = keep * ratio[..., -per_head:]
    return diagonal_matrices(outer, v.shape) @ core @ diagonal_matrices(inner, v.shape)


@pytest.mark.parametrize("act", ["gelu", "relu"])
def test_contract_of_minimax(act: str) -> None:
    mixer, rounded = minimax_mixer(hidden_act=act), {"bfloat16": "off by"}  # buffers of its decays
    contract.holds(mixer, 11, minimax_formula, rounded, tokens=20, position_embeddings=None)


def test_scale_of_the_branch() -> None:
    """The stream is alpha h + beta mixer(h), and the norm after it removes a common factor."""
    scales, ids = {"linear": (2.5, 0.5), "full": (3.0, 6.0)}, torch.randint(19, (2, 8))

    def make(factor: float) -> Any:
        return minimax_model(**{
            f"{kind}_attn_{name}_factor": factor * value
            for kind, pair in scales.items()
            for name, value in zip(("alpha", "beta"), pair, strict=True)
        })  # fmt: skip

    model, other = make(1.0), make(4.0)
    layers = record(model, ids)
    assert [x.linear.branch_scale for x in layers] == [0.2, 2.0, 0.2]
    row = torch.eye(8)[[7, 7]]
    for layer in layers[::-1]:
        added = torch.einsum("bi,bij->bj", row, layer.operator.dense())
        row = row + layer.linear.branch_scale * added
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        found = ImplicitAttentionRollout(each).attribute(ids, query="last")
        assert relative_error(found, row) <= 1e-4
    alone = record_one(
        minimax_mixer(linear_attn_beta_factor=0.5), torch.randn(1, 4, 11), None, None
    )
    assert alone.linear.branch_scale == 1


# --- LFM2 and LFM3 ---------------------------------------------------------------------------


def lfm_mixer(family: str = "lfm2", **options: Any) -> Any:
    own = make_config(family, hidden_size=5, num_attention_heads=1, **options)
    words = "".join(word.capitalize() for word in family.split("_"))
    return randomise(getattr(modeling(family), f"{words}ShortConv")(own, 0))


def lfm_formula(module: Any, hidden: Tensor, kwargs: Any) -> Tensor:
    hidden, mask = hidden.detach().double(), kwargs.get("attention_mask")
    keep = keep_of(mask, hidden)
    write, read, x = linear(module.in_proj, hidden * keep[..., None]).chunk(3, -1)
    shape = (*x.shape, 1)
    outer = diagonal_matrices(read[..., None], shape) @ causal_taps(module.conv, hidden.shape[1])
    real = diagonal_matrices(keep[..., None, None], shape)
    return outer @ real @ diagonal_matrices(write[..., None], shape)


@pytest.mark.parametrize("family", SHORT_CONVOLUTIONS)
@pytest.mark.parametrize(("kernel", "bias"), [(1, False), (3, True)])
def test_contract_of_short_convolutions(kernel: int, bias: bool, family: str) -> None:
    mixer = lfm_mixer(family, conv_L_cache=kernel, conv_bias=bias)
    contract.holds(mixer, 5, lfm_formula, {"left padding": "bias in a batch"} if bias else {})


@pytest.mark.parametrize("hidden_tokens", [slice(0, 4), slice(6, 9), slice(3, 5)])
def test_padding_of_a_short_convolution_with_biases(hidden_tokens: slice) -> None:
    """The model leaks padding through the convolution; it counts as bias."""
    mixer = lfm_mixer(conv_bias=True).double()
    hidden, mask = torch.randn(2, 9, 5).double(), torch.ones(2, 9, dtype=torch.long)
    mask[1, hidden_tokens] = 0
    layer = record_one(mixer, hidden, attention_mask=mask)
    check(layer, 1e-12)
    wanted = lfm_formula(mixer, hidden, {"attention_mask": mask})
    assert relative_error(layer.operator.dense(None), wanted) <= 1e-12
    assert not layer.operator.dense(None)[1][:, :, mask[1] == 0].any()
    assert {leaf.component for leaf in layer.operator.leaves()} == {"conv", "gate", None}


# --- xLSTM -----------------------------------------------------------------------------------


def xlstm_formula(module: Any, hidden: Tensor, _: Any) -> Tensor:
    """With each channel's own share of the centering."""
    hidden = hidden.detach().double()
    batch, tokens, _ = hidden.shape
    heads, cap = module.config.num_heads, module.config.gate_soft_cap
    if module.config.weight_mode == "fused":
        n, p = module.qk_dim, module.v_dim
        q, k, v, o = linear(module.qkv_opreact, hidden).split([n, n, p, p], -1)
        i_gate, f_gate = linear(module.ifgate_preact, hidden).split([heads, heads], -1)
    else:
        names = ("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact")
        q, k, v, o, i_gate, f_gate = (linear(getattr(module, name), hidden) for name in names)
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
    core = core.repeat_interleave(v.shape[-1], 1)
    h, norm = times(core, v), module.multihead_norm
    sigma = (h.var(-1, keepdim=True, correction=0) + norm.eps).sqrt()
    weight = norm.weight.detach().double().view(heads, -1)
    own_share = torch.sigmoid(o) * weight / sigma * (1 - 1 / v.shape[-1])
    return diagonal_matrices(own_share, v.shape) @ core


@pytest.mark.parametrize("options", [
    {"use_bias": False},
    {"weight_mode": "fused"},
    {"num_heads": 1, "chunk_size": 64},
    {"num_heads": 4, "v_dim_factor": 2.0},
    {"v_dim_factor": 0.5},
])  # fmt: skip
def test_contract_of_xlstm(options: dict[str, Any]) -> None:
    clauses = set(contract.CORE)
    if "chunk_size" not in options:
        clauses -= {"bfloat16"}  # which the model's chunks do not take
    contract.holds(xlstm_mixer(**options), 16, xlstm_formula, tokens=20, clauses=clauses)


def test_large_gates_do_not_overflow() -> None:
    """exp of the input gate alone would be infinite."""
    mixer = xlstm_mixer(gate_soft_cap=300.0)
    with torch.no_grad():
        mixer.igate_preact.weight.mul_(300)
    layer = record_one(mixer, torch.randn(2, 20, 16))
    assert torch.isfinite(layer.output).all()
    check(layer, 1e-4)
