"""A small real model of every adapter of the table, timm's and MambaVision's aside."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from zoo import (
    architectures,
    delta,
    fla_cpu,
    fla_references,
    mamba2_simple_cpu,
    mamba3_cpu,
    mamba_ssm_cpu,
)
from zoo.mamba import randomise
from zoo.networks import NETWORKS


def mamba3(patch: pytest.MonkeyPatch) -> architectures.Case:
    package = mamba_ssm_cpu.install(patch, causal_conv1d=True)
    return architectures.language(mamba3_cpu.Mamba3(package, patch).make_lm())


def mamba2_simple(patch: pytest.MonkeyPatch) -> architectures.Case:
    """It learns the states before the first token."""
    package = mamba_ssm_cpu.install(patch, causal_conv1d=True)
    make = mamba2_simple_cpu.Simple(package, patch).make
    mixer = randomise(make(8, fused=False, learnable_init_states=True))
    return architectures.Case(mixer, torch.randn(2, 9, 8))


def of_sigmoids(patch: pytest.MonkeyPatch) -> architectures.Case:
    options = {"num_heads": 2, "head_dim": 6, "output_gate_activation": "sigmoid"}
    layer = fla_cpu.install(patch).layer("GatedDeltaNet", hidden_size=16, **options)
    return architectures.Case(layer, torch.randn(2, 9, 16))


def of_delta(patch: pytest.MonkeyPatch, family: str) -> architectures.Case:
    return architectures.language(delta.Family(family, patch).model())


def of_fla(patch: pytest.MonkeyPatch, family: str) -> architectures.Case:
    options = {"norm_eps": fla_references.EPS} | fla_references.MODELS[family]
    return architectures.language(fla_cpu.install(patch).model(family, **options))


ADAPTERS: dict[str, architectures.Make] = {
    **NETWORKS,
    "mamba3": mamba3,
    "mamba2 simple": mamba2_simple,
    "gated delta net with a sigmoid": of_sigmoids,
    **{f"{name} of delta rules": partial(of_delta, family=name) for name in delta.FAMILIES},
    **{f"fla {name}": partial(of_fla, family=name) for name in fla_references.MODELS},
}
