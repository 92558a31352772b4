"""VMamba written again in float64 from a state dict, with loops over tokens and scans.

Nothing here calls the package.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles import map_conv_matrices, scan_matrices
from oracles.vim import Weights, softplus
from oracles.vim import randomise as randomise_all

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


def released_shapes(width: int, depths: tuple[int, ...], ratio: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the released checkpoints of the second version."""
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.0.weight": (width // 2, 3, 3, 3),
        "patch_embed.5.weight": (width, width // 2, 3, 3),
        "classifier.head.weight": (1000, width * 2 ** (len(depths) - 1)),
        "classifier.head.bias": (1000,),
    }

    def normed(name: str, size: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (size,)

    shapes["patch_embed.0.bias"], shapes["patch_embed.5.bias"] = (width // 2,), (width,)
    normed("patch_embed.2", width // 2)
    normed("patch_embed.7", width)
    normed("classifier.norm", width * 2 ** (len(depths) - 1))
    for stage, depth in enumerate(depths):
        size = width * 2**stage
        inner, rank = ratio * size, -(-size // 16)
        for number in range(depth):
            block = f"layers.{stage}.blocks.{number}"
            normed(f"{block}.norm", size)
            normed(f"{block}.norm2", size)
            normed(f"{block}.op.out_norm", inner)
            shapes |= {
                f"{block}.op.in_proj.weight": (inner, size),
                f"{block}.op.out_proj.weight": (size, inner),
                f"{block}.op.conv2d.weight": (inner, 1, 3, 3),
                f"{block}.op.x_proj_weight": (4, rank + 2, inner),
                f"{block}.op.dt_projs_weight": (4, inner, rank),
                f"{block}.op.dt_projs_bias": (4, inner), f"{block}.op.A_logs": (4 * inner, 1),
                f"{block}.op.Ds": (4 * inner,), f"{block}.mlp.fc1.weight": (4 * size, size),
                f"{block}.mlp.fc1.bias": (4 * size,), f"{block}.mlp.fc2.weight": (size, 4 * size),
                f"{block}.mlp.fc2.bias": (size,),
            }  # fmt: skip
        if stage + 1 < len(depths):
            shapes[f"layers.{stage}.downsample.1.weight"] = (2 * size, size, 3, 3)
            shapes[f"layers.{stage}.downsample.1.bias"] = (2 * size,)
            normed(f"layers.{stage}.downsample.3", 2 * size)
    return shapes


@torch.no_grad()
def randomise(module: nn.Module) -> Any:
    """Every parameter random, and different in every scan."""
    randomise_all(module)
    for name, parameter in module.named_parameters():
        noise = torch.randn_like(parameter)
        if name.endswith("A_logs"):
            parameter.copy_(0.6 * noise)
        elif name.endswith("dt_projs_bias"):
            parameter.copy_(noise - 1)
        elif name.endswith(("x_proj_weight", "dt_projs_weight")):
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return module


def orders(size: tuple[int, int], kind: str) -> list[list[int]]:
    """Which token every step of each scan reads."""
    rows = [y * size[1] + x for y in range(size[0]) for x in range(size[1])]
    columns = [y * size[1] + x for x in range(size[1]) for y in range(size[0])]
    return {
        "cross": [rows, columns, rows[::-1], columns[::-1]],
        "rows both ways": [rows, rows, rows[::-1], rows[::-1]],
        "rows": [rows] * 4,
    }[kind]


class Mixer:
    """A mixer at one example: its matrices before the norm, and what they lead to.

    ``w`` are float64 weights, ``hidden`` is (L, E), ``size`` the map's height and width, ``kind``
    the order of the scans, ``gate`` one of ``"act"``, ``"plain"`` and ``"none"``. If ``out_act``, a
    GELU follows the norm.
    """

    def __init__(
        self, w: Weights, hidden: Tensor, size: tuple[int, int], kind: str = "cross",
        gate: str = "none", act: str = "silu", out_act: bool = False,
    ) -> None:  # fmt: skip
        tokens, function = size[0] * size[1], ACTIVATIONS[act]
        x = hidden @ w["in_proj.weight"].T
        z = torch.ones(1)
        if gate != "none":
            x, z = x.chunk(2, -1)
            z = function(z) if gate == "act" else z
        self.values = x  # (L, D)
        channels = x.shape[1]
        eye = torch.eye(tokens).double()
        conv, u = eye.expand(channels, -1, -1), x
        if "conv2d.weight" in w:
            kernel = w["conv2d.weight"].shape[-1]
            lags = [(kernel // 2 - i, kernel // 2 - j)
                    for i, j in itertools.product(range(kernel), repeat=2)]  # fmt: skip
            taps = w["conv2d.weight"].flatten(2)
            (conv,) = map_conv_matrices(taps, lags, size[1], (1, tokens, channels, 1))
            u = torch.einsum("cij,jc->ic", conv, x) + w.get("conv2d.bias", 0)
        s = function(u)
        rates, skips = -w["A_logs"].exp().view(4, channels, -1), w["Ds"].view(4, channels)
        rank, state = w["dt_projs_weight"].shape[-1], rates.shape[-1]
        core = torch.zeros(channels, tokens, tokens).double()
        for k, order in enumerate(orders(size, kind)):
            selected = s[order] @ w["x_proj_weight"][k].T
            t, b, c = selected.split([rank, state, state], -1)
            dt = softplus(t @ w["dt_projs_weight"][k].T + w["dt_projs_bias"][k])
            (scan,) = scan_matrices(dt[None], rates[k], b[None], c[None])  # (D, L, L)
            place = torch.zeros(tokens, tokens).double()
            place[order, range(tokens)] = 1
            core += place @ scan @ place.T + skips[k, :, None, None] * eye
        ratio = torch.where(u == 0, 0.5, s / u)
        r = torch.einsum("cij,jc->ic", core, s)
        self.scanned = core @ (ratio.T[:, :, None] * conv)  # (D, L, L)
        y = r
        self.scale = torch.ones_like(r)
        if "out_norm.weight" in w:
            deviation = (r.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
            y = (r - r.mean(-1, keepdim=True)) / deviation
            y = y * w["out_norm.weight"] + w["out_norm.bias"]
            # of a channel's own numbers, what is left beside the mean over all
            self.scale = w["out_norm.weight"] / deviation * (1 - 1 / channels)
        if out_act:
            self.scale, y = self.scale * F.gelu(y) / y, F.gelu(y)
        self.scale = self.scale * z
        self.output = (y * z) @ w["out_proj.weight"].T

    def matrices(self) -> Tensor:
        """alpha of every channel, (D, L, L)."""
        return self.scale.T[:, :, None] * self.scanned


def spread(row: Tensor, size: tuple[int, int], kernel: int, padding: int) -> Tensor:
    """A row over a coarser map (h', w') as one over a finer of ``size``, token by token."""
    out = torch.zeros(size).double()
    for y, x in itertools.product(range(row.shape[0]), range(row.shape[1])):
        read = [
            (i, j)
            for i in range(2 * y - padding, 2 * y - padding + kernel)
            for j in range(2 * x - padding, 2 * x - padding + kernel)
            if 0 <= i < size[0] and 0 <= j < size[1]
        ]
        for place in read:
            out[place] += row[y, x] / len(read)
    return out
