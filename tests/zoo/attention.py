"""Small real models of transformers that hold softmax attention, with random parameters."""

from __future__ import annotations

from typing import Any

from helpers.versions import named

from captum_ssm.mixers.registry import adapter_for
from zoo import delta
from zoo.mamba import randomise

#: Families whose attention the adapter for transformers serves: model, config, options.
_BASE: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 20,
}  # fmt: skip
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_IMAGES = {k: v for k, v in _BASE.items() if k != "vocab_size"} | {
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 3,
}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", {**_BASE, "num_labels": 3}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _BASE),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 4, "bos_token_id": 0,
        "eos_token_id": 0, "scale_attn_by_inverse_layer_idx": True,
    }),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "attention_bias": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 4}),
    "vit": ("ViTForImageClassification", "ViTConfig", _IMAGES),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _IMAGES),
    "jamba": ("JambaForCausalLM", "JambaConfig", {
        **_GROUPED, "num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1,
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 3, "mamba_dt_rank": 2,
    }),
    "zamba": ("ZambaForCausalLM", "ZambaConfig", {
        **_GROUPED, "num_hidden_layers": 5, "mamba_d_state": 3, "mamba_dt_rank": 2,
        "n_mamba_heads": 2,
        "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"],
    }),
    "zamba2": ("Zamba2ForCausalLM", "Zamba2Config", {
        **_BASE, "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "mamba_d_state": 4, "mamba_headdim": 8, "n_mamba_heads": 4, "mamba_ngroups": 2,
        "use_shared_attention_adapter": True, "adapter_rank": 3, "use_mem_rope": True,
        "num_mem_blocks": 1,
    }),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {
        **delta.GROUPED, **delta.EXPERTS,
        **{k: v for k, v in _GROUPED.items() if k != "intermediate_size"}, "head_dim": 8,
        "layer_types": ["full_attention", "full_attention"],
    }),
    "minimax": ("MiniMaxForCausalLM", "MiniMaxConfig", {
        **_GROUPED, "layer_types": ["full_attention", "full_attention"], "num_local_experts": 2,
        "num_experts_per_tok": 1, "full_attn_alpha_factor": 2.0, "full_attn_beta_factor": 3.0,
    }),
}  # fmt: skip
IMAGES = ("vit", "deit")


def attention_model(family: str, attention: str = "sdpa", **options: Any) -> Any:
    """The family's model with random parameters, running the given attention function."""
    model_class, config_class, small = FAMILIES[family]
    config = named(config_class)(**small | options)
    config._experts_implementation = "eager"  # the others know no float64
    model = randomise(named(model_class)(config))
    model.set_attn_implementation(attention)
    return model


def attention_names(model: Any) -> list[str]:
    """Names of the model's modules of softmax attention."""
    found = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        softmax = "Lightning" not in kind and "Delta" not in kind
        if kind.endswith("Attention") and softmax and adapter_for(module) is not None:
            found.append(name)
    return found
