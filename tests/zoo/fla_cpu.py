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

from zoo import fla_references
from zoo.fla_torch import (
    ACTIVATIONS,
    convolution,
    convolution_step,
    elu_p1,
    l2norm,
    norm,
    one_by_one,
    rms_norm,
    rms_norm_gated,
    rms_norm_linear,
    swiglu,
    swiglu_linear,
)

SKIP_REASON = "flash-linear-attention needs special install steps, see CONTRIBUTING.md"

LAYERS = {
    "MultiScaleRetention": "multiscale_retention",
    "HGRNAttention": "hgrn",
    "HGRN2Attention": "hgrn2",
    "GatedLinearAttention": "gla",
    "RWKV6Attention": "rwkv6",
    "DeltaNet": "delta_net",
    "GatedDeltaNet": "gated_deltanet",
    **fla_references.LAYERS,
}


# --- small models -----------------------------------------------------------------------------


@torch.no_grad()
def randomise(model: Any) -> Any:
    """Every parameter random: no bias 0, no norm weight 1, no structured decay."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape).to(parameter)
        kind = name.rsplit(".", 1)[-1]
        if "norm" in name and kind == "weight":
            parameter.copy_(1 + 0.3 * noise)
        elif kind in ("bias", "A_log", "dt_bias", "bonus", "mu", "x_bias", "lower_bounds"):
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
            return randomise(getattr(self.layers[LAYERS[name]], name)(layer_idx=0, **options))

    def model(self, name: str, **options: Any) -> Any:
        """A language model of two layers by its family, such as ``"RetNet"``."""
        small = {
            "vocab_size": 19,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "intermediate_size": 24,
            "fuse_cross_entropy": False,
        }
        models = importlib.import_module("fla.models")
        config = getattr(models, f"{name}Config")(**small | options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return randomise(getattr(models, f"{name}ForCausalLM")(config))


@cache
def _modules() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla warns that there is no GPU
        importlib.import_module("fla.models")
        layers = {name: importlib.import_module(f"fla.layers.{name}") for name in LAYERS.values()}
        of = importlib.import_module
        return SimpleNamespace(
            layers=layers,
            layernorm=of("fla.modules.norm.layernorm"),
            gated=of("fla.modules.norm.fused_norm_gate"),
            conv=of("fla.modules.causal_conv1d.ops"),
            activations=of("fla.modules.activations.ops"),
            rotary=of("fla.modules.rotary.ops"),
            token_shift=of("fla.modules.token_shift"),
            mlp=of("fla.modules.mlp"),
            rwkv6=of("fla.models.rwkv6.modeling_rwkv6"),
        )


def install(monkeypatch: pytest.MonkeyPatch) -> FLA:
    """Make fla's layers run on the CPU until ``monkeypatch`` is undone."""
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
        pytest.skip(SKIP_REASON)
    modules = _modules()
    _use_torch(monkeypatch, modules)
    _use_references(monkeypatch, modules.layers)
    fla_references.use(monkeypatch, modules.layers)
    return FLA(modules.layers)


def _use_torch(patch: pytest.MonkeyPatch, modules: SimpleNamespace) -> None:
    layers = modules.layers
    patch.setattr(modules.layernorm, "layer_norm", norm)
    patch.setattr(modules.layernorm, "group_norm", norm)
    patch.setattr(modules.layernorm, "rms_norm", rms_norm)
    patch.setattr(modules.gated, "rms_norm_gated", rms_norm_gated)
    patch.setattr(layers["hgrn2"], "rms_norm_linear", rms_norm_linear)
    for module in (modules.conv, layers["gated_deltanet"]):
        patch.setattr(module, "causal_conv1d", one_by_one(convolution))
    patch.setattr(modules.conv, "causal_conv1d_update", convolution_step)
    for name, function in ACTIVATIONS.items():
        patch.setitem(modules.activations.ACT2FN, name, function)
    patch.setattr(layers["hgrn"], "swiglu", swiglu)
    patch.setattr(layers["hgrn2"], "swish", F.silu)
    patch.setattr(layers["delta_net"], "elu_p1", elu_p1)
    patch.setattr(modules.mlp, "swiglu", swiglu)
    patch.setattr(modules.mlp, "swiglu_linear", swiglu_linear)
    for module in (layers["rwkv6"], modules.rwkv6):
        patch.setattr(module, "token_shift", modules.token_shift.token_shift_ref)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
        assert options.pop("seqlen_offsets") == 0 and options.pop("chunk_indices") is None

        def whole(x: Tensor, interleaved: bool) -> Tensor:
            tokens = x.shape[1]
            return modules.rotary.rotary_embedding_ref(x, cos[:tokens], sin[:tokens], interleaved)

        return one_by_one(whole)(x=x, **options)

    patch.setattr(modules.rotary, "rotary_embedding", rotate)


def _use_references(patch: pytest.MonkeyPatch, layers: dict[str, Any]) -> None:
    def op(layer: str, name: str, reference: Callable[..., Any]) -> None:
        for form in ("chunk", "fused_recurrent", "fused_chunk", "parallel"):
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

    def head_first(*tensors: Tensor) -> list[Tensor]:
        return [t.transpose(1, 2) for t in tensors]

    def run_retention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, None]:
        return retention(*head_first(q, k, v)).transpose(1, 2), None

    def run_gla(
        q: Tensor, k: Tensor, v: Tensor, g: Any = None, gk: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        return gla(q, k, v, g if gk is None else gk)

    def run_rwkv6(
        r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float, **_: Any
    ) -> tuple[Tensor, None]:
        return rwkv6(*head_first(r, k, v, w), u, scale)[0].transpose(1, 2), None

    def run_delta(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool, **_: Any
    ) -> tuple[Tensor, None]:
        if use_qk_l2norm_in_kernel:
            q, k = l2norm(q.float()), l2norm(k.float())
        out = delta(*head_first(q, k, v, beta))[0]
        return out.transpose(1, 2).to(v.dtype), None

    def run_gated_delta(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        allow_neg_eigval: bool,
        **options: Any,
    ) -> tuple[Tensor, None]:
        for name in ("qk_l2norm", "gate", "beta_sigmoid"):
            assert options[f"use_{name}_in_kernel"]
        shared = v.shape[2] // q.shape[2]
        q, k = (l2norm(x.float()).repeat_interleave(shared, 2) for x in (q, k))
        beta = torch.sigmoid(beta.float()) * (2 if allow_neg_eigval else 1)
        out = gated_delta(q, k, v, beta, gate(g, A_log, dt_bias))[0]
        return out.to(v.dtype), None

    def run_hgrn(x: Tensor, g: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hgrn(x, g)

    op("multiscale_retention", "retention", run_retention)
    op("hgrn", "hgrn", run_hgrn)
    op("gla", "gla", run_gla)
    op("hgrn2", "gla", run_gla)
    op("rwkv6", "rwkv6", run_rwkv6)
    op("delta_net", "delta_rule", run_delta)
    op("gated_deltanet", "gated_delta_rule", run_gated_delta)
