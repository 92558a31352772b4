"""Naive references of flash-linear-attention for the layers that its other stand-ins leave out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.fla_torch import convolution, l2norm, normed, one_by_one

LAYERS = {
    "GatedDeltaProduct": "gated_deltaproduct", "Comba": "comba", "MesaNet": "mesa_net",
    "PaTHAttention": "path_attn", "ForgettingAttention": "forgetting_attn",
    "LogLinearMamba2": "log_linear_mamba2",
}  # fmt: skip
#: Small models of them, by family.
MODELS: dict[str, dict[str, Any]] = {
    "GatedDeltaProduct": {
        "num_heads": 2, "head_dim": 5, "expand_v": 1.2, "num_householder": 2,
        "use_forget_gate": True,
    },
    "Comba": {"num_heads": 2, "head_dim": 5, "expand_v": 1.2},
    "MesaNet": {"num_heads": 2, "head_dim": 5, "use_output_gate": True},
    "PaTHAttention": {"num_heads": 4, "num_kv_heads": 2, "use_forget_gate": True},
    "ForgettingTransformer": {"num_heads": 4, "num_kv_heads": 2, "use_output_gate": True},
    "LogLinearMamba2": {"num_heads": 4, "head_dim": 8, "state_size": 3, "n_groups": 2},
}  # fmt: skip


def use(patch: pytest.MonkeyPatch, layers: dict[str, Any]) -> None:
    """Have the layers call these until ``patch`` is undone."""
    product = layers["gated_deltaproduct"]
    patch.setattr(product, "chunk_gated_delta_product", _product)
    patch.setattr(product, "fused_recurrent_gated_delta_rule", one_by_one(_delta_rule))
    for form in ("chunk", "fused_recurrent"):
        patch.setattr(layers["comba"], f"{form}_comba", one_by_one(_comba))
    patch.setattr(layers["mesa_net"], "chunk_mesa_net", _mesa_net)
    patch.setattr(layers["path_attn"], "parallel_path_attn", one_by_one(_path))
    patch.setattr(layers["path_attn"], "l2_norm", lambda x, output_dtype: l2norm(x.float()))
    patch.setattr(layers["forgetting_attn"], "parallel_forgetting_attn", _forgetting)
    _use_log_linear(patch, layers["log_linear_mamba2"])


def _naive(package: str, name: str) -> Callable[..., Any]:
    reference: Callable[..., Any] = getattr(
        importlib.import_module(f"fla.ops.{package}.naive"), name
    )
    return reference


def _product(
    q: Tensor, k: Tensor, g: Tensor | None, use_qk_l2norm_in_kernel: bool, **options: Any
) -> Any:
    naive = _naive("gated_delta_product", "naive_recurrent_gated_delta_product")
    dtype, scale = options["v"].dtype, q.shape[-1] ** -0.5
    q, k = normed(q, k, is_asked=use_qk_l2norm_in_kernel)
    out = naive(q, k, g=g, scale=scale, **options)[0]
    return out.to(dtype), None


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, *,
    use_qk_l2norm_in_kernel: bool, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    naive = _naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")
    g = torch.zeros_like(beta) if g is None else g
    q, k = normed(q, k, is_asked=use_qk_l2norm_in_kernel)
    return naive(q, k, v, beta, g)[0].to(v.dtype), None


def _comba(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, *,
    use_qk_l2norm_in_kernel: bool, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """By the reference in chunks; that of single steps, as no kernel, decays and then erases."""
    shared = v.shape[2] // q.shape[2]
    vectors = normed(q, k, p, is_asked=use_qk_l2norm_in_kernel)
    q, k, p = (x.repeat_interleave(shared, 2) for x in vectors)
    out = _naive("comba", "naive_chunk_comba")(q, k, v, p, g, beta)[0]
    return out.to(v.dtype), None


def _mesa_net(**tensors: Any) -> tuple[Tensor, None, None]:
    def whole(
        q: Tensor, k: Tensor, v: Tensor, lamb: Tensor, max_CG_iteration: int, **others: Any
    ) -> Tensor:
        q, k = l2norm(q.float()), l2norm(k.float())
        naive = _naive("mesa_net", "naive_mesa_net_CG")
        gates = others["g"], lamb, others["beta"]
        return naive(q, k, v, *gates, q.shape[1], max_CG_iteration)[0].to(v.dtype)

    return one_by_one(whole)(**tensors), None, None


def _path(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, g: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    g = torch.zeros_like(q[..., 0]) if g is None else g
    naive = _naive("path_attn", "naive_path_attn")
    return naive(q, k, v, w, beta, g, q.shape[-1] ** -0.5, chunk_size=8), None


def _forgetting(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    naive = one_by_one(_naive("forgetting_attn", "naive_forgetting_attn"))
    return naive(cu_seqlens=cu_seqlens, q=q, k=k, v=v, g=g).to(q.dtype)


def _use_log_linear(patch: pytest.MonkeyPatch, layer: Any) -> None:
    naive = _naive("log_linear_attn", "naive_log_linear_attn")

    def levels(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, level_scales: Tensor, scale: float, **_: Any
    ) -> tuple[Tensor, None]:
        tensors = (x.float() for x in (q, k, v, g, level_scales))
        return naive(*tensors, scale).to(v.dtype), None

    patch.setattr(layer, "chunk_log_linear_attn", levels)
    patch.setattr(importlib.import_module("fla.modules.convolution"), "causal_conv1d", convolution)
    # its own code, told that it needs another device
    forward = layer.LogLinearMamba2.forward
    names = tuple("cpu" if x == "cuda" else x for x in forward.__code__.co_consts)
    patch.setattr(forward, "__code__", forward.__code__.replace(co_consts=names))
