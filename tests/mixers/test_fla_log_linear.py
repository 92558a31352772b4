"""Log-linear Mamba-2 of flash-linear-attention: the operator is the layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import contract, fla_checks
from helpers.contract import LEAKS
from helpers.fla_checks import EPS, Formula, conv_parts, convolved, rms_factors
from torch import Tensor
from zoo.fla_cpu import FLA

pytestmark = pytest.mark.slow

WIDTH = 12
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"n_groups": 2, "use_conv_bias": True, "norm_before_gate": True},
    "no norm": {"rmsnorm": False, "use_bias": False},
}


def make(fla: FLA, case: str, **options: Any) -> Any:
    small = {"hidden_size": WIDTH, "num_heads": 4, "head_dim": 6, "state_size": 3, "norm_eps": EPS}
    return fla.layer("LogLinearMamba2", **small | CASES[case] | options)


@torch.no_grad()
def formula(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    heads, width, tokens = layer.num_heads, layer.intermediate_size, hidden.shape[1]
    real = keep.double()[..., None]
    z, stream, dt, level = layer.in_proj(hidden * real).split(
        [width, layer.conv_dim, heads, heads * layer.num_lambda_dims], -1
    )
    weight = layer.conv1d.weight.detach()
    bias = layer.conv1d.bias
    whole = SimpleNamespace(weight=weight, bias=bias, activation="silu")
    activated = convolved(whole, stream * real) * real
    _, key, query = activated.split([width, *[(layer.conv_dim - width) // 2] * 2], -1)
    key, query = (
        x.unflatten(-1, (layer.n_groups, -1)).repeat_interleave(heads // layer.n_groups, 2)
        for x in (key, query)
    )
    dt = torch.log1p(torch.exp(dt + layer.dt_bias))
    log_decay = -layer.A_log.exp() * dt
    scales = torch.log1p(torch.exp(layer.L * level.unflatten(-1, (heads, -1))))  # (B, L, H, levels)
    core = torch.zeros(len(hidden), heads, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i + 1):
            apart = len(f"{i ^ j:b}".lstrip("0"))
            read = (query[:, i] * key[:, j]).sum(-1) * log_decay[:, j + 1 : i + 1].sum(1).exp()
            core[:, :, i, j] = scales[:, i, :, apart] * read * dt[:, j]
    values = stream[..., :width].unflatten(-1, (heads, -1))
    own = SimpleNamespace(weight=weight[:width], bias=None if bias is None else bias[:width])
    conv, bias = conv_parts(own, heads, values.shape[-1], tokens)
    ratio = torch.sigmoid(fla_checks.oracles.times(conv, values * real[..., None]) + bias)
    gate = F.silu(z).view_as(values)

    def factors(o: Tensor) -> Tensor:
        if layer.norm is None:
            return torch.ones_like(o)
        entering = o if layer.norm_before_gate else o * gate
        groups = entering.flatten(2).unflatten(-1, (layer.n_groups, -1))
        norm = rms_factors(None, layer.norm.eps, whole=False)(groups)
        return (norm.flatten(2) * layer.norm.weight).view_as(o)

    return Formula(
        values, conv, bias, ratio, core, factors, gate, keep.double(), skip=layer.D.detach()
    )


def test_skips_of_channels(fla: FLA) -> None:
    clauses = ("float32", "float64", "batches", "lengths")
    contract.holds(make(fla, "groups", D_has_hdim=True), WIDTH, clauses=clauses)


@pytest.mark.parametrize("case", CASES)
def test_contract(fla: FLA, case: str) -> None:
    fla_checks.holds(make(fla, case), WIDTH, formula, compacted=False, refuses=LEAKS)
