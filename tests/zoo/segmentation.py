"""Small networks that answer for every pixel, with Mamba between convolutions (after U-Mamba)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from zoo.mamba import randomise


class Stage(nn.Module):
    """A convolution, instance norm and a bent line; then a mixer over all places in a row."""

    def __init__(self, dims: int, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv = getattr(nn, f"Conv{dims}d")(channels, width, 3, stride, 1)
        self.norm = getattr(nn, f"InstanceNorm{dims}d")(width, affine=True)
        self.before = nn.LayerNorm(width)
        self.mixer = MambaMixer(MambaConfig(hidden_size=width, state_size=3, conv_kernel=3), 0)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.norm(self.conv(x)), 0.01)
        places = self.before(x.flatten(2).mT)
        return x + self.mixer(places).mT.unflatten(2, x.shape[2:])


class UMamba(nn.Module):
    """Two stages down and one up again, with a skip between."""

    def __init__(self, dims: int = 2, classes: int = 4, width: int = 6) -> None:
        super().__init__()
        self.first = Stage(dims, 3, width, 1)
        self.second = Stage(dims, width, 2 * width, 2)
        self.up = getattr(nn, f"ConvTranspose{dims}d")(2 * width, width, 2, 2)
        self.join = getattr(nn, f"Conv{dims}d")(2 * width, width, 3, 1, 1)
        self.norm = getattr(nn, f"InstanceNorm{dims}d")(width)
        self.head = getattr(nn, f"Conv{dims}d")(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.first(images)
        up = self.up(self.second(fine))
        joined = F.leaky_relu(self.norm(self.join(torch.cat([up, fine], 1))))
        return self.head(joined)


def u_mamba(dims: int = 2) -> Any:
    return randomise(UMamba(dims)).eval()
