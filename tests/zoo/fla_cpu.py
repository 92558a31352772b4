"""flash-linear-attention (fla) on the CPU.

fla's layers call Triton kernels through module globals. Here those globals are pointed at the
naive references that fla ships beside its kernels, and the fused norms, activations, convolutions
and rotary embeddings at plain torch, so that its own layers and models, unchanged, run forward
and backward without a GPU. References that fla lacks for packed sequences are run one sequence at
a time. Most of them compute in float32 whatever the dtype of the input.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo import fla_references, mamba3_cpu
from zoo.fla_torch import (
    ACTIVATIONS,
    attention,
    convolution,
    convolution_step,
    elu_p1,
    l2norm,
    norm,
    normed,
    one_by_one,
    packed_attention,
    rms_norm,
    rms_norm_gated,
    rms_norm_linear,
    rms_norm_swish_gate_linear,
    swiglu,
    swiglu_linear,
)

SKIP_REASON = "flash-linear-attention needs special install steps, see CONTRIBUTING.md"

LAYERS = {
    "MultiScaleRetention": "multiscale_retention", "HGRNAttention": "hgrn",
    "HGRN2Attention": "hgrn2", "GatedLinearAttention": "gla", "RWKV6Attention": "rwkv6",
    "RWKV7Attention": "rwkv7", "DeltaNet": "delta_net", "GatedDeltaNet": "gated_deltanet",
    "KimiDeltaAttention": "kda", "Mamba": "mamba", "Mamba2": "mamba2", "Mamba3": "mamba3",
    "LinearAttention": "linear_attn", "SimpleGatedLinearAttention": "simple_gla",
    "BasedLinearAttention": "based", "LightNetAttention": "lightnet", "GatedSlotAttention": "gsa",
    "Attention": "attn", **fla_references.LAYERS,
}  # fmt: skip
#: Families of language models, and what makes them small.
MODELS: dict[str, dict[str, Any]] = {
    "RetNet": {"num_heads": 4},
    "HGRN": {},
    "HGRN2": {"expand_ratio": 4},
    "GLA": {"num_heads": 2},
    "RWKV6": {"num_heads": 2, "proj_low_rank_dim": 4},
    "RWKV7": {
        "head_dim": 8, "decay_low_rank_dim": 4, "gate_low_rank_dim": 5, "a_low_rank_dim": 4,
        "v_low_rank_dim": 3, "fuse_norm": False,
    },
    "DeltaNet": {"num_heads": 2},
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 6},
    "KDA": {"num_heads": 2, "head_dim": 6},
    "Mamba": {"state_size": 4},
    "Mamba2": {"state_size": 4, "head_dim": 8, "chunk_size": 4},
    "Mamba3": {"state_size": 8, "head_dim": 8},
    "LinearAttention": {"num_heads": 2, "feature_map": "elu"},
    "LightNet": {"expand_ratio": 8, "gate_low_rank_dim": 4},
    "GSA": {"num_heads": 2, "num_slots": 5},
    "Transformer": {"num_heads": 2, "qk_norm": True},
    "Samba": {
        "state_size": 4,
        "hidden_ratio": 1,
        "attn": {"layers": [1], "num_heads": 2, "window_size": 3},
    },
}  # fmt: skip
#: Layers that know nothing of the place they have in a model.
_PLACELESS = ("BasedLinearAttention",)
#: Families of models whose configuration makes the width of the mixers itself.
_WIDTH_OF_ITS_OWN = ("Mamba", "Mamba2", "Mamba3", "Samba")


# --- small models -----------------------------------------------------------------------------


@torch.no_grad()
def randomise(model: Any) -> Any:
    """Every parameter random: no bias 0, no norm weight 1, no structured decay."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape).to(parameter)
        kind = name.rsplit(".", 1)[-1]
        if "norm" in name and kind == "weight":
            parameter.copy_(1 + 0.3 * noise)
        elif kind in ("bias", "A_log", "dt_bias", "bonus", "mu", "x_bias", "lower_bounds", "k_k"):
            parameter.copy_(0.5 * noise)
        elif "conv1d" in name:
            parameter.copy_(noise / math.sqrt(parameter[0].numel()))
        else:
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
    return model.eval()


class FLA:
    """fla's layers and models on the CPU, small and random."""

    def __init__(self, layers: dict[str, Any]) -> None:
        self.layers = layers

    def layer(self, name: str, **options: Any) -> Any:
        """A layer by its class name."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            place = {} if name in _PLACELESS else {"layer_idx": 0}
            layer = getattr(self.layers[LAYERS[name]], name)
            return randomise(layer(**place | options))

    def model(self, name: str, **options: Any) -> Any:
        """A language model of two layers by its family, such as ``"RetNet"``."""
        small = {
            "vocab_size": 19, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24,
            "fuse_cross_entropy": False,
        }  # fmt: skip
        if name in _WIDTH_OF_ITS_OWN:
            del small["intermediate_size"]
        models = importlib.import_module("fla.models")
        config = getattr(models, f"{name}Config")(**small | MODELS.get(name, {}) | options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return randomise(getattr(models, f"{name}ForCausalLM")(config))


@cache
def _modules() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla warns that there is no GPU
        importlib.import_module("fla.models")
        _give_auto_classes_back()
        layers = {name: importlib.import_module(f"fla.layers.{name}") for name in LAYERS.values()}
        of = importlib.import_module
        return SimpleNamespace(
            layers=layers,
            layernorm=of("fla.modules.norm.layernorm"),
            gated=of("fla.modules.norm.fused_norm_gate"),
            mamba_norm=of("fla.modules.norm.layernorm_gated"),
            feature_map=of("fla.modules.feature_map"),
            conv=of("fla.modules.causal_conv1d.ops"),
            activations=of("fla.modules.activations.ops"),
            rotary=of("fla.modules.rotary.ops"),
            token_shift=of("fla.modules.token_shift"),
            mlp=of("fla.modules.mlp"),
            rwkv6=of("fla.models.rwkv6.modeling_rwkv6"),
            rwkv7=of("fla.models.rwkv7.modeling_rwkv7"),
        )


def _give_auto_classes_back() -> None:
    """Undo what fla does to transformers' Auto classes, which other tests load models by."""
    for module, names in (
        ("configuration_auto", ("CONFIG_MAPPING",)),
        ("modeling_auto", ("MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING")),
    ):
        auto = importlib.import_module(f"transformers.models.auto.{module}")
        for name in names:
            given = getattr(auto, name)._extra_content
            for key in [each for each, value in given.items() if "fla." in str(value)]:
                del given[key]


def install(monkeypatch: pytest.MonkeyPatch) -> FLA:
    """Make fla's layers run on the CPU until ``monkeypatch`` is undone."""
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
        pytest.skip(SKIP_REASON)
    modules = _modules()
    _use_torch(monkeypatch, modules)
    _use_references(monkeypatch, modules.layers)
    fla_references.use(monkeypatch, modules.layers)
    return FLA(modules.layers)


def as_it_is() -> FLA:
    """fla with its own kernels, for Triton's interpreter."""
    return FLA(_modules().layers)


def _use_torch(patch: pytest.MonkeyPatch, modules: SimpleNamespace) -> None:
    layers = modules.layers
    patch.setattr(modules.layernorm, "layer_norm", norm)
    patch.setattr(modules.layernorm, "group_norm", norm)
    patch.setattr(modules.layernorm, "rms_norm", rms_norm)
    patch.setattr(modules.gated, "rms_norm_gated", rms_norm_gated)
    patch.setattr(modules.mamba_norm, "rmsnorm_fn", modules.mamba_norm.rms_norm_ref)
    for name in ("hgrn2", "gsa"):
        patch.setattr(layers[name], "rms_norm_linear", rms_norm_linear)
    patch.setattr(layers["lightnet"], "rms_norm_swish_gate_linear", rms_norm_swish_gate_linear)
    patch.setattr(modules.feature_map, "swish", F.silu)
    for module in (modules.conv, layers["gated_deltanet"]):
        patch.setattr(module, "causal_conv1d", one_by_one(convolution))
    patch.setattr(modules.conv, "causal_conv1d_update", convolution_step)
    for name, function in ACTIVATIONS.items():
        patch.setitem(modules.activations.ACT2FN, name, function)
    patch.setattr(layers["hgrn"], "swiglu", swiglu)
    patch.setattr(layers["hgrn2"], "swish", F.silu)
    for name in ("delta_net", "linear_attn"):
        patch.setattr(layers[name], "elu_p1", elu_p1)
    patch.setattr(modules.mlp, "swiglu", swiglu)
    patch.setattr(modules.mlp, "swiglu_linear", swiglu_linear)
    for module in (layers["rwkv6"], modules.rwkv6):
        patch.setattr(module, "token_shift", modules.token_shift.token_shift_ref)
    shift = one_by_one(modules.token_shift.token_shift_ref)

    def shift_and_last(
        x: Tensor, cu_seqlens: Tensor | None, output_cache: bool, cache: None = None
    ) -> tuple[Tensor, Tensor]:
        assert output_cache and cache is None
        return shift(x=x, cu_seqlens=cu_seqlens), x[:, -1:]

    for module in (layers["rwkv7"], modules.rwkv7):
        patch.setattr(module, "token_shift", shift_and_last)
    ops = "fla.ops.rwkv7"
    for name, package, reference in (
        ("fused_addcmul_rwkv7", "fused_addcmul", "torch_addcmul_rwkv7"),
        ("fused_k_rwkv7", "fused_k_update", "k_update_ref"),
        ("gate_output_correction", "gate_output_correction", "gate_output_correction_ref"),
    ):
        of_torch = getattr(importlib.import_module(f"{ops}.{package}"), reference)
        patch.setattr(layers["rwkv7"], name, of_torch)
    patch.setattr(layers["rwkv7"], "l2_norm", l2norm)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
        assert options.pop("seqlen_offsets") == 0 and options.pop("chunk_indices") is None

        def whole(x: Tensor, interleaved: bool) -> Tensor:
            tokens = x.shape[1]
            return modules.rotary.rotary_embedding_ref(x, cos[:tokens], sin[:tokens], interleaved)

        return one_by_one(whole)(x=x, **options)

    patch.setattr(modules.rotary, "rotary_embedding", rotate)
    patch.setattr(layers["attn"], "flash_attn_func", attention)
    patch.setattr(layers["attn"], "flash_attn_varlen_func", packed_attention, raising=False)
    patch.setattr(layers["mamba3"], "mamba3_siso_combined", packed_scan)
    # its own code, told that it needs another device
    forward = layers["mamba3"].Mamba3.forward
    names = tuple("cpu" if x == "cuda" else x for x in forward.__code__.co_consts)
    patch.setattr(forward, "__code__", forward.__code__.replace(co_consts=names))


def _use_references(patch: pytest.MonkeyPatch, layers: dict[str, Any]) -> None:
    def op(layer: str, name: str, reference: Callable[..., Any]) -> None:
        for form in ("chunk", "fused_recurrent", "fused_chunk", "parallel", "fused_mul_recurrent"):
            if hasattr(layers[layer], f"{form}_{name}"):
                patch.setattr(layers[layer], f"{form}_{name}", one_by_one(reference))

    def naive(package: str, name: str, module: str = "naive") -> Callable[..., Any]:
        return getattr(importlib.import_module(f"fla.ops.{package}.{module}"), name)

    retention = naive("retention", "naive_retention")
    hgrn = naive("hgrn", "naive_recurrent_hgrn")
    gla = naive("gla", "naive_recurrent_gla")
    rwkv6 = naive("rwkv6", "naive_recurrent_rwkv6", "recurrent_naive")
    delta = naive("delta_rule", "delta_rule_recurrence")
    gated_delta = naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")
    gate = naive("gated_delta_rule", "naive_gdn_gate", "gate")
    dplr = naive("generalized_delta_rule.dplr", "dplr_recurrence")
    kda = naive("kda", "naive_recurrent_kda")
    kda_gate = naive("kda", "naive_kda_gate", "gate")
    kda_bounded_gate = naive("kda", "naive_kda_lowerbound_gate", "gate")
    linear = naive("linear_attn", "naive_recurrent_linear_attn")
    simple_gla = naive("simple_gla", "naive_recurrent_simple_gla")
    gsa = naive("gsa", "naive_recurrent_gsa")
    based = naive("based", "naive_parallel_based")

    def head_first(*tensors: Tensor) -> list[Tensor]:
        return [t.transpose(1, 2) for t in tensors]

    def run_delta(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool, **_: Any
    ) -> tuple[Tensor, None]:
        q, k = normed(q, k, is_asked=use_qk_l2norm_in_kernel)
        out = delta(*head_first(q, k, v, beta))[0]
        return out.transpose(1, 2).to(v.dtype), None

    def in_kernel(q: Tensor, k: Tensor, beta: Tensor, options: Any) -> tuple[Tensor, ...]:
        """Queries, keys and steps as the kernels of gated rules make them."""
        for name in ("gate", "beta_sigmoid"):
            assert options[f"use_{name}_in_kernel"]
        beta = torch.sigmoid(beta.float()) * (2 if options["allow_neg_eigval"] else 1)
        return *normed(q, k, is_asked=options["use_qk_l2norm_in_kernel"]), beta

    def run_gated_delta(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        q, k, beta = in_kernel(q, k, beta, options)
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        out = gated_delta(q, k, v, beta, gate(g, options["A_log"], options["dt_bias"]))[0]
        return out.to(v.dtype), None

    def run_rwkv7(
        r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor | None = None,
        kk: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if kk is not None:
            a, b = -kk, kk * a
        given = head_first(r * r.shape[-1] ** 0.5, k, v, a, b, w)  # the reference divides by it
        out = dplr(*(x.float() for x in given))[0]
        return out.transpose(1, 2).to(v.dtype), None

    def run_kda(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        q, k, beta = in_kernel(q, k, beta, options)
        given = g, options["A_log"], options["dt_bias"]
        bound = options["lower_bound"]
        logs = kda_gate(*given) if bound is None else kda_bounded_gate(*given, bound)
        return kda(q, k, v, logs, beta)[0], None

    def run_linear(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        wanted = {name: options[name] for name in ("scale", "normalize") if name in options}
        return linear(q, k, v, **wanted)[0], None

    def lightnet(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, None]:
        total = k.float().logcumsumexp(1)
        before = torch.cat([total[:, :1], total[:, :-1]], 1)
        return gla(q, (k - total).exp(), v, before - total)[0], None

    def run_lightnet(**tensors: Any) -> tuple[Tensor, tuple[None, None]]:
        return one_by_one(lightnet)(**tensors)[0], (None, None)

    op("multiscale_retention", "retention", lambda q, k, v, **_: (
        retention(*head_first(q, k, v)).transpose(1, 2), None
    ))  # fmt: skip
    op("hgrn", "hgrn", lambda x, g, **_: hgrn(x, g))
    for layer in ("gla", "hgrn2"):
        op(layer, "gla", lambda q, k, v, g=None, gk=None, **_: (
            gla(q, k, v, g if gk is None else gk)
        ))  # fmt: skip
    op("rwkv6", "rwkv6", lambda r, k, v, w, u, scale, **_: (
        rwkv6(*head_first(r, k, v, w), u, scale)[0].transpose(1, 2), None
    ))  # fmt: skip
    op("rwkv7", "rwkv7", run_rwkv7)
    op("delta_net", "delta_rule", run_delta)
    op("gated_deltanet", "gated_delta_rule", run_gated_delta)
    op("kda", "kda", run_kda)
    for layer in ("linear_attn", "based"):
        op(layer, "linear_attn", run_linear)
    op("simple_gla", "simple_gla", lambda q, k, v, g, **_: (simple_gla(q, k, v, g)[0], None))
    for form in ("chunk", "fused_recurrent"):
        patch.setattr(layers["lightnet"], f"{form}_lightnet", run_lightnet)
    op("gsa", "gsa", lambda q, k, v, s, g, scale, **_: gsa(q, k, v, s, g, scale))
    op("based", "based", lambda q, k, v, scale, use_norm: (
        based(*head_first(q, k, v), scale, use_norm).transpose(1, 2)
    ))  # fmt: skip


def packed_scan(cu_seqlens: Tensor | None, **operands: Any) -> Tensor:
    """Mamba-3's scan, of packed sequences each alone; some operands have heads before tokens."""
    if cu_seqlens is None:
        return mamba3_cpu.siso(**operands)
    outputs = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        cut = dict(operands)
        for name in ("Q", "K", "V", "Angles", "Z"):
            cut[name] = None if cut[name] is None else cut[name][:, start:end]
        for name in ("ADT", "DT", "Trap"):
            cut[name] = cut[name][..., start:end]
        outputs.append(mamba3_cpu.siso(**cut))
    return torch.cat(outputs, 1)
