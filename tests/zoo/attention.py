"""Small real models of transformers that hold softmax attention, with random parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from helpers.versions import VERSION_4, named, not_in_4, renamed
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from captum_ssm.mixers.registry import adapter_for
from zoo.mamba import randomise

#: Families whose attention the adapter for transformers serves: model, config, options.
_BASE: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 20,
}
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
_IMAGES = {k: v for k, v in _BASE.items() if k != "vocab_size"} | {
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 3,
}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", {**_BASE, "num_labels": 3}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _BASE),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 23,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "attention_bias": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 4}),
    "vit": ("ViTForImageClassification", "ViTConfig", _IMAGES),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _IMAGES),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 3,
            "mamba_dt_rank": 2,
        },
    ),
    "zamba": (
        "ZambaForCausalLM",
        "ZambaConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 5,
            "layers_block_type": [
                "linear_attention",
                "hybrid",
                "linear_attention",
                "hybrid",
                "linear_attention",
            ],
            "mamba_d_state": 3,
            "mamba_dt_rank": 2,
            "n_mamba_heads": 2,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            **_BASE,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "mamba_d_state": 4,
            "mamba_headdim": 8,
            "n_mamba_heads": 4,
            "mamba_ngroups": 2,
            "use_shared_attention_adapter": True,
            "adapter_rank": 3,
            "use_mem_rope": True,
            "num_mem_blocks": 1,
        },
    ),
    "bamba": (
        "BambaForCausalLM",
        "BambaConfig",
        {**_GROUPED, **_MAMBA2, "attn_layer_indices": [1], "attention_bias": True},
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **_GROUPED,
            **_MAMBA2,
            "mamba_d_ssm": 32,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.7,
            "key_multiplier": 0.6,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_GROUPED,
            **_MAMBA2,
            "layer_types": ["linear_attention", "full_attention"],
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "num_local_experts": 0,
            "shared_intermediate_size": 16,
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **{k: v for k, v in _GROUPED.items() if k != "num_hidden_layers"},
            "head_dim": 5,
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 4,
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_GROUPED,
            **_DELTA,
            "head_dim": 8,
            "layer_types": ["full_attention", "full_attention"],
            "num_experts": 0,
        },
    ),
    "qwen3_5": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {
            **_GROUPED,
            **_DELTA,
            "head_dim": 8,
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {
            **{k: v for k, v in _GROUPED.items() if k != "intermediate_size"},
            **_DELTA,
            "head_dim": 8,
            "layer_types": ["full_attention", "full_attention"],
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 7,
            "shared_expert_intermediate_size": 9,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {
            **_GROUPED,
            **_DELTA,
            "layer_types": ["linear_attention", "full_attention"],
            "pad_token_id": 0,
        },
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            **_BASE,
            "num_key_value_heads": 4,
            "layer_types": ["full_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense"],
            "q_lora_rank": None,
            "kv_lora_rank": 6,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 5,
            "pad_token_id": 0,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {
            **_GROUPED,
            "layer_types": ["full_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "full_attn_alpha_factor": 2.0,
            "full_attn_beta_factor": 3.0,
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**_GROUPED, "layer_types": ["full_attention", "full_attention"]},
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {
            **_GROUPED,
            "layer_types": ["full_attention", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 7,
        },
    ),
    "lfm3": (
        "Lfm3ForCausalLM",
        "Lfm3Config",
        {
            **_GROUPED,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "head_dim": 8,
            "pad_token_id": 0,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {
            **_GROUPED,
            "head_dim": 4,
            "attention_window_size": 4,
            "sliding_window": 4,
            "lru_width": 16,
            "block_types": ["attention"],
        },
    ),
}
IMAGES = ("vit", "deit")
TEXTS = tuple(family for family in FAMILIES if family not in IMAGES)
#: Those whose eager attention is refused in version 4 of transformers.
REFUSED_EAGER = ("bert", "gpt2", "jamba")
#: Models of attention alone.
TRANSFORMERS = ("bert", "gpt_neox", "gpt2", "llama", "mistral", "vit", "deit")


def attention_model(family: str, attention: str = "sdpa", **options: Any) -> Any:
    """The family's model with random parameters, running the given attention function."""
    if attention == "eager":
        not_in_4(family, *REFUSED_EAGER)
    model_class, config_class, small = FAMILIES[family]
    config = named(config_class)(**renamed(family, small | options))
    config._experts_implementation = "eager"  # the others know no float64
    model = randomise(named(model_class)(config))
    if model._supports_sdpa or not VERSION_4:
        model.set_attn_implementation(attention)
    for name, module in model.named_modules():
        if name.endswith("linear_attn"):  # runs on a GPU alone, and is not what is tested here
            module.forward = lambda hidden_states, **_: hidden_states
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


def eagerly(model: Any) -> Any:
    """A copy that runs eager attention, so that its modules return their probabilities."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    eager.config.use_cache = False
    for module in eager.modules() if VERSION_4 else ():
        written_out = type(module).__mro__[1]  # a few classes of version 4 choose theirs when made
        if "Sdpa" in type(module).__name__ and written_out is not nn.Module:
            module.__class__ = written_out
        if type(module).__name__ == "JambaAttention":
            module.register_forward_pre_hook(_asked_for_weights, with_kwargs=True)
    return eager


def _asked_for_weights(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"output_attentions": True}


def note_probabilities(module: Any, note: Callable[[Tensor], None]) -> None:
    """Have the probabilities (B, H, L, L) of every call of a module of :func:`eagerly` noted."""
    if type(module).__name__ == "RecurrentGemmaSdpaAttention":  # of version 4, returns none
        forward = module.forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            with _Probabilities(note):
                return forward(*args, **kwargs)

        module.forward = noting
    else:  # the second output; of ViT in version 4, that of a module inside
        inner = getattr(module, "attention", module)
        inner.register_forward_hook(lambda _, __, out: note(out[1]))


class _Probabilities(TorchFunctionMode):
    """Works out the probabilities of torch's own attention."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            scores = args[0] @ args[1].mT * kwargs["scale"] + kwargs["attn_mask"]
            self._note(torch.softmax(scores, -1))
        return func(*args, **kwargs)
