"""Random configurations of the Mamba and Mamba-2 mixers of transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from fuzz.fuzzing import fuzz
from fuzz.mixer_checks import Inputs, Made, check_any, inputs
from fuzz.transformers_mixers import ACTIVATION, BOOL, EPS, FEW, KERNEL, mixer, sides, told
from hypothesis import given
from hypothesis import strategies as st

LIMITS = st.sampled_from([(0.0, float("inf")), (0.2, 1.5), (0.0, 0.8)])

# --- Mamba-1 -----------------------------------------------------------------------------------

_MAMBA1 = {
    "hidden_size": st.integers(1, 9),
    "state_size": FEW,
    "conv_kernel": KERNEL,
    "time_step_rank": FEW,
    "expand": st.integers(1, 3),
    "use_bias": BOOL,
    "use_conv_bias": BOOL,
    "hidden_act": ACTIVATION,
}


def mamba(options: dict[str, Any]) -> Made:
    module = mixer("mamba.MambaMixer", "MambaConfig", options)
    unpadded = sides(options["use_bias"], options["conv_kernel"])
    # A is computed in float32
    return Made(module, options["hidden_size"], told, sides=unpadded)


def falcon_mamba(options: dict[str, Any]) -> Made:
    module = mixer("falcon_mamba.FalconMambaMixer", "FalconMambaConfig", options, mixer_rms_eps=EPS)
    unpadded = sides(options["use_bias"], options["conv_kernel"])
    return Made(module, options["hidden_size"], told, sides=unpadded)


_HYBRID = {
    "hidden_size": st.sampled_from([2, 4, 6, 8]),
    "mamba_d_state": FEW,
    "mamba_d_conv": KERNEL,
    "mamba_dt_rank": FEW,
    "mamba_expand": st.integers(1, 3),
    "mamba_proj_bias": BOOL,
    "mamba_conv_bias": BOOL,
}


def jamba(options: dict[str, Any]) -> Made:
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": EPS}
    module = mixer("jamba.JambaMambaMixer", "JambaConfig", options, **small)
    unpadded = sides(options["mamba_proj_bias"], options["mamba_d_conv"])
    return Made(module, options["hidden_size"], told, sides=unpadded)


def zamba(options: dict[str, Any]) -> Made:
    layers = {"num_hidden_layers": 1, "layers_block_type": ["linear_attention"]}
    small = {"num_attention_heads": 2, **layers}
    module = mixer("zamba.ZambaMambaMixer", "ZambaConfig", options, **small)
    unpadded = sides(options["mamba_proj_bias"], options["mamba_d_conv"])
    return Made(module, options["hidden_size"], told, sides=unpadded)


# --- Mamba-2 -----------------------------------------------------------------------------------

_MAMBA2: dict[str, Any] = {
    "groups": st.integers(1, 3),
    "each": st.integers(1, 3),  # heads of a group
    "per_head": st.sampled_from([2, 4, 6]),
    "state": FEW,
    "kernel": KERNEL,
    "chunk": st.sampled_from([1, 4, 8, 32]),
    "bias": BOOL,
    "conv_bias": BOOL,
    "limit": LIMITS,
    "act": ACTIVATION,
}
#: By family: class, configuration, what is fixed, and what the family calls the options above;
#: None for what it does not have.
_FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, str | None]]] = {}
_BAMBA = {
    "heads": "mamba_n_heads",
    "per_head": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "kernel": "mamba_d_conv",
    "chunk": "mamba_chunk_size",
    "bias": "mamba_proj_bias",
    "conv_bias": "mamba_conv_bias",
    "limit": "time_step_limit",
    "act": "hidden_act",
}
_ATTENTION = {"num_attention_heads": 1, "num_key_value_heads": 1}
_FAMILIES["mamba2"] = (
    "mamba2.Mamba2Mixer",
    "Mamba2Config",
    {"layer_norm_epsilon": EPS, "num_hidden_layers": 1},
    {
        "heads": "num_heads",
        "per_head": "head_dim",
        "groups": "n_groups",
        "state": "state_size",
        "kernel": "conv_kernel",
        "chunk": "chunk_size",
        "bias": "use_bias",
        "conv_bias": "use_conv_bias",
        "limit": "time_step_limit",
        "act": "hidden_act",
    },
)
_FAMILIES["bamba"] = (
    "bamba.BambaMixer",
    "BambaConfig",
    {**_ATTENTION, "rms_norm_eps": EPS, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    _BAMBA,
)
_FAMILIES["granitemoehybrid"] = (
    "granitemoehybrid.GraniteMoeHybridMambaLayer",
    "GraniteMoeHybridConfig",
    {
        **_ATTENTION,
        "rms_norm_eps": EPS,
        "num_hidden_layers": 1,
        "layer_types": ["linear_attention"],
    },
    _BAMBA,
)
_FAMILIES["falcon_h1"] = (
    "falcon_h1.FalconH1Mixer",
    "FalconH1Config",
    {
        **_ATTENTION,
        "rms_norm_eps": EPS,
        "num_hidden_layers": 1,
        "ssm_in_multiplier": 1.4,
        "ssm_multipliers": [0.75, 1.25, 0.5, 1.125, 0.875],
    },
    _BAMBA,
)
_FAMILIES["zamba2"] = (
    "zamba2.Zamba2MambaMixer",
    "Zamba2Config",
    {"num_attention_heads": 1, "num_hidden_layers": 1, "layers_block_type": ["linear_attention"]},
    {
        "heads": "n_mamba_heads",
        "per_head": "mamba_headdim",
        "groups": "mamba_ngroups",
        "state": "mamba_d_state",
        "kernel": "mamba_d_conv",
        "chunk": "chunk_size",
        "bias": "add_bias_linear",
        "conv_bias": None,
        "limit": None,
        "act": None,
    },
)
_FAMILIES["nemotron_h"] = (
    "nemotron_h.NemotronHMamba2Mixer",
    "NemotronHConfig",
    {**_ATTENTION, "layer_norm_epsilon": EPS, "layers_block_type": ["linear_attention"]},
    {
        "heads": "mamba_num_heads",
        "per_head": "mamba_head_dim",
        "groups": "n_groups",
        "state": "ssm_state_size",
        "kernel": "conv_kernel",
        "chunk": "chunk_size",
        "bias": "use_bias",
        "conv_bias": "use_conv_bias",
        "limit": None,
        "act": "mamba_hidden_act",
    },
)


def mamba2(family: str) -> Callable[[dict[str, Any]], Made]:
    """A maker of the family's Mamba-2 mixers."""
    path, config, fixed, names = _FAMILIES[family]

    def make(options: dict[str, Any]) -> Made:
        heads = options["groups"] * options["each"]
        drawn = {**options, "heads": heads}
        given = {name: drawn[own] for own, name in names.items() if name is not None}
        # all families have expand = 2
        width = heads * options["per_head"] // 2
        more = {"hidden_size": width}
        if family == "falcon_h1":
            more |= {"mamba_d_ssm": 2 * width, "mamba_rms_norm": options["conv_bias"]}
            more |= {"mamba_norm_before_gate": options["each"] == 1}
        module = mixer(path, config, given, **fixed | more)
        if family == "falcon_h1":  # the model's doing
            modeling = importlib.import_module(type(module).__module__)
            multipliers = modeling.compute_mup_vector(
                transformers.FalconH1Config(**fixed | more | given)
            )
            module.register_buffer("mup_vector", multipliers, persistent=False)
        if family == "zamba2":  # not in its configuration
            module.norm.variance_epsilon = EPS
        unpadded = sides(options["bias"], options["kernel"])
        # chunks are computed in float32
        return Made(module, width, told, sides=unpadded)

    return make


SUBJECTS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Made]]] = {
    "mamba": (_MAMBA1, mamba),
    "falcon_mamba": (_MAMBA1, falcon_mamba),
    "jamba": (_HYBRID, jamba),
    "zamba": ({**_HYBRID, "n_mamba_heads": st.integers(1, 2)}, zamba),
    **{family: (_MAMBA2, mamba2(family)) for family in _FAMILIES},
}


@pytest.mark.parametrize("name", SUBJECTS)
@fuzz(quick=2, long=50)
@given(st.data(), inputs())
def test_mixers(name: str, data: st.DataObject, drawn: Inputs) -> None:
    check_any(*SUBJECTS[name], data, drawn)
