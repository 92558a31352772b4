"""VMamba: captum_ssm's SS2D.

    x, z = in_proj(h)              u = conv(x) + b over the map       s = act(u)
    t, B, C = x_proj_k(s)          dt = softplus(W_k t + b_k)         A = -exp(A_log_k)
    r = (sum over k of P_k' alpha_k P_k + D_k) s
    y = act(z) (w (r - mean r) / sigma(r) + b)                        output = out_proj(y)

where P_k brings the tokens into the order in which scan k reads them, and P_k' back.  Frozen: dt,
B, C, the ratio act(u) / u, 1 / sigma and act(z); the centering of the norm is linear and stays.  It
subtracts the mean over all channels, every one of which is a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..operators import (
    Chain,
    Diagonal,
    HeadCentering,
    Operator,
    Permute,
    SelectiveScan,
    Shape,
    ShortConv,
    Sum,
)
from .base import Call, LinearMixer
from .parts.common import (
    activation_ratio,
    as_heads,
    frozen,
    linear,
    output_gate,
    run,
    working_dtype,
)
from .parts.token_map import Reduction, TokenMap


def ss2d(module: Any, call: Call) -> LinearMixer:
    """captum_ssm's SS2D, in all its forms."""
    hidden = call.hidden_states
    size = call.argument("size", 1)
    projected = run(module.in_proj, hidden.to(working_dtype(module, hidden)))
    x, z = projected.chunk(2, -1) if module.form.gate else (projected, None)
    values = as_heads(x)  # (B, L, D, 1)
    shape = Shape(*values.shape)
    conv = [] if module.conv2d is None else [_conv(module.conv2d, values, size[1])]
    u = conv[0].affine(values) if conv else values
    ratio = activation_ratio(module.act, _name(module.act), u)
    core = Chain(
        _scans(module, (u * ratio).squeeze(-1), size),
        Diagonal(ratio, shape, "activation"),
        *conv,
    )
    # Each part is put outside all others, so that parts[0] acts last.  A norm or an activation is
    # frozen at its own input: the parts inside it have to be evaluated first.
    parts: list[Operator] = [*_out_norm(module.out_norm, core, values), core]
    if module.form.out_act:
        out_ratio = activation_ratio(module.out_act, "gelu", Chain(*parts).affine(values))
        parts.insert(0, Diagonal(out_ratio, shape, "activation"))
    if z is not None:
        act = module.act if module.form.gate_act else nn.Identity()
        parts.insert(0, output_gate(act, as_heads(z)))

    def project(y: Tensor) -> Tensor:
        return run(module.out_proj, y.flatten(2))

    token_map = TokenMap(size, None, _reduction(call, size))
    return LinearMixer(values, Chain(*parts), project, map=token_map)


def _name(act: nn.Module) -> str:
    return type(act).__name__.lower()


def _conv(conv: nn.Conv2d, values: Tensor, width: int) -> ShortConv:
    """A depthwise convolution of a map, padded to its size, as an operator."""
    weight = conv.weight.to(values).flatten(2)  # (D, 1, K)
    bias = None if conv.bias is None else frozen(conv.bias, values).view(1, 1, -1, 1)
    (rows, columns), (above, left) = conv.kernel_size, (side // 2 for side in conv.kernel_size)
    lags = [(above - i, left - j) for i in range(rows) for j in range(columns)]
    return ShortConv(weight, Shape(*values.shape), bias, lags, width=width)


def _scans(module: Any, activated: Tensor, size: tuple[int, int]) -> Sum:
    """The sum of all scans of act(u) (B, L, D), each in an order of its own, and of the skip."""
    shape = Shape(*activated[..., None].shape)
    count, _, rank = module.dt_projs_weight.shape
    rates = (-torch.exp(module.A_logs.to(activated))).chunk(count)
    state = rates[0].shape[1]
    terms: list[Operator] = []
    for k, order in enumerate(module.scan_orders(size, torch.device("cpu"))):
        there = Permute(order, shape, "scan", device=activated.device)
        selected = linear(activated, module.x_proj_weight[k]).index_select(1, there.order)
        t, b, c = torch.split(selected, [rank, state, state], -1)
        dt = F.softplus(linear(t, module.dt_projs_weight[k], module.dt_projs_bias[k]))
        scan = SelectiveScan(dt, rates[k], b, c)
        terms.append(Chain(there.inverted(), scan, there))
    skip = frozen(module.Ds, activated).view(count, -1).sum(0)
    return Sum(*terms, Diagonal(skip.view(1, 1, -1, 1), shape, "skip"))


def _out_norm(norm: nn.Module, core: Operator, values: Tensor) -> list[Operator]:
    """The frozen LayerNorm over all channels of the core's output, outermost factor first."""
    if not isinstance(norm, nn.LayerNorm):
        return []
    shape = Shape(*values.shape)
    variance = core.affine(values).var((-1, -2), correction=0, keepdim=True)
    bias = None if norm.bias is None else frozen(norm.bias, values).view(1, 1, -1, 1)
    weight = frozen(norm.weight, values).view(-1, 1, 1)
    return [
        ShortConv(weight, shape, bias, component="norm"),  # one tap: the affine part
        Diagonal(torch.rsqrt(variance + norm.eps), shape, "norm"),
        HeadCentering(shape, values, across=True),
    ]


def _reduction(call: Call, size: tuple[int, int]) -> Reduction | None:
    """The convolution to the next, coarser map; None unless the mixer is in a whole model."""
    stage: Any = next((m for m in call.around if hasattr(m, "downsample")), None)
    if stage is None:
        return None
    coarser = next((m for m in stage.downsample.modules() if hasattr(m, "kernel_size")), None)
    return None if coarser is None else Reduction(coarser, size)
