"""VMamba's mixer: a convolution over a grid of tokens, then scans in several orders."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attr.call.checks import choice
from ...errors import OptionError
from ..vim.mixer import scan, step_projection

#: Number of scans; each scan has separate weights.
SCANS = 4
#: Scan orders by published forward type: "cross" scans rows and columns in both directions, "rows
#: both ways" only rows in both directions, and "rows" only rows in one direction.
_CROSS = ("v0", "v01", "v02", "v03", "v04", "v05", "v2", "v3")
_ORDERS = dict.fromkeys(_CROSS, "cross") | {"v052d": "rows both ways", "v051d": "rows"}

ACTIVATIONS = {"silu": nn.SiLU, "gelu": nn.GELU, "relu": nn.ReLU}


class Form(NamedTuple):
    """The mixer settings that the name of a published forward type encodes.

    Attributes:
        orders: the scan orders: ``"cross"``, ``"rows both ways"`` or ``"rows"``.
        gate: whether the output is multiplied by a gate z.
        gate_act: whether the activation is applied to z.
        out_norm: whether a LayerNorm is applied to the sum of the scans.
        out_act: whether a GELU is applied after the norm.
    """

    orders: str
    gate: bool
    gate_act: bool
    out_norm: bool
    out_act: bool


def form_of(forward_type: str) -> Form:
    """Return the settings of a mixer with a published forward type.

    Args:
        forward_type: a version with suffixes, such as ``"v05_noz"``. Suffixes are ``noz`` (no
            gate), ``nozact`` (no activation of the gate), ``onnone`` (no output norm), ``oact``
            (output activation) and ``no32`` (kernel precision, ignored).

    Raises:
        OptionError: when the version or a suffix is not supported.

    Example:
        >>> from captum_ssm.models.vmamba import form_of
        >>> form_of("v05_noz").gate, form_of("v0").gate
        (False, True)
    """
    version, *suffixes = forward_type.split("_")
    known_suffixes = {"noz", "nozact", "onnone", "oact", "no32"}
    if version not in _ORDERS or not known_suffixes.issuperset(suffixes):
        raise OptionError(
            f"forward_type={forward_type!r} is not supported. Use one of {tuple(_ORDERS)}, "
            f"followed by any of {tuple('_' + suffix for suffix in sorted(known_suffixes))}."
        )
    return Form(
        orders=_ORDERS[version], gate="noz" not in suffixes, gate_act="nozact" not in suffixes,
        out_norm="onnone" not in suffixes, out_act="oact" in suffixes,
    )  # fmt: skip


class SS2D(nn.Module):
    """VMamba's mixer, with the parameter names of the published code.

    With x, z = in_proj(h) and u = act(conv(x)) over the grid of tokens, the output is

        out_proj(act(z) y)        where y = norm(sum over k of scan_k(u) + D_k u)

    Each scan k has a separate order of tokens and separate weights.

    Args:
        d_model: width E of the tokens.
        d_state: number N of states per channel. Default: 16.
        ssm_ratio: number of channels D, as a multiple of E. Default: 2.0.
        dt_rank: rank of the projections to dt. Default: None, E / 16 rounded up.
        act: the activation: ``"silu"``, ``"gelu"`` or ``"relu"``. Default: ``"silu"``.
        d_conv: height and width of the convolution; 0 or 1 for no convolution. Default: 3.
        conv_bias: whether the convolution has a bias. Default: True.
        forward_type: published name of gate, norm and scan orders; see :func:`form_of`. Default:
            ``"v05_noz"``, no gate.

    Raises:
        OptionError: when ``act`` or ``forward_type`` is unknown.

    Example:
        >>> import torch
        >>> from captum_ssm.models.vmamba import SS2D
        >>> mixer = SS2D(d_model=16)
        >>> mixer(torch.zeros(2, 12, 16), size=(3, 4)).shape
        torch.Size([2, 12, 16])
        >>> [order.tolist() for order in mixer.scan_orders((2, 2), torch.device("cpu"))]
        [[0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0], [3, 1, 2, 0]]
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        ssm_ratio: float = 2.0,
        dt_rank: int | None = None,
        act: str = "silu",
        d_conv: int = 3,
        conv_bias: bool = True,
        forward_type: str = "v05_noz",
    ) -> None:
        super().__init__()
        self.form = form_of(forward_type)
        inner = int(ssm_ratio * d_model)
        rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        self.in_proj = nn.Linear(d_model, inner * (2 if self.form.gate else 1), bias=False)
        self.act: nn.Module = ACTIVATIONS[choice("act", act, ACTIVATIONS)]()
        self.conv2d: nn.Conv2d | None = None
        if d_conv > 1:
            padding = (d_conv - 1) // 2
            self.conv2d = nn.Conv2d(
                inner, inner, d_conv, padding=padding, groups=inner, bias=conv_bias
            )
        selections = [nn.Linear(inner, rank + 2 * d_state, bias=False) for _ in range(SCANS)]
        step_projections = [step_projection(rank, inner) for _ in range(SCANS)]
        rates = torch.arange(1, d_state + 1, dtype=torch.float32).log()
        self.x_proj_weight = _stacked([layer.weight for layer in selections])
        self.dt_projs_weight = _stacked([layer.weight for layer in step_projections])
        self.dt_projs_bias = _stacked([layer.bias for layer in step_projections])
        self.A_logs = nn.Parameter(rates.expand(SCANS * inner, -1).clone())
        self.Ds = nn.Parameter(torch.ones(SCANS * inner))
        self.out_norm = nn.LayerNorm(inner) if self.form.out_norm else nn.Identity()
        self.out_act = nn.GELU() if self.form.out_act else nn.Identity()
        self.out_proj = nn.Linear(inner, d_model, bias=False)

    def forward(self, hidden_states: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the mixer's output for tokens (B, L, E), in the same shape.

        Args:
            hidden_states: the tokens of a grid, row by row.
            size: height and width of the grid.
        """
        x = self.in_proj(hidden_states)
        z = None
        if self.form.gate:
            x, z = x.chunk(2, dim=-1)
            z = self.act(z) if self.form.gate_act else z
        if self.conv2d is not None:
            x = self.conv2d(x.mT.unflatten(-1, size)).flatten(-2).mT
        y = self.out_act(self.out_norm(self._sum_of_scans(self.act(x), size).to(x.dtype)))
        out: Tensor = self.out_proj(y if z is None else y * z)
        return out

    def scan_orders(self, size: tuple[int, int], device: torch.device) -> list[Tensor]:
        """Return for each scan the token positions (L,) in scan order, for a grid of ``size``."""
        rows = torch.arange(math.prod(size), device=device)
        columns = rows.view(size).T.flatten()
        if self.form.orders == "rows":
            return [rows] * SCANS
        forward_orders = [rows, columns if self.form.orders == "cross" else rows]
        return [*forward_orders, *(order.flip(0) for order in forward_orders)]

    def _sum_of_scans(self, u: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the sum of all scans of u (B, L, D), in float32 or wider."""
        total = torch.zeros_like(u, dtype=torch.promote_types(u.dtype, torch.float32))
        rates, skips = self.A_logs.chunk(SCANS), self.Ds.chunk(SCANS)
        rank, state = self.dt_projs_weight.shape[2], self.A_logs.shape[1]
        for k, order in enumerate(self.scan_orders(size, u.device)):
            ordered = u.index_select(1, order)
            selected = F.linear(ordered, self.x_proj_weight[k])
            low_rank_dt, b, c = torch.split(selected, [rank, state, state], -1)
            dt = F.linear(low_rank_dt, self.dt_projs_weight[k])
            values, dt, b, c = (x.mT.contiguous() for x in (ordered, dt, b, c))
            y = scan(values, dt, rates[k], b, c, skips[k], self.dt_projs_bias[k])
            total = total.index_add(1, order, y.mT.to(total.dtype))
        return total


def _stacked(weights: list[Tensor]) -> nn.Parameter:
    """Return one parameter with the weights of all scans, as in published checkpoints."""
    return nn.Parameter(torch.stack([weight.detach() for weight in weights]))
