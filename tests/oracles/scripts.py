"""The rows that the authors' scripts read off a Mamba mixer, written again with loops over tokens.

Nothing here calls the package.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oracles import Parts
from oracles.vim import double_weights, parts


def rows(mixer: nn.Module, hidden: Tensor, query: int, script: str) -> Tensor:
    """The query's row of every channel (D, L), for what enters the mixer (L, E).

    Args:
        mixer: of Vision Mamba (v2), or one that reads in one direction.
        hidden: what enters it.
        query: the token asked.
        script: ``"s6"``, that of the hidden-attention paper, or ``"unified"``.
    """
    w = double_weights(mixer)
    row = direction(parts(w, hidden[None]), query, script)
    if "A_b_log" in w:
        reverse = parts(w, hidden.flip(0)[None], "_b", "A_b_log")
        back = direction(reverse, len(hidden) - 1 - query, script).flip(-1)
        row[:, query + 1 :] = back[:, query + 1 :]
    return row


def direction(found: Parts, query: int, script: str) -> Tensor:
    """That of one direction, in the order in which it reads the tokens."""
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
