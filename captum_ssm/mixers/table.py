"""The table of built-in mixers, and the versions that they are tested with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .. import __version__

#: How a mixer's output is added to the residual stream: by itself; together with other mixers of
#: the same block that have the same input; or only to the input of the mixer that runs next.
Joins = Literal["residual", "parallel", "feeds"]

#: Ways to explain a model: LatimFlow; the methods that multiply the layers' matrices
#: (ImplicitAttention, ImplicitAttentionRollout, MambaAttribution); and explanations of generated
#: text.
Ability = Literal["LatimFlow", "fold methods", "generated text"]


@dataclass(frozen=True)
class Architecture:
    """One supported mixer class.

    Attributes:
        family: name of the architecture, such as ``"Mamba"``.
        package: name of the distribution that contains the class, such as ``"transformers"``.
        class_path: fully qualified name of the mixer class.
        tested_version: version of the package in tests. Default: ``""``, for a user's class.
        joins: how the mixer's output is added to the residual stream; see
            :func:`~captum_ssm.register_mixer`. Default: ``"residual"``.
        lacks: which of ``"LatimFlow"``, ``"fold methods"`` (ImplicitAttention and the rollouts) and
            ``"generated text"`` do not support its models, with the reason. Default: none.
        alone: whether tests cover only the mixer, without a model around it. Default: False.
        like: full name of the class whose adapter it uses; see
            :func:`~captum_ssm.register_mixer`. Default: ``""``, its own adapter.

    Example:
        >>> from captum_ssm.mixers import supported_architectures
        >>> sorted({a.package for a in supported_architectures() if a.family == "Mamba"})
        ['flash-linear-attention', 'mamba-ssm', 'mambapy', 'transformers']
    """

    family: str
    package: str
    class_path: str
    tested_version: str = ""
    joins: Joins = "residual"
    lacks: Mapping[Ability, str] = field(default_factory=dict, hash=False)
    alone: bool = False
    like: str = ""


#: The last version 4 of transformers; some of its classes were replaced in version 5.
TRANSFORMERS_4 = "4.57.6"

#: Versions of packages in the tests.
VERSIONS = {
    "captum-ssm": __version__,
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "mamba-ssm": "2.3.2",
    "timm": "1.0.31",
    "mambavision": "1.2.0",
    "flash-linear-attention": "0.6.0",
    "xlstm": "2.0.6",
    "mambapy": "1.2.0",
    "deeptab": "2.1.0",
}

#: What models with some mixers do not support, and the reason, by an option of :data:`_TABLE`.
_LACKS: dict[str, Mapping[Ability, str]] = {
    "both ways": {"generated text": "reads both ways"},
    "images": {"generated text": "reads images"},
    "tables": {"generated text": "reads tables"},
    # embeddings of n-grams; fold methods support models that are configured without them
    "n-grams": {"fold methods": "mixes n-grams outside of its mixers"},
    "end to end": {"fold methods": "reads images end to end", "generated text": "reads images"},
}

#: One line per mixer: family, class, adapter, and options.
_TABLE = """
Mamba, mamba.MambaMixer, mamba:hf_mamba
Falcon Mamba, falcon_mamba.FalconMambaMixer, mamba:hf_mamba
Mamba, mamba_ssm.modules.mamba_simple.Mamba, mamba:mamba_ssm_mamba
Vision Mamba, captum_ssm.models.vim.mixer.VimMixer, vim:vim_mixer, images
Caduceus, captum_ssm.models.dna.caduceus.BiMamba, vim:bi_mamba, both ways
Caduceus, captum_ssm.models.dna.caduceus.StrandsMixer, vim:both_strands, both ways
HyenaDNA, captum_ssm.models.dna.hyena.HyenaOperator, hyena:hyena
StripedHyena 2, captum_ssm.models.dna.striped_hyena.HyenaCascade, hyena:cascade
StripedHyena 2, captum_ssm.models.dna.striped_hyena.StripedAttention, hyena:attention
VMamba, captum_ssm.models.vmamba.mixer.SS2D, vmamba:ss2d, images
Jamba, jamba.JambaMambaMixer, mamba:hf_mamba
Jamba, jamba.JambaAttention, attention:hf_attention
Zamba, zamba.ZambaMambaMixer, mamba:hf_zamba
Zamba, zamba.ZambaAttention, attention:hf_attention, feeds
Zamba 2, zamba2.Zamba2Attention, attention:hf_attention, feeds
Bamba, bamba.BambaAttention, attention:hf_attention
Falcon-H1, falcon_h1.FalconH1Attention, attention:falcon_h1_attention, parallel
Granite 4, granitemoehybrid.GraniteMoeHybridAttention, attention:granite_attention
Nemotron-H, nemotron_h.NemotronHAttention, attention:hf_attention
Qwen3-Next, qwen3_next.Qwen3NextAttention, attention:hf_attention
Qwen3.5, qwen3_5.Qwen3_5Attention, attention:hf_attention
Qwen3.5, qwen3_5_moe.Qwen3_5MoeAttention, attention:hf_attention
Qwen3.5, qwen3_5.Qwen3_5VisionAttention, attention:hf_attention, end to end
Qwen3.5, qwen3_5_moe.Qwen3_5MoeVisionAttention, attention:hf_attention, end to end
OLMo Hybrid, olmo_hybrid.OlmoHybridAttention, attention:hf_attention
Kimi Linear, kimi_linear.KimiLinearAttention, attention:hf_attention
Ling 3, bailing_hybrid.BailingHybridAttention, attention:hf_attention
GLM-5.3-Flash, glm5_next.Glm5NextTextAttention, attention:glm5_next_attention
GLM-5.3-Flash, glm5_next.Glm5NextVisionAttention, attention:hf_attention, end to end
MiniMax, minimax.MiniMaxAttention, attention:minimax_attention
LFM2, lfm2.Lfm2Attention, attention:hf_attention
LFM2, lfm2_moe.Lfm2MoeAttention, attention:hf_attention
Griffin, recurrent_gemma.RecurrentGemmaAttention, attention:hf_attention
Griffin, recurrent_gemma.RecurrentGemmaSdpaAttention, griffin:sdpa_attention, transformers 4
BERT, bert.BertSelfAttention, attention:hf_attention, both ways
GPT-NeoX, gpt_neox.GPTNeoXAttention, attention:hf_attention
GPT-2, gpt2.GPT2Attention, attention:gpt2_attention
Llama, llama.LlamaAttention, attention:hf_attention
Mistral, mistral.MistralAttention, attention:hf_attention
ViT, vit.ViTAttention, attention:vit_attention, images
DeiT, deit.DeiTAttention, attention:vit_attention, images
SigLIP, siglip.SiglipAttention, attention:hf_attention, images
SigLIP 2, siglip2.Siglip2Attention, attention:hf_attention, images
Transformer, torch.nn.modules.activation.MultiheadAttention, package_attention:torch_attention
ViT, timm.layers.attention.Attention, package_attention:timm_attention, images
MambaVision, mambavision.models.mamba_vision.MambaVisionMixer, mambavision:mambavision_mixer, images
MambaVision, mambavision.models.mamba_vision.Attention, mambavision:mambavision_attention, images
Griffin, recurrent_gemma.RecurrentGemmaRecurrentBlock, griffin:recurrent_gemma
RWKV-4, rwkv.RwkvSelfAttention, rwkv:rwkv4
Qwen3-Next, qwen3_next.Qwen3NextGatedDeltaNet, delta:qwen3_next
Qwen3.5, qwen3_5.Qwen3_5GatedDeltaNet, delta:qwen3_5
Qwen3.5, qwen3_5_moe.Qwen3_5MoeGatedDeltaNet, delta:qwen3_5
Qwen4-Exp, qwen4_exp.Qwen4ExpTextGatedDeltaNet, delta:qwen3_5, n-grams
Qwen4-Exp, qwen4_exp.Qwen4ExpTextAttention, attention:qwen4_exp_attention, n-grams
OLMo Hybrid, olmo_hybrid.OlmoHybridGatedDeltaNet, delta:olmo_hybrid
Kimi Linear, kimi_linear.KimiLinearDeltaAttention, delta:kimi_delta
Ling 3, bailing_hybrid.BailingHybridDeltaAttention, delta:kimi_delta
GLM-5.3-Flash, glm5_next.Glm5NextTextLinearAttention, delta:kimi_delta
MiniMax, minimax.MiniMaxLightningAttention, minimax:lightning_attention
xLSTM, xlstm.xLSTMLayer, xlstm:mlstm
xLSTM, xlstm.xlstm_large.model.mLSTMLayer, xlstm:mlstm
xLSTM, xlstm.blocks.mlstm.layer.mLSTMLayer, xlstm:xlstm_mlstm
xLSTM, xlstm.blocks.slstm.layer.sLSTMLayer, xlstm:xlstm_slstm
LFM2, lfm2.Lfm2ShortConv, lfm2:short_conv
LFM2, lfm2_moe.Lfm2MoeShortConv, lfm2:short_conv
LFM3, lfm3.Lfm3ShortConv, lfm2:short_conv
LFM3, lfm3.Lfm3Attention, attention:hf_attention
RetNet, fla.layers.multiscale_retention.MultiScaleRetention, fla.linear:fla_retention
HGRN, fla.layers.hgrn.HGRNAttention, fla.gated:fla_hgrn
HGRN2, fla.layers.hgrn2.HGRN2Attention, fla.gated:fla_hgrn2
GLA, fla.layers.gla.GatedLinearAttention, fla.linear:fla_gla
RWKV-6, fla.layers.rwkv6.RWKV6Attention, fla.rwkv:fla_rwkv6
RWKV-7, captum_ssm.models.rwkv7.mixer.RWKV7TimeMix, rwkv:rwkv7
RWKV-7, fla.layers.rwkv7.RWKV7Attention, fla.rwkv:fla_rwkv7
DeltaNet, fla.layers.delta_net.DeltaNet, fla.delta:fla_delta_net
Gated DeltaNet, fla.layers.gated_deltanet.GatedDeltaNet, fla.delta:fla_gated_delta_net
Gated DeltaProduct, fla.layers.gated_deltaproduct.GatedDeltaProduct, fla.delta:fla_delta_product
Comba, fla.layers.comba.Comba, fla.delta:fla_comba
MesaNet, fla.layers.mesa_net.MesaNet, fla.mesa_net:fla_mesa_net
PaTH, fla.layers.path_attn.PaTHAttention, fla.attention:fla_path
Forgetting Transformer, fla.layers.forgetting_attn.ForgettingAttention, fla.attention:fla_forgetting
Log-linear Mamba-2, fla.layers.log_linear_mamba2.LogLinearMamba2, fla.mamba:fla_log_linear_mamba2
Kimi Delta Attention, fla.layers.kda.KimiDeltaAttention, fla.delta:fla_kda
Mamba, fla.layers.mamba.Mamba, fla.mamba:fla_mamba
Mamba-2, fla.layers.mamba2.Mamba2, fla.mamba:fla_mamba2
Mamba-3, fla.layers.mamba3.Mamba3, fla.mamba:fla_mamba3
Linear attention, fla.layers.linear_attn.LinearAttention, fla.linear:fla_linear_attention
Simple GLA, fla.layers.simple_gla.SimpleGatedLinearAttention, fla.linear:fla_simple_gla, alone
Based, fla.layers.based.BasedLinearAttention, fla.linear:fla_based, alone
LightNet, fla.layers.lightnet.LightNetAttention, fla.gated:fla_lightnet
GSA, fla.layers.gsa.GatedSlotAttention, fla.gated:fla_gsa
Transformer, fla.layers.attn.Attention, fla.attention:fla_attention
Mamba-2, mamba2.Mamba2Mixer, mamba2:hf_mamba2
Bamba, bamba.BambaMixer, mamba2:hf_mamba2
Zamba 2, zamba2.Zamba2MambaMixer, mamba2:zamba2_mamba2
Falcon-H1, falcon_h1.FalconH1Mixer, mamba2:falcon_h1_mamba2, parallel
Granite 4, granitemoehybrid.GraniteMoeHybridMambaLayer, mamba2:granite_mamba2
Nemotron-H, nemotron_h.NemotronHMamba2Mixer, mamba2:hf_mamba2
Mamba-2, mamba_ssm.modules.mamba2.Mamba2, mamba2:mamba_ssm_mamba2
Mamba-2, mamba_ssm.modules.mamba2_simple.Mamba2Simple, mamba2:mamba_ssm_mamba2_simple, alone
Mamba-2, mamba_ssm.modules.mha.MHA, package_attention:mamba_ssm_attention
Mamba-3, mamba_ssm.modules.mamba3.Mamba3, mamba3:mamba_ssm_mamba3
Mamba, mambapy.mamba.MambaBlock, mambapy:mambapy_block
Mamba-2, mambapy.mamba2.Mamba2Block, mamba2:mambapy_mamba2_block
Jamba, mambapy.jamba.AttentionSDPA, mambapy:mambapy_attention
Vision Mamba, mambapy.vim.VMambaBlock, mambapy:mambapy_vision_block, images
Mambular, deeptab.nn.blocks.mamba.MambaBlock, mambapy:deeptab_block, tables
"""


def _architecture(family: str, path: str, options: list[str]) -> Architecture:
    """Return the Architecture of a table line; a path with one dot is a class of transformers."""
    package = path.split(".")[0].replace("_", "-")
    if path.count(".") == 1:
        model, name = path.split(".")
        package, path = "transformers", f"transformers.models.{model}.modeling_{model}.{name}"
    package = "flash-linear-attention" if package == "fla" else package
    tested = TRANSFORMERS_4 if "transformers 4" in options else VERSIONS[package]
    joins: Joins = "parallel" if "parallel" in options else "residual"
    joins = "feeds" if "feeds" in options else joins
    lacks = next((_LACKS[option] for option in options if option in _LACKS), {})
    return Architecture(family, package, path, tested, joins, lacks, "alone" in options)


_LINES = [line.split(", ") for line in _TABLE.strip().splitlines()]
#: The built-in mixers.
BUILT_IN = tuple(_architecture(family, path, options) for family, path, _, *options in _LINES)
#: The adapters by class path, as ``"module:function"`` in this package.
ADAPTERS = {own.class_path: line[2] for own, line in zip(BUILT_IN, _LINES, strict=True)}
