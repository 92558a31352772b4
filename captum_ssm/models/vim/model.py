"""Vision Mamba: embedded patches with class tokens, residual mixer blocks, a norm and a head."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attr.call.checks import choice
from ...errors import OptionError
from ..checkpoints import check_sizes
from ..perceptron import INIT_STD
from .mixer import BimambaType, VimMixer

#: Position of the class token: after the first half of the patches, before all patches, or after
#: all patches; "double" has two tokens, before and after the patches.
ClsToken = Literal["middle", "head", "end", "double", "none"]

CLS_TOKENS = ("middle", "head", "end", "double", "none")
POOLS = ("none", "mean", "max", "all")


class VimBlock(nn.Module):
    """A residual block x + mixer(norm(x)), where x is in float32 or wider.

    Args:
        norm: a norm of width E.
        mixer: the module that mixes the tokens.

    Example:
        >>> import torch
        >>> from captum_ssm.models.vim import VimBlock, VimMixer
        >>> block = VimBlock(torch.nn.RMSNorm(16), VimMixer(d_model=16))
        >>> block(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, norm: nn.Module, mixer: VimMixer) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after the block, in the shape of ``x`` (B, L, E)."""
        out: Tensor = x + self.mixer(_norm_in_its_dtype(self.norm, x))
        return out


class VisionMamba(nn.Module):
    """An image classifier of bidirectional Mambas, with the parameter names of Vim checkpoints.

    Images of different sizes than ``img_size`` are accepted, with interpolated position embeddings.

    Args:
        img_size: height and width of the images, or one number for both. Default: 224.
        patch_size: side of the patches. Default: 16.
        stride: distance between patches. Default: None, the patch size.
        depth: number of blocks. Default: 24.
        embed_dim: width E of the tokens. Default: 192.
        channels: color channels of the images. Default: 3.
        num_classes: number of classes; 0 to return the pooled features. Default: 1000.
        cls_token: position of the class token: ``"middle"``, ``"head"`` (first), ``"end"``,
            ``"double"`` (the mean of a first and a last token) or ``"none"``. Default:
            ``"middle"``.
        final_pool_type: pooling without a class token: ``"none"`` (the last token), ``"mean"``
            over tokens, ``"max"`` of each logit over tokens, or ``"all"`` (no pooling). Default:
            ``"none"``.
        pos_embed: whether there are position embeddings. Default: True.
        rms_norm: RMSNorm if True, else LayerNorm. Default: True.
        norm_epsilon: epsilon of the norms. Default: 1e-5.
        bimamba_type: weights of the second scan direction; see
            :class:`~captum_ssm.models.vim.VimMixer`. Default: ``"v2"``.
        if_divide_out: whether the sum of both directions is halved (v2 only). Default: True.
        **mixer_options: further arguments of :class:`~captum_ssm.models.vim.VimMixer`.

    Raises:
        OptionError: when ``cls_token``, ``final_pool_type`` or ``bimamba_type`` is unknown, a size
            is below 1, or patches are larger than the images.

    Example:
        >>> import torch
        >>> from captum_ssm.models import VisionMamba
        >>> model = VisionMamba(img_size=32, patch_size=8, depth=2, embed_dim=16, num_classes=5)
        >>> model(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 5])
    """

    pos_embed: nn.Parameter | None

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        stride: int | None = None,
        depth: int = 24,
        embed_dim: int = 192,
        channels: int = 3,
        num_classes: int = 1000,
        *,
        cls_token: ClsToken = "middle",
        final_pool_type: str = "none",
        pos_embed: bool = True,
        rms_norm: bool = True,
        norm_epsilon: float = 1e-5,
        bimamba_type: BimambaType = "v2",
        if_divide_out: bool = True,
        **mixer_options: Any,
    ) -> None:
        super().__init__()
        self.cls = choice("cls_token", cls_token, CLS_TOKENS)
        self.final_pool_type = choice("final_pool_type", final_pool_type, POOLS)
        stride = patch_size if stride is None else stride
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        check_sizes(stride=stride, depth=depth, embed_dim=embed_dim, channels=channels)
        if not 1 <= patch_size <= (side := min(height, width)):
            raise OptionError(
                f"patch_size={patch_size} does not fit img_size={img_size}. Use a patch_size from "
                f"1 to {side}, or larger images."
            )
        self.grid = (height - patch_size) // stride + 1, (width - patch_size) // stride + 1
        proj = nn.Conv2d(channels, embed_dim, patch_size, stride)
        nn.init.normal_(proj.weight, std=proj.weight[0].numel() ** -0.5)
        nn.init.zeros_(proj.bias)  # type: ignore[arg-type]
        self.patch_embed: Any = nn.Sequential(OrderedDict(proj=proj))

        def learned(count: int) -> nn.Parameter:
            return nn.Parameter(
                nn.init.trunc_normal_(torch.empty(1, count, embed_dim), std=INIT_STD)
            )

        if cls_token == "double":
            self.cls_token_head, self.cls_token_tail = learned(1), learned(1)
        elif cls_token != "none":
            self.cls_token = learned(1)
        patches = math.prod(self.grid)
        positions = learned(patches + len(self.cls_positions(patches))) if pos_embed else None
        self.register_parameter("pos_embed", positions)

        def norm() -> nn.Module:
            return (nn.RMSNorm if rms_norm else nn.LayerNorm)(embed_dim, eps=norm_epsilon)

        def block() -> VimBlock:
            mixer = VimMixer(
                embed_dim, bimamba_type=bimamba_type, if_divide_out=if_divide_out, **mixer_options
            )
            with torch.no_grad():  # all blocks add to the stream: keep their sum's size
                mixer.out_proj.weight /= math.sqrt(depth)
            return VimBlock(norm(), mixer)

        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.norm_f = norm()
        self.head: nn.Module = nn.Identity()
        if num_classes > 0:
            self.head = nn.Linear(embed_dim, num_classes)
            nn.init.trunc_normal_(self.head.weight, std=INIT_STD)
            nn.init.zeros_(self.head.bias)

    def cls_positions(self, patches: int) -> list[int]:
        """Return the positions of the class tokens in the sequence of ``patches`` patches."""
        positions: dict[str, list[int]] = {
            "middle": [patches // 2],
            "head": [0],
            "end": [patches],
            "double": [0, patches + 1],
            "none": [],
        }
        return positions[self.cls]

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, classes) of images (B, C, H, W), or of all tokens (B, L, classes)."""
        out: Tensor = self.head(self.forward_features(images))
        pools_logits = self.cls == "none" and self.final_pool_type == "max"
        return out.amax(1) if pools_logits else out

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the head's input for images (B, C, H, W): (B, E), or for all tokens (B, L, E)."""
        x: Tensor = self.patch_embed(images)
        grid = x.shape[2], x.shape[3]
        x = self._with_cls(x.flatten(2).transpose(1, 2))  # (B, L, E)
        if self.pos_embed is not None:
            x = x + self._resized(self.pos_embed, grid)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        for layer in self.layers:
            x = layer(x)
        x = _norm_in_its_dtype(self.norm_f, x)
        positions = self.cls_positions(math.prod(grid))
        if positions:
            return x[:, positions].mean(1)
        if self.final_pool_type == "none":
            return x[:, -1]
        return x.mean(1) if self.final_pool_type == "mean" else x

    def _with_cls(self, x: Tensor) -> Tensor:
        """Insert the class tokens into the sequence of patches, (B, L, E)."""
        if self.cls == "none":
            return x
        if self.cls == "double":
            first = self.cls_token_head.expand(len(x), -1, -1)
            last = self.cls_token_tail.expand(len(x), -1, -1)
            return torch.cat([first, x, last], dim=1)
        (at,) = self.cls_positions(x.shape[1])
        return torch.cat([x[:, :at], self.cls_token.expand(len(x), -1, -1), x[:, at:]], dim=1)

    def _resized(self, embeddings: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the position embeddings, bicubically interpolated for a different patch grid."""
        if grid == self.grid:
            return embeddings
        old_cls, old_patches = self._layout(self.grid)
        new_cls, new_patches = self._layout(grid)
        patches = embeddings[:, old_patches].mT.reshape(1, -1, *self.grid)  # (1, E, h, w)
        patches = F.interpolate(patches, size=grid, mode="bicubic", align_corners=False)
        out = embeddings.new_empty(1, len(new_cls) + len(new_patches), patches.shape[1])
        out[:, new_patches] = patches.flatten(2).mT
        out[:, new_cls] = embeddings[:, old_cls]
        return out

    def _layout(self, grid: tuple[int, int]) -> tuple[list[int], list[int]]:
        """Return the positions of the class tokens and of the patches in the sequence of tokens."""
        patches = math.prod(grid)
        cls = self.cls_positions(patches)
        return cls, [t for t in range(patches + len(cls)) if t not in cls]


def _norm_in_its_dtype(norm: Any, x: Tensor) -> Tensor:
    """Return norm(x), in the dtype of the norm's weight; x is in float32 or wider."""
    out: Tensor = norm(x.to(norm.weight.dtype))
    return out
