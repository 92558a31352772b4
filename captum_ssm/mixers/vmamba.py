"""VMamba: the mixer SS2D in captum_ssm.models.vmamba.

    x, z = in_proj(h)              u = conv(x) + b over the map       s = act(u)
    t, B, C = x_proj_k(s)          dt = softplus(W_k t + b_k)         A = -exp(A_log_k)
    r = (sum over k of P_k' alpha_k P_k + D_k) s
    y = act(z) (w (r - mean r) / sigma(r) + b)                        output = out_proj(y)

Here P_k permutes the tokens to the order of scan k, and P_k' is the inverse.  Frozen: dt, B, C, the
ratio act(u) / u, 1 / sigma and act(z).  The norm's centering, which subtracts the mean over all
channels, stays linear.  Every channel is a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..operators import Chain, Operator, Permute, SelectiveScan, ShortConv
from .base import Call, LinearMixer
from .parts.common import frozen, linear, mixer_input, run
from .parts.token_map import Downsampling, TokenMap
from .path import Path


def ss2d(module: Any, call: Call) -> LinearMixer:
    """Linearize SS2D: a sum of selective scans of a map in several token orders."""
    size = call.argument("size", 1)
    projected = run(module.in_proj, mixer_input(module, call))
    x, z = projected.chunk(2, -1) if module.form.gate else (projected, None)
    path, norm = Path(x), module.out_norm
    if module.conv2d is not None:
        path.then(_conv(module.conv2d, path, size[1]))
    path.act(module.act)
    skip = frozen(module.Ds, x).view(len(module.x_proj_weight), -1).sum(0)  # of all scan orders
    path.scan(*_scans(module, path, size), skip=skip)
    if isinstance(norm, nn.LayerNorm):
        path.layer_norm(norm.weight, norm.bias, norm.eps, across=True)
    if module.form.out_act:
        path.act(module.out_act)
    if z is not None:
        path.gate(z, module.act if module.form.gate_act else nn.Identity())
    return path.to(module.out_proj, map=TokenMap(size, None, _downsampling(call, size)))


def _conv(conv: nn.Conv2d, path: Path, width: int) -> ShortConv:
    """Return a depthwise convolution of a two-dimensional map as an operator."""
    weight = conv.weight.to(path.values).flatten(2)  # (D, 1, K)
    bias = None if conv.bias is None else frozen(conv.bias, path.values).view(1, 1, -1, 1)
    # the kernel reaches this many rows above a token, and columns to its left
    (rows, columns), (above, left) = conv.kernel_size, (side // 2 for side in conv.kernel_size)
    lags = [(above - i, left - j) for i in range(rows) for j in range(columns)]
    return ShortConv(weight, path.shape, bias, lags, width=width)


def _scans(module: Any, path: Path, size: tuple[int, int]) -> list[Operator]:
    """Return one scan for each scan order, with parameters computed from ``path.now``."""
    activated = path.now.squeeze(-1)
    orders, _, rank = module.dt_projs_weight.shape
    rates = (-torch.exp(module.A_logs.to(activated))).chunk(orders)
    state_size = rates[0].shape[1]
    scans: list[Operator] = []
    for k, order in enumerate(module.scan_orders(size, torch.device("cpu"))):
        permute = Permute(order, path.shape, "scan", device=activated.device)
        selected = linear(activated, module.x_proj_weight[k]).index_select(1, permute.order)
        t, b, c = torch.split(selected, [rank, state_size, state_size], -1)
        dt = F.softplus(linear(t, module.dt_projs_weight[k], module.dt_projs_bias[k]))
        scans.append(Chain(permute.inverted(), SelectiveScan(dt, rates[k], b, c), permute))
    return scans


def _downsampling(call: Call, size: tuple[int, int]) -> Downsampling | None:
    """Return the down-sampling convolution to the next, coarser map, or None after the last map."""
    # the enclosing modules, innermost first
    stage: Any = next((m for m in call.around if hasattr(m, "downsample")), None)
    if stage is None:
        return None
    conv = next((m for m in stage.downsample.modules() if hasattr(m, "kernel_size")), None)
    return None if conv is None else Downsampling(conv, size)
