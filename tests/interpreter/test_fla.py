"""flash-linear-attention's own kernels: operators are what they return, and models are explained.

Up to 64 tokens its layers take one token after the other, beyond that chunks of 64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import fla_checks, interpreted
from helpers.every_method import METHODS, named
from helpers.marks import slow_but
from oracles import relative_error
from torch import nn
from zoo import fla_cpu, fla_references
from zoo.fla_cpu import FLA

from captum_ssm import LatimFlow
from captum_ssm.mixers import table
from captum_ssm.tracing import find_mixers

#: Small models, with heads of sizes that are no powers of two wherever their kernels take these.
FAMILIES: dict[str, dict[str, Any]] = {
    "RetNet": {"hidden_size": 24},
    "HGRN": {"hidden_size": 18},
    "HGRN2": {"hidden_size": 12},
    "GLA": {"hidden_size": 20},
    "RWKV6": {"hidden_size": 20},
    "RWKV7": {"num_hidden_layers": 2},  # the second reads values of the first
    "DeltaNet": {"hidden_size": 18},
    "GatedDeltaNet": {"hidden_size": 18, "head_dim": 5},
    "KDA": {"hidden_size": 18, "head_dim": 5, "num_heads": 1},
    "Mamba": {"hidden_size": 18},
    "Mamba2": {"hidden_size": 24},
    "LinearAttention": {"hidden_size": 18},
    "LightNet": {"hidden_size": 16},
    "GSA": {"hidden_size": 18},
    "GatedDeltaProduct": {"hidden_size": 18},
    "Comba": {"hidden_size": 18},
    "MesaNet": {"hidden_size": 18},
    "PaTHAttention": {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1},
    "ForgettingTransformer": {"hidden_size": 24},
}
#: Layers whose kernels do not run here, and why.
NOT_INTERPRETED = {
    "Attention": "flash-attn is written in CUDA",
    "LogLinearMamba2": "the layer asks for a CUDA device",
    "Mamba3": "the layer asks for a CUDA device; its kernel is mamba_ssm's, see test_mamba3.py",
}
#: Layers that no model has.
ALONE: dict[str, dict[str, Any]] = {
    "SimpleGatedLinearAttention": {"num_heads": 2},
    "BasedLinearAttention": {"num_heads": 2, "num_key_value_heads": 2, "feature_dim": 3},
}
#: How much kernels round by themselves.
ROUNDED = {"MesaNet": (5e-3, "its kernels hold queries and keys in float16")}
#: The same in chunks.
ROUNDED_IN_CHUNKS = {
    "RWKV6": (5e-5, "decays are exponentials of differences of long sums"),
    "RWKV7": (2e-3, "exponentials that grow over half a chunk are multiplied"),
}
#: The same of models in bfloat16 beside their float32 copies.
ROUNDED_IN_HALF = {"RetNet": (5e-3, "the angles that it turns by are kept in the model's format")}
#: Families whose chunks refuse float32.
HALF_IN_CHUNKS = ("DeltaNet", "GatedDeltaProduct")
#: Families that call GLA's kernels.
LIKE_GLA = {"GSA", "LightNet"}


def made(fla: FLA, family: str, dtype: torch.dtype) -> nn.Module:
    small = {"num_hidden_layers": 1, "norm_eps": fla_checks.EPS}
    own = fla_references.MODELS.get(family, {})
    return fla.model(family, **small | own | FAMILIES[family]).to(dtype)


def bound(family: str, dtype: torch.dtype, chunks: bool = False) -> float:
    known = {
        **ROUNDED,
        **(ROUNDED_IN_CHUNKS if chunks else {}),
        **(ROUNDED_IN_HALF if dtype == torch.bfloat16 else {}),
    }
    return known.get(family, (interpreted.FLOAT32, ""))[0]


@pytest.mark.parametrize("dtype", slow_but([torch.float32], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("family", FAMILIES)
def test_single_steps(fla: FLA, family: str, dtype: torch.dtype) -> None:
    model = made(fla, family, dtype)
    interpreted.check(model, torch.randint(19, (2, 13)), bound=bound(family, dtype))


@pytest.mark.parametrize("family", slow_but(set(FAMILIES) - LIKE_GLA, FAMILIES))
def test_chunks(fla: FLA, family: str) -> None:
    only_half = family in HALF_IN_CHUNKS
    dtype = torch.bfloat16 if only_half else torch.float32
    model, ids = made(fla, family, dtype), torch.randint(19, (2, 70))
    interpreted.check(model, ids, bound=bound(family, dtype, chunks=True), twins=not only_half)


@pytest.mark.parametrize("tokens", [13, 70])
@pytest.mark.parametrize("name", ALONE)
def test_layers_alone(fla: FLA, name: str, tokens: int) -> None:
    layer = fla.layer(name, hidden_size=18, **ALONE[name])
    interpreted.check(layer, torch.randn(2, tokens, 18))


@pytest.mark.parametrize(
    "family",
    # PaTHAttention asks for a cache
    slow_but(set(FAMILIES) - LIKE_GLA, sorted(set(FAMILIES) - {"PaTHAttention"})),
)
def test_packed_sequences(fla: FLA, family: str) -> None:
    """As layers make them of a padded batch."""
    dtype = torch.float32
    model, mask = made(fla, family, dtype), fla_checks.side_mask([11, 6], 11)
    ids = torch.randint(19, (2, 11))
    layers = interpreted.check(model, ids, attention_mask=mask, bound=bound(family, dtype))
    assert all(torch.equal(layer.linear.mask, mask.bool()) for layer in layers)


@named(METHODS, (LatimFlow,))
@pytest.mark.parametrize(
    "family", ["GLA", "RetNet", "HGRN2", "RWKV6", "RWKV7", "DeltaNet", "GatedDeltaNet", "Mamba2"]
)
def test_every_method(fla: FLA, family: str, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels as by fla's references."""
    model = fla.model(family, **FAMILIES[family] | {"norm_eps": fla_checks.EPS})
    ids, mask = torch.randint(19, (2, 9)), fla_checks.side_mask([9, 5], 9)
    asked: dict[str, Any] = {"target": (-1, 3), "additional_forward_args": mask}
    found = method(model).attribute(ids, **asked)
    fla_cpu.install(monkeypatch)
    assert relative_error(found, method(model).attribute(ids, **asked)) <= 1e-4


#: Families by the signature of their kernels, with the rules that read them.
READ = {
    **dict.fromkeys(("RetNet", "GLA", "LinearAttention", "HGRN2"), ("frozen", "centered")),
    **dict.fromkeys(("RWKV6", "RWKV7"), ("frozen", "centered")),
    **dict.fromkeys(("GatedDeltaNet", "KDA", "Comba"), ("frozen", "centered")),
    "ForgettingTransformer": ("frozen", "centered"),
    **dict.fromkeys(("HGRN", "LightNet", "GSA"), ("frozen",)),
}


@pytest.mark.parametrize(
    "case",
    slow_but(
        ("GLA centered", "KDA frozen", "HGRN frozen"),
        [f"{family} {rule}" for family, rules in READ.items() for rule in rules],
    ),
)
def test_kernels_are_read_as_operators_are(
    fla: FLA, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, at the nodes of the rule."""
    family, rule = case.split()
    model = made(fla, family, torch.float32)
    limit = bound(family, torch.float32, chunks=True)
    interpreted.check_read(model, torch.randint(19, (1, 9)), rule, monkeypatch, limit)


@pytest.mark.parametrize("tokens", slow_but((1,), (1, 3)))
@pytest.mark.parametrize("family", ["GLA", "RWKV6", "RWKV7"])
def test_tokens_after_a_cache_get_what_they_get_in_the_whole_sequence(
    fla: FLA, family: str, tokens: int
) -> None:
    model, ids = made(fla, family, torch.float32), torch.randint(19, (2, 12))
    explain = LatimFlow(model, rule="frozen")
    whole = explain.attribute(ids, (-1, 3))
    with torch.no_grad():
        cache = model(ids[:, :-tokens], use_cache=True).past_key_values
    new = LatimFlow(lambda x: model(x, past_key_values=cache).logits, model, rule="frozen")
    found = new.attribute(ids[:, -tokens:], (-1, 3))
    error = (found - whole[:, -tokens:]).abs().max() / whole.abs().max()
    assert error < bound(family, torch.float32, chunks=True)


def test_no_layer_is_forgotten(fla: FLA) -> None:
    """Whatever has an adapter is run, or has a reason."""
    run = {
        type(mixer.module).__name__
        for family in FAMILIES
        for mixer in find_mixers(made(fla, family, torch.float32))
    }
    known = {
        x.class_path.rpartition(".")[2] for x in table.BUILT_IN if x.class_path.startswith("fla.")
    }
    assert sorted([*run, *ALONE, *NOT_INTERPRETED]) == sorted(known)
