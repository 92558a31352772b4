"""MambaVision's mixer and attention, which are called on windows of a 2-D grid of patches.

    x, z = in_proj(h)                  u = conv_x(x)              s = conv_z(z)
    t, B, C = x_proj(SiLU(u))          dt = softplus(W t + 2 b)   A = -exp(A_log)
    y = [(alpha + D) SiLU(u); SiLU(s)]                            output = out_proj(y)

Frozen: dt, B, C, and the ratios SiLU(u) / u and SiLU(s) / s.  The values are the whole output of
in_proj: z is not a gate but the second half of the channels, with a convolution and an activation
but no scan.  Both convolutions read tokens on either side.  The package adds b, the bias of
dt_proj, twice.

Modules of a MambaVisionLayer receive the grid's windows as a batch.  The operators act on the whole
grid: one matrix for all tokens, with a diagonal block for each window.  Windows at the grid's lower
and right edges are padded.  The contribution of padding is a constant in every layer, even if an
earlier layer mixed tokens into the padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedMixerError
from ..operators import Diagonal, DirectSum, SelectiveScan, ShortConv
from ..operators.reorder import Windowed
from .base import Call, LinearMixer
from .package_attention import timm_attention
from .parts.common import frozen, mixer_input, run
from .parts.token_map import Downsampling, TokenMap, square_windows
from .path import Path


def mambavision_mixer(module: Any, call: Call) -> LinearMixer:
    """Linearize mambavision's MambaVisionMixer: a selective scan of half of the channels."""
    path = Path(run(module.in_proj, mixer_input(module, call)))
    path.then(_same_conv((module.conv1d_x, module.conv1d_z), path)).act(live=True)
    x, _ = path.now.squeeze(-1).chunk(2, -1)
    scanned = Path(x).scan(_scan(module, x), skip=module.D)
    no_scan = Diagonal(x.new_ones(1, 1, 1, 1), scanned.shape)
    return _on_whole_grid(path.then(DirectSum(*scanned.parts, no_scan)).to(module.out_proj), call)


def mambavision_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize mambavision's Attention, a copy of timm's Attention."""
    if module.fused_attn and module.attn_drop.p > 0:
        raise UnsupportedMixerError(
            f"{type(module).__name__} with attn_drop={module.attn_drop.p} drops random weights "
            "even in evaluation mode, so outputs are random. Set attn_drop.p = 0 on this module."
        )
    return _on_whole_grid(timm_attention(module, call), call)


def _same_conv(convolutions: tuple[nn.Conv1d, nn.Conv1d], path: Path) -> ShortConv:
    """Return depthwise convolutions on separate channels as one operator, with ``same`` padding."""
    weight = torch.cat([frozen(conv.weight, path.values) for conv in convolutions])  # (2 D, 1, K)
    biases = [frozen(conv.bias, path.values) for conv in convolutions if conv.bias is not None]
    bias = torch.cat(biases).view(1, 1, -1, 1) if biases else None
    lookahead = (weight.shape[-1] - 1) // 2  # torch puts an odd pad on the right
    lags = [lookahead - tap for tap in range(weight.shape[-1])]
    return ShortConv(weight, path.shape, bias, lags)


def _scan(module: Any, activated: Tensor) -> SelectiveScan:
    """Return the scan, with parameters computed from SiLU(u) (B, L, D)."""
    sizes = [module.dt_rank, module.d_state, module.d_state]
    t, b, c = torch.split(run(module.x_proj, activated), sizes, -1)
    dt = F.softplus(run(module.dt_proj, t) + frozen(module.dt_proj.bias, activated))
    return SelectiveScan(dt, -torch.exp(frozen(module.A_log, activated)), b, c)


def _on_whole_grid(mixer: LinearMixer, call: Call) -> LinearMixer:
    """Convert a mixer that was called on windows of a grid to a mixer of the whole grid."""
    layer: Any = next((m for m in call.around if hasattr(m, "window_size")), None)
    if layer is None:  # called without a layer around it
        return mixer
    height, width = call.around[layer][-2:]  # of its input, (B, C, height, width)
    windows = square_windows((height, width), layer.window_size, mixer.values.device)
    return replace(
        mixer,
        values=windows.merge(mixer.values),
        operator=Windowed(mixer.operator, windows, windows.padding(mixer.values)),
        map=TokenMap((height, width), windows, _downsampling(layer, (height, width))),
    )


def _downsampling(layer: Any, size: tuple[int, int]) -> Downsampling | None:
    """Return the layer's down-sampling convolution, or None."""
    if layer.downsample is None:
        return None
    return Downsampling(next(iter(layer.downsample.reduction)), size)
