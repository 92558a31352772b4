"""MesaNet of flash-linear-attention: the operator is the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import fla_checks
from helpers.fla_checks import EPS, Formula, convolved, rms_factors
from oracles import relative_error
from torch import Tensor
from zoo.fla_cpu import FLA

pytestmark = pytest.mark.slow

WIDTH = 24
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gate, bias": {"use_output_gate": True, "conv_bias": True, "conv_size": 3},
    "few iterations": {"max_cg_step_training": 2, "lambda_lower_bound": 0.5, "num_heads": 1},
}


def make(fla: FLA, case: str) -> Any:
    options = {"hidden_size": WIDTH, "num_heads": 3, "head_dim": 5, "norm_eps": EPS}
    return fla.layer("MesaNet", **options | CASES[case])


@torch.no_grad()
def formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    heads, tokens = layer.num_heads, hidden.shape[1]
    q, k = (
        _unit(convolved(getattr(layer, f"{n}_conv1d"), getattr(layer, f"{n}_proj")(hidden)), heads)
        for n in "qk"
    )
    beta, decay = torch.sigmoid(layer.b_proj(hidden)), torch.sigmoid(layer.a_proj(hidden))
    ridge = torch.log1p(torch.exp(layer.lambda_params)) + layer.lambda_lower_bound
    ridge = torch.diag_embed(ridge.view(heads, -1))
    core = torch.zeros(len(q), heads, tokens, tokens, dtype=torch.float64)
    gram = torch.zeros(len(q), heads, q.shape[-1], q.shape[-1], dtype=torch.float64)
    for t in range(tokens):
        written = beta[:, t, :, None] * k[:, t]
        gram = gram * decay[:, t, :, None, None] + written[..., None] * k[:, t, :, None]
        asked = _solved(gram + ridge, q[:, t], layer.max_cg_step_training)
        for j in range(t + 1):
            kept = decay[:, j + 1 : t + 1].prod(1) * beta[:, j]
            core[:, :, t, j] = kept * (asked * k[:, j]).sum(-1)
    values = layer.v_proj(hidden).unflatten(-1, (heads, -1))
    one = torch.ones_like(values)
    gate = F.silu(layer.g_proj(hidden)).view_as(values) if layer.use_output_gate else one
    conv, bias = torch.eye(tokens, dtype=torch.float64)[None, None], torch.zeros(heads, 1)
    factors = rms_factors(layer.o_norm.weight, layer.o_norm.eps, whole=False)
    return Formula(values, conv, bias, one, core, factors, gate, keep.double())


def _unit(x: Tensor, heads: int) -> Tensor:
    x = x.unflatten(-1, (heads, -1))
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def _solved(matrix: Tensor, q: Tensor, iterations: int) -> Tensor:
    """Conjugate gradients from 0, with the layer's own constants."""
    x, left, along = torch.zeros_like(q), q, q
    for _ in range(iterations):
        turned = torch.einsum("bhmn,bhn->bhm", matrix, along)
        before = left.pow(2).sum(-1, keepdim=True)
        step = before / ((along * turned).sum(-1, keepdim=True) + 1e-5)
        x, left = x + step * along, left - step * turned
        along = left + left.pow(2).sum(-1, keepdim=True) / (before + 1e-5) * along
    return x


@pytest.mark.parametrize("case", CASES)
def test_contract(fla: FLA, case: str) -> None:
    fla_checks.holds(make(fla, case), WIDTH, formula, compacted=True)


def test_queries_are_those_that_solve(fla: FLA) -> None:
    """After as many steps as there are states, up to the layer's constants."""
    layer = make(fla, "plain").double()
    hidden = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    recorded = fla_checks.record_one(layer, hidden)
    scan = next(leaf for leaf in recorded.operator.leaves() if "query" in leaf.tensors())
    named = scan.tensors()
    q = _unit(convolved(layer.q_conv1d, layer.q_proj(hidden)), layer.num_heads)
    ridge = F.softplus(layer.lambda_params).view(layer.num_heads, -1) + layer.lambda_lower_bound
    for t in range(6):
        kept = named["log_decay"][:, : t + 1].flip(1).cumsum(1).flip(1)
        kept = (kept - named["log_decay"][:, : t + 1]).exp() if t == 0 else torch.cat(
            [kept[:, 1:].exp(), torch.ones_like(kept[:, :1])], 1
        )  # fmt: skip
        weights = kept * named["scale"][:, : t + 1]
        keys = named["key"][:, : t + 1]
        gram = torch.einsum("bjh,bjhm,bjhn->bhmn", weights, keys, keys) + torch.diag_embed(ridge)
        wanted = torch.linalg.solve(gram, q[:, t])
        assert relative_error(named["query"][:, t], wanted) <= 1e-3
