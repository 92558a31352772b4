"""A small real model of every adapter of the table, timm's and MambaVision's aside."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from oracles import vim as vim_oracle

from captum_ssm.models import Caduceus, HyenaDNA, StripedHyena
from zoo import (
    architectures,
    delta,
    fla_cpu,
    fla_references,
    mamba2_simple_cpu,
    mamba3_cpu,
    mamba_ssm_cpu,
    mambapy,
    networks,
    short_conv,
    xlstm_cpu,
)
from zoo.mamba import randomise


def mamba3(patch: pytest.MonkeyPatch) -> architectures.Case:
    package = mamba_ssm_cpu.install(patch, causal_conv1d=True)
    return architectures.language(mamba3_cpu.Mamba3(package, patch).make_lm())


def mamba2_simple(patch: pytest.MonkeyPatch) -> architectures.Case:
    """It learns the states before the first token."""
    package = mamba_ssm_cpu.install(patch, causal_conv1d=True)
    make = mamba2_simple_cpu.Simple(package, patch).make
    mixer = randomise(make(8, fused=False, learnable_init_states=True))
    return architectures.Case(mixer, torch.randn(2, 9, 8))


def caduceus(patch: pytest.MonkeyPatch, **options: Any) -> architectures.Case:
    small = {"d_model": 6, "n_layer": 2, "vocab_size": 16, "d_state": 3}
    return architectures.language(vim_oracle.randomise(Caduceus(**small | options)))


def hyenadna(patch: pytest.MonkeyPatch) -> architectures.Case:
    model = HyenaDNA(d_model=6, n_layer=2, l_max=16, filter_order=5, order=3)
    return architectures.language(randomise(model))


def fading(module: Any) -> Any:
    """With random parameters; what grows would hide all else."""
    for name, parameter in randomise(module).named_parameters():
        if name.endswith("log_poles"):
            parameter.data = -parameter.data.abs()
    return module


def striped_hyena(patch: pytest.MonkeyPatch) -> architectures.Case:
    layout = ("se", "mr", "li", "attention")
    sizes = {"heads": 2, "inner_mlp_size": 6, "se_length": 3, "mr_length": 130, "state_size": 3}
    model = StripedHyena(layout, 8, 16, se_groups=2, mr_groups=4, eps=0.05, **sizes)
    return architectures.language(fading(model))


def of_fla(patch: pytest.MonkeyPatch, name: str, **options: Any) -> architectures.Case:
    """A layer of flash-linear-attention of which it has no model."""
    layer = fla_cpu.install(patch).layer(name, hidden_size=16, num_heads=2, **options)
    return architectures.Case(layer, torch.randn(2, 9, 16))


def of_reference(patch: pytest.MonkeyPatch, family: str) -> architectures.Case:
    """A model of flash-linear-attention whose kernels are the package's references."""
    options = fla_references.MODELS[family]
    return architectures.language(fla_cpu.install(patch).model(family, norm_eps=0.05, **options))


def of_mambapy(patch: pytest.MonkeyPatch, family: str, **options: Any) -> architectures.Case:
    model = mambapy.MODELS[family](patch, **options)
    if family in ("vision", "deeptab"):
        return architectures.Case(model, torch.randn(2, 9, 8))
    return architectures.language(model)


#: Those whose blocks return what their routers said, so that no one activation is theirs.
WITH_ROUTERS = ("mambapy jamba", "mambapy jamba with norms")
#: Those whose tokens are mixed before the layers read them.
MIXED_BEFORE = ("qwen4_exp with n-grams",)
ADAPTERS: dict[str, architectures.Make] = {
    **networks.NETWORKS,
    "falcon_h1 without a norm": partial(
        networks.mamba2_family, family="falcon_h1", mamba_rms_norm=False
    ),
    "mamba3": mamba3,
    "mamba2 simple": mamba2_simple,
    # beside a layer of Mamba, with a convolution
    "mamba_ssm attention": lambda patch: architectures.language(
        randomise(mamba_ssm_cpu.install(patch, causal_conv1d=False).make_hybrid(d_conv=3))
    ),
    "xlstm large": lambda _: architectures.language(xlstm_cpu.large()),
    "xlstm blocks": lambda _: architectures.language(xlstm_cpu.blocks()),
    "gated delta net with a sigmoid": partial(
        of_fla, name="GatedDeltaNet", head_dim=6, output_gate_activation="sigmoid"
    ),
    "caduceus of both strands": caduceus,
    "caduceus of one strand": partial(caduceus, rcps=False, bias=True, conv_bias=False, d_conv=2),
    "hyenadna": hyenadna,
    "striped hyena": striped_hyena,
    "simple gla": partial(of_fla, name="SimpleGatedLinearAttention", norm_eps=0.05),
    "based": partial(of_fla, name="BasedLinearAttention", num_key_value_heads=2, feature_dim=3),
    **{
        f"fla {family}": partial(networks.fla, family=family)
        for family in fla_cpu.MODELS
        if family != "GLA"  # which is in the zoo
    },
    **{f"fla {each}": partial(of_reference, family=each) for each in fla_references.MODELS},
    **{
        name: partial(networks.of_delta, family=name)
        for name in ("qwen3_5", "qwen3_5_moe", "bailing_hybrid", "glm5_next")
    },
    "mambapy": partial(of_mambapy, family="mamba"),
    "mambapy mamba2": partial(of_mambapy, family="mamba2"),
    "mambapy jamba": partial(of_mambapy, family="jamba"),
    "mambapy vision": partial(of_mambapy, family="vision"),
    "mambapy jamba with norms": partial(of_mambapy, family="jamba", inner_layernorms=True),
    "deeptab": partial(of_mambapy, family="deeptab"),
    "deeptab, both directions": partial(of_mambapy, family="deeptab", bidirectional=True),
    **dict.fromkeys(MIXED_BEFORE, partial(networks.of_delta, family="qwen4_exp", **delta.N_GRAMS)),
    "lfm2_moe": lambda _: architectures.language(short_conv.make_model("lfm2_moe")),
    "lfm3": lambda _: architectures.language(short_conv.make_model("lfm3")),
}
