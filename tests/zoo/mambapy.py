"""Small models of mambapy and of deeptab, whose blocks are those of mambapy changed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zoo import mamba2_simple_cpu, mamba_ssm_cpu
from zoo.mamba import randomise

_REASON = "{} is not installed, see CONTRIBUTING.md"


def module(name: str, patch: pytest.MonkeyPatch) -> Any:
    """A module of mambapy, whose Mamba-2 and language model import mamba_ssm."""
    if importlib.util.find_spec("mambapy") is None:
        pytest.skip(_REASON.format("mambapy"))
    package = mamba_ssm_cpu.install(patch, causal_conv1d=True)
    mamba2 = importlib.import_module("mambapy.mamba2")
    own = mamba2_simple_cpu.Simple(package, patch).module
    for function in (
        "mamba_chunk_scan_combined",
        "mamba_split_conv1d_scan_combined",
        "causal_conv1d_fn",
    ):
        patch.setattr(mamba2, function, getattr(own, function))
    return importlib.import_module(f"mambapy.{name}")


def mamba(patch: pytest.MonkeyPatch, **options: Any) -> Any:
    lm = module("lm", patch)
    small = {"d_model": 6, "n_layers": 2, "d_state": 3}
    return randomise(lm.LM(lm.MambaConfig(**small | options), 16))


def mamba2(patch: pytest.MonkeyPatch, **options: Any) -> Any:
    lm = module("lm", patch)
    small = {"d_model": 8, "n_layers": 2, "d_head": 2, "d_state": 3, "chunk_size": 8}
    return randomise(lm.LM(lm.Mamba2Config(**small | {"use_mem_eff_path": False} | options), 16))


def jamba(patch: pytest.MonkeyPatch, **options: Any) -> Any:
    package = module("jamba", patch)
    # an epsilon of norms of few features that does not blow rounding errors up
    small = {
        "d_model": 8, "n_layers": 2, "mlp_size": 12, "d_state": 3, "vocab_size": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 1,
        "num_experts_per_tok": 1, "attn_layer_offset": 1, "attn_layer_period": 2,
        "rms_norm_eps": 0.05,
    }  # fmt: skip
    return randomise(package.JambaLM(package.JambaLMConfig(**small | options)))


def vision(patch: pytest.MonkeyPatch, **options: Any) -> Any:
    package = module("vim", patch)
    small = {"d_model": 8, "n_layers": 2, "d_state": 3}
    return randomise(package.VMamba(package.MambaConfig(**small | options)))


def deeptab(patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """deeptab's stack of blocks, without what the package imports to read tables and to train."""
    home = getattr(sys.modules.get("deeptab"), "__path__", None)
    spec = importlib.util.find_spec("deeptab") if home is None else None
    if spec is not None and spec.origin is not None:
        home = [str(Path(spec.origin).parent)]
    if home is None:
        pytest.skip(_REASON.format("deeptab"))
    for name in [each for each in sys.modules if each.startswith("deeptab.")]:
        patch.delitem(sys.modules, name)
    bare = ModuleType("deeptab")
    bare.__path__ = list(home)
    patch.setitem(sys.modules, "deeptab", bare)
    blocks = importlib.import_module("deeptab.nn.blocks.mamba")
    small = {
        "d_model": 8, "n_layers": 2, "d_state": 3, "expand_factor": 2, "conv_bias": True,
        "norm": "RMSNorm", "layer_norm_eps": 0.05,
    }  # fmt: skip
    return randomise(blocks.Mamba(SimpleNamespace(**small | options)))


MODELS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (mamba, mamba2, jamba, vision, deeptab)
}
