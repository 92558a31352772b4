"""Attention of flash-linear-attention whose scores are its own: forgetting ones and PaTH."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import fla_checks
from helpers.fla_checks import Formula, convolved, record_one
from oracles import relative_error
from torch import Tensor
from zoo.fla_cpu import FLA

from captum_ssm.attr.call.components import parse_components

pytestmark = pytest.mark.slow

WIDTH = 24
FORGETTING: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "qkv_bias": True, "qk_norm": True},
    "gate": {"use_output_gate": True, "window_size": 3, "num_heads": 2},
}
PATH: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "use_forget_gate": True, "use_low_rank_w": False},
    "norms": {"use_qk_norm": True, "conv_bias": True, "num_heads": 2},
    "no conv": {"use_w_shortconv": False},
}


def forgetting(fla: FLA, case: str) -> Any:
    options = {"hidden_size": WIDTH, "num_heads": 4}
    return fla.layer("ForgettingAttention", **options | FORGETTING[case])


def path(fla: FLA, case: str) -> Any:
    return fla.layer("PaTHAttention", **{"hidden_size": WIDTH, "num_heads": 4} | PATH[case])


@torch.no_grad()
def forgetting_formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    q, k, v = (
        getattr(layer, f"{n}_proj")(hidden).unflatten(-1, (-1, layer.head_dim)) for n in "qkv"
    )
    if layer.qk_norm:
        q, k = _rms(q, layer.q_norm), _rms(k, layer.k_norm)
    k, v = (x.repeat_interleave(layer.num_kv_groups, 2) for x in (k, v))
    forget = -torch.log1p(torch.exp(-layer.f_proj(hidden)))
    tokens = hidden.shape[1]
    scores = torch.full((len(q), layer.num_heads, tokens, tokens), -torch.inf).double()
    for i in range(tokens):
        for j in range(i + 1):
            product = (q[:, i] * k[:, j]).sum(-1) / layer.head_dim**0.5
            scores[:, :, i, j] = product + forget[:, j + 1 : i + 1].sum(1)
    gate = torch.ones_like(v)
    if layer.use_output_gate:
        gate = torch.sigmoid(layer.g_proj(hidden)).view_as(v)
    return _formula(v, scores, gate, keep)


@torch.no_grad()
def path_formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    q, k, v = (
        getattr(layer, f"{n}_proj")(hidden).unflatten(-1, (-1, layer.head_dim)) for n in "qkv"
    )
    if hasattr(layer.maybe_q_norm, "weight"):
        q, k = _rms(q, layer.maybe_q_norm), _rms(k, layer.maybe_k_norm)
    w = convolved(getattr(layer, "w_conv1d", None), layer.w_proj(hidden))
    w = w.unflatten(-1, (-1, layer.head_dim))
    w = w / (w.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    beta = 2 * torch.sigmoid(layer.bt_proj(hidden))
    groups = layer.num_heads // layer.num_kv_heads
    k, v, w, beta = (x.repeat_interleave(groups, 2) for x in (k, v, w, beta))
    forget = torch.zeros_like(beta)
    if layer.use_forget_gate:
        forget = -torch.log1p(torch.exp(-layer.g_proj(hidden)))
    tokens = hidden.shape[1]
    scores = torch.full((len(q), layer.num_heads, tokens, tokens), -torch.inf).double()
    for j in range(tokens):
        key = k[:, j]  # reflected by every token on its way
        for i in range(j, tokens):
            if i > j:
                found = beta[:, i] * (w[:, i] * key).sum(-1)
                key = key - found[..., None] * w[:, i]
            asked = (q[:, i] * key).sum(-1) + forget[:, j + 1 : i + 1].sum(1)
            scores[:, :, i, j] = asked / layer.head_dim**0.5
    return _formula(v, scores, torch.ones_like(v), keep)


def _formula(values: Tensor, scores: Tensor, gate: Tensor, keep: Tensor) -> Formula:
    heads, tokens = values.shape[2], values.shape[1]
    conv, bias = torch.eye(tokens, dtype=torch.float64)[None, None], torch.zeros(heads, 1)
    one = torch.ones_like(values)
    return Formula(
        values, conv, bias, one, scores.softmax(-1), torch.ones_like, gate, keep.double()
    )


def _rms(x: Tensor, norm: Any) -> Tensor:
    x = x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    return x * norm.weight.view(-1, x.shape[-1])


@pytest.mark.parametrize("case", FORGETTING)
def test_forgetting_matrices(fla: FLA, case: str) -> None:
    fla_checks.holds(forgetting(fla, case), WIDTH, forgetting_formula, compacted=True)


@pytest.mark.parametrize("case", PATH)
def test_path_matrices(fla: FLA, case: str) -> None:
    layer, hidden = path(fla, case).double(), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    linear = record_one(layer, hidden).linear
    wanted = path_formula(layer, hidden, torch.ones(2, 9))
    output = layer.o_proj(wanted.before_projection().flatten(2))
    assert relative_error(linear.output(), output) <= 1e-11
    for components in ("s6", "exact"):
        operator = linear.restrict(parse_components(components)).operator
        assert relative_error(operator.dense(None), wanted.alpha(components)) <= 1e-11
