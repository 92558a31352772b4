"""Small language models of transformers, freshly initialized."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from captum_ssm.errors import OptionError
from captum_ssm.models.folders import model_of
from captum_ssm.models.vocabulary import WordVocabulary

#: By architecture, the class of transformers.
MODELS = {
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "gated-deltanet": "Qwen3NextForCausalLM",
    "qwen3-next": "Qwen3NextForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "griffin": "RecurrentGemmaForCausalLM",
    "bamba": "BambaForCausalLM",
}


@dataclass(frozen=True)
class ModelSize:
    """The architecture and size of the model to train.

    Attributes:
        architecture: ``"mamba"``, ``"mamba2"``, ``"rwkv"`` (RWKV-4), or ``"gated-deltanet"``, a
            Qwen3-Next without attention and experts. ``"qwen3-next"`` has softmax attention in the
            last block, as ``"bamba"`` beside Mamba-2. ``"griffin"`` is a RecurrentGemma without
            attention. Default: ``"mamba"``.
        layers: number of blocks. Default: 2.
        hidden: width of the residual stream. Default: 64.
        state: states per channel, of Mamba, Mamba-2 and Bamba. Default: 16.
        conv_kernel: taps of the short convolution, except in RWKV. Default: 4.
        head_dim: channels per head, of Mamba-2, Bamba, Gated DeltaNet and Qwen3-Next. Default: 16.
    """

    architecture: str = "mamba"
    layers: int = 2
    hidden: int = 64
    state: int = 16
    conv_kernel: int = 4
    head_dim: int = 16

    def __post_init__(self) -> None:
        if self.architecture not in MODELS:
            raise OptionError(
                f"architecture={self.architecture!r} is not known. Use one of {tuple(MODELS)}."
            )


def new_model(size: ModelSize, vocabulary: WordVocabulary, *, lasting_from: int = 0) -> nn.Module:
    """Return a freshly initialized causal language model of transformers.

    In lasting layers the decays and step sizes start near one (``A_log = -8``). The state then
    keeps all inputs of a prompt from the first training step on, which makes recall much quicker to
    learn (after Trockman et al. 2024).

    Args:
        size: architecture and size of the model.
        vocabulary: the words of the model.
        lasting_from: the first of the lasting layers, negative to count from the end. Earlier
            layers, and decays without ``A_log`` and a step size, start as in transformers. Default:
            0, all are lasting.
    """
    model = model_of(
        MODELS[size.architecture], settings_of(size, len(vocabulary), vocabulary.pad_id)
    )
    blocks = model.rwkv.blocks if size.architecture == "rwkv" else model.base_model.layers
    mixers = [part for block in blocks[lasting_from:] for part in block.modules()]
    with torch.no_grad():
        for mixer in mixers:
            if hasattr(mixer, "A_log"):
                mixer.A_log.fill_(-8.0)
                step_bias = mixer.dt_proj.bias if size.architecture == "mamba" else mixer.dt_bias
                step_bias.fill_(math.log(math.e - 1))  # softplus of it is 1
    fresh: nn.Module = model
    return fresh


def settings_of(size: ModelSize, words: int, pad_id: int) -> dict[str, Any]:
    """Return the configuration of a model with so many words."""
    settings = {
        "vocab_size": words,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "pad_token_id": pad_id,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
    }
    return settings | _OWN[size.architecture](size)


def _of_mamba(size: ModelSize) -> dict[str, Any]:
    return {"state_size": size.state, "conv_kernel": size.conv_kernel}


def _of_mamba2(size: ModelSize) -> dict[str, Any]:
    return _of_mamba(size) | {
        "head_dim": size.head_dim,
        "num_heads": 2 * size.hidden // size.head_dim,
        "n_groups": 1,
        "chunk_size": 32,  # sequences are short, and are padded to whole chunks
    }


def _of_gated_deltanet(size: ModelSize) -> dict[str, Any]:
    heads = size.hidden // size.head_dim
    return {
        "layer_types": ["linear_attention"] * size.layers,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size.head_dim,
        "linear_value_head_dim": size.head_dim,
        "linear_conv_kernel_dim": size.conv_kernel,
        "intermediate_size": size.hidden,
        "num_experts": 0,
        "use_cache": False,  # which wants a layer of attention
    }


def _of_qwen3_next(size: ModelSize) -> dict[str, Any]:
    return _of_gated_deltanet(size) | {
        "layer_types": ["linear_attention"] * (size.layers - 1) + ["full_attention"],
        "num_attention_heads": size.hidden // size.head_dim,
        "num_key_value_heads": size.hidden // size.head_dim,
        "head_dim": size.head_dim,
    }


def _of_rwkv(size: ModelSize) -> dict[str, Any]:
    return {
        "attention_hidden_size": 2 * size.hidden,
        "intermediate_size": size.hidden,
        "use_cache": False,  # which wants the attention as wide as the stream
    }


def _of_griffin(size: ModelSize) -> dict[str, Any]:
    return {
        "block_types": ["recurrent"],
        "num_attention_heads": 4,  # the blocks of the gates' weights, too
        "lru_width": size.hidden,
        "conv1d_width": size.conv_kernel,
        "intermediate_size": 2 * size.hidden,
        "use_cache": False,  # which wants a layer of attention
    }


def _of_bamba(size: ModelSize) -> dict[str, Any]:
    return {
        "attn_layer_indices": [size.layers - 1],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": size.hidden,
        "mamba_n_heads": 2 * size.hidden // size.head_dim,
        "mamba_d_head": size.head_dim,
        "mamba_n_groups": 1,
        "mamba_d_state": size.state,
        "mamba_d_conv": size.conv_kernel,
        "mamba_chunk_size": 32,
    }


_OWN = {
    "mamba": _of_mamba,
    "mamba2": _of_mamba2,
    "gated-deltanet": _of_gated_deltanet,
    "qwen3-next": _of_qwen3_next,
    "rwkv": _of_rwkv,
    "griffin": _of_griffin,
    "bamba": _of_bamba,
}
