"""MambaVision's matrices over whole maps, in float64, window by window and token by token.

Nothing here calls the package: hooks of our own catch what layers and mixers receive.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oracles import conv_matrices, diagonal_matrices, scan_matrices

Size = tuple[int, int]


@dataclass
class Layer:
    """A mixer of a run: the map it works on, and what it received in windows."""

    mixer: Any
    size: Size
    side: int
    hidden: Tensor  # (B W, T, E)

    def alpha(self, components: Collection[str]) -> Tensor:
        """(B, C, L, L) over the map."""
        is_attention = hasattr(self.mixer, "qkv")
        of = attention_matrices if is_attention else mixer_matrices
        return over_the_map(of(self.mixer, self.hidden, components), self.size, self.side)


@torch.no_grad()
def mixer_matrices(mixer: Any, hidden: Tensor, components: Collection[str]) -> Tensor:
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
    if "scan" in components or "skip" in components:
        alpha[:, :half] = 0
    if "scan" in components:
        alpha[:, :half] += scan_matrices(dt, -mixer.A_log.exp(), b, c)
    if "skip" in components:
        alpha[:, :half] += mixer.D[:, None, None] * torch.eye(tokens)
    if "activation" in components:
        alpha = alpha @ diagonal_matrices((1 / (1 + (-u).exp()))[..., None], shape)
    return alpha @ conv if "conv" in components else alpha


@torch.no_grad()
def attention_matrices(module: Any, hidden: Tensor, components: Collection[str]) -> Tensor:
    """(B, C, L, L) of an Attention, every channel of a head alike."""
    module, hidden = copy.deepcopy(module).double(), hidden.double()
    heads, width = module.num_heads, module.head_dim
    tokens = hidden.shape[1]
    if "scan" not in components:
        return torch.eye(tokens).double().repeat(len(hidden), heads * width, 1, 1)
    query, key, _ = module.qkv(hidden).unflatten(-1, (3, heads, width)).unbind(2)
    query, key = module.q_norm(query), module.k_norm(key)
    scores = torch.einsum("bihp,bjhp->bhij", query, key) / width**0.5
    return scores.softmax(-1).repeat_interleave(width, 1)


def held(size: Size, side: int) -> list[tuple[int, int, int]]:
    """(token, window, place in the window) for every token of a map."""
    across = -(-size[1] // side)
    return [
        (r * size[1] + c, r // side * across + c // side, r % side * side + c % side)
        for r, c in itertools.product(range(size[0]), range(size[1]))
    ]


def over_the_map(blocks: Tensor, size: Size, side: int) -> Tensor:
    """(B W, C, T, T) as (B, C, L, L)."""
    windows = -(-size[0] // side) * -(-size[1] // side)
    length = size[0] * size[1]
    out = blocks.new_zeros(len(blocks) // windows, blocks.shape[1], length, length)
    for (i, window, row), (j, other, column) in itertools.product(held(size, side), repeat=2):
        if window == other:
            out[:, :, i, j] = blocks[window::windows, :, row, column]
    return out


def run(model: Any, images: Tensor) -> list[Layer]:
    """The mixers of one run in float64."""
    model = copy.deepcopy(model).double()
    layers: list[Layer] = []

    def watch(level: Any) -> None:
        def enter(module: Any, args: Any) -> None:
            level.size = tuple(args[0].shape[-2:])

        def leave(module: Any, args: Any, output: Tensor) -> None:
            layers.append(Layer(module, level.size, level.window_size, args[0].detach()))

        level.register_forward_pre_hook(enter)
        for block in level.blocks:
            block.mixer.register_forward_hook(leave)

    for level in model.levels:
        if not level.conv:
            watch(level)
    with torch.no_grad():
        model(images.double())
    return layers
