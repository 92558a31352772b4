"""Vision Mamba: captum_ssm's VimMixer, and Mamba in the published fork of mamba_ssm.

x, z = in_proj(h)                  y = SiLU(z) (alpha_f + D + ...) x, output = out_proj(y)

f(x) = (scan + D) SiLU(conv(x) + b), with frozen ratios as in mamba.py, P the flip of tokens:

none   alpha = SiLU(z) f
v1     alpha = SiLU(z) (scan + P scan_b P + 2 D) SiLU conv, where scan_b differs in A only
v2     alpha = SiLU(z) (f + P f_b P) / 2, where f_b has weights of its own
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedMixerError
from ..operators import Chain, Diagonal, Operator, SelectiveScan, Shape, ShortConv, Sum
from ..operators.reorder import flip
from .base import Call, LinearMixer
from .parts.common import as_heads, causal_conv, frozen, linear, run, working_dtype

#: Above this error an output is not the sum of two directions; rounding stays far below.
_ANOTHER_FUNCTION = 0.25


def vim_mixer(module: Any, call: Call) -> LinearMixer:
    """captum_ssm.models.vim's VimMixer."""
    hidden = call.hidden_states
    projected = run(module.in_proj, hidden.to(working_dtype(module, hidden)))
    return _linearize(module, projected, run_projections=True)


def published_fork(module: Any, call: Call) -> LinearMixer:
    """Mamba of the mamba_ssm fork that is published with Vision Mamba."""
    call.refuse_cache("inference_params", position=1)
    hidden = call.hidden_states
    hidden = hidden.to(working_dtype(module, hidden))
    projected = linear(hidden, module.in_proj.weight, module.in_proj.bias)
    mixer = _linearize(module, projected, run_projections=not module.use_fast_path)
    if module.bimamba_type != "none" and not module.use_fast_path:
        _check_both_directions(module, mixer, call.output_tensor)
    return mixer


def _check_both_directions(module: Any, mixer: LinearMixer, output: Tensor) -> None:
    """Raise if the module did not compute both directions, as some copies of the fork on a CPU."""
    with torch.no_grad():
        rebuilt = mixer.output()
        difference = (rebuilt - output.to(rebuilt)).abs().max()
    if bool(difference > _ANOTHER_FUNCTION * output.to(rebuilt).abs().max()):
        raise UnsupportedMixerError(
            f"{type(module).__name__} with bimamba_type={module.bimamba_type!r} did not compute "
            "the sum of both directions: with use_fast_path=False the published fork drops the "
            "backward one, so the model's own predictions are wrong. Use use_fast_path=True, or "
            "load the weights with captum_ssm.models.load_vim, which runs anywhere."
        )


def _linearize(module: Any, projected: Tensor, *, run_projections: bool) -> LinearMixer:
    """The mixer from the output of in_proj, x and z (B, L, 2 D)."""
    x, z = projected.chunk(2, dim=-1)
    values = as_heads(x)  # (B, L, D, 1)
    shape = Shape(*values.shape)
    ahead = direction(module, values, run_projections=run_projections)
    both: tuple[Operator, ...]
    if module.bimamba_type == "v2":
        back = direction(module, values.flip(1), "_b", run_projections=run_projections)
        both = (both_ways(ahead, back, 0.5 if _halves(module) else 1.0),)
    elif module.bimamba_type == "v1":
        a_b = -torch.exp(module.A_b_log.to(values))
        scan = SelectiveScan(ahead.dt, ahead.a, ahead.b, ahead.c)
        back_scan = SelectiveScan(ahead.dt.flip(1), a_b, ahead.b.flip(1), ahead.c.flip(1))
        turn = flip(shape, values.device, "scan")
        skip = Diagonal(2 * ahead.skip, shape, "skip")
        core = Sum(scan, Chain(turn, back_scan, turn), skip)
        both = (core, *ahead.operators()[1:])
    else:
        both = ahead.operators()
    operator = Chain(Diagonal(as_heads(F.silu(z)), shape, "gate"), *both)
    gamma = getattr(module, "gamma", None)

    def project(y: Tensor) -> Tensor:
        out = _call(module.out_proj, y.flatten(2), run_projections)
        return out if gamma is None else out * gamma.to(out)

    return LinearMixer(values, operator, project)


class Direction(NamedTuple):
    """The coefficients of one direction, without the gate.

    Attributes:
        dt, b, c: step sizes (B, L, D), input and output vectors (B, L, N) or (B, L, G, N), with
            their graphs.
        a: decay rates (D, N).
        skip: weights (1, 1, D, 1).
        ratio: of the activation, (B, L, D, 1).
        conv: the short convolution.
    """

    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor
    ratio: Tensor
    conv: ShortConv

    def operators(self) -> tuple[Operator, ...]:
        """Scan and skip, activation, convolution: outermost first."""
        shape = self.conv.shape
        scan = SelectiveScan(self.dt, self.a, self.b, self.c)
        return (
            Sum(scan, Diagonal(self.skip, shape, "skip")),
            Diagonal(self.ratio, shape, "activation"),
            self.conv,
        )


def both_ways(ahead: Direction, back: Direction, share: float = 1.0) -> Operator:
    """The sum of two directions, share (f + P f_b P).

    Args:
        ahead: the direction from the first token to the last.
        back: the direction from the last token to the first, tokens in this order.
        share: a factor on each. Default: 1.0.
    """
    shape, like = ahead.conv.shape, ahead.ratio
    turn = flip(shape, like.device)
    # without a component, so that no choice of components drops the factor
    part = Diagonal(like.new_full((1, 1, 1, 1), share), shape)
    return Sum(Chain(part, *ahead.operators()), Chain(turn, part, *back.operators(), turn))


def direction(
    module: Any, values: Tensor, suffix: str = "", *, run_projections: bool = True
) -> Direction:
    """The coefficients of one direction of a Mamba.

    Args:
        module: a Mamba, or the module of one direction.
        values: (B, L, D, 1), in the order in which the direction reads them.
        suffix: suffix of its parameters' names. Default: ``""``.
        run_projections: whether its projections are called, or their weights read. Default: True.
    """
    shape = Shape(*values.shape)
    conv, u = causal_conv(getattr(module, f"conv1d{suffix}"), values, None, shape)
    ratio = torch.sigmoid(u)
    dt_proj = getattr(module, f"dt_proj{suffix}")
    a = -torch.exp(getattr(module, "A_b_log" if suffix else "A_log").to(values))  # (D, N)
    x_proj = getattr(module, f"x_proj{suffix}")
    selected = _call(x_proj, (u * ratio).squeeze(-1), run_projections)
    rank, state = dt_proj.weight.shape[1], a.shape[1]
    t, b, c = torch.split(selected, [rank, state, state], dim=-1)
    dt = F.softplus(linear(t, dt_proj.weight, dt_proj.bias))
    skip = frozen(getattr(module, f"D{suffix}"), values).view(1, 1, -1, 1)
    return Direction(dt, a, b, c, skip, ratio, conv)


def _halves(module: Any) -> bool:
    """Whether the sum is halved; the attribute's name differs between published copies."""
    return bool(getattr(module, "if_divide_out", getattr(module, "if_devide_out", False)))


def _call(projection: Any, x: Tensor, as_module: bool) -> Tensor:
    if as_module:
        return run(projection, x)
    return linear(x, projection.weight, projection.bias)
