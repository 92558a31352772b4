"""Griffin, RWKV-4, MiniMax and xLSTM of transformers, with random parameters."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from helpers.versions import named
from torch import Tensor

from zoo.mamba import randomise


def modeling(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def spread(module: Any, **functions: Callable[[Tensor], Tensor]) -> Any:
    """Parameters whose names end in a key are made anew, by a function of noise of their shape."""
    for name, parameter in randomise(module).named_parameters():
        for end, function in functions.items():
            if name.endswith(end):
                parameter.data = function(torch.randn_like(parameter))
    return module


def _decays(noise: Tensor) -> Tensor:
    """From nearly 0 to nearly 1."""
    return 2 * noise - 2


def griffin_config(**options: Any) -> Any:
    small = {
        "vocab_size": 19, "hidden_size": 12, "intermediate_size": 18, "num_hidden_layers": 3,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4, "lru_width": 9,
        "attention_window_size": 5, "block_types": ["recurrent", "recurrent", "attention"],
    }  # fmt: skip
    return named("RecurrentGemmaConfig")(**small | options)


def griffin_block(**options: Any) -> Any:
    block = modeling("recurrent_gemma").RecurrentGemmaRecurrentBlock(griffin_config(**options), 0)
    return spread(block, recurrent_param=_decays)


def griffin_model(**options: Any) -> Any:
    model = named("RecurrentGemmaForCausalLM")(griffin_config(**options))
    return spread(model, recurrent_param=_decays)


#: Decays from fast to slow, and mixtures with the previous token from 0 to 1.
_MIXTURES: dict[str, Callable[[Tensor], Tensor]] = {
    "time_decay": lambda noise: 2 * noise - 1,
    **{f"time_mix_{name}": torch.sigmoid for name in ("key", "value", "receptance")},
}


def rwkv_config(**options: Any) -> Any:
    small = {"vocab_size": 19, "hidden_size": 7, "attention_hidden_size": 10}
    return named("RwkvConfig")(**small | {"num_hidden_layers": 4, "rescale_every": 2} | options)


def rwkv_mixer(**options: Any) -> Any:
    return spread(modeling("rwkv").RwkvSelfAttention(rwkv_config(**options), 1), **_MIXTURES)


def rwkv_model(**options: Any) -> Any:
    return spread(named("RwkvForCausalLM")(rwkv_config(**options)), **_MIXTURES)


def minimax_config(**options: Any) -> Any:
    # eager, as the other implementation of experts takes neither odd sizes nor float64
    small = {
        "vocab_size": 19, "hidden_size": 11, "intermediate_size": 9, "num_hidden_layers": 3,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4, "block_size": 16,
        "num_local_experts": 2, "num_experts_per_tok": 2, "experts_implementation": "eager",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }  # fmt: skip
    return named("MiniMaxConfig")(**small | options)


def minimax_mixer(**options: Any) -> Any:
    return randomise(modeling("minimax").MiniMaxLightningAttention(minimax_config(**options), 0))


def minimax_model(**options: Any) -> Any:
    return randomise(named("MiniMaxForCausalLM")(minimax_config(**options)))


def xlstm_mixer(**options: Any) -> Any:
    small = {"vocab_size": 19, "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 2}
    small |= {"use_bias": True, "chunk_size": 16, "ffn_round_up_to_multiple_of": 8}
    config = named("xLSTMConfig")(**small | {"norm_eps": 1e-3} | options)
    return randomise(modeling("xlstm").xLSTMLayer(config))
