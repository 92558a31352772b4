"""Every method on models as people build them, whose norms and MLPs are kernels as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.every_method import METHODS
from oracles import relative_error
from torch import nn
from zoo import fla_cpu, mamba_ssm_cpu
from zoo.fla_cpu import FLA
from zoo.mamba import randomise
from zoo.mamba_ssm_cpu import MambaSSM

#: Of fla's models; kernels for a step take the longest here, so that few features do.
OF_FLA: dict[str, dict[str, Any]] = {
    "GatedDeltaNet": {"hidden_size": 12, "head_dim": 4, "num_hidden_layers": 1},
    "GLA": {"hidden_size": 12, "num_hidden_layers": 1},
    "RetNet": {"hidden_size": 16, "num_hidden_layers": 1},
    "HGRN2": {"hidden_size": 12, "num_hidden_layers": 1},
    "RWKV7": {"fuse_norm": True, "hidden_size": 8},
}
#: Of mamba_ssm's: the kind of layer, and whether a kernel adds and normalises.
OF_MAMBA_SSM = {
    (kind, fused): 2 if kind == "Mamba1" or fused else 1
    for kind in ("Mamba1", "Mamba2")
    for fused in (True, False)
}
BOUND = 1e-5


def check(model: nn.Module, by_torch: Callable[[pytest.MonkeyPatch], Any]) -> None:
    """What methods find is what they find where packages' references take the kernels' place."""
    ids = torch.randint(16, (1, 7))
    for method in METHODS:
        found = method(model).attribute(ids, target=(-1, 3))
        with pytest.MonkeyPatch.context() as patch:
            by_torch(patch)
            wanted = method(model).attribute(ids, target=(-1, 3))
        assert relative_error(found, wanted) <= BOUND, method


@pytest.mark.parametrize("family", OF_FLA)
def test_fla(fla: FLA, family: str) -> None:
    check(fla.model(family, **OF_FLA[family]), fla_cpu.install)


@pytest.mark.parametrize(("kind", "fused"), OF_MAMBA_SSM)
def test_mamba_ssm(mamba_ssm: MambaSSM, kind: str, fused: bool) -> None:
    layers = OF_MAMBA_SSM[kind, fused]
    options = {"ssm_cfg": {"layer": kind}, "fused_add_norm": fused, "n_layer": layers}

    def by_torch(patch: pytest.MonkeyPatch) -> None:
        mamba_ssm_cpu.install(patch, causal_conv1d=True)

    check(randomise(mamba_ssm.make_lm(8, **options)), by_torch)
