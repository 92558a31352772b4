"""The parts that layers of flash-linear-attention (fla) have in common.

Most of them drop padding before they compute and put zeros back in its place.  Here the tokens
stay where they are: padded values are set to zero, and the state does not decay over them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ...operators import Chain, Diagonal, Operator, Shape, ShortConv
from ..base import Call, LinearMixer
from ..parts.common import zeroed as zeroed
from ..parts.common import (
    as_heads,
    masked,
    output_gate,
    padding_mask,
    refuse_packed,
    run,
    working_dtype,
)


def entering(module: Any, call: Call) -> tuple[Tensor, Tensor | None]:
    """The sequence entering a layer in its working dtype, and the mask of real tokens."""
    call.refuse_cache("past_key_values", position=2)
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    refuse_packed(call, **{x: i for i, x in enumerate(names) if x == "cu_seqlens"})
    hidden = call.hidden_states
    hidden = hidden.to(working_dtype(module, hidden))
    return hidden, padding_mask(call.argument("attention_mask", 1), hidden)


def entering_unpadded(
    module: Any, call: Call, skips: str | None = None
) -> tuple[Tensor, Tensor | None]:
    """As :func:`entering`, for a layer that drops padded tokens: they are zeros.

    Args:
        module: the layer.
        call: its recorded call.
        skips: name of the part that would skip padding between tokens. Default: None, its short
            convolution if it has one.
    """
    hidden, mask = entering(module, call)
    if mask is None:
        return hidden, None
    if skips is None and getattr(module, "use_short_conv", False):
        skips = "short convolution"
    pieces = (mask[:, 1:] != mask[:, :-1]).sum(1)
    if skips is not None and bool((pieces > 1).any()):
        raise InputError(
            f"The attention_mask given to {type(module).__name__} has padding between tokens of "
            f"one sequence, over which its {skips} would skip. Pad at one side."
        )
    return hidden * mask[:, :, None], mask


def convolved(conv: Any, x: Tensor) -> Tensor:
    """Apply a ShortConvolution with its activation to ``x`` (B, L, C); None changes nothing."""
    if conv is None:
        return x
    heads = as_heads(x)
    out = short_conv(conv, heads).affine(heads).squeeze(-1)
    return out if conv.activation is None else F.silu(out)


def queries_and_keys(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of RetNet and of GLA, per head and per group of heads, (B, L, ., N)."""
    q = convolved(getattr(module, "q_conv1d", None), run(module.q_proj, hidden))
    k = convolved(getattr(module, "k_conv1d", None), run(module.k_proj, hidden))
    q, k = as_heads(q, module.num_heads), as_heads(k, module.num_kv_heads)
    if module.feature_map_fn is None:
        return q, k
    return module.feature_map_fn(q), module.feature_map_fn(k)


def short_conv(conv: Any, values: Tensor, repeat: int = 1) -> ShortConv:
    """Convert a ShortConvolution to an operator.

    Groups of ``repeat`` neighboring heads of the values (B, L, H, P) share filters.
    """
    heads, per_head = values.shape[2] // repeat, values.shape[3]
    weight = conv.weight.flip(-1).to(values).view(heads, per_head, -1)  # by lag
    weight = weight.repeat_interleave(repeat, 0)
    bias: Tensor | None = None
    if conv.bias is not None:
        bias = conv.bias.to(values).view(1, 1, heads, per_head).repeat_interleave(repeat, 2)
    return ShortConv(weight, Shape(*values.shape), bias)


def value_stream(
    x: Tensor,
    conv: Any,
    mask: Tensor | None,
    per_head: int,
    *,
    repeat: int = 1,
    silu: bool = False,
) -> tuple[Tensor, list[Operator]]:
    """The values (B, L, H, P), and the operators between them and the recurrence, outermost first.

    Args:
        x: projected values (B, L, C).
        conv: a ShortConvolution, or None.
        mask: True for real tokens (B, L), or None.
        per_head: value channels of a head, P.
        repeat: neighboring heads of the recurrence that share the values of one head.
        silu: whether SiLU follows although the convolution does not apply it, or is missing.
    """
    values = as_heads(x, x.shape[-1] // per_head).repeat_interleave(repeat, 2)
    shape = Shape(*values.shape)
    parts = masked(mask, shape, values)
    u = values if mask is None else values * mask[:, :, None, None]
    if conv is not None:
        operator = short_conv(conv, values, repeat)
        u, silu = operator.affine(u), silu or conv.activation is not None
        parts = [operator, *parts]
    if silu:
        parts = [Diagonal(torch.sigmoid(u), shape, "activation"), *parts]
    if conv is not None:  # the convolution's bias reaches padded tokens
        parts = [*masked(mask, shape, values), *parts]
    return values, parts


def frozen_rms_norm(o: Tensor, weight: Tensor | None, eps: float, *, whole: bool) -> Diagonal:
    """An RMSNorm frozen at its input ``o`` (B, L, H, P): per head, or over all channels."""
    over = (-2, -1) if whole else (-1,)
    factor = torch.rsqrt(o.square().mean(over, keepdim=True) + eps)
    if weight is not None:
        factor = factor * weight.to(o).view(o.shape[2:] if whole else o.shape[3:])
    return Diagonal(factor, Shape(*o.shape), "norm")


def norm_and_gate(module: Any, hidden: Tensor, o: Tensor) -> list[Operator]:
    """The output gate of RetNet or GLA, if any, and the RMSNorm per head frozen at ``o``."""
    norm = module.g_norm_swish_gate if module.fuse_norm_and_gate else module.g_norm
    parts: list[Operator] = [frozen_rms_norm(o, norm.weight, norm.eps, whole=False)]
    if getattr(module, "use_output_gate", True):
        g = as_heads(run(module.g_proj, hidden), o.shape[2])
        parts.insert(0, output_gate(F.silu if module.fuse_norm_and_gate else module.gate_fn, g))
    return parts


def o_norm_and_gate(module: Any, hidden: Tensor, o: Tensor) -> list[Operator]:
    """The output gate of a delta rule, if any, and the RMSNorm per head frozen at ``o``."""
    norm = module.o_norm
    parts: list[Operator] = [frozen_rms_norm(o, norm.weight, norm.eps, whole=False)]
    if getattr(module, "use_gate", True):
        g = as_heads(run(module.g_proj, hidden), o.shape[2])
        parts.insert(0, output_gate(torch.sigmoid if norm.activation == "sigmoid" else F.silu, g))
    return parts


def closing(
    module: Any,
    hidden: Tensor,
    mask: Tensor | None,
    scan: Operator,
    after: Callable[[Any, Tensor, Tensor], list[Operator]],
    *,
    repeat: int = 1,
    silu: bool = False,
) -> LinearMixer:
    """The mixer around a recurrence; padded outputs are zero.

    Args:
        module: the layer, whose values are those of v_proj.
        hidden: its input (B, L, E).
        mask: True for real tokens (B, L), or None.
        scan: the recurrence.
        after: makes the operators after it, outermost first, from the layer, its input and the
            recurrence's output.
        repeat: as in :func:`value_stream`. Default: 1.
        silu: as in :func:`value_stream`. Default: False.
    """
    values, inner = value_stream(
        run(module.v_proj, hidden),
        getattr(module, "v_conv1d", None),
        mask,
        scan.shape.per_head,
        repeat=repeat,
        silu=silu,
    )
    core = Chain(scan, *inner)
    operator = Chain(
        *masked(mask, scan.shape, values), *after(module, hidden, core.affine(values)), core
    )
    return LinearMixer(values, operator, lambda y: run(module.o_proj, y.flatten(2)), mask)


def rotated(rotary: Any, mask: Tensor | None, x: Tensor) -> Tensor:
    """Rotary embedding of (B, L, H, N), whose first half pairs with its second half.

    Positions count real tokens. As in the model, angles are float32 whatever x is.
    """
    if mask is None:
        position = torch.arange(x.shape[1], device=x.device)[None]
    else:
        position = (mask.cumsum(1) - 1).clamp_min(0)
    frequency = rotary.inv_freq
    if frequency.dtype != torch.float32:
        exponent = torch.arange(0, rotary.dim, 2, device=x.device, dtype=torch.float32) / rotary.dim
        frequency = 1.0 / rotary.base**exponent
    angle = position.float()[:, :, None, None] * frequency.to(x.device)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
