"""The rows that the authors' scripts read off a Mamba mixer, written again with loops over tokens.

Nothing here calls the package.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oracles.vim import Weights, select, silu


def rows(mixer: nn.Module, hidden: Tensor, query: int, script: str) -> Tensor:
    """The query's row of every channel (D, L), for what enters the mixer (L, E).

    Args:
        mixer: of Vision Mamba (v2), or one that reads in one direction.
        hidden: what enters it.
        query: the token asked.
        script: ``"s6"``, that of the hidden-attention paper, or ``"unified"``.
    """
    w = {name: value.detach().double() for name, value in mixer.state_dict().items()}
    x, z = (hidden.double() @ w["in_proj.weight"].T).chunk(2, -1)
    row = direction(w, "", x, z, query, script)
    if "A_b_log" in w:
        back = direction(w, "_b", x.flip(0), z.flip(0), len(x) - 1 - query, script).flip(-1)
        row[:, query + 1 :] = back[:, query + 1 :]
    return row


def direction(w: Weights, end: str, x: Tensor, z: Tensor, query: int, script: str) -> Tensor:
    """That of one direction, for x and z (L, D) in the order in which it reads them."""
    u, dt, b, c = select(w, end, x)
    a = -w["A_b_log" if end else "A_log"].exp()
    slip = script == "s6"  # which also keeps its rows in single precision
    row = torch.zeros(x.shape[1], len(x), dtype=torch.float32 if slip else torch.float64)
    for t in range(query if slip else query + 1):
        entry = c[query] * dt[t, :, None] * b[t]
        for k in range(t + 1, query if slip else query + 1):
            entry = entry * torch.exp(dt[k, :, None] * a)
        row[:, t] = entry.sum(-1)
    if slip:
        return row.double()
    row = row * torch.sigmoid(u).T
    taps = w[f"conv1d{end}.weight"][:, 0]
    out = torch.zeros_like(row)
    for lag in range(taps.shape[1]):
        out[:, : len(x) - lag] += row[:, lag:] * taps[:, -1 - lag, None]
    return out * silu(z[query])[:, None]
