"""The line of registration of every built-in mixer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from .. import __version__

#: How a mixer's output joins the residual stream of its block: added to it; added together with
#: other mixers of the same block that read the same stream; or added only to the input of the
#: mixer that runs next.
Joins = Literal["residual", "parallel", "feeds"]

#: What models of a mixer may be explained by: the decomposition; the methods that fold the layers'
#: operators (ImplicitAttention, ImplicitAttentionRollout, MambaAttribution); and the decomposition
#: of what a model generates.
Ability = Literal["LatimFlow", "fold methods", "generated text"]


class Line(NamedTuple):
    """One mixer class and its adapter.

    Attributes:
        family: the common name of the architecture.
        package: distribution the class comes from.
        path: the class; for transformers short, ``"mamba.MambaMixer"`` standing for
            ``transformers.models.mamba.modeling_mamba.MambaMixer``.
        adapter: module of this package and function.
        joins: how the mixer's output joins the residual stream.
        tested: version of the package that the tests run against, where it is an older one.
            Default: None, that of :data:`VERSIONS`.
        lacks: what models of the mixer are refused, by the reason why. Default: nothing.
        alone: whether the tests know the mixer by itself, and no model around it. Default: False.
    """

    family: str
    package: str
    path: str
    adapter: str
    joins: Joins = "residual"
    tested: str | None = None
    lacks: Mapping[Ability, str] = MappingProxyType({})
    alone: bool = False

    @property
    def class_path(self) -> str:
        """The fully qualified class name."""
        if self.package != "transformers":
            return self.path
        model, name = self.path.split(".")
        return f"transformers.models.{model}.modeling_{model}.{name}"


#: The last version 4, of which some classes were replaced.
TRANSFORMERS_4 = "4.57.6"

#: Versions that the tests run against.
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

_IMAGES: Mapping[Ability, str] = {"generated text": "reads images"}
#: The model's embeddings of n-grams; models that are configured without them are folded.
_N_GRAMS: Mapping[Ability, str] = {"fold methods": "mixes n-grams outside of its mixers"}
_END_TO_END: Mapping[Ability, str] = {
    "fold methods": "reads images end to end",
    "generated text": "reads images",
}

BUILT_IN = (
    Line("Mamba", "transformers", "mamba.MambaMixer", "mamba:hf_mamba"),
    Line("Falcon Mamba", "transformers", "falcon_mamba.FalconMambaMixer", "mamba:hf_mamba"),
    Line("Mamba", "mamba-ssm", "mamba_ssm.modules.mamba_simple.Mamba", "mamba:mamba_ssm_mamba"),
    Line(
        "Vision Mamba",
        "captum-ssm",
        "captum_ssm.models.vim.mixer.VimMixer",
        "vim:vim_mixer",
        lacks=_IMAGES,
    ),
    Line(
        "Caduceus",
        "captum-ssm",
        "captum_ssm.models.dna.caduceus.BiMamba",
        "caduceus:bi_mamba",
        lacks={"generated text": "reads both ways"},
    ),
    Line(
        "Caduceus",
        "captum-ssm",
        "captum_ssm.models.dna.caduceus.StrandsMixer",
        "caduceus:both_strands",
        lacks={"generated text": "reads both ways"},
    ),
    Line("HyenaDNA", "captum-ssm", "captum_ssm.models.dna.hyena.HyenaOperator", "hyena:hyena"),
    Line(
        "StripedHyena 2",
        "captum-ssm",
        "captum_ssm.models.dna.striped_hyena.HyenaCascade",
        "striped_hyena:cascade",
    ),
    Line(
        "StripedHyena 2",
        "captum-ssm",
        "captum_ssm.models.dna.striped_hyena.StripedAttention",
        "striped_hyena:attention",
    ),
    Line(
        "VMamba",
        "captum-ssm",
        "captum_ssm.models.vmamba.mixer.SS2D",
        "vmamba:ss2d",
        lacks=_IMAGES,
    ),
    Line("Jamba", "transformers", "jamba.JambaMambaMixer", "mamba:hf_mamba"),
    Line("Jamba", "transformers", "jamba.JambaAttention", "attention:hf_attention"),
    Line("Zamba", "transformers", "zamba.ZambaMambaMixer", "mamba:hf_zamba"),
    Line("Zamba", "transformers", "zamba.ZambaAttention", "attention:hf_attention", "feeds"),
    Line("Zamba 2", "transformers", "zamba2.Zamba2Attention", "attention:hf_attention", "feeds"),
    Line("Bamba", "transformers", "bamba.BambaAttention", "attention:hf_attention"),
    Line(
        "Falcon-H1",
        "transformers",
        "falcon_h1.FalconH1Attention",
        "attention:falcon_h1_attention",
        "parallel",
    ),
    Line(
        "Granite 4",
        "transformers",
        "granitemoehybrid.GraniteMoeHybridAttention",
        "attention:granite_attention",
    ),
    Line("Nemotron-H", "transformers", "nemotron_h.NemotronHAttention", "attention:hf_attention"),
    Line("Qwen3-Next", "transformers", "qwen3_next.Qwen3NextAttention", "attention:hf_attention"),
    Line("Qwen3.5", "transformers", "qwen3_5.Qwen3_5Attention", "attention:hf_attention"),
    Line("Qwen3.5", "transformers", "qwen3_5_moe.Qwen3_5MoeAttention", "attention:hf_attention"),
    Line(
        "Qwen3.5",
        "transformers",
        "qwen3_5.Qwen3_5VisionAttention",
        "attention:hf_attention",
        lacks=_END_TO_END,
    ),
    Line(
        "Qwen3.5",
        "transformers",
        "qwen3_5_moe.Qwen3_5MoeVisionAttention",
        "attention:hf_attention",
        lacks=_END_TO_END,
    ),
    Line(
        "OLMo Hybrid",
        "transformers",
        "olmo_hybrid.OlmoHybridAttention",
        "attention:hf_attention",
    ),
    Line(
        "Kimi Linear",
        "transformers",
        "kimi_linear.KimiLinearAttention",
        "attention:hf_attention",
    ),
    Line(
        "Ling 3",
        "transformers",
        "bailing_hybrid.BailingHybridAttention",
        "attention:hf_attention",
    ),
    Line(
        "GLM-5.3-Flash",
        "transformers",
        "glm5_next.Glm5NextTextAttention",
        "attention:glm5_next_attention",
    ),
    Line(
        "GLM-5.3-Flash",
        "transformers",
        "glm5_next.Glm5NextVisionAttention",
        "attention:hf_attention",
        lacks=_END_TO_END,
    ),
    Line("MiniMax", "transformers", "minimax.MiniMaxAttention", "attention:minimax_attention"),
    Line("LFM2", "transformers", "lfm2.Lfm2Attention", "attention:hf_attention"),
    Line("LFM2", "transformers", "lfm2_moe.Lfm2MoeAttention", "attention:hf_attention"),
    Line(
        "Griffin",
        "transformers",
        "recurrent_gemma.RecurrentGemmaAttention",
        "attention:hf_attention",
    ),
    Line(
        "Griffin",
        "transformers",
        "recurrent_gemma.RecurrentGemmaSdpaAttention",
        "griffin:sdpa_attention",
        tested=TRANSFORMERS_4,
    ),
    Line(
        "BERT",
        "transformers",
        "bert.BertSelfAttention",
        "attention:hf_attention",
        lacks={"generated text": "reads both ways"},
    ),
    Line("GPT-NeoX", "transformers", "gpt_neox.GPTNeoXAttention", "attention:hf_attention"),
    Line("GPT-2", "transformers", "gpt2.GPT2Attention", "attention:gpt2_attention"),
    Line("Llama", "transformers", "llama.LlamaAttention", "attention:hf_attention"),
    Line("Mistral", "transformers", "mistral.MistralAttention", "attention:hf_attention"),
    Line("ViT", "transformers", "vit.ViTAttention", "attention:vit_attention", lacks=_IMAGES),
    Line("DeiT", "transformers", "deit.DeiTAttention", "attention:vit_attention", lacks=_IMAGES),
    Line(
        "SigLIP",
        "transformers",
        "siglip.SiglipAttention",
        "attention:hf_attention",
        lacks=_IMAGES,
    ),
    Line(
        "SigLIP 2",
        "transformers",
        "siglip2.Siglip2Attention",
        "attention:hf_attention",
        lacks=_IMAGES,
    ),
    Line(
        "Transformer",
        "torch",
        "torch.nn.modules.activation.MultiheadAttention",
        "torch_attention:torch_attention",
    ),
    Line(
        "ViT",
        "timm",
        "timm.layers.attention.Attention",
        "timm_attention:timm_attention",
        lacks=_IMAGES,
    ),
    Line(
        "MambaVision",
        "mambavision",
        "mambavision.models.mamba_vision.MambaVisionMixer",
        "mambavision:mambavision_mixer",
        lacks=_IMAGES,
    ),
    Line(
        "MambaVision",
        "mambavision",
        "mambavision.models.mamba_vision.Attention",
        "mambavision:mambavision_attention",
        lacks=_IMAGES,
    ),
    Line(
        "Griffin",
        "transformers",
        "recurrent_gemma.RecurrentGemmaRecurrentBlock",
        "griffin:recurrent_gemma",
    ),
    Line("RWKV-4", "transformers", "rwkv.RwkvSelfAttention", "rwkv:rwkv4"),
    Line("Qwen3-Next", "transformers", "qwen3_next.Qwen3NextGatedDeltaNet", "delta:qwen3_next"),
    Line("Qwen3.5", "transformers", "qwen3_5.Qwen3_5GatedDeltaNet", "delta:qwen3_5"),
    Line("Qwen3.5", "transformers", "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet", "delta:qwen3_5"),
    Line(
        "Qwen4-Exp",
        "transformers",
        "qwen4_exp.Qwen4ExpTextGatedDeltaNet",
        "delta:qwen3_5",
        lacks=_N_GRAMS,
    ),
    Line(
        "Qwen4-Exp",
        "transformers",
        "qwen4_exp.Qwen4ExpTextAttention",
        "attention:qwen4_exp_attention",
        lacks=_N_GRAMS,
    ),
    Line("OLMo Hybrid", "transformers", "olmo_hybrid.OlmoHybridGatedDeltaNet", "delta:olmo_hybrid"),
    Line("Kimi Linear", "transformers", "kimi_linear.KimiLinearDeltaAttention", "delta:kimi_delta"),
    Line(
        "Ling 3",
        "transformers",
        "bailing_hybrid.BailingHybridDeltaAttention",
        "delta:kimi_delta",
    ),
    Line(
        "GLM-5.3-Flash",
        "transformers",
        "glm5_next.Glm5NextTextLinearAttention",
        "delta:kimi_delta",
    ),
    Line(
        "MiniMax",
        "transformers",
        "minimax.MiniMaxLightningAttention",
        "minimax:lightning_attention",
    ),
    Line("xLSTM", "transformers", "xlstm.xLSTMLayer", "xlstm:mlstm"),
    Line("xLSTM", "xlstm", "xlstm.xlstm_large.model.mLSTMLayer", "xlstm:mlstm"),
    Line("xLSTM", "xlstm", "xlstm.blocks.mlstm.layer.mLSTMLayer", "xlstm:xlstm_mlstm"),
    Line("xLSTM", "xlstm", "xlstm.blocks.slstm.layer.sLSTMLayer", "slstm:xlstm_slstm"),
    Line("LFM2", "transformers", "lfm2.Lfm2ShortConv", "lfm2:short_conv"),
    Line("LFM2", "transformers", "lfm2_moe.Lfm2MoeShortConv", "lfm2:short_conv"),
    Line("LFM3", "transformers", "lfm3.Lfm3ShortConv", "lfm2:short_conv"),
    Line("LFM3", "transformers", "lfm3.Lfm3Attention", "attention:hf_attention"),
    Line(
        "RetNet",
        "flash-linear-attention",
        "fla.layers.multiscale_retention.MultiScaleRetention",
        "fla.retnet:fla_retention",
    ),
    Line("HGRN", "flash-linear-attention", "fla.layers.hgrn.HGRNAttention", "fla.hgrn:fla_hgrn"),
    Line("HGRN2", "flash-linear-attention", "fla.layers.hgrn2.HGRN2Attention", "fla.gla:fla_hgrn2"),
    Line("GLA", "flash-linear-attention", "fla.layers.gla.GatedLinearAttention", "fla.gla:fla_gla"),
    Line(
        "RWKV-6", "flash-linear-attention", "fla.layers.rwkv6.RWKV6Attention", "fla.rwkv6:fla_rwkv6"
    ),
    Line("RWKV-7", "captum-ssm", "captum_ssm.models.rwkv7.mixer.RWKV7TimeMix", "rwkv7:rwkv7"),
    Line(
        "RWKV-7", "flash-linear-attention", "fla.layers.rwkv7.RWKV7Attention", "fla.rwkv7:fla_rwkv7"
    ),
    Line(
        "DeltaNet",
        "flash-linear-attention",
        "fla.layers.delta_net.DeltaNet",
        "fla.delta:fla_delta_net",
    ),
    Line(
        "Gated DeltaNet",
        "flash-linear-attention",
        "fla.layers.gated_deltanet.GatedDeltaNet",
        "fla.delta:fla_gated_delta_net",
    ),
    Line(
        "Gated DeltaProduct",
        "flash-linear-attention",
        "fla.layers.gated_deltaproduct.GatedDeltaProduct",
        "fla.delta_product:fla_gated_delta_product",
    ),
    Line(
        "Comba",
        "flash-linear-attention",
        "fla.layers.comba.Comba",
        "fla.delta_product:fla_comba",
    ),
    Line(
        "MesaNet",
        "flash-linear-attention",
        "fla.layers.mesa_net.MesaNet",
        "fla.mesa_net:fla_mesa_net",
    ),
    Line(
        "PaTH",
        "flash-linear-attention",
        "fla.layers.path_attn.PaTHAttention",
        "fla.path:fla_path",
    ),
    Line(
        "Forgetting Transformer",
        "flash-linear-attention",
        "fla.layers.forgetting_attn.ForgettingAttention",
        "fla.forgetting:fla_forgetting",
    ),
    Line(
        "Log-linear Mamba-2",
        "flash-linear-attention",
        "fla.layers.log_linear_mamba2.LogLinearMamba2",
        "fla.log_linear:fla_log_linear_mamba2",
    ),
    Line(
        "Kimi Delta Attention",
        "flash-linear-attention",
        "fla.layers.kda.KimiDeltaAttention",
        "fla.delta:fla_kda",
    ),
    Line("Mamba", "flash-linear-attention", "fla.layers.mamba.Mamba", "fla.mamba:fla_mamba"),
    Line("Mamba-2", "flash-linear-attention", "fla.layers.mamba2.Mamba2", "fla.mamba:fla_mamba2"),
    Line("Mamba-3", "flash-linear-attention", "fla.layers.mamba3.Mamba3", "fla.mamba:fla_mamba3"),
    Line(
        "Linear attention",
        "flash-linear-attention",
        "fla.layers.linear_attn.LinearAttention",
        "fla.linear_attn:fla_linear_attention",
    ),
    Line(
        "Simple GLA",
        "flash-linear-attention",
        "fla.layers.simple_gla.SimpleGatedLinearAttention",
        "fla.linear_attn:fla_simple_gla",
        alone=True,
    ),
    Line(
        "Based",
        "flash-linear-attention",
        "fla.layers.based.BasedLinearAttention",
        "fla.linear_attn:fla_based",
        alone=True,
    ),
    Line(
        "LightNet",
        "flash-linear-attention",
        "fla.layers.lightnet.LightNetAttention",
        "fla.lightnet:fla_lightnet",
    ),
    Line(
        "GSA",
        "flash-linear-attention",
        "fla.layers.gsa.GatedSlotAttention",
        "fla.gsa:fla_gsa",
    ),
    Line(
        "Transformer",
        "flash-linear-attention",
        "fla.layers.attn.Attention",
        "fla.attention:fla_attention",
    ),
    Line("Mamba-2", "transformers", "mamba2.Mamba2Mixer", "mamba2:hf_mamba2"),
    Line("Bamba", "transformers", "bamba.BambaMixer", "mamba2:hf_mamba2"),
    Line("Zamba 2", "transformers", "zamba2.Zamba2MambaMixer", "mamba2:zamba2_mamba2"),
    Line(
        "Falcon-H1",
        "transformers",
        "falcon_h1.FalconH1Mixer",
        "mamba2:falcon_h1_mamba2",
        "parallel",
    ),
    Line(
        "Granite 4",
        "transformers",
        "granitemoehybrid.GraniteMoeHybridMambaLayer",
        "mamba2:granite_mamba2",
    ),
    Line("Nemotron-H", "transformers", "nemotron_h.NemotronHMamba2Mixer", "mamba2:hf_mamba2"),
    Line(
        "Mamba-2",
        "mamba-ssm",
        "mamba_ssm.modules.mamba2.Mamba2",
        "mamba2_ssm:mamba_ssm_mamba2",
    ),
    Line(
        "Mamba-2",
        "mamba-ssm",
        "mamba_ssm.modules.mamba2_simple.Mamba2Simple",
        "mamba2_ssm:mamba_ssm_mamba2_simple",
        alone=True,
    ),
    Line(
        "Mamba-2",
        "mamba-ssm",
        "mamba_ssm.modules.mha.MHA",
        "mamba_ssm_attention:mamba_ssm_attention",
    ),
    Line("Mamba-3", "mamba-ssm", "mamba_ssm.modules.mamba3.Mamba3", "mamba3:mamba_ssm_mamba3"),
    Line("Mamba", "mambapy", "mambapy.mamba.MambaBlock", "mambapy:mambapy_block"),
    Line("Mamba-2", "mambapy", "mambapy.mamba2.Mamba2Block", "mambapy:mambapy_mamba2_block"),
    Line("Jamba", "mambapy", "mambapy.jamba.AttentionSDPA", "mambapy:mambapy_attention"),
    Line(
        "Vision Mamba",
        "mambapy",
        "mambapy.vim.VMambaBlock",
        "mambapy:mambapy_vision_block",
        lacks=_IMAGES,
    ),
    Line(
        "Mambular",
        "deeptab",
        "deeptab.nn.blocks.mamba.MambaBlock",
        "mambapy:deeptab_block",
        lacks={"generated text": "reads tables"},
    ),
)
