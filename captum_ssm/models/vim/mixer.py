"""The mixer of Vision Mamba: a Mamba that scans the tokens in both directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attr.call.checks import choice
from ...operators.kernels.arithmetic import full_precision
from ...operators.kernels.scan_backward import selective_scan

#: Weights of the second scan direction: "none" for only one direction, "v1" for a separate A, and
#: "v2" for separate weights except the input and output projections.
BimambaType = Literal["none", "v1", "v2"]

#: Bounds of the initial step sizes dt, which are drawn log-uniformly.
_DT_MIN, _DT_MAX = 1e-3, 1e-1


class VimMixer(nn.Module):
    """Vision Mamba's mixer, with the parameter names of the published code.

    With x, z = in_proj(h), u = SiLU(conv(x)) and f(x, z) = SiLU(z) (scan(u) + D u), the output is
    out_proj(y). For each ``bimamba_type``, y is::

        none:  f(x, z)
        v1:    f(x, z) + SiLU(z) (flip scan_b(flip u) + D u)     (scan_b has a separate A)
        v2:    (f(x, z) + flip f_b(flip x, flip z)) / 2          (f_b has separate weights)

    Args:
        d_model: width E of the tokens.
        d_state: number N of states per channel. Default: 16.
        d_conv: kernel size of the convolutions. Default: 4.
        d_inner: number D of channels. Default: None, 2 E.
        dt_rank: rank of the projection to dt. Default: None, E / 16 rounded up.
        bias: whether the input and output projections have biases. Default: False.
        conv_bias: whether the convolutions have biases. Default: True.
        bimamba_type: ``"none"``, ``"v1"`` or ``"v2"``, as above. Default: ``"v2"``.
        if_divide_out: whether v2 divides the sum of both directions by 2. Default: True.
        init_layer_scale: initial factor gamma on the output. Default: None, no factor.

    Raises:
        OptionError: when ``bimamba_type`` is unknown.

    Example:
        >>> import torch
        >>> from captum_ssm.models.vim import VimMixer
        >>> VimMixer(d_model=16)(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    A_log: nn.Parameter
    gamma: nn.Parameter | None

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        d_inner: int | None = None,
        dt_rank: int | None = None,
        bias: bool = False,
        conv_bias: bool = True,
        bimamba_type: BimambaType = "v2",
        if_divide_out: bool = True,
        init_layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.bimamba_type = choice("bimamba_type", bimamba_type, ("none", "v1", "v2"))
        self.if_divide_out = if_divide_out
        inner = 2 * d_model if d_inner is None else d_inner
        rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=bias)
        for suffix in ("", "_b") if bimamba_type == "v2" else ("",):
            conv = nn.Conv1d(inner, inner, d_conv, groups=inner, padding=d_conv - 1, bias=conv_bias)
            self.add_module(f"conv1d{suffix}", conv)
            self.add_module(f"x_proj{suffix}", nn.Linear(inner, rank + 2 * d_state, bias=False))
            self.add_module(f"dt_proj{suffix}", step_projection(rank, inner))
            self.register_parameter(f"D{suffix}", nn.Parameter(torch.ones(inner)))
        for name in ("A_log",) if bimamba_type == "none" else ("A_log", "A_b_log"):
            rates = torch.arange(1, d_state + 1, dtype=torch.float32).log()
            self.register_parameter(name, nn.Parameter(rates.expand(inner, -1).clone()))
        self.out_proj = nn.Linear(inner, d_model, bias=bias)
        gamma = None
        if init_layer_scale is not None:
            gamma = nn.Parameter(torch.full((d_model,), float(init_layer_scale)))
        self.register_parameter("gamma", gamma)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the mixer's output for tokens (B, L, E), in the same shape."""
        x, z = self.in_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)  # (B, D, L)
        scan_inputs = (*self._select(x, ""), z)
        y = self._scan(scan_inputs, "A_log", "")
        if self.bimamba_type == "v1":
            y = y + self._scan([x.flip(-1) for x in scan_inputs], "A_b_log", "").flip(-1)
        elif self.bimamba_type == "v2":  # names of the reversed scan's weights end in _b
            scan_inputs = (*self._select(x.flip(-1), "_b"), z.flip(-1))
            y = y + self._scan(scan_inputs, "A_b_log", "_b").flip(-1)
            y = y / 2 if self.if_divide_out else y
        out: Tensor = self.out_proj(y.transpose(1, 2).to(hidden_states.dtype))
        return out if self.gamma is None else out * self.gamma

    def _select(self, x: Tensor, suffix: str) -> tuple[Tensor, ...]:
        """Return u and dt before bias and softplus, both (B, D, L), and B and C, both (B, N, L)."""
        conv, x_proj, dt_proj = self._modules_of(suffix)
        u = F.silu(conv(x)[..., : x.shape[-1]])
        rank, state = dt_proj.weight.shape[1], self.A_log.shape[1]
        low_rank_dt, b, c = x_proj(u.transpose(1, 2)).split([rank, state, state], dim=-1)
        return u, F.linear(low_rank_dt, dt_proj.weight).mT, b.mT, c.mT

    def _scan(self, scan_inputs: Sequence[Tensor], a_log: str, suffix: str) -> Tensor:
        """Return SiLU(z) (scan(u) + D u), for (u, dt, B, C, z) and the name of the parameter A."""
        u, dt, b, c, z = scan_inputs
        rates, skip = getattr(self, a_log), getattr(self, f"D{suffix}")
        return scan(u, dt, rates, b, c, skip, self._modules_of(suffix)[2].bias, z)

    def _modules_of(self, suffix: str) -> tuple[Any, Any, Any]:
        """Return conv1d, x_proj and dt_proj with this suffix of their names."""
        conv, x_proj, dt_proj = (
            getattr(self, name + suffix) for name in ("conv1d", "x_proj", "dt_proj")
        )
        return conv, x_proj, dt_proj


def scan(
    u: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    bias: Tensor,
    z: Tensor | None = None,
) -> Tensor:
    """Return the gated selective scan SiLU(z) (scan(u) + D u) as (B, D, L), in float32 or wider.

    Args:
        u: values (B, D, L).
        dt: step sizes before bias and softplus (B, D, L).
        a_log: logarithms of the decay rates (D, N).
        b, c: the scan's input and output projections B and C, (B, N, L).
        skip: the skip weights D, (D,).
        bias: the bias of the step sizes (D,).
        z: the gate before its SiLU (B, D, L). Default: None, no gate.
    """  # fmt: skip
    precise = torch.promote_types(u.dtype, torch.float32)
    function = scan_function(u.is_cuda and precise == torch.float32)
    # the kernel converts its inputs to float32 itself
    dtype = precise if function is selective_scan else u.dtype
    with full_precision(u.device):
        u, dt, b, c = (x.to(dtype) for x in (u, dt, b, c))
        a, z = -torch.exp(a_log.to(precise)), None if z is None else z.to(dtype)
        y: Tensor = function(
            u, dt, a, b, c, skip.to(precise), z=z, delta_bias=bias.to(precise), delta_softplus=True
        )
    return y


@cache
def scan_function(cuda: bool) -> Callable[..., Any]:
    """Return the CUDA kernel of mamba_ssm if it is installed, else this package's scan."""
    if not cuda:
        return selective_scan
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except ImportError:
        return selective_scan
    kernel: Callable[..., Any] = selective_scan_fn
    return kernel


def step_projection(rank: int, inner: int) -> nn.Linear:
    """Return a projection to step sizes before softplus, with log-uniform initial step sizes."""
    layer = nn.Linear(rank, inner)
    with torch.no_grad():
        nn.init.uniform_(layer.weight, -(rank**-0.5), rank**-0.5)
        low, high = math.log(_DT_MIN), math.log(_DT_MAX)
        dt = torch.exp(low + (high - low) * torch.rand_like(layer.bias))
        layer.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
    return layer
