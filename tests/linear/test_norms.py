"""Norms of torch, and as transformers' models write them: frozen scales, exactly affine."""

from __future__ import annotations

import oracles
import pytest
import torch
from helpers.function_arguments import draw
from oracles.euler import apply, check
from torch import Tensor, nn
from zoo.mamba import randomise

from captum_ssm.errors import NotLinearError


class HandWritten(nn.Module):
    """RMSNorm as transformers' models write it, which compute in float32."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.form == "pow":
            variance = wide.pow(2).mean(-1, keepdim=True)
            wide = wide * torch.rsqrt(variance + 1e-2)
        elif self.form == "in place":
            wide = wide * wide.square().mean(-1, keepdim=True).add_(1e-2).rsqrt_()
        elif self.form == "norm":
            wide = wide / (wide.norm(2, dim=-1, keepdim=True) * 6**-0.5 + 1e-2)
        else:
            wide = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-2)
        return self.weight * wide.to(x.dtype)


NORMS = {
    "layer": lambda: nn.LayerNorm(6, eps=1e-2),
    "layer without bias": lambda: nn.LayerNorm((4, 6), bias=False),
    "plain layer": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "rms": lambda: nn.RMSNorm(6, eps=1e-2),
    "rms without eps": lambda: nn.RMSNorm((4, 6)),
    "plain rms": lambda: nn.RMSNorm(6, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, 4),
    "plain group": lambda: nn.GroupNorm(4, 4, affine=False),
    "instance": lambda: nn.InstanceNorm1d(4, affine=True),
    "plain instance": lambda: nn.InstanceNorm1d(4, eps=1e-2),
    "instance with statistics": lambda: nn.InstanceNorm1d(
        4, affine=True, track_running_stats=True
    ).eval(),
    "batch": lambda: nn.BatchNorm1d(4).eval(),
    "plain batch": lambda: nn.BatchNorm1d(4, affine=False).eval(),
    **{f"by hand, {f}": lambda f=f: HandWritten(f) for f in ("pow", "in place", "norm", "sqrt")},
}


@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm):
    for dtype in (torch.float64, torch.float32):
        module = randomise(NORMS[norm]()).to(dtype)
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + 0.2)
        found = check(module, [draw().to(dtype)])
        shifts = getattr(module, "bias", None) is not None or isinstance(module, nn.BatchNorm1d)
        assert found.is_live and bool(found.constants) == shifts


def test_norms_in_half_precision_are_as_precise_as_torchs():
    for norm in ("layer", "rms", "group"):
        module = randomise(NORMS[norm]()).bfloat16()
        x = 3 + draw().bfloat16()
        found = apply(module, [x])
        exact = module.double()(x.double())
        own = oracles.relative_error(module.bfloat16()(x), exact)
        assert oracles.relative_error(found.outputs[0], exact) <= 2 * own + 1e-3


def test_a_norm_over_the_batch_is_refused():
    with pytest.raises(NotLinearError, match=r"'here'.*eval"):
        apply(nn.BatchNorm1d(4, dtype=torch.float64), [draw()])
