"""Jamba and Zamba: their Mamba-1 mixers, and the whole hybrids."""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.contract import CORE, LEAKS
from helpers.versions import VERSION_4
from oracles import conv_matrices, diagonal_matrices, scan_matrices
from torch import Tensor
from zoo.attention import attention_model

from captum_ssm import trace
from captum_ssm.attr.engine.fold import stages
from captum_ssm.errors import CachedStateError
from captum_ssm.testing.adapters import check_adapter
from captum_ssm.tracing import Layer

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")

FAMILIES = ["jamba", "zamba"]
#: An epsilon that keeps the norms of two features well conditioned.
NORMS = {"rms_norm_eps": 0.05}


def hybrid(family: str, attention: str = "sdpa", **options: Any) -> Any:
    return attention_model(family, attention, **NORMS | options)


def record(model: Any, *args: Any, **kwargs: Any) -> list[Layer]:
    with torch.no_grad(), trace(model, operators=False) as t:
        model(*args, **kwargs)
    return t.layers


def is_mamba(layer: Layer) -> bool:
    return "Mamba" in type(layer.mixer.module).__name__


@dataclass
class Parts:
    exact: Tensor  # (B, D, L, L)
    unified: Tensor  # the same without the skip
    output: Tensor  # (B, L, E)


def mixer_parts(mixer: Any, hidden: Tensor, mask: Tensor | None = None) -> Parts:
    """The mixer's matrices and output from its parameters, in float64, head by head."""
    mixer = copy.deepcopy(mixer).double()
    hidden = hidden.double()
    batch, tokens, _ = hidden.shape
    keep = torch.ones(batch, tokens, 1) if mask is None else mask[:, :, None]
    keep = keep.double()
    of_version_4 = hasattr(mixer, "slow_forward")  # there the mask silences x, not what enters
    projected = mixer.in_proj(hidden if of_version_4 else hidden * keep)
    if type(mixer).__name__ == "ZambaMambaMixer":
        x, z = projected[..., 0::2], projected[..., 1::2]
        heads = [
            (mixer.x_proj_weight[g], mixer.dt_proj_weight[g], mixer.dt_proj_bias[g])
            for g in range(mixer.n_mamba_heads)
        ]
    else:
        x, z = projected.chunk(2, -1)
        heads = [(mixer.x_proj.weight, mixer.dt_proj.weight, mixer.dt_proj.bias)]
    x = x * keep if of_version_4 else x
    channels = x.shape[-1]
    shape = (batch, tokens, channels, 1)
    taps = mixer.conv1d.weight[:, 0]
    width = taps.shape[1]
    conv = conv_matrices(taps[:, None], [width - 1 - k for k in range(width)], (1, *shape[1:]))
    u = torch.einsum("xdij,bjd->bid", conv, x)
    if mixer.conv1d.bias is not None:
        u = u + mixer.conv1d.bias
    ratio = torch.sigmoid(u)
    v = keep * ratio * u
    per_head = channels // len(heads)
    log_rates = mixer.A_log.reshape(channels, -1)
    scans = []
    for g, (select, widen, bias) in enumerate(heads):
        mine = slice(g * per_head, (g + 1) * per_head)
        rank, state = mixer.time_step_rank, mixer.ssm_state_size
        t, b, c = F.linear(v[..., mine], select).split([rank, state, state], -1)
        if hasattr(mixer, "dt_layernorm"):
            t, b, c = (
                s / (s.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight
                for s, norm in (
                    (t, mixer.dt_layernorm),
                    (b, mixer.b_layernorm),
                    (c, mixer.c_layernorm),
                )
            )
        dt = torch.log1p(torch.exp(F.linear(t, widen, bias)))
        scans.append(scan_matrices(dt, -log_rates[mine].exp(), b, c))
    scan = torch.cat(scans, 1)
    skip = diagonal_matrices(mixer.D.reshape(1, 1, -1, 1), shape)
    gate = diagonal_matrices((z * torch.sigmoid(z))[..., None], shape)
    silenced = diagonal_matrices(keep[..., None], shape)
    before = silenced @ diagonal_matrices(ratio[..., None], shape) @ conv @ silenced
    y = torch.einsum("bdij,bjd->bid", gate @ (scan + skip), v)
    return Parts(gate @ (scan + skip) @ before, gate @ scan @ before, mixer.out_proj(y))


# --- the mixers ------------------------------------------------------------------------------


def cache_of(family: str, model: Any) -> Any:
    """An empty cache; in version 4 every model has a class of its own."""
    if VERSION_4:
        code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        names = {"jamba": "HybridMambaAttentionDynamicCache", "zamba": "ZambaHybridDynamicCache"}
        return getattr(code, names[family])(model.config, 1, torch.float32)
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_are_refused(family: str) -> None:
    model = hybrid(family)
    layers = record(model, torch.randint(1, 23, (1, 5)), past_key_values=cache_of(family, model))
    for layer in layers:
        with pytest.raises(CachedStateError):
            _ = layer.operator


def test_zamba_layers_that_share_their_weights_stay_apart() -> None:
    """The shared transformer: tensors of several modules; in version 4 one, called repeatedly."""
    model = hybrid("zamba")
    first, second = (x for x in record(model, torch.randint(1, 23, (1, 6))) if not is_mamba(x))
    assert (first.mixer.module is second.mixer.module) == VERSION_4
    assert (
        first.mixer.module.q_proj.weight.data_ptr() == second.mixer.module.q_proj.weight.data_ptr()
    )
    assert not torch.equal(first.operator.dense("heads"), second.operator.dense("heads"))


# --- whole hybrids ---------------------------------------------------------------------------


def test_stages() -> None:
    ids = torch.randint(1, 23, (1, 6))
    zamba = stages(record(hybrid("zamba"), ids))
    assert [[is_mamba(layer) for layer in stage] for stage in zamba] == [
        [True],
        [False, True],
        [True],
        [False, True],
        [True],
    ]
    assert all(stage[0].joins == "feeds" for stage in zamba if len(stage) == 2)
    jamba = stages(record(hybrid("jamba"), ids))
    assert [[is_mamba(layer) for layer in stage] for stage in jamba] == [
        [True],
        [False],
        [True],
        [False],
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mamba_proj_bias": True},
        {"mamba_conv_bias": False},
        {"mamba_d_conv": 2, "mamba_d_state": 1},
        {"mamba_d_state": 16, "mamba_expand": 3, "mamba_dt_rank": 5},
        {"n_mamba_heads": 1},
        {"n_mamba_heads": 4, "mamba_proj_bias": True},
    ],
)
def test_contract(family: str, options: dict[str, Any]) -> None:
    if family == "jamba" and "n_mamba_heads" in options:
        options = {"mamba_dt_rank": 3 * options["n_mamba_heads"]}

    def formula(module: Any, hidden: Tensor, kwargs: Any) -> dict[str, Tensor] | None:
        if "Mamba" not in type(module).__name__:
            return None
        parts = mixer_parts(module, hidden, kwargs.get("attention_mask"))
        return {"exact": parts.exact, "unified": parts.unified}

    model = hybrid(family, **options)
    ids, leaks = torch.randint(1, 23, (2, 9)), LEAKS if "mamba_proj_bias" in options else {}
    check_adapter(lambda: model, ids, formula, leaks, CORE)
