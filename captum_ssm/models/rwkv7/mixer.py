"""The mixer of RWKV-7, which updates its state with a generalized delta rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...mixers.rwkv import log_decay, mix_with_previous, unit_vectors_by_head
from ...operators import DeltaRule

#: Epsilon of the group norm over heads, as in the published code.
_NORM_EPS = 64e-5


class RWKV7TimeMix(nn.Module):
    """RWKV-7's mixer, with the parameter names of the published checkpoints.

    The equations are in :mod:`captum_ssm.mixers.rwkv`.

    Args:
        width: width E of the residual stream.
        head_size: channels of a head. Default: 64.
        is_first: whether the mixer is in the first block. In later blocks, the values of the first
            block are mixed in. Default: False.
        decay_rank: rank of the projection to decays. Default: 64.
        step_rank: rank of the projection to step sizes. Default: 64.
        value_rank: rank of the projection to the share of the first block's values. Default: 32.
        gate_rank: rank of the projection to the gate. Default: 128.

    Example:
        >>> import torch
        >>> from captum_ssm.models.rwkv7 import RWKV7TimeMix
        >>> out, values = RWKV7TimeMix(16, head_size=8, is_first=True)(torch.zeros(2, 5, 16))
        >>> out.shape, values.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 16]))
    """

    def __init__(
        self,
        width: int,
        head_size: int = 64,
        is_first: bool = False,
        *,
        decay_rank: int = 64,
        step_rank: int = 64,
        value_rank: int = 32,
        gate_rank: int = 128,
    ) -> None:
        super().__init__()
        self.is_first = is_first

        def per_channel(fill: float = 0.0) -> nn.Parameter:
            return nn.Parameter(torch.full((1, 1, width), fill))

        def low_rank(rank: int) -> tuple[nn.Parameter, nn.Parameter]:
            up = nn.init.normal_(torch.empty(rank, width), std=0.1 * width**-0.5)
            return nn.Parameter(torch.zeros(width, rank)), nn.Parameter(up)

        for name in "rwkvag":
            self.register_parameter(f"x_{name}", per_channel(0.5))
        self.w0, (self.w1, self.w2) = per_channel(-3.0), low_rank(decay_rank)
        self.a0, (self.a1, self.a2) = per_channel(), low_rank(step_rank)
        if not is_first:
            self.v0, (self.v1, self.v2) = per_channel(1.0), low_rank(value_rank)
        self.g1, self.g2 = low_rank(gate_rank)
        self.k_k, self.k_a = per_channel(0.7), per_channel(1.0)
        self.r_k = nn.Parameter(torch.zeros(width // head_size, head_size))
        self.receptance, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.ln_x = nn.GroupNorm(width // head_size, width, eps=_NORM_EPS)

    def forward(self, hidden: Tensor, v_first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the mixer's output, and the values of the first block, both (B, L, E).

        Args:
            hidden: the input (B, L, E).
            v_first: the values of the first block. Default: None, this is the first block.
        """
        r, w, k, v, a, g = mix_with_previous(self, hidden)
        g = torch.sigmoid(g @ self.g1) @ self.g2
        w = log_decay(self.w0 + torch.tanh(w @ self.w1) @ self.w2)
        a = torch.sigmoid(self.a0 + a @ self.a1 @ self.a2)
        r, keys, values = self.receptance(r), self.key(k), self.value(v)
        if v_first is None:
            v_first = values
        else:
            share_of_first = torch.sigmoid(self.v0 + v @ self.v1 @ self.v2)
            values = values + share_of_first * (v_first - values)
        heads = self.r_k.shape[0]
        erase = unit_vectors_by_head(keys * self.k_k, heads)
        keys = keys * (1 + (a - 1) * self.k_a)
        r, w, k, v, a = (x.unflatten(-1, (heads, -1)) for x in (r, w, keys, values, a))
        # states are computed in float32 or wider
        inputs = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (r, w, k, v, erase, a))
        recalled: Tensor = _DeltaRuleOutput.apply(*inputs)  # type: ignore[no-untyped-call]
        out = self.ln_x(recalled.to(hidden.dtype).flatten(2).flatten(0, 1)).view(hidden.shape)
        bonus = (r * k * self.r_k).sum(-1, keepdim=True) * v
        return self.output((out + bonus.flatten(2)) * g), v_first


class _DeltaRuleOutput(torch.autograd.Function):
    """The delta rule's output, with gradients for all arguments; an operator's are frozen."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, w: Tensor, k: Tensor, v: Tensor, e: Tensor, a: Tensor) -> Any:
        ctx.save_for_backward(r, w, k, v, e, a)
        return _delta_rule(r, w, k, v, e, a).apply(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        saved = ctx.saved_tensors  # read once, as torch's checkpoints require
        of_values, of_factors = _delta_rule(*saved).backward(saved[3], grads[0])
        names = "query", "log_decay", "key", "", "erase", "erase_step"  # of forward; "" for values
        return tuple(of_factors[name] if name else of_values for name in names)


def _delta_rule(r: Tensor, w: Tensor, k: Tensor, v: Tensor, e: Tensor, a: Tensor) -> DeltaRule:
    return DeltaRule(r, k, torch.ones_like(r[..., 0]), w, v.shape[-1], erase=e, erase_step=a)
