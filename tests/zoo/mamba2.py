"""Small real models of transformers that hold Mamba-2 mixers, with random parameters."""

from __future__ import annotations

from typing import Any

from helpers.versions import named

from zoo.mamba import randomise

INFINITY = float("inf")
#: Added to mean squares: norms of few features must not blow rounding errors up.
EPS = 0.02
_SSM = {"mamba_n_heads": 6, "mamba_d_head": 4, "mamba_n_groups": 2, "mamba_d_state": 5}
_SMALL: dict[str, Any] = {
    "vocab_size": 19, "hidden_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 14, "rms_norm_eps": EPS,
}  # fmt: skip
#: Model, config and options of every family; mixers have D = 24 channels and G = 2 groups.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", {
        "vocab_size": 19, "hidden_size": 12, "num_hidden_layers": 2, "num_heads": 6,
        "head_dim": 4, "n_groups": 2, "state_size": 5, "chunk_size": 8,
        "layer_norm_epsilon": EPS,
    }),
    "bamba": ("BambaForCausalLM", "BambaConfig", {
        **_SMALL, **_SSM, "num_hidden_layers": 3, "attn_layer_indices": [1],
    }),
    "zamba2": ("Zamba2ForCausalLM", "Zamba2Config", {
        **{k: v for k, v in _SMALL.items() if k != "num_key_value_heads"},
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "n_mamba_heads": 6, "mamba_headdim": 4, "mamba_ngroups": 2, "mamba_d_state": 5,
        "num_mem_blocks": 1, "chunk_size": 8, "time_step_min": 0.3,
    }),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", {
        **_SMALL, **_SSM, "num_hidden_layers": 2, "mamba_d_ssm": 24, "mamba_rms_norm": True,
        "mamba_norm_before_gate": True, "ssm_in_multiplier": 1.4, "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.75, 1.25, 0.5, 1.125, 0.875],  # exact in bfloat16 too
        "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.5, "mamba_chunk_size": 8,
    }),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", {
        **_SMALL, **_SSM,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3, "residual_multiplier": 0.4, "num_local_experts": 0,
        "shared_intermediate_size": 16, "mamba_chunk_size": 8,
    }),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig", {
        **{k: v for k, v in _SMALL.items() if k != "rms_norm_eps"}, "head_dim": 6,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 6, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 5,
        "chunk_size": 8, "time_step_min": 0.3, "layer_norm_epsilon": EPS,
    }),
}  # fmt: skip
HYBRIDS = tuple(family for family in FAMILIES if family != "mamba2")
#: What the families call: a bias of in_proj and out_proj, of the convolution, and its width.
OPTIONS = {
    "mamba2": ("use_bias", "use_conv_bias", "conv_kernel", "time_step_limit"),
    "bamba": ("mamba_proj_bias", "mamba_conv_bias", "mamba_d_conv", "time_step_limit"),
    "zamba2": ("add_bias_linear", None, "mamba_d_conv", None),
    "falcon_h1": ("mamba_proj_bias", "mamba_conv_bias", "mamba_d_conv", "time_step_limit"),
    "granitemoehybrid": ("mamba_proj_bias", "mamba_conv_bias", "mamba_d_conv", "time_step_limit"),
    "nemotron_h": ("use_bias", "use_conv_bias", "conv_kernel", None),
}
_CLASSES = (
    "Mamba2Mixer", "BambaMixer", "Zamba2MambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer",
    "NemotronHMamba2Mixer", "Mamba2", "Mamba2Simple",
)  # fmt: skip


def make_model(family: str, **options: Any) -> Any:
    """The family's language model with random parameters."""
    model_class, config_class, small = FAMILIES[family]
    config = named(config_class)(**small | options)
    model = randomise(named(model_class)(config))
    if family == "zamba2":  # not in its configuration
        for name in mixer_names(model):
            assert model.get_submodule(name).norm.variance_epsilon == 1e-5
            model.get_submodule(name).norm.variance_epsilon = EPS
    return model


def mixer_names(model: Any) -> list[str]:
    """The names of the Mamba-2 mixers of a model."""
    return [name for name, m in model.named_modules() if type(m).__name__ in _CLASSES]


def first_mixer(model: Any) -> Any:
    return model.get_submodule(mixer_names(model)[0])
