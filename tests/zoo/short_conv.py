"""Small models of transformers whose recurrent layers are short convolutions between gates."""

from __future__ import annotations

from typing import Any

from helpers.versions import named

from zoo.delta import EXPERTS
from zoo.mamba import randomise

_COMMON: dict[str, Any] = {
    "vocab_size": 19, "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1,
    "layer_types": ["conv", "full_attention", "conv"],
}  # fmt: skip
#: Attention in windows, rotations of half a head, and taps that reach seven tokens.
_GATED: dict[str, Any] = {
    "layer_types": ["conv", "sliding_attention", "full_attention"],
    "sliding_window": 4,
    "head_dim": 8,
    "norm_eps": 0.05,  # norms of few channels that do not blow rounding errors up
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: By model: config class, model class and options.
_CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {}),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", {**EXPERTS, "num_dense_layers": 1}),
    "lfm3": ("Lfm3Config", "Lfm3ForCausalLM", _GATED),
}
FAMILIES = tuple(_CLASSES)


def make_config(family: str, **options: Any) -> Any:
    config, _, own = _CLASSES[family]
    return named(config)(**_COMMON | own | options)


def make_model(family: str, **options: Any) -> Any:
    return randomise(named(_CLASSES[family][1])(make_config(family, **options)))
