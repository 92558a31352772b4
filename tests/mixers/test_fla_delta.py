"""The delta rule layers of flash-linear-attention: the operator is the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import fla_checks
from helpers.fla_checks import (
    EPS,
    Formula,
    conv_parts,
    convolved,
    decayed_scores,
    rms_factors,
)
from torch import Tensor
from zoo.fla_cpu import FLA

pytestmark = pytest.mark.slow

WIDTH = 24
DELTA: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias and gate": {"conv_bias": True, "use_gate": True, "conv_size": 3, "expand_v": 2.0},
    "elu, sum": {"qk_activation": "elu", "qk_norm": "sum", "expand_k": 2.0},
    "relu": {"qk_activation": "relu", "use_beta": False, "num_heads": 2},
    "no conv": {"use_short_conv": False, "allow_neg_eigval": True},
    "identity": {"use_short_conv": False, "qk_activation": "identity"},
}
GATED: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_v_heads": 6, "conv_bias": True, "output_gate_activation": "sigmoid"},
    "no gate": {"use_gate": False, "conv_size": 3, "num_heads": 1},
    "no conv": {"use_short_conv": False, "allow_neg_eigval": True, "expand_v": 1.0},
}
KDA: dict[str, dict[str, Any]] = {
    "plain": {},
    "bounded": {"safe_gate": True, "lower_bound": -3.0, "conv_bias": True, "conv_size": 3},
    "grouped": {"num_v_heads": 6, "expand_v": 0.5},
    "no conv": {"use_short_conv": False, "allow_neg_eigval": True},
}
_BOUNDED = ("KimiDeltaAttention", "bounded")
CASES = [
    *(("DeltaNet", case) for case in DELTA),
    *(("GatedDeltaNet", case) for case in GATED),
    *[("KimiDeltaAttention", case) for case in KDA],
]


def make(fla: FLA, family: str, case: str) -> Any:
    options = {"hidden_size": WIDTH, "norm_eps": EPS}
    if family == "DeltaNet":
        return fla.layer(family, **options | {"num_heads": 4} | DELTA[case])
    cases = GATED if family == "GatedDeltaNet" else KDA
    return fla.layer(family, **options | {"num_heads": 3, "head_dim": 6} | cases[case])


@torch.no_grad()
def formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    gated = hasattr(layer, "A_log")
    tokens, heads = hidden.shape[1], layer.num_v_heads if gated else layer.num_heads
    q, k = (_key(layer, n, hidden) for n in "qk")
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    beta = torch.ones(q.shape[:3], dtype=torch.float64)
    if getattr(layer, "use_beta", True):
        beta = torch.sigmoid(layer.b_proj(hidden))
    beta = beta * (2 if layer.allow_neg_eigval else 1)
    log_decay = torch.zeros_like(beta)[..., None]
    if gated:
        project = layer.f_proj if hasattr(layer, "f_proj") else layer.a_proj
        a, rate = project(hidden) + layer.dt_bias, layer.A_log.exp()[:, None]
        a = a.unflatten(-1, (heads, -1))
        log_decay = -rate * torch.log1p(torch.exp(a))
        if getattr(layer, "lower_bound", None) is not None:
            log_decay = layer.lower_bound / (1 + torch.exp(-rate * a))
    values = layer.v_proj(hidden).unflatten(-1, (heads, -1))
    v_conv = getattr(layer, "v_conv1d", None)
    conv, bias = conv_parts(v_conv, heads, values.shape[-1], tokens)
    ratio = torch.sigmoid(fla_checks.oracles.times(conv, values) + bias)
    gate = torch.ones_like(values)
    if getattr(layer, "use_gate", True):
        g = layer.g_proj(hidden)
        sigmoid = layer.o_norm.activation == "sigmoid"
        gate = (torch.sigmoid(g) if sigmoid else F.silu(g)).view_as(values)
    factors = rms_factors(layer.o_norm.weight, layer.o_norm.eps, whole=False)
    core = _core(q / q.shape[-1] ** 0.5, k, beta, log_decay)
    return Formula(values, conv, bias, ratio, core, factors, gate, keep.double())


def _key(layer: Any, name: str, hidden: Tensor) -> Tensor:
    conv = getattr(layer, f"{name}_conv1d", None)
    x = convolved(conv, getattr(layer, f"{name}_proj")(hidden))
    kind = getattr(layer, "qk_activation", "silu")
    if kind == "silu" and conv is None:
        x = F.silu(x)
    elif kind == "relu":
        x = x.clamp_min(0)
    elif kind == "elu":
        x = torch.where(x > 0, x + 1, x.exp())
    x = x.unflatten(-1, (layer.num_heads, -1))
    if getattr(layer, "qk_norm", "l2") == "sum":
        return x / x.abs().sum(-1, keepdim=True).clamp_min(1e-6)
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def _core(q: Tensor, k: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """(Q K^T . E) (I + tril(beta K K^T . E, -1))^-1 diag(beta), E the products of decays."""
    beta = beta.transpose(1, 2)
    inner = torch.tril(beta[..., None] * decayed_scores(k, k, log_decay), -1)
    eye = torch.eye(q.shape[1], dtype=torch.float64)
    read = decayed_scores(q, k, log_decay)
    return read @ torch.linalg.inv(eye + inner) @ torch.diag_embed(beta)


@pytest.mark.parametrize(("family", "case"), CASES)
def test_contract(fla: FLA, family: str, case: str) -> None:
    fla_checks.holds(make(fla, family, case), WIDTH, formula, compacted=True)
