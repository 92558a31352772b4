"""Random configurations of transformers' recurrent mixers other than Mamba's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from fuzz.fuzzing import fuzz
from fuzz.mixer_checks import Inputs, Made, check_any, inputs, randomised
from fuzz.transformers_mixers import ACTIVATION, BOOL, EPS, KERNEL, mixer, sides, told
from helpers.versions import VERSION_4, continuing
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from zoo.delta import FAMILIES as DELTA
from zoo.delta import Family
from zoo.mamba import randomise

_GRIFFIN = {
    "hidden_size": st.integers(1, 9),
    "heads": st.integers(1, 3),
    "each": st.integers(1, 4),
    "conv1d_width": KERNEL,
    "resets": BOOL,
}


def griffin(options: dict[str, Any]) -> Made:
    """Positions may begin anew, as where sequences are packed."""
    heads = options["heads"]
    module = mixer(
        "recurrent_gemma.RecurrentGemmaRecurrentBlock",
        "RecurrentGemmaConfig",
        {name: options[name] for name in ("hidden_size", "conv1d_width")},
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=2,
        lru_width=heads * options["each"],
    )
    randomised(module, {"recurrent_param": lambda noise: 2 * noise - 2})

    def call(hidden: Tensor, _: Tensor | None) -> dict[str, Any]:
        positions = torch.arange(hidden.shape[1])
        positions = positions % 7 if options["resets"] else positions
        arguments = {"position_ids": positions[None], "attention_mask": None, "use_cache": False}
        return arguments | continuing(0)

    return Made(module, options["hidden_size"], call)


_RWKV = {"hidden_size": st.integers(1, 9), "attention_hidden_size": st.integers(1, 9)}


def rwkv(options: dict[str, Any]) -> Made:
    config = transformers.RwkvConfig(num_hidden_layers=2, **options)
    modeling = importlib.import_module("transformers.models.rwkv.modeling_rwkv")
    module = randomise(modeling.RwkvSelfAttention(config, 1))
    spread = {
        "time_decay": lambda noise: 2 * noise - 1,
        "time_mix_key": torch.sigmoid,
        "time_mix_value": torch.sigmoid,
        "time_mix_receptance": torch.sigmoid,
    }
    return Made(randomised(module, spread), options["hidden_size"])


_XLSTM = {
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
    modeling = importlib.import_module("transformers.models.xlstm.modeling_xlstm")
    heads, per_head = options["heads"], options["per_head"]
    own = {k: v for k, v in options.items() if k not in ("heads", "per_head")}
    if VERSION_4:  # past one chunk its layers fail by themselves
        own["chunk_size"] = 512
    config = transformers.xLSTMConfig(
        hidden_size=heads * per_head,
        num_heads=heads,
        num_hidden_layers=1,
        ffn_round_up_to_multiple_of=8,
        norm_eps=1e-2,
        **own,
    )
    module = randomise(modeling.xLSTMLayer(config))
    # the module's chunks do not take bfloat16
    return Made(module, heads * per_head, upcast=False)


_LFM2 = {"hidden_size": st.integers(1, 9), "conv_L_cache": KERNEL, "conv_bias": BOOL}


def lfm2(options: dict[str, Any]) -> Made:
    small = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    module = mixer("lfm2.Lfm2ShortConv", "Lfm2Config", options, layer_types=["conv"], **small)
    unpadded = sides(options["conv_bias"], options["conv_L_cache"])
    return Made(module, options["hidden_size"], told, sides=unpadded)


def lfm2_moe(options: dict[str, Any]) -> Made:
    small = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    module = mixer(
        "lfm2_moe.Lfm2MoeShortConv", "Lfm2MoeConfig", options, layer_types=["conv"], **small
    )
    unpadded = sides(options["conv_bias"], options["conv_L_cache"])
    return Made(module, options["hidden_size"], told, sides=unpadded)


_MINIMAX = {
    "hidden_size": st.integers(1, 9),
    "num_attention_heads": st.integers(1, 4),
    "head_dim": st.sampled_from([2, 4, 6]),
    "block_size": st.sampled_from([1, 3, 16, 64]),
    "hidden_act": ACTIVATION,
}


def minimax(options: dict[str, Any]) -> Made:
    small = {"num_key_value_heads": 1, "num_hidden_layers": 2, "rms_norm_eps": EPS}
    module = mixer("minimax.MiniMaxLightningAttention", "MiniMaxConfig", options, **small)

    def call(_: Tensor, mask: Tensor | None) -> dict[str, Any]:
        return {"position_embeddings": None, "attention_mask": mask}

    both = ("left", "right")
    # products of its decays are kept in buffers
    return Made(module, options["hidden_size"], call, sides=both, upcast=False)


_DELTA = {
    "hidden_size": st.sampled_from([2, 6, 8]),
    "heads": st.integers(1, 3),
    "each": st.integers(1, 2),
    "key": st.integers(2, 5),
    "value": st.integers(2, 5),
    "linear_conv_kernel_dim": KERNEL,
    "hidden_act": ACTIVATION,
}


def delta(family: str) -> Callable[[dict[str, Any]], Made]:
    """A maker of the family's delta rules."""

    def make(options: dict[str, Any]) -> Made:
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
        return Made(module, options["hidden_size"], told, sides=("left", "right"))

    return make


SUBJECTS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Made]]] = {
    "recurrent_gemma": (_GRIFFIN, griffin),
    "rwkv": (_RWKV, rwkv),
    "xlstm": (_XLSTM, xlstm),
    "lfm2": (_LFM2, lfm2),
    "lfm2_moe": (_LFM2, lfm2_moe),
    "minimax": (_MINIMAX, minimax),
    **{family: (_DELTA, delta(family)) for family in DELTA},
}


@pytest.fixture(scope="module", autouse=True)
def own_functions() -> Iterator[None]:
    """The models' own torch functions, not the kernels of other packages."""
    with pytest.MonkeyPatch.context() as patch:
        for family in DELTA:
            with suppress(pytest.skip.Exception):  # not in every version
                Family(family, patch)
        yield


@pytest.mark.parametrize("name", SUBJECTS)
@fuzz(quick=2, long=50)
@given(st.data(), inputs())
def test_mixers(name: str, data: st.DataObject, drawn: Inputs) -> None:
    check_any(*SUBJECTS[name], data, drawn)
