"""Mamba, Mamba-2 and Mamba-3: fla's Mamba, Mamba2 and Mamba3.

The equations are those of :mod:`..mamba`, :mod:`..mamba2` and :mod:`..mamba3`; the modules differ
in names, and in what they do to padding.  Mamba and Mamba2 silence what enters and leaves their
convolution, Mamba2 without kernels all that enters it, and their states decay over padded tokens.
Mamba3 drops padded tokens.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from ...errors import UnsupportedMixerError
from .. import mamba, mamba2, mamba3
from ..base import Call, LinearMixer
from ..parts.common import run
from .common import entering, entering_unpadded, zeroed


def fla_mamba(module: Any, call: Call) -> LinearMixer:
    """fla's Mamba."""
    hidden, mask = entering(module, call)
    x, z = run(module.in_proj, hidden).chunk(2, dim=-1)
    gate = F.silu(z) if module.activation in ("silu", "swish") else module.act(z)
    select = mamba.selection(module, as_module=True)
    return mamba.linearize(module, (zeroed(x, mask), gate), mask, select, run_out_proj=True)


def fla_mamba2(module: Any, call: Call) -> LinearMixer:
    """fla's Mamba2."""
    hidden, mask = entering(module, call)
    groups, heads, width = module.n_groups, module.num_heads, module.intermediate_size
    if not (hidden.is_cuda and sys.modules[type(module).__module__].is_fast_path_available):
        hidden = zeroed(hidden, mask)
        if groups not in (1, heads):
            raise UnsupportedMixerError(
                f"fla's Mamba2 with n_groups={groups} without the kernels of mamba_ssm on a GPU: "
                "it deals the groups of B and C out to other heads than its kernels do, which has "
                "no adapter. Run it on a GPU with mamba_ssm."
            )
    z, stream, dt = torch.split(
        run(module.in_proj, hidden), [width, module.conv_dim, heads], dim=-1
    )
    norm = None
    if module.rmsnorm:
        own = module.norm
        norm = mamba2.OutputNorm(own.weight, own.eps, width // own.group_size, own.norm_before_gate)
    return mamba2.linearize(
        module,
        torch.cat([z, zeroed(stream, mask), dt], -1),
        mask,
        groups=groups,
        dt_limit=module.dt_limit,
        norm=norm,
        project=lambda y: run(module.out_proj, y.flatten(2)),
    )


def fla_mamba3(module: Any, call: Call) -> LinearMixer:
    """fla's Mamba3 with ``is_mimo=False``."""
    mamba3.refuse_mimo(module)
    hidden, mask = entering_unpadded(module, call, skips="trapezoidal rule")
    return mamba3.linearize(
        module,
        run(module.in_proj, hidden),
        mask,
        heads=module.num_heads,
        groups=module.n_groups,
        state=module.ssm_state_size,
    )
