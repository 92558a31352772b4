"""The matrices of MambaVision's mixers, in float64.

Nothing here calls the package.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oracles import conv_matrices, diagonal_matrices, scan_matrices


@torch.no_grad()
def mixer_matrices(mixer: Any, hidden: Tensor) -> Tensor:
    """(B, 2 D, L, L) of a MambaVisionMixer, without windows."""
    mixer, hidden = copy.deepcopy(mixer).double(), hidden.double()
    values = mixer.in_proj(hidden)  # (B, L, 2 D)
    batch, tokens, channels = values.shape
    shape = (batch, tokens, channels, 1)
    taps = torch.cat([mixer.conv1d_x.weight, mixer.conv1d_z.weight])  # (2 D, 1, K)
    lags = {3: (1, 0, -1), 4: (1, 0, -1, -2), 1: (0,)}[taps.shape[-1]]
    conv = conv_matrices(taps, lags, shape)
    u = torch.einsum("bcij,bjc->bic", conv, values)
    if mixer.conv1d_x.bias is not None:
        u = u + torch.cat([mixer.conv1d_x.bias, mixer.conv1d_z.bias])
    half = channels // 2
    selected = F.linear((u / (1 + (-u).exp()))[..., :half], mixer.x_proj.weight)
    t, b, c = selected.split([mixer.dt_rank, mixer.d_state, mixer.d_state], -1)
    dt = F.softplus(F.linear(t, mixer.dt_proj.weight) + 2 * mixer.dt_proj.bias)

    alpha = torch.eye(tokens).double().repeat(batch, channels, 1, 1)
    alpha[:, :half] *= mixer.D[:, None, None]
    alpha[:, :half] += scan_matrices(dt, -mixer.A_log.exp(), b, c)
    return alpha @ diagonal_matrices((1 / (1 + (-u).exp()))[..., None], shape) @ conv
