"""VMamba: embedded patches, stages of blocks over ever coarser grids of tokens, and a head."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attr.call.checks import choice
from ...errors import OptionError
from ..perceptron import INIT_STD, perceptron
from .mixer import SS2D

DOWNSAMPLES = ("v1", "v2", "v3")
PATCH_EMBEDS = ("v1", "v2")


class PermuteDims(nn.Module):
    """Permute the dimensions of a tensor; a module, so that weight names have published numbers."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


class PatchMerging(nn.Module):
    """Merge each 2 x 2 tokens of a grid (B, h, w, E) to one token, with half height and width."""

    # read by the adapter, as of a convolution that merges the same tokens
    kernel_size = stride = 2, 2
    padding, dilation = (0, 0), (1, 1)

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))  # to even height and width
        corners = [x[:, down::2, right::2] for right in (0, 1) for down in (0, 1)]
        out: Tensor = self.reduction(self.norm(torch.cat(corners, -1)))
        return out


class VSSBlock(nn.Module):
    """A block on a grid of tokens (B, h, w, E): x = x + op(norm(x)), then x + mlp(norm2(x)).

    Args:
        width: width E of the tokens.
        mlp_hidden: hidden units of the mlp; 0 for no mlp. Default: 0.
        **mixer_options: arguments of :class:`~captum_ssm.models.vmamba.SS2D`.

    Example:
        >>> import torch
        >>> from captum_ssm.models.vmamba import VSSBlock
        >>> VSSBlock(8, mlp_hidden=16)(torch.zeros(2, 3, 4, 8)).shape
        torch.Size([2, 3, 4, 8])
    """

    def __init__(self, width: int, mlp_hidden: int = 0, **mixer_options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.op = SS2D(width, **mixer_options)
        self.has_mlp = mlp_hidden > 0
        if self.has_mlp:
            self.norm2 = nn.LayerNorm(width)
            self.mlp = perceptron(width, mlp_hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the grid of tokens after the block, in the shape of ``x`` (B, h, w, E)."""
        size = x.shape[1], x.shape[2]
        x = x + self.op(self.norm(x).flatten(1, 2), size=size).unflatten(1, size)
        return x + self.mlp(self.norm2(x)) if self.has_mlp else x


class VMamba(nn.Module):
    """An image classifier of 2D selective scans, with the parameter names of VMamba checkpoints.

    The published channels-first and channels-last models are equivalent; both fit this class. The
    released VMamba-T (s1l8) is ``VMamba(d_state=1, ssm_ratio=1.0, conv_bias=False)``; VMamba-S
    (s2l15) has ``depths=(2, 2, 15, 2)`` and ``ssm_ratio=2.0`` instead, and VMamba-B also
    ``dims=128``.

    Args:
        patch_size: side of the patches. Default: 4.
        channels: color channels of the images. Default: 3.
        num_classes: number of classes. Default: 1000.
        depths: number of blocks in each stage. Default: (2, 2, 8, 2).
        dims: width E of each stage; or one number, the width of the first stage, which is doubled
            in each later stage. Default: 96.
        mlp_ratio: hidden units of the mlps, as a multiple of E; 0 for no mlps. Default: 4.0.
        patch_norm: whether embedded patches are normalized. Default: True.
        patch_embed: ``"v1"`` for one convolution of separate patches, ``"v2"`` for two convolutions
            of overlapping patches. Default: ``"v2"``.
        downsample: the layer between stages: ``"v1"`` for a projection of 2 x 2 tokens, ``"v2"``
            for a 2 x 2 convolution, ``"v3"`` for a 3 x 3 convolution. Default: ``"v3"``.
        pos_embed: height and width of the grid of learned position embeddings. Default: None, no
            position embeddings.
        **mixer_options: further arguments of :class:`~captum_ssm.models.vmamba.SS2D`.

    Raises:
        OptionError: when ``patch_embed``, ``downsample`` or an option of the mixer is unknown, or a
            size is below 1.

    Example:
        >>> import torch
        >>> from captum_ssm.models import VMamba
        >>> model = VMamba(depths=(1, 1), dims=8, num_classes=5, d_state=1)
        >>> model(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 5])
    """

    pos_embed: nn.Parameter | None

    def __init__(
        self,
        patch_size: int = 4,
        channels: int = 3,
        num_classes: int = 1000,
        depths: Sequence[int] = (2, 2, 8, 2),
        dims: int | Sequence[int] = 96,
        *,
        mlp_ratio: float = 4.0,
        patch_norm: bool = True,
        patch_embed: str = "v2",
        downsample: str = "v3",
        pos_embed: tuple[int, int] | None = None,
        **mixer_options: Any,
    ) -> None:
        super().__init__()
        choice("patch_embed", patch_embed, PATCH_EMBEDS)
        choice("downsample", downsample, DOWNSAMPLES)
        widths = (
            [dims * 2**stage for stage in range(len(depths))] if isinstance(dims, int) else dims
        )
        if len(widths) != len(depths) or not depths or min(*depths, *widths, patch_size) < 1:
            raise OptionError(
                f"depths={tuple(depths)}, dims={dims} and patch_size={patch_size}: pass one depth "
                "and one width of 1 or more for each stage, and a patch_size of 1 or more."
            )
        embedding = _separate_patches if patch_embed == "v1" else _overlapping_patches
        self.patch_embed = embedding(channels, widths[0], patch_size, patch_norm)
        positions = None if pos_embed is None else torch.randn(1, widths[0], *pos_embed) * INIT_STD
        self.register_parameter("pos_embed", None if positions is None else nn.Parameter(positions))
        self.layers = nn.ModuleList()
        for depth, width, next_width in zip(depths, widths, [*widths[1:], 0], strict=True):
            hidden = int(width * mlp_ratio)
            blocks = [VSSBlock(width, hidden, **mixer_options) for _ in range(depth)]
            coarser = _downsampling(downsample, width, next_width) if next_width else nn.Identity()
            stage = OrderedDict(blocks=nn.Sequential(*blocks), downsample=coarser)
            self.layers.append(nn.Sequential(stage))
        self.classifier = nn.Sequential(
            OrderedDict(
                norm=nn.LayerNorm(widths[-1]),
                permute=PermuteDims(0, 3, 1, 2),
                avgpool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(1),
                head=nn.Linear(widths[-1], num_classes),
            )
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=INIT_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, classes) for images (B, C, H, W)."""
        out: Tensor = self.classifier(self.forward_features(images))
        return out

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the tokens (B, h, w, E) after the last stage, for images (B, C, H, W)."""
        x: Tensor = self.patch_embed(images)
        if self.pos_embed is not None:
            positions: Tensor = self.pos_embed
            size = x.shape[1:3]
            if positions.shape[2:] != size:
                positions = F.interpolate(positions, size=size, mode="bicubic", align_corners=False)
            x = x + positions.permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        return x


def _separate_patches(channels: int, width: int, patch: int, normed: bool) -> nn.Sequential:
    """Return a layer from images (B, C, H, W) to tokens (B, h, w, E), one per patch."""
    return nn.Sequential(
        nn.Conv2d(channels, width, patch, patch),
        PermuteDims(0, 2, 3, 1),
        nn.LayerNorm(width) if normed else nn.Identity(),
    )


def _overlapping_patches(channels: int, width: int, patch: int, normed: bool) -> nn.Sequential:
    """Return a layer from images (B, C, H, W) to tokens (B, h, w, E), ``patch`` pixels apart."""
    stride, half = patch // 2, width // 2
    return nn.Sequential(
        nn.Conv2d(channels, half, stride + 1, stride, 1),
        PermuteDims(0, 2, 3, 1),
        nn.LayerNorm(half) if normed else nn.Identity(),
        PermuteDims(0, 3, 1, 2),
        nn.GELU(),
        nn.Conv2d(half, width, stride + 1, stride, 1),
        PermuteDims(0, 2, 3, 1),
        nn.LayerNorm(width) if normed else nn.Identity(),
    )


def _downsampling(kind: str, width: int, out: int) -> nn.Module:
    """Return a layer that halves height and width of a grid of tokens (B, h, w, E)."""
    if kind == "v1":
        return PatchMerging(width, out)
    kernel, padding = (2, 0) if kind == "v2" else (3, 1)
    return nn.Sequential(
        PermuteDims(0, 3, 1, 2),
        nn.Conv2d(width, out, kernel, 2, padding),
        PermuteDims(0, 2, 3, 1),
        nn.LayerNorm(out),
    )
