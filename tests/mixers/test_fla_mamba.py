"""Mamba, Mamba-2, Mamba-3 and log-linear Mamba-2 of flash-linear-attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from helpers import contract, fla_checks
from helpers.contract import LEAKS, check, record_one
from helpers.fla_checks import EPS, GAP, conv_parts, convolved, rms_factors, side_mask
from oracles import COMPONENTS, Formula, mamba2_formula, mamba3_formula, relative_error
from torch import Tensor
from zoo import mamba3_cpu
from zoo.fla_cpu import FLA
from zoo.mamba import randomise

from captum_ssm import LatimALTI, LatimLogit
from captum_ssm.errors import InputError, UnsupportedMixerError

pytestmark = pytest.mark.slow

WIDTH = 16
SMALL: dict[str, dict[str, Any]] = {
    "Mamba": {"intermediate_size": 24, "state_size": 4},
    "Mamba2": {"head_dim": 8, "state_size": 4, "chunk_size": 4},
    "Mamba3": {"head_dim": 8, "state_size": 8},
}
BIASED = {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Mamba", {}),
    ("Mamba", BIASED),
    ("Mamba2", BIASED),
    ("Mamba2", {"n_groups": 4, "D_has_hdim": True, "norm_before_gate": True}),
    ("Mamba2", {"rmsnorm": False, "dt_limit": (0.1, 0.5)}),
    ("Mamba3", {"is_outproj_norm": True, "use_bias": True}),
    ("Mamba3", {"n_groups": 2, "rope_fraction": 1.0, "A_floor": 0.6}),
]


def make(fla: FLA, kind: str, **options: Any) -> Any:
    layer = fla.layer(kind, hidden_size=WIDTH, **SMALL[kind] | options)
    if kind == "Mamba3":
        return mamba3_cpu.randomised(layer)
    randomise(layer)
    if getattr(layer, "norm", None) is not None:
        layer.norm.eps = EPS
    return layer


@torch.no_grad()
def matrices(layer: Any, hidden: Tensor, kwargs: Any) -> Tensor:
    mask = kwargs.get("attention_mask")
    kind = type(layer).__name__
    if kind == "Mamba":
        return oracles.alpha(oracles.mamba1_parts(layer, hidden, mask), COMPONENTS)
    if kind == "Mamba2":
        norms = layer.n_groups if layer.rmsnorm else 0
        form = mamba2_formula.Form(
            layer.n_groups, 4, layer.dt_limit, norms, norm_first=layer.norm_before_gate
        )
        form.norm_eps = EPS
        parts = mamba2_formula.mamba2_parts(layer, hidden, form, mask)
        return oracles.alpha(parts, COMPONENTS)
    # the names of mamba_ssm
    layer.d_state, layer.d_inner = layer.ssm_state_size, layer.intermediate_size
    layer.num_bc_heads = layer.n_groups
    return mamba3_formula.matrices(layer, hidden, COMPONENTS)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_contract(fla: FLA, kind: str, options: dict[str, Any]) -> None:
    # padded tokens are cut out of what Mamba-3 reads, which its formula does not know
    clauses = ("float32", "float64", "bfloat16", "matrices", "batches", "lengths")
    contract.holds(make(fla, kind, **options), WIDTH, matrices, clauses=clauses, masked=False)


def test_padding_between_tokens(fla: FLA) -> None:
    hidden = torch.randn(1, 8, WIDTH)
    for kind in ("Mamba", "Mamba2"):
        check(record_one(make(fla, kind, **BIASED), hidden, attention_mask=GAP))
    with pytest.raises(InputError, match="trapezoidal rule would skip"):
        record_one(make(fla, "Mamba3"), hidden, attention_mask=GAP).verify()


def test_what_has_no_adapter_is_refused(fla: FLA) -> None:
    for kind, options, named in (
        ("Mamba2", {"n_groups": 2}, "n_groups=2"),
        ("Mamba3", {"is_mimo": True}, "is_mimo=True"),
    ):
        layer = fla.layer(kind, hidden_size=WIDTH, **SMALL[kind] | options)
        layer.forward = lambda hidden_states, **_: (hidden_states, None, None)
        with pytest.raises(UnsupportedMixerError, match=named):
            record_one(layer, torch.randn(1, 4, WIDTH)).verify()


@pytest.mark.parametrize("method", [LatimALTI, LatimLogit])
def test_padded_projections(fla: FLA, method: Any) -> None:
    """What reads their weight off finds the same, whichever example is padded."""
    model, ids = fla.model("Mamba3", norm_eps=EPS, use_bias=True), torch.randint(19, (2, 11))
    for layer in model.backbone.layers:
        torch.nn.init.normal_(layer.mixer.out_proj.bias)
    for lengths in ([11, 6], [6, 11]):
        together = method(model).attribute(ids, (-1, 3), side_mask(lengths, 11))
        for row, length in enumerate(lengths):
            alone = method(model).attribute(ids[row : row + 1, 11 - length :], (-1, 3))
            assert relative_error(together[row : row + 1, 11 - length :], alone) <= 1e-5


# --- log-linear Mamba-2 ----------------------------------------------------------------------


def make_log_linear(fla: FLA, **options: Any) -> Any:
    small = {"hidden_size": 12, "num_heads": 4, "head_dim": 6, "state_size": 3, "norm_eps": EPS}
    return fla.layer("LogLinearMamba2", **small | options)


GROUPS = {"n_groups": 2, "use_conv_bias": True, "norm_before_gate": True}


def log_linear(layer: Any, hidden: Tensor, keep: Tensor) -> Formula:
    heads, width, tokens = layer.num_heads, layer.intermediate_size, hidden.shape[1]
    real = keep.double()[..., None]
    z, stream, dt, level = layer.in_proj(hidden * real).split(
        [width, layer.conv_dim, heads, heads * layer.num_lambda_dims], -1
    )
    weight, bias = layer.conv1d.weight.detach(), layer.conv1d.bias
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
    gate = F.silu(z).view_as(values)

    def factors(o: Tensor) -> Tensor:
        if layer.norm is None:
            return torch.ones_like(o)
        entering = o if layer.norm_before_gate else o * gate
        groups = entering.flatten(2).unflatten(-1, (layer.n_groups, -1))
        norm = rms_factors(None, layer.norm.eps, whole=False)(groups)
        return (norm.flatten(2) * layer.norm.weight).view_as(o)

    found = conv_parts(own, values, keep=keep.double())
    skip = layer.D.detach()
    return Formula(values, core, keep, norm=factors, gate=gate, skip=skip, **found)


@pytest.mark.parametrize("options", [GROUPS, {"rmsnorm": False, "use_bias": False}])
def test_contract_of_log_linear(fla: FLA, options: dict[str, Any]) -> None:
    layer = make_log_linear(fla, **options)
    fla_checks.holds(layer, 12, log_linear, compacted=False, refuses=LEAKS)


def test_skips_of_channels(fla: FLA) -> None:
    clauses = ("float32", "float64", "batches", "lengths")
    contract.holds(make_log_linear(fla, **GROUPS, D_has_hdim=True), 12, clauses=clauses)
