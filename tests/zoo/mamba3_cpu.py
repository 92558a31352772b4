"""mamba_ssm's Mamba3 on the CPU.

Its kernel (``mamba3_siso_combined``) runs on CUDA devices only, and the package has no reference
for it.  Here a loop over tokens stands in for the kernel, in float32, or float64 where an operand
is float64; everything around it is the package's own module.  ``tests/interpreter`` holds the
loop to the kernel itself.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.mamba import randomise

MODULE = "mamba_ssm.modules.mamba3"
#: Norms of few features that do not blow rounding errors up.
EPS = 0.02


class Mamba3:
    """mamba_ssm's Mamba3 on the CPU, and factories for small models of it."""

    def __init__(self, package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._package = package
        self.module: Any = sys.modules[MODULE]
        monkeypatch.setattr(self.module, "mamba3_siso_combined", siso)

    def make(self, d_model: int = 12, **options: Any) -> Any:
        """A mixer of D = 2 E channels with random parameters."""
        small = {"d_state": 8, "headdim": 8, "ngroups": 1}
        return randomised(self.module.Mamba3(d_model, **small | options))

    def make_lm(self, d_model: int = 12, **options: Any) -> Any:
        """mamba_ssm's language model of two layers, whose mixers are Mamba3.

        The package's own builder knows Mamba and Mamba2 only.
        """
        model = randomise(self._package.make_lm(d_model))
        for block in model.backbone.layers:
            block.mixer = self.make(d_model, layer_idx=block.layer_idx, **options)
        return model


@torch.no_grad()
def randomised(mixer: Any) -> nn.Module:
    """The mixer with nothing left at zero or one."""
    randomise(mixer)
    for parameter in (mixer.dt_bias, mixer.B_bias, mixer.C_bias):
        parameter.normal_()
    for norm in (mixer.B_norm, mixer.C_norm, *([mixer.norm] if mixer.is_outproj_norm else [])):
        norm.eps = EPS
    return mixer.eval()  # type: ignore[no-any-return]


def siso(
    Q: Tensor, K: Tensor, V: Tensor, ADT: Tensor, DT: Tensor, Trap: Tensor, Q_bias: Tensor,
    K_bias: Tensor, Angles: Tensor, D: Tensor, Z: Tensor | None, chunk_size: int,
    Input_States: None = None, return_final_states: bool = False, cu_seqlens: None = None,
) -> Tensor:  # fmt: skip
    """What ``mamba3_siso_combined`` documents, one token after the other.

    Q and K are (B, L, G, N); V and Z (B, L, H, P); ADT, DT and Trap (B, H, L); the biases (H, N);
    Angles (B, L, H, S); D (H,).
    """
    assert Input_States is None and cu_seqlens is None and not return_final_states
    operands = (Q, K, V, ADT, DT, Trap, Angles)
    double = any(t.dtype == torch.float64 for t in operands)
    Q, K, v, ADT, DT, Trap, Angles = (t.double() if double else t.float() for t in operands)
    repeats = len(Q_bias) // Q.shape[2]
    q, k = (s.repeat_interleave(repeats, 2) + bias.to(s) for s, bias in ((Q, Q_bias), (K, K_bias)))
    decay, end, rate = torch.exp(ADT), torch.sigmoid(Trap), torch.tanh(Angles) * math.pi
    angle = torch.zeros_like(rate[:, 0])
    state = v.new_zeros(*v.shape[:1], *v.shape[2:], q.shape[-1])  # (B, H, P, N)
    before = torch.zeros_like(state)
    outputs = []
    for t in range(q.shape[1]):
        step = DT[:, :, t, None, None]
        # modulo one turn, as in the kernel, lest a long sum lose digits
        angle = torch.remainder(angle + rate[:, t] * DT[:, :, t, None], 2 * math.pi)
        now = v[:, t, :, :, None] * turn(k[:, t], angle)[:, :, None]
        weight = end[:, :, t, None, None]
        state = decay[:, :, t, None, None] * (state + (1 - weight) * step * before)
        state = state + weight * step * now
        before = now
        read = (state * turn(q[:, t], angle)[:, :, None]).sum(-1)
        outputs.append(read + D.to(v)[:, None] * v[:, t])
    out = torch.stack(outputs, 1)
    return (out if Z is None else out * F.silu(Z.to(v))).to(V.dtype)


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """Pairs of neighbouring entries of x (..., N) as complex numbers times e^(i angle (..., S))."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    unturned = pairs.shape[-1] - angle.shape[-1]
    factor = torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(pairs * F.pad(factor, (0, unturned), value=1)).flatten(-2)
