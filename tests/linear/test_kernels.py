"""Mixers that are read as they run, held to their operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.padding import both_sides
from oracles import relative_error
from torch import Tensor
from zoo import attention, delta, mamba2, mamba_ssm_cpu
from zoo.mamba import transformers_model

from captum_ssm import LatimFlow
from captum_ssm.linear import Network
from captum_ssm.linear.kernels import READ, Reading

Make = Callable[[pytest.MonkeyPatch], Any]


def of_mamba_ssm(fused: bool, **options: Any) -> Make:
    def make(patch: pytest.MonkeyPatch) -> Any:
        package = mamba_ssm_cpu.install(patch, causal_conv1d=fused)
        return package.make_lm(d_model=16, fused=fused, **options)

    return make


#: Models whose mixers are read, all of them.
MODELS: dict[str, Make] = {
    **{name: lambda _, n=name: transformers_model(n) for name in ("mamba", "falcon_mamba")},
    **{
        name: lambda _, n=name: mamba2.make_model(n)
        for name in ("mamba2", "bamba", "falcon_h1", "nemotron_h", "granite", "zamba2")
        if name in mamba2.FAMILIES
    },
    **{
        name: lambda patch, n=name: delta.Family(n, patch).model()
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    },
    **{
        name: lambda _, n=name: attention.attention_model(n)
        for name in ("bert", "gpt_neox", "gpt2", "llama", "mistral", "vit", "deit", "jamba")
    },
    "mamba_ssm Mamba": of_mamba_ssm(False),
    "mamba_ssm Mamba, fused": of_mamba_ssm(True),
    "mamba_ssm Mamba-2": of_mamba_ssm(False, ssm_cfg={"layer": "Mamba2"}),
    "mamba_ssm Mamba-2, fused": of_mamba_ssm(True, ssm_cfg={"layer": "Mamba2"}),
}
