"""GatedDeltaProduct and Comba of flash-linear-attention: the operator is the layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import fla_checks
from helpers.fla_checks import EPS, Formula, conv_parts, convolved, rms_factors
from oracles import token_loops
from torch import Tensor
from zoo.fla_cpu import FLA

pytestmark = pytest.mark.slow

WIDTH = 24
PRODUCT: dict[str, dict[str, Any]] = {
    "plain": {},
    "three steps": {"num_householder": 3, "num_v_heads": 4, "conv_bias": True, "head_dim": 4},
    "one step": {"num_householder": 1, "use_output_gate": False, "use_forget_gate": False},
    "no conv": {"use_short_conv": False, "allow_neg_eigval": False},
}
COMBA: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_v_heads": 4, "conv_bias": True, "use_output_gate": False},
    "no correction": {"use_output_correction": False, "use_inner_decay": False},
    "no conv": {"use_short_conv": False},
}
CASES = [
    *(("GatedDeltaProduct", case) for case in PRODUCT),
    *(("Comba", case) for case in COMBA),
]


def make(fla: FLA, family: str, case: str) -> Any:
    own = {"GatedDeltaProduct": PRODUCT, "Comba": COMBA}[family][case]
    options = {"hidden_size": WIDTH, "num_heads": 2, "head_dim": 5, "expand_v": 2, "norm_eps": EPS}
    return fla.layer(family, **options | own)


@torch.no_grad()
def formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    steps, heads = getattr(layer, "num_householder", 1), layer.num_v_heads
    values = layer.v_proj(hidden).unflatten(-1, (steps * heads, -1))
    conv, bias = conv_parts(
        getattr(layer, "v_conv1d", None), steps * heads, values.shape[-1], hidden.shape[1]
    )
    ratio = torch.sigmoid(fla_checks.oracles.times(conv, values) + bias)
    core = _product(layer, hidden) if hasattr(layer, "num_householder") else _comba(layer, hidden)

    def factors(o: Tensor) -> Tensor:
        """Of the sum over steps, for each of them."""
        whole = o.unflatten(2, (steps, heads)).sum(2)
        norm = rms_factors(layer.o_norm.weight, layer.o_norm.eps, whole=False)
        return torch.cat([norm(whole)] * steps, 2)

    gate = torch.ones_like(values)
    if layer.use_output_gate:
        g = layer.g_proj(hidden).unflatten(-1, (heads, -1))
        act = F.silu if hasattr(layer, "num_householder") else torch.sigmoid
        gate = torch.cat([act(g)] * steps, 2)
    return Formula(values, conv, bias, ratio, core, factors, gate, keep.double())


def _product(layer: Any, hidden: Tensor) -> Tensor:
    steps, heads = layer.num_householder, layer.num_v_heads
    q, k = (_key(layer, name, hidden) for name in "qk")
    each = heads // layer.num_heads
    beta = torch.sigmoid(layer.b_proj(hidden)) * (2 if layer.allow_neg_eigval else 1)
    of_step = [slice(m * layer.num_heads, (m + 1) * layer.num_heads) for m in range(steps)]
    keys = torch.stack([k[:, :, one].repeat_interleave(each, 2) for one in of_step], 2)
    log_decay = _log_decay(layer, hidden) if layer.use_forget_gate else None
    operator = SimpleNamespace(
        query=torch.cat([q.repeat_interleave(each, 2)] * steps, 2) / q.shape[-1] ** 0.5,
        key=torch.cat([keys] * steps, 3),
        beta=torch.cat([beta.unflatten(-1, (steps, heads))] * steps, 3),
        log_decay=None if log_decay is None else torch.cat([log_decay] * steps, 2),
        writes=[m for m in range(steps) for _ in range(heads)],
        shape=(*hidden.shape[:2], steps * heads, 1),
    )
    return token_loops.matrices(token_loops.delta_product, operator)


def _comba(layer: Any, hidden: Tensor) -> Tensor:
    q, k = (_raw_key(layer, name, hidden) for name in "qk")
    p = k * torch.sigmoid(layer.decay)[:, None] if layer.use_inner_decay else k
    q = q - layer.D[:, None] * p if layer.use_output_correction else q
    each = layer.num_v_heads // layer.num_heads
    q, k, p = (_unit(x).repeat_interleave(each, 2) for x in (q, k, p))
    beta, decay = torch.sigmoid(layer.b_proj(hidden)), _log_decay(layer, hidden).exp()
    batch, tokens, heads, state = q.shape
    out = torch.zeros(batch, heads, tokens, tokens, dtype=torch.float64)
    for j in range(tokens):  # what is written at j, and who reads how much of it
        held = torch.zeros(batch, heads, state, dtype=torch.float64)
        for t in range(j, tokens):
            missing = float(t == j) - (p[:, t] * held).sum(-1)
            held = held * decay[:, t, :, None]
            held = held + beta[:, t, :, None] * k[:, t] * missing[..., None]
            out[:, :, t, j] = (q[:, t] * held).sum(-1) / state**0.5
    return out


def _raw_key(layer: Any, name: str, hidden: Tensor) -> Tensor:
    conv = getattr(layer, f"{name}_conv1d", None)
    x = convolved(conv, getattr(layer, f"{name}_proj")(hidden))
    return (F.silu(x) if conv is None else x).unflatten(-1, (-1, layer.head_k_dim))


def _key(layer: Any, name: str, hidden: Tensor) -> Tensor:
    return _unit(_raw_key(layer, name, hidden))


def _unit(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def _log_decay(layer: Any, hidden: Tensor) -> Tensor:
    return -layer.A_log.exp() * torch.log1p(torch.exp(layer.a_proj(hidden) + layer.dt_bias))


@pytest.mark.parametrize(("family", "case"), CASES)
def test_contract(fla: FLA, family: str, case: str) -> None:
    layer = make(fla, family, case)
    steps = getattr(layer, "num_householder", 1)
    fla_checks.holds(
        layer,
        WIDTH,
        formula,
        compacted=True,
        before_projection=lambda y: y.unflatten(2, (steps, -1)).sum(2),
    )
