"""Replace fused functions of packages by torch functions during an observed run.

A fused kernel hides its inputs and computation from torch, so it cannot be linearized. The replaced
functions act on single tokens: mamba_ssm's and flash-linear-attention's norms, gated norms,
activations and gated MLPs, and fla's rotations, token shift, and channel mixing of RWKV-6 and
RWKV-7. Kernels that mix tokens are not replaced; :mod:`captum_ssm.linear.kernels` handles them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..changes import Shared, lasting
from .loops import Repair, replacing


@contextmanager
def unfused() -> Iterator[None]:
    """Replace fused functions by torch functions, until the last nested context exits."""
    with lasting(_changes.enter):
        yield


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Any:
    """Return a norm of x + residual per channel group; with ``prenorm`` also return the sum."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    grouped = torch.unflatten(total, -1, (num_groups, -1))
    norm = F.rms_norm if is_rms_norm else F.layer_norm
    out = norm(grouped, grouped.shape[-1:], None, eps=eps).flatten(-2)
    out = out if weight is None else out * weight.to(wide)
    out = (out if bias is None else out + bias.to(wide)).to(x.dtype)
    if not prenorm:
        return out
    if residual is not None:
        return out, total.to(residual.dtype)
    return out, total if residual_in_fp32 else total.to(x.dtype)


def _norm_of_mamba_ssm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace mamba_ssm's norm by :func:`_norm`, unless it has two norms, dropout or a rowscale."""

    @functools.wraps(original)
    def norm(*args: Any) -> Any:
        x, weight, bias, residual, x1, weight1, _, eps, dropout_p, rowscale, *options = args
        returns_mask = options.pop()  # left are prenorm, residual_in_fp32 and is_rms_norm
        if dropout_p or returns_mask or any(y is not None for y in (x1, weight1, rowscale)):
            return original(*args)
        return _norm(x, weight, bias, residual, eps, *options)

    return norm


def gated_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    eps: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = True,
    act: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    """Return a norm of ``x`` in channel groups, before or after multiplication by a gate act(z)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y, gate = x.to(wide), None if z is None else act(z.to(wide))
    if gate is not None and not norm_before_gate:
        y = y * gate
    groups = y.shape[-1] // (group_size or y.shape[-1])
    y = _norm(y, weight, bias, eps=eps, is_rms_norm=is_rms_norm, num_groups=groups)
    if gate is not None and norm_before_gate:
        y = y * gate
    out: Tensor = y.to(x.dtype)
    return out


def _gated_norm_of_fla(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace fla's gated norm by :func:`gated_norm`, except with ``residual`` or ``prenorm``."""

    @functools.wraps(original)
    def norm(*args: Any) -> Any:
        x, z, weight, bias, activation, residual, eps, prenorm, _, is_rms_norm = args
        if residual is not None or prenorm:
            return original(*args)
        act = torch.sigmoid if activation == "sigmoid" else F.silu
        return gated_norm(x, weight, bias, z, eps, is_rms_norm=is_rms_norm, act=act)

    return norm


def _norm_linear(
    x: Tensor, weight: Any, bias: Any, matrix: Tensor, shift: Any, *options: Any
) -> Tensor:
    """Return matrix norm(x) + shift; ``options`` are the further arguments of :func:`_norm`."""
    return F.linear(_norm(x, weight, bias, *options), matrix, shift)


def _gated_linear(
    x: Tensor, z: Tensor, weight: Any, bias: Any, matrix: Tensor, shift: Any, *options: Any
) -> Tensor:
    """Return matrix norm(x, gate z) + shift; ``options`` begin with the residual and eps."""
    _, eps, *_, is_rms_norm = options
    return F.linear(gated_norm(x, weight, bias, z, eps, is_rms_norm=is_rms_norm), matrix, shift)


def _rotation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace fla's rotary embedding, except for interleaved features or packed sequences."""

    @functools.wraps(original)
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, **how: Any) -> Any:
        offset = how.get("seqlen_offsets", 0)
        if interleaved or how.get("cu_seqlens") is not None or not isinstance(offset, int):
            return original(x, cos, sin, interleaved=interleaved, **how)
        # the first features are turned by angles in pairs (i, half + i); the rest stays
        cos, sin = (y[offset : offset + x.shape[1], None].to(x.dtype) for y in (cos, sin))
        half = cos.shape[-1]
        first, second, rest = x.tensor_split((half, 2 * half), -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    return rotate


def _swiglu(gate: Tensor, x: Tensor) -> Tensor:
    return F.silu(gate) * x


def _swiglu_linear(gate: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(_swiglu(gate, x), weight, bias)


def _token_shift(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cache: Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the previous token minus each token, and the last tokens if ``output_cache``.

    The token before the first is 0, or in ``cache`` (B, E).
    """
    before, last = F.pad(x[:, :-1], (0, 0, 1, 0)), x[:, -1]
    if cache is not None:
        before = torch.cat([cache[:, None], x[:, :-1]], 1)
    if cu_seqlens is not None:  # the first indices of packed sequences, and the end
        positions = torch.arange(x.shape[1], device=x.device)
        is_start = (positions[:, None] == cu_seqlens[:-1]).any(1)
        before, last = before.masked_fill(is_start[:, None], 0), x[0, cu_seqlens[1:] - 1]
    return before - x, last if output_cache else None


def _shift(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace fla's token shift, except for packed sequences after a cache."""

    @functools.wraps(original)
    def shift(x: Tensor, cu_seqlens: Any = None, cache: Any = None, *rest: Any) -> Any:
        compute = _token_shift if cu_seqlens is None or cache is None else original
        return compute(x, cu_seqlens, cache, *rest)

    return shift


def _squared_relu(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.relu(x.to(wide)).square().to(x.dtype)


def _elu_and_one(x: Tensor) -> Tensor:
    return F.elu(x) + 1


#: Torch functions for fla's activations, by the name of fla's class or function.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SquaredReLUFunction": _squared_relu,
    "SwishFunction": F.silu,
    "SigmoidFunction": torch.sigmoid,
    "elu_p1": _elu_and_one,
}
#: Names of attributes in which fla's modules store activations.
_HELD = ("act_fn", "gate_fn", "feature_map_q", "feature_map_k")


def _with_torchs_activation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a class's ``__getattribute__`` so that it returns torch's form of an activation."""

    def get_attribute(self: Any, name: str) -> Any:
        value = original(self, name)
        if name not in _HELD:
            return value
        # a bound method such as SwishFunction.apply has the class's name
        return _ACTIVATIONS.get(getattr(getattr(value, "__self__", value), "__name__", ""), value)

    return get_attribute


def _by(substitute: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper that ignores the original function and returns ``substitute``."""
    return lambda _: substitute


_FUSED: tuple[Repair, ...] = (
    ("mamba_ssm.ops.triton.layer_norm", "LayerNormFn.apply", _norm_of_mamba_ssm),
    ("fla.modules.norm.layernorm", "LayerNormFunction.apply", _by(_norm)),
    ("fla.modules.activations.ops", "SwiGLULinearFunction.apply", _by(_swiglu_linear)),
    ("fla.modules.mlp", "swiglu", _by(_swiglu)),
    ("fla.modules.token_shift", "TokenShift.apply", _shift),
    ("fla.modules.norm.layernorm", "LayerNormLinearFunction.apply", _by(_norm_linear)),
    ("fla.modules.norm.fused_norm_gate", "LayerNormGatedFunction.apply", _gated_norm_of_fla),
    ("fla.modules.norm.fused_norm_gate", "LayerNormGatedLinearFunction.apply", _by(_gated_linear)),
    ("fla.modules.norm.layernorm_gated", "LayerNormFn.apply", _by(gated_norm)),
    ("mamba_ssm.ops.triton.layernorm_gated", "LayerNormFn.apply", _by(gated_norm)),
    ("fla.modules.rotary.ops", "rotary_embedding", _rotation),
    ("fla.modules.feature_map", "swish", _by(F.silu)),
    ("fla.layers.hgrn", "swiglu", _by(_swiglu)),
    ("fla.layers.hgrn2", "swish", _by(F.silu)),
    ("fla.layers.delta_net", "elu_p1", _by(_elu_and_one)),
    *(
        (module, f"{name}.__getattribute__", _with_torchs_activation)
        for module, name in (
            ("fla.models.rwkv6.modeling_rwkv6", "RWKV6FeedForward"),
            ("fla.models.rwkv7.modeling_rwkv7", "RWKV7FeedForward"),
            ("fla.layers.multiscale_retention", "MultiScaleRetention"),
            ("fla.layers.gla", "GatedLinearAttention"),
            ("fla.layers.linear_attn", "LinearAttention"),
            ("fla.layers.simple_gla", "SimpleGatedLinearAttention"),
            ("fla.layers.rwkv6", "RWKV6Attention"),
        )
    ),
)
_changes = Shared(lambda: replacing(_FUSED))
