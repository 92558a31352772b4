"""Find supported classes with the same submodules and parameters as an unknown mixer."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from torch import nn

from .table import BUILT_IN

#: Names of a mixer's parameters and of its submodules with parameters, and the classes that have
#: exactly these names (tests compare them with instances).  A class has several entries if its
#: configuration changes the names.  Classes with equal names are listed by full name.
PARTS = {
    "A_log D conv1d dt_proj in_proj out_proj x_proj": (
        "MambaMixer FalconMambaMixer Mamba VimMixer mambapy.mamba.MambaBlock"
    ),
    "A_b_log A_log D D_b conv1d conv1d_b dt_proj dt_proj_b in_proj out_proj x_proj x_proj_b": (
        "VimMixer"
    ),
    "A_log D B_layernorm C_layernorm conv1d dt_layernorm dt_proj in_proj out_proj x_proj": (
        "mambapy.mamba.MambaBlock"
    ),
    "A_log A_log_b D D_b conv1d conv1d_b dt_proj dt_proj_b in_proj out_proj x_proj x_proj_b": (
        "VMambaBlock"
    ),
    "A_log_fwd D_fwd conv1d_fwd dt_proj_fwd in_proj_fwd out_proj x_proj_fwd": (
        "deeptab.nn.blocks.mamba.MambaBlock"
    ),
    "A_log_bwd A_log_fwd D_bwd D_fwd conv1d_bwd conv1d_fwd dt_proj_bwd dt_proj_fwd in_proj_bwd "
    "in_proj_fwd out_proj x_proj_bwd x_proj_fwd": "deeptab.nn.blocks.mamba.MambaBlock",
    "A_log D b_layernorm c_layernorm conv1d dt_layernorm dt_proj in_proj out_proj x_proj": (
        "JambaMambaMixer"
    ),
    "A_log D conv1d dt_proj_bias dt_proj_weight in_proj out_proj x_proj_weight": "ZambaMambaMixer",
    "A_log D conv1d dt_bias in_proj norm out_proj": (
        "Mamba2Mixer Mamba2 BambaMixer Zamba2MambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer "
        "NemotronHMamba2Mixer Mamba2Block"
    ),
    "A_log D conv1d dt_bias in_proj out_proj": "FalconH1Mixer",
    "A_log D conv1d dt_bias in_proj init_states norm out_proj": "Mamba2Simple",
    "B_bias B_norm C_bias C_norm D dt_bias in_proj out_proj": "Mamba3",
    "conv_1d linear_out linear_x linear_y rg_lru": "RecurrentGemmaRecurrentBlock",
    "key output receptance time_decay time_first time_mix_key time_mix_receptance time_mix_value "
    "value": "RwkvSelfAttention",
    "A_log conv1d dt_bias in_proj_ba in_proj_qkvz norm out_proj": "Qwen3NextGatedDeltaNet",
    "A_log conv1d dt_bias in_proj_a in_proj_b in_proj_qkv in_proj_z norm out_proj": (
        "Qwen3_5GatedDeltaNet Qwen3_5MoeGatedDeltaNet Qwen4ExpTextGatedDeltaNet"
    ),
    "A_log a_proj b_proj conv1d dt_bias g_proj k_proj o_norm o_proj q_proj v_proj": (
        "OlmoHybridGatedDeltaNet"
    ),
    "b_proj conv1d forget_gate g_a_proj g_b_proj k_proj o_norm o_proj q_proj v_proj": (
        "KimiLinearDeltaAttention Glm5NextTextLinearAttention"
    ),
    "b_proj conv1d forget_gate g_proj k_proj o_norm o_proj q_proj v_proj": (
        "BailingHybridDeltaAttention"
    ),
    "g_proj kv_a_layernorm kv_a_proj_with_mqa kv_b_proj o_proj q_proj": "BailingHybridAttention",
    "indexer kv_a_layernorm kv_a_proj_with_mqa kv_b_proj o_proj q_a_layernorm q_a_proj q_b_proj": (
        "Glm5NextTextAttention"
    ),
    "A_log b_proj dt_bias f_proj g_proj k_conv1d k_proj o_norm o_proj q_conv1d q_proj v_conv1d "
    "v_proj": "KimiDeltaAttention",
    "k_proj norm o_proj q_proj v_proj": "LinearAttention",
    "g_norm g_proj k_proj o_proj q_proj v_proj": "LightNetAttention",
    "f_proj g_norm k_proj o_proj q_proj v_proj": "GatedSlotAttention",
    "a_lora g_lora g_norm k_a k_k k_proj o_proj r_k r_proj v_proj w_lora x_a x_g x_k x_r x_v x_w": (
        "RWKV7Attention"
    ),
    "a_lora g_lora g_norm k_a k_k k_proj o_proj r_k r_proj v_lora v_proj w_lora x_a x_g x_k x_r "
    "x_v x_w": "RWKV7Attention",
    "norm out_proj output_gate qkv_proj": "MiniMaxLightningAttention",
    "fgate_preact igate_preact k multihead_norm ogate_preact out_proj q v": "xLSTMLayer",
    "conv in_proj out_proj": "Lfm2ShortConv Lfm2MoeShortConv Lfm3ShortConv",
    "g_norm_swish_gate g_proj gk_proj k_proj o_proj q_proj v_proj": "GatedLinearAttention",
    "g_norm_swish_gate g_proj k_proj o_proj q_proj v_proj": "MultiScaleRetention",
    "f_proj g_norm g_proj i_proj o_proj": "HGRNAttention",
    "f_proj g_norm i_proj o_proj q_proj": "HGRN2Attention",
    "bonus g_norm g_proj k_proj o_proj r_proj v_proj w_proj x_bias x_proj": "RWKV6Attention",
    "b_proj k_conv1d k_proj o_norm o_proj q_conv1d q_proj v_conv1d v_proj": "DeltaNet",
    "A_log a_proj b_proj dt_bias g_proj k_conv1d k_proj o_norm o_proj q_conv1d q_proj v_conv1d "
    "v_proj": "GatedDeltaNet",
    "k_proj o_proj q_proj v_proj": (
        "LlamaAttention MistralAttention JambaAttention BambaAttention RecurrentGemmaAttention "
        "MiniMaxAttention ZambaAttention Zamba2Attention FalconH1Attention NemotronHAttention "
        "GraniteMoeHybridAttention ViTAttention DeiTAttention"
    ),
    "k_norm k_proj o_proj q_norm q_proj v_proj": (
        "Qwen3NextAttention Qwen3_5Attention Qwen3_5MoeAttention OlmoHybridAttention"
    ),
    "indexer k_norm k_proj o_proj q_norm q_proj v_proj": "Qwen4ExpTextAttention",
    "g_proj k_norm k_proj o_proj q_norm q_proj v_proj": "Lfm3Attention",
    "k_layernorm k_proj out_proj q_layernorm q_proj v_proj": "Lfm2Attention Lfm2MoeAttention",
    "kv_a_layernorm kv_a_proj_with_mqa kv_b_proj o_proj q_proj": "KimiLinearAttention",
    "dense query_key_value": "GPTNeoXAttention",
    "c_attn c_proj": "GPT2Attention",
    "key query value": "BertSelfAttention",
    "proj qkv": "Attention",
    "A_log D conv1d_x conv1d_z dt_proj in_proj out_proj x_proj": "MambaVisionMixer",
}


def parts_of(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's direct parameters, and of its children with parameters."""
    names = {name for name, part in module.named_children() if any(True for _ in part.parameters())}
    return frozenset(names | {name for name, _ in module.named_parameters(recurse=False)})


def classes_with_parts(name: str, parts: frozenset[str]) -> list[str]:
    """Return full names of built-in classes with exactly these parts, most similar name first.

    Args:
        name: class name of the unknown mixer.
        parts: names of the unknown mixer's parameters and submodules, from :func:`parts_of`.
    """
    matches = (names for row, names in PARTS.items() if parts == set(row.split()))
    ends = next(matches, "").split()  # class names, or ends of class paths
    # the same class name first
    ends.sort(key=lambda x: (_class_name(x) != name, -_name_similarity(name, _class_name(x))))
    paths = [line.class_path for line in BUILT_IN]
    return [path for end in ends for path in paths if f".{path}".endswith(f".{end}")]


def _class_name(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _name_similarity(name: str, other: str) -> float:
    """Return the similarity of two names without endings such as Mixer; 0 if it is at most 1/2."""
    stem, other_stem = (re.sub("(Attention|Mixer|Layer|Block)$", "", x) for x in (name, other))
    ratio = SequenceMatcher(None, stem, other_stem).ratio()
    return ratio if ratio > 0.5 else 0.0
