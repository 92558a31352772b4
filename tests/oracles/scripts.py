"""The rows that the authors' scripts read off a Mamba mixer, written again with loops over tokens.

Nothing here calls the package.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oracles.vim import double_weights, parts


def rows(mixer: nn.Module, hidden: Tensor, query: int, script: str) -> Tensor:
    """The query's row of every channel (D, L), for what enters the mixer (L, E).

    ``script`` is ``"s6"``, that of the hidden-attention paper, or ``"unified"``.
    """
    found = parts(double_weights(mixer), hidden[None])
    dt, b, c, a = found.dt[0], found.b[0], found.c[0], found.a
    slip = script == "s6"  # which also keeps its rows in single precision
    row = torch.zeros(len(a), len(dt), dtype=torch.float32 if slip else torch.float64)
    for t in range(query if slip else query + 1):
        entry = c[query] * dt[t, :, None] * b[t]
        for k in range(t + 1, query if slip else query + 1):
            entry = entry * torch.exp(dt[k, :, None] * a)
        row[:, t] = entry.sum(-1)
    if slip:
        return row.double()
    out = torch.einsum("dt,dtj->dj", row * found.ratio[0].T, found.conv[0])
    return out * found.gate[0, query][:, None]
