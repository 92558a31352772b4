"""Plain torch for what flash-linear-attention computes in fused kernels.

These take the arguments that fla's layers pass, in its own names, and compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def one_by_one(reference: Callable[..., Any], dim: int = 1) -> Callable[..., Any]:
    """A reference that also takes ``cu_seqlens``, by running each packed sequence alone."""

    def op(cu_seqlens: Tensor | None = None, **tensors: Any) -> Any:
        if cu_seqlens is None:
            return reference(**tensors)
        parts = []
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            if end > start:
                cut = {
                    name: t.narrow(dim, start, end - start)
                    if isinstance(t, Tensor) and t.dim() >= 3
                    else t
                    for name, t in tensors.items()
                }
                parts.append(reference(**cut))
        if isinstance(parts[0], Tensor):
            return torch.cat(parts, dim)
        return torch.cat([part[0] for part in parts], dim), None

    return op


def activated(x: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return x
    return torch.sigmoid(x) if activation == "sigmoid" else F.silu(x)


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    residual: None = None, initial_state: None = None, output_final_state: bool = False,
    backend: str = "triton", chunk_indices: None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """fla's causal_conv1d for ``x`` (B, L, C) and ``weight`` (C, K), its state for a cache."""
    assert residual is None and initial_state is None
    channels, width = weight.shape
    padded = F.pad(x.float().transpose(1, 2), (width - 1, 0))
    bias = None if bias is None else bias.float()
    out = F.conv1d(padded, weight.float()[:, None], bias, groups=channels)
    state = padded[..., -width:].to(x.dtype) if output_final_state else None
    return activated(out.transpose(1, 2), activation).to(x.dtype), state


def convolution_step(
    x: Tensor, cache: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, **_: Any
) -> tuple[Tensor, Tensor]:
    """fla's causal_conv1d_update, called for sequences of one token; the cache holds zeros."""
    assert not cache.any()
    out = x.float() * weight.float()[:, -1]
    out = out if bias is None else out + bias.float()
    return activated(out, activation).to(x.dtype), cache


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, residual: Tensor | None = None,
    eps: float = 1e-5, prenorm: bool = False, residual_in_fp32: bool = False,
    is_rms_norm: bool = False, num_groups: int = 1,
) -> Any:  # fmt: skip
    """fla's layer_norm, rms_norm and group_norm."""
    total = x if residual is None else x + residual
    out = total.float().unflatten(-1, (num_groups, -1))
    if not is_rms_norm:
        out = out - out.mean(-1, keepdim=True)
    out = (out / torch.sqrt(out.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    out = out if weight is None else out * weight.float()
    out = (out if bias is None else out + bias.float()).to(x.dtype)
    return (out, total) if prenorm else out


def rms_norm(*args: Any, **options: Any) -> Any:
    return norm(*args, **options, is_rms_norm=True)


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: None, activation: str, residual: None,
    prenorm: bool, residual_in_fp32: bool, eps: float,
) -> Tensor:  # fmt: skip
    assert bias is None and residual is None and not prenorm
    out = rms_norm(x.float(), weight, eps=eps)
    gate = torch.sigmoid(g.float()) if activation == "sigmoid" else F.silu(g.float())
    return (out * gate).to(x.dtype)


def rms_norm_linear(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, linear_weight: Tensor,
    linear_bias: Tensor | None, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    return F.linear(rms_norm(x, norm_weight, norm_bias, eps=eps), linear_weight, linear_bias)


def rms_norm_swish_gate_linear(
    x: Tensor, g: Tensor, norm_weight: Tensor | None, norm_bias: None, linear_weight: Tensor,
    linear_bias: Tensor | None, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    gated = rms_norm_gated(x, g, norm_weight, norm_bias, "silu", None, False, False, eps)
    return F.linear(gated, linear_weight, linear_bias)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]
) -> Tensor:
    """FlashAttention of (B, L, H, N), with keys and values that groups of heads share."""
    assert causal
    groups, tokens, dtype = q.shape[2] // k.shape[2], q.shape[1], v.dtype
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
    if window_size != (-1, -1):
        seen = seen.triu(-window_size[0])
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).to(dtype)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, causal: bool, window_size: Any, **_: Any
) -> Tensor:
    """The same for packed sequences (T, H, N), each of which attends to itself."""
    bounds = zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)
    outputs = [
        attention(*(x[None, start:end] for x in (q, k, v)), causal, window_size)
        for start, end in bounds
    ]
    return torch.cat(outputs, 1)[0]


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(swiglu(x, y), weight, bias)


def elu_p1(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def square_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def l2norm(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def normed(*vectors: Tensor, is_asked: bool) -> list[Tensor]:
    """Vectors in float32, at length one if that is asked of a kernel."""
    return [l2norm(x.float()) if is_asked else x.float() for x in vectors]


ACTIVATIONS = {
    "sigmoid": torch.sigmoid, "silu": F.silu, "swish": F.silu, "sqrelu": square_relu,
}  # fmt: skip
