"""Small models of transformers with gated delta rules, on the models' own torch functions."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
from helpers.versions import named

from zoo.mamba import randomise

_KERNELS = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", "causal_conv1d_fn",
    "causal_conv1d_update",
)  # fmt: skip
_COMMON: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-3,  # norms of few channels that do not blow rounding errors up
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = {
    "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 3, "linear_value_head_dim": 5,
}  # fmt: skip
_WIDE = {"intermediate_size": 16}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 7,
    "shared_expert_intermediate_size": 9,
    "experts_implementation": "eager",  # the others know no float64
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 2, "linear_num_heads": 2, "linear_head_dim": 5, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 3, "kv_lora_rank": 6,
}  # fmt: skip
LATENT_EXPERTS: dict[str, Any] = {
    **_LATENT, **_WIDE, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 7, "n_group": 2, "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "experts_implementation": "eager",
}  # fmt: skip
INDEXED: dict[str, Any] = {
    "qk_rope_head_dim": 0, "q_lora_rank": 5, "index_topk": 4, "index_kpool": 2, "index_head_dim": 3,
    "index_n_heads": 2, "hc_mult": 2,
}  # fmt: skip

#: Two streams between the layers, and attention to four tokens that an indexer chooses.
_STREAMS: dict[str, Any] = {
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "hc_count": 2,
    "hc_lowrank": 5, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
    "indexer_budget": 4, "indexer_compress_ratio": 2,
}  # fmt: skip
#: By model: mixer class, model class, config class and options.
_CLASSES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextGatedDeltaNet", "Qwen3NextForCausalLM", "Qwen3NextConfig", {
        **GROUPED, **_WIDE, "head_dim": 8, "num_experts": 0,
    }),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {
        **GROUPED, **_WIDE, "head_dim": 8,
    }),
    "qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {
        **GROUPED, **EXPERTS, "head_dim": 8,
    }),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", "OlmoHybridForCausalLM", "OlmoHybridConfig", {
        **GROUPED, **_WIDE, "linear_allow_neg_eigval": True,
    }),
    "kimi_linear": ("KimiLinearDeltaAttention", "KimiLinearForCausalLM", "KimiLinearConfig", {
        **_LATENT, **_WIDE, "mlp_layer_types": ["dense"] * 3,
    }),
    "qwen4_exp": ("Qwen4ExpTextGatedDeltaNet", "Qwen4ExpForCausalLM", "Qwen4ExpTextConfig", {
        **GROUPED, **EXPERTS, **_STREAMS, "head_dim": 8, "output_gate_type": "sigmoid",
    }),
    "bailing_hybrid": (
        "BailingHybridDeltaAttention", "BailingHybridForCausalLM", "BailingHybridConfig",
        {**LATENT_EXPERTS, "num_key_value_heads": None},
    ),
    "glm5_next": (
        "Glm5NextTextLinearAttention", "Glm5NextForConditionalGeneration", "Glm5NextTextConfig",
        {**LATENT_EXPERTS, **INDEXED},
    ),
}  # fmt: skip
#: What a model's configuration calls options of its delta rule otherwise.
_OWN_NAMES = {
    "bailing_hybrid": {
        "linear_num_heads": "num_attention_heads",
        "linear_head_dim": "head_dim",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }
}
FAMILIES = tuple(_CLASSES)
#: Embeddings of pairs and triples of tokens, mixed by a convolution, for the first layer.
N_GRAMS: dict[str, Any] = {
    "ple_layer_ids": [1], "ple_embed_dim": 12, "ple_conv_kernel_size": 3, "ngram_size": 3,
    "heads_per_ngram": 2, "ngram_vocab_size_base": 20, "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 1,
}  # fmt: skip


class Family:
    """The classes of one model, with the functions that fla's kernels replace in their place."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._name = name
        mixer, model, config, self._options = _CLASSES[name]
        self._model, self._config = named(model), named(config)
        modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        without_kernels(modeling, monkeypatch)
        self.mixer_class = getattr(modeling, mixer)

    def config(self, **options: Any) -> Any:
        own = _OWN_NAMES.get(self._name, {})
        options = self._options | options
        return self._config(**_COMMON | {own.get(k, k): v for k, v in options.items()})

    def mixer(self, **options: Any) -> Any:
        return randomise(self.mixer_class(self.config(**options), 0))

    def model(self, **options: Any) -> Any:
        config = self.config(**options)
        if self._name != "glm5_next":
            return randomise(self._model(config))
        model = self._model(_with_vision(config))
        del model.model.visual  # which reads images; these models are given texts
        return randomise(model)


def _with_vision(config: Any) -> Any:
    """The configuration of GLM-5.3-Flash as a whole, of which the text's is a part."""
    small = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8}
    vision = small | {"out_hidden_size": config.hidden_size}
    experts = {"experts_implementation": "eager"}
    return named("Glm5NextConfig")(text_config=config.to_dict(), vision_config=vision, **experts)


def without_kernels(modeling: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model run its own torch functions, not the kernels of fla, also where that is found."""
    for kernel in _KERNELS:
        reference = getattr(modeling, kernel, None)
        while hasattr(reference, "__wrapped__"):
            reference = reference.__wrapped__
        if reference is not None:
            monkeypatch.setattr(modeling, kernel, reference)
