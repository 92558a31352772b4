"""LATIM written again in float64 as plainly as possible: every vector by itself, in loops.

Nothing here calls the package. Shapes: T is (B, L queries, L sources, E).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oracles import Parts, mamba1_parts
from oracles import vim as vim_oracle
from oracles.mamba2_formula import Form, mamba2_parts

Function = Callable[[Tensor], Tensor]

#: f of eq. 19; None stands for the frozen ratio.
FUNCTIONS: dict[str, Function | None] = {
    "linearized": None, "silu": lambda x: x / (1 + torch.exp(-x)), "taylor1": lambda x: 0.5 * x,
    "taylor2": lambda x: 0.5 * x + 0.25 * x * x,
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)), "identity": lambda x: x,
}  # fmt: skip


def shares(
    x: Tensor, taps: Tensor, bias: Tensor, ratio: Tensor, keep: Tensor, function: Function | None
) -> Tensor:
    """phi[t, k] of eq. 19, what token t - k contributes to the activation at t: (L, K, D).

    ``x`` and ``ratio`` are (L, D), ``taps`` (D, K), the last for the token itself. Padding, where
    ``keep`` (L,) is 0, counts as bias. The bias stays out of the frozen ratio.
    """
    tokens, width = len(x), taps.shape[1]
    phi = torch.zeros(tokens, width, x.shape[1]).double()
    for t in range(tokens):
        constant = bias.clone()
        for k in range(width):
            if t >= k:
                constant += (1 - keep[t - k]) * taps[:, -1 - k] * x[t - k]
        for k in range(width):
            tap = torch.zeros_like(bias)
            if t >= k:
                tap = keep[t - k] * taps[:, -1 - k] * x[t - k]
            if function is None:
                phi[t, k] = keep[t] * ratio[t] * tap
            else:
                phi[t, k] = keep[t] * function(tap + constant if k == 0 else tap)
    return phi


def vectors(matrix: Tensor, phi: Tensor, post: Tensor, weight: Tensor) -> Tensor:
    """T of one example (eqs. 21, 22 and 25), (L, L, E).

    ``matrix`` is M + delta D (D, L, L), ``phi`` (L, K, D), ``post`` gate and norm (L, D), and
    ``weight`` that of the output projection (E, D).
    """
    tokens, width, _ = phi.shape
    out = torch.zeros(tokens, tokens, len(weight)).double()
    for i in range(tokens):
        for j in range(tokens):
            v = torch.zeros(phi.shape[-1]).double()
            for k in range(width):
                if j + k < tokens:
                    v += matrix[:, i, j + k] * phi[j + k, k]
            out[i, j] = weight @ (post[i] * v)
    return out


@torch.no_grad()
def of_parts(mixer: Any, parts: Parts, activation: str, end: str = "") -> Tensor:
    width, taps = parts.values.shape[-1], getattr(mixer, f"conv1d{end}").weight.double()
    matrices = parts.scan + parts.skip[:, None, None] * torch.eye(parts.values.shape[1])
    weight, found = mixer.out_proj.weight.double(), []
    for b, matrix in enumerate(matrices):
        of_conv = parts.values[b], taps[:width, 0], parts.conv_bias
        phi = shares(*of_conv, parts.ratio[b], parts.mask[b], FUNCTIONS[activation])
        found.append(vectors(matrix, phi, parts.gate[b] * parts.norm[b], weight))
    return torch.stack(found)


def mamba1(mixer: Any, hidden: Tensor, activation: str, mask: Tensor | None = None) -> Tensor:
    return of_parts(mixer, mamba1_parts(mixer, hidden, mask), activation)


def mamba2(
    mixer: Any, hidden: Tensor, form: Form, activation: str, mask: Tensor | None = None
) -> Tensor:
    return of_parts(mixer, mamba2_parts(mixer, hidden, form, mask), activation)


@torch.no_grad()
def vim(mixer: Any, hidden: Tensor, activation: str) -> Tensor:
    """Both directions of Vision Mamba's v2 mixer, halved."""
    w = vim_oracle.double_weights(mixer)
    ahead = of_parts(mixer, vim_oracle.parts(w, hidden), activation)
    back = vim_oracle.parts(w, hidden.flip(1), "_b", "A_b_log")
    return (ahead + of_parts(mixer, back, activation, "_b").flip(1, 2)) / 2


def alti(contributions: Tensor, stream: Tensor | None = None) -> Tensor:
    """Eq. 6 entry by entry, (B, L, L); with a stream (B, L, E) as in eq. 4.

    A row of zeros becomes the token's own.
    """
    batch, tokens = contributions.shape[:2]
    out = torch.zeros(batch, tokens, tokens).double()
    for b in range(batch):
        for i in range(tokens):
            parts = contributions[b, i].double().clone()  # (L, E)
            if stream is not None:
                parts[i] += stream[b, i].double()
            y = parts.sum(0)
            for j in range(tokens):
                closeness = y.abs().sum() - (y - parts[j]).abs().sum()
                out[b, i, j] = closeness if closeness > 0 else 0.0
            if out[b, i].sum() > 0:
                out[b, i] /= out[b, i].sum()
            else:
                out[b, i, i] = 1.0
    return out
