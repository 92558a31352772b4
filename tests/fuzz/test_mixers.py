"""Random configurations of the recurrent mixers of transformers and mamba_ssm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from fuzz.mixer_checks import BOOL, BOTH, EPS, FEW, KERNEL, Drawn, Make, fuzzed
from helpers.versions import continuing, named, renamed
from hypothesis import strategies as st
from torch import Tensor
from zoo import mamba_ssm_cpu, recurrent
from zoo.delta import FAMILIES as DELTA
from zoo.delta import Family
from zoo.mamba import randomise, transformers_model
from zoo.mamba2 import FAMILIES as MAMBA2
from zoo.mamba2 import first_mixer, make_model
from zoo.mamba2_simple_cpu import Simple
from zoo.mamba3_cpu import Mamba3
from zoo.short_conv import FAMILIES as SHORT_CONVOLUTIONS
from zoo.short_conv import make_model as make_short_conv

Made = tuple[Any, int, dict[str, Any]]
ACTIVATION = st.sampled_from(["silu", "silu", "gelu", "relu", "tanh"])
LIMITS = st.sampled_from([(0.0, float("inf")), (0.2, 1.5), (0.0, 0.8)])
CHUNK = st.sampled_from([1, 4, 8, 32])


def sides(bias: bool, kernel: int) -> dict[str, Any]:
    """Padding on the left leaks a bias of the input projection through the convolution."""
    return {"sides": ("right",) if bias and kernel > 1 else BOTH}


# --- Mamba -------------------------------------------------------------------------------------

_MAMBA: Drawn = {
    "hidden_size": st.integers(1, 9),
    "state_size": FEW,
    "conv_kernel": KERNEL,
    "time_step_rank": FEW,
    "expand": st.integers(1, 3),
    "use_bias": BOOL,
    "use_conv_bias": BOOL,
    "hidden_act": ACTIVATION,
}


def mamba(options: dict[str, Any], family: str) -> Made:
    model = transformers_model(family, num_hidden_layers=1, **options)
    told = sides(options["use_bias"], options["conv_kernel"])
    return model.backbone.layers[0].mixer, options["hidden_size"], told


_HYBRID: Drawn = {
    "hidden_size": st.sampled_from([2, 4, 6, 8]),
    "mamba_d_state": FEW,
    "mamba_d_conv": KERNEL,
    "mamba_dt_rank": FEW,
    "mamba_expand": st.integers(1, 3),
    "mamba_proj_bias": BOOL,
    "mamba_conv_bias": BOOL,
}


def hybrid(options: dict[str, Any], path: str, **small: Any) -> Made:
    model, name = path.split(".")
    config = named(name.removesuffix("MambaMixer") + "Config")
    settings = config(**renamed(model, {"num_attention_heads": 2} | small | options))
    module = randomise(getattr(recurrent.modeling(model), name)(settings, layer_idx=0))
    told = sides(options["mamba_proj_bias"], options["mamba_d_conv"])
    return module, options["hidden_size"], told


# --- Mamba-2 -----------------------------------------------------------------------------------

#: Of all families expand = 2.
_MAMBA2: Drawn = {
    "groups": st.integers(1, 3),
    "each": st.integers(1, 3),  # heads of a group
    "per_head": st.sampled_from([2, 4, 6]),
    "state": FEW,
    "kernel": KERNEL,
    "chunk": CHUNK,
    "bias": BOOL,
    "conv_bias": BOOL,
    "limit": LIMITS,
    "act": ACTIVATION,
}
_OPTIONS = "heads per_head groups state kernel chunk bias conv_bias limit act"
_OF_BAMBA = """mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv mamba_chunk_size
    mamba_proj_bias mamba_conv_bias time_step_limit hidden_act"""
#: What the families call the options above; "-" for what they do not have.
_NAMES = {
    "mamba2": """num_heads head_dim n_groups state_size conv_kernel chunk_size use_bias
        use_conv_bias time_step_limit hidden_act""",
    "bamba": _OF_BAMBA,
    "granitemoehybrid": _OF_BAMBA,
    "falcon_h1": _OF_BAMBA,
    "zamba2": """n_mamba_heads mamba_headdim mamba_ngroups mamba_d_state mamba_d_conv chunk_size
        add_bias_linear - - -""",
    "nemotron_h": """mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel chunk_size
        use_bias use_conv_bias - mamba_hidden_act""",
}


def mamba2(options: dict[str, Any], family: str) -> Made:
    drawn = {**options, "heads": options["groups"] * options["each"]}
    width = drawn["heads"] * options["per_head"] // 2
    names = zip(_OPTIONS.split(), _NAMES[family].split(), strict=True)
    given = {name: drawn[own] for own, name in names if name != "-"}
    if family == "falcon_h1":
        given |= {"mamba_d_ssm": 2 * width, "mamba_rms_norm": options["conv_bias"]}
        given |= {"mamba_norm_before_gate": options["each"] == 1}
    attention = {} if family == "mamba2" else {"num_attention_heads": 1}
    model = make_model(family, hidden_size=width, **attention, **given)
    return first_mixer(model), width, sides(options["bias"], options["kernel"])


# --- other recurrences -------------------------------------------------------------------------

_GRIFFIN: Drawn = {
    "hidden_size": st.integers(1, 9),
    "heads": st.integers(1, 3),
    "each": st.integers(1, 4),
    "conv1d_width": KERNEL,
    "resets": BOOL,
}


def griffin(options: dict[str, Any]) -> Made:
    """Positions may begin anew, as where sequences are packed."""
    heads, own = options["heads"], ("hidden_size", "conv1d_width")
    small = {"num_attention_heads": heads, "head_dim": 2, "lru_width": heads * options["each"]}

    def positions(hidden: Tensor) -> Tensor:
        found = torch.arange(hidden.shape[1])
        return (found % 7 if options["resets"] else found)[None]

    told = {"position_ids": positions, "attention_mask": None, "use_cache": False, **continuing(0)}
    module = recurrent.griffin_block(**small, **{name: options[name] for name in own})
    return module, options["hidden_size"], told


_RWKV: Drawn = {"hidden_size": st.integers(1, 9), "attention_hidden_size": st.integers(1, 9)}


def rwkv(options: dict[str, Any]) -> Made:
    return recurrent.rwkv_mixer(**options), options["hidden_size"], {}


_XLSTM: Drawn = {
    "heads": st.integers(1, 3),
    "per_head": st.sampled_from([4, 8]),
    "qk_dim_factor": st.sampled_from([0.5, 1.0]),
    "v_dim_factor": st.sampled_from([0.5, 1.0, 2.0]),
    "weight_mode": st.sampled_from(["single", "fused"]),
    "use_bias": BOOL,
    "gate_soft_cap": st.sampled_from([2.0, 15.0]),
    "chunk_size": st.sampled_from([4, 16, 64]),
}


def xlstm(options: dict[str, Any]) -> Made:
    own = {k: v for k, v in options.items() if k not in ("heads", "per_head")}
    width = options["heads"] * options["per_head"]
    own |= {"hidden_size": width, "num_heads": options["heads"], "norm_eps": 1e-2}
    # the module's chunks do not take bfloat16
    return recurrent.xlstm_mixer(**own), width, {"upcast": False}


_SHORT: Drawn = {"hidden_size": st.integers(1, 9), "conv_L_cache": KERNEL, "conv_bias": BOOL}


def short_conv(options: dict[str, Any], family: str) -> Made:
    model = make_short_conv(family, num_attention_heads=1, head_dim=8, **options)
    told = sides(options["conv_bias"], options["conv_L_cache"])
    return model.model.layers[0].conv, options["hidden_size"], told


_MINIMAX: Drawn = {
    "hidden_size": st.integers(1, 9),
    "num_attention_heads": st.integers(1, 4),
    "head_dim": st.sampled_from([2, 4, 6]),
    "block_size": st.sampled_from([1, 3, 16, 64]),
    "hidden_act": ACTIVATION,
}


def minimax(options: dict[str, Any]) -> Made:
    module = recurrent.minimax_mixer(rms_norm_eps=EPS, **options)
    # products of its decays are kept in buffers
    told = {"sides": BOTH, "upcast": False, "position_embeddings": None}
    return module, options["hidden_size"], told


_DELTA: Drawn = {
    "hidden_size": st.sampled_from([2, 6, 8]),
    "heads": st.integers(1, 3),
    "each": st.integers(1, 2),
    "key": st.integers(2, 5),
    "value": st.integers(2, 5),
    "linear_conv_kernel_dim": KERNEL,
    "hidden_act": ACTIVATION,
}


def delta(options: dict[str, Any], family: str) -> Made:
    heads, each = options["heads"], options["each"]
    own = {k: options[k] for k in ("hidden_size", "linear_conv_kernel_dim", "hidden_act")}
    if family in ("kimi_linear", "bailing_hybrid", "glm5_next"):
        own |= {"linear_num_heads": heads, "linear_head_dim": options["key"]}
    else:
        own |= {
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads * each,
            "linear_key_head_dim": options["key"],
            "linear_value_head_dim": options["value"],
        }
    with pytest.MonkeyPatch.context() as patch:  # the module's fixture keeps what it needs
        module = Family(family, patch).mixer(**own, rms_norm_eps=EPS)
    return module, options["hidden_size"], {"sides": BOTH}


ONE_LAYER = {"num_hidden_layers": 1, "layers_block_type": ["linear_attention"]}
SUBJECTS: dict[str, tuple[Drawn, Make]] = {
    **{family: (_MAMBA, partial(mamba, family=family)) for family in ("mamba", "falcon_mamba")},
    "jamba": (
        _HYBRID,
        partial(hybrid, path="jamba.JambaMambaMixer", num_key_value_heads=1, rms_norm_eps=EPS),
    ),
    "zamba": (
        {**_HYBRID, "n_mamba_heads": st.integers(1, 2)},
        partial(hybrid, path="zamba.ZambaMambaMixer", **ONE_LAYER),
    ),
    **{family: (_MAMBA2, partial(mamba2, family=family)) for family in MAMBA2},
    "recurrent_gemma": (_GRIFFIN, griffin),
    "rwkv": (_RWKV, rwkv),
    "xlstm": (_XLSTM, xlstm),
    "minimax": (_MINIMAX, minimax),
    **{family: (_SHORT, partial(short_conv, family=family)) for family in SHORT_CONVOLUTIONS},
    **{family: (_DELTA, partial(delta, family=family)) for family in DELTA},
}
test_mixers_of_transformers = fuzzed(SUBJECTS)


# --- mamba_ssm, on its slow and its fused paths ------------------------------------------------

_OF_MAMBA: Drawn = {
    "d_model": st.integers(1, 9),
    "d_state": FEW,
    "d_conv": KERNEL,
    "expand": st.integers(1, 3),
    "dt_rank": FEW,
    "conv_bias": BOOL,
    "bias": BOOL,
    "fused": BOOL,
}
_OF_MAMBA2: Drawn = {
    "groups": st.integers(1, 3),
    "each": st.integers(1, 3),  # heads of a group
    "headdim": st.sampled_from([2, 4, 6]),
    "d_state": FEW,
    "d_conv": KERNEL,
    "chunk_size": CHUNK,
    "bias": BOOL,
    "conv_bias": BOOL,
    "dt_limit": LIMITS,
    "fused": BOOL,
    "more": st.fixed_dictionaries(
        {"rmsnorm": BOOL, "norm_before_gate": BOOL, "beside": st.integers(0, 3)}
    ),
}
_OF_SIMPLE = {**_OF_MAMBA2, "more": st.fixed_dictionaries({"learnable_init_states": BOOL})}
_OF_MAMBA3: Drawn = {
    "groups": st.integers(1, 2),
    "each": st.integers(1, 2),
    "headdim": st.sampled_from([2, 4, 8]),
    "d_state": st.sampled_from([4, 8, 14]),
    "rope_fraction": st.sampled_from([0.5, 1.0]),
    "is_outproj_norm": BOOL,
    "A_floor": st.sampled_from([1e-4, 0.6]),
}
#: mamba_ssm's makers, as long as the module's tests run.
PACKAGE: dict[str, Any] = {}


def of_mamba(options: dict[str, Any]) -> Made:
    return randomise(PACKAGE["mamba"].make_mamba(**options)), options["d_model"], {}


def of_mamba2(options: dict[str, Any]) -> Made:
    options = dict(options)
    groups, each, more = (options.pop(name) for name in ("groups", "each", "more"))
    width, fused = groups * each * options["headdim"] // 2, options["fused"]
    if "learnable_init_states" in more:
        make = PACKAGE["simple"].make
    else:
        make, scanned = PACKAGE["mamba"].make_mamba2, 2 * width
        # channels that pass no scan, which the fused path's reference does not know
        width += 0 if fused else more.pop("beside")
        more = {"rmsnorm": more["rmsnorm"], "d_ssm": scanned} | (
            {} if fused else {"norm_before_gate": more["norm_before_gate"]}
        )
    module = randomise(make(width, ngroups=groups, **options, **more))
    if hasattr(module, "norm"):
        module.norm.eps = EPS
    return module, width, {}


def of_mamba3(options: dict[str, Any]) -> Made:
    options = dict(options)
    groups, each = options.pop("groups"), options.pop("each")
    width = groups * each * options["headdim"]
    return PACKAGE["mamba3"].make(width, ngroups=groups, **options), width, {}


test_mixers_of_mamba_ssm = fuzzed(
    {
        "Mamba": (_OF_MAMBA, of_mamba),
        "Mamba2": (_OF_MAMBA2, of_mamba2),
        "Mamba2Simple": (_OF_SIMPLE, of_mamba2),
        "Mamba3": (_OF_MAMBA3, of_mamba3),
    }
)


@pytest.fixture(scope="module", autouse=True)
def packages() -> Iterator[None]:
    """The models' own torch functions, and mamba_ssm as if causal_conv1d were installed."""
    with pytest.MonkeyPatch.context() as patch:
        for family in DELTA:
            with suppress(pytest.skip.Exception):  # not in every version
                Family(family, patch)
        package = mamba_ssm_cpu.install(patch, causal_conv1d=True)
        made = {"mamba": package, "simple": Simple(package, patch)}
        PACKAGE.update(made, mamba3=Mamba3(package, patch))
        yield
