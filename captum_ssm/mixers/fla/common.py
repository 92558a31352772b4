"""Functions that several adapters of flash-linear-attention (fla) share.

Most layers of fla remove padded tokens before they compute, and return zeros for these tokens.  The
adapters keep padded tokens: their values are set to zero, and the state does not decay over them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ..base import Call, LinearMixer
from ..parts.common import as_heads, mixer_input, padding_mask, refuse_packed, run, zeroed
from ..path import Path


def input_and_mask(module: Any, call: Call) -> tuple[Tensor, Tensor | None]:
    """Return a layer's input (B, L, E) in the working dtype, and the mask of real tokens."""
    call.refuse_cache("past_key_values", position=2)
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    # the position of cu_seqlens differs between layers; some have no such argument
    refuse_packed(call, **{x: i for i, x in enumerate(names) if x == "cu_seqlens"})
    hidden = mixer_input(module, call)
    return hidden, padding_mask(call.argument("attention_mask", 1), hidden)


def zeroed_input_and_mask(
    module: Any, call: Call, skips: str | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return :func:`input_and_mask` with padded tokens set to zero, for a layer that removes them.

    Args:
        module: the layer.
        call: the layer's recorded call.
        skips: name of the submodule that would skip padding between real tokens, for the error.
            Default: None, the short convolution if the layer has one.
    """
    hidden, mask = input_and_mask(module, call)
    if mask is None:
        return hidden, None
    if skips is None and getattr(module, "use_short_conv", False):
        skips = "short convolution"
    changes = (mask[:, 1:] != mask[:, :-1]).sum(1)  # 1 if padding is on one side
    if skips is not None and bool((changes > 1).any()):
        raise InputError(
            f"The attention_mask passed to {type(module).__name__} has padding between tokens of "
            f"one sequence, which its {skips} would skip. Pad every sequence on one side only."
        )
    return zeroed(hidden, mask), mask


def project(
    module: Any, name: str, hidden: Tensor, silu: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Return a projection (B, L, C) after its short convolution and activation, if there are any.

    Args:
        module: the layer; its ``{name}_proj`` and ``{name}_conv1d`` are used.
        name: prefix of the submodules' names, such as ``"q"``.
        hidden: input of the layer (B, L, E).
        silu: whether to apply SiLU if there is no convolution. Default: False.
        mask: True for real tokens (B, L); the convolution's input is zero at other tokens.
            Default: None, all tokens are real.
    """
    x, conv = run(getattr(module, f"{name}_proj"), hidden), getattr(module, f"{name}_conv1d", None)
    if conv is None:
        return F.silu(x) if silu else x
    convolved = Path(zeroed(x, mask)).conv(conv).now.squeeze(-1)
    return convolved if conv.activation is None else F.silu(convolved)


def queries_and_keys(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries (B, L, H, N) and keys of groups of heads (B, L, G, N) of RetNet or GLA."""
    q = as_heads(project(module, "q", hidden), module.num_heads)
    k = as_heads(project(module, "k", hidden), module.num_kv_heads)
    if module.feature_map_fn is None:
        return q, k
    return module.feature_map_fn(q), module.feature_map_fn(k)


def value_path(
    module: Any,
    hidden: Tensor,
    mask: Tensor | None,
    per_head: int,
    *,
    name: str = "v",
    repeat: int = 1,
    silu: bool = False,
) -> Path:
    """Return the :class:`.Path` of the values after projection, convolution and activation.

    Args:
        module: the layer; its ``{name}_proj`` and ``{name}_conv1d`` are used.
        hidden: input of the layer (B, L, E).
        mask: True for real tokens (B, L), or None.
        per_head: number of value channels of a head, P.
        name: prefix of the submodules' names. Default: ``"v"``.
        repeat: number of neighboring heads that share the values of one head. Default: 1.
        silu: whether to apply SiLU even without a convolution that has an activation. Default:
            False.
    """
    x, conv = run(getattr(module, f"{name}_proj"), hidden), getattr(module, f"{name}_conv1d", None)
    path = Path(x, mask, x.shape[-1] // per_head).repeat(repeat).silence()
    if conv is not None:
        path.conv(conv)
    if silu or (conv is not None and conv.activation is not None):
        path.act()
    return path.silence()  # the convolution's bias reaches padded tokens


def to_mixer(
    module: Any,
    hidden: Tensor,
    path: Path,
    norm: Any,
    act: Callable[[Tensor], Tensor] | None = None,
) -> LinearMixer:
    """Apply norm, gate, mask and output projection; return the mixer.

    Args:
        module: the layer.
        hidden: input of the layer (B, L, E).
        path: the values after the recurrence, as a :class:`.Path`.
        norm: module of the RMSNorm of each head, or None.
        act: activation of the gate, whose input is the output of g_proj. Default: None, no gate.
    """
    if norm is not None:
        path.rms_norm(norm.weight, norm.eps)
    if act is not None:
        path.gate(run(module.g_proj, hidden), act)
    return path.silence().to(module.o_proj)


def norm_and_gate_act(module: Any) -> tuple[Any, Any]:
    """Return the norm module of RetNet or GLA, and the gate's activation (None for no gate)."""
    if module.fuse_norm_and_gate:
        return module.g_norm_swish_gate, F.silu
    return module.g_norm, module.gate_fn if getattr(module, "use_output_gate", True) else None


def gate_act(norm: Any) -> Callable[[Tensor], Tensor]:
    """Return the activation of the gate that a norm module applies: sigmoid or SiLU."""
    return torch.sigmoid if norm.activation == "sigmoid" else F.silu


def rotate(rotary: Any, mask: Tensor | None, x: Tensor) -> Tensor:
    """Apply a rotary embedding to ``x`` (B, L, H, N), pairing channel n with channel n + N / 2.

    Positions count only real tokens.  As in the model, angles are float32 for every dtype of ``x``.
    """
    if mask is None:
        position = torch.arange(x.shape[1], device=x.device)[None]
    else:
        position = (mask.cumsum(1) - 1).clamp_min(0)
    frequency = rotary.inv_freq
    if frequency.dtype != torch.float32:  # rounded by a cast of the model
        exponent = torch.arange(0, rotary.dim, 2, device=x.device, dtype=torch.float32) / rotary.dim
        frequency = 1.0 / rotary.base**exponent
    angle = position.float()[:, :, None, None] * frequency.to(x.device)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
