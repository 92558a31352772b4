"""Models of which :mod:`oracles.frozen_network` writes down the matrices."""

from __future__ import annotations

from typing import Any

from oracles import frozen_network as frozen
from zoo import attention
from zoo import mamba2 as mamba2_models
from zoo.small import mamba_lm


def mamba() -> tuple[Any, ...]:
    model = mamba_lm(num_hidden_layers=2, use_bias=True)
    norms = [block.norm for block in model.backbone.layers]
    return model, frozen.mamba_layers, norms, [], model.backbone.norm_f


def mamba2() -> tuple[Any, ...]:
    model = mamba2_models.make_model("mamba2")
    norms = [block.norm for block in model.backbone.layers]
    return model, frozen.mamba_layers, norms, [], model.backbone.norm_f


def decoder(model: Any, final: Any) -> tuple[Any, ...]:
    model.set_attn_implementation("eager")
    layers = model.model.layers
    norms = [n for layer in layers for n in (layer.input_layernorm, frozen.second_norm(layer))]
    attentions = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    return model, frozen.decoder_layers, norms, attentions, final


def llama() -> tuple[Any, ...]:
    model = attention.attention_model("llama", rms_norm_eps=0.02)
    return decoder(model, model.model.norm)


def bamba() -> tuple[Any, ...]:
    model = mamba2_models.make_model("bamba")
    return decoder(model, model.model.final_layernorm)


def gpt_neox() -> tuple[Any, ...]:
    model = attention.attention_model("gpt_neox", "eager")
    layers = model.gpt_neox.layers
    norms = [n for x in layers for n in (x.input_layernorm, x.post_attention_layernorm)]
    own = [layer.attention for layer in layers]
    return model, frozen.parallel_layers, norms, own, model.gpt_neox.final_layer_norm


#: Networks, and the error allowed: all but GPT-NeoX compute norms in float32.
NETWORKS = {mamba: 1e-5, mamba2: 1e-5, llama: 1e-5, bamba: 1e-5, gpt_neox: 1e-10}
