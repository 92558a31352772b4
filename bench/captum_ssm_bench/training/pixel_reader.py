"""A help in training image classifiers: patches are asked which class covers each of their pixels.

A label says once per image what a mask says once per pixel, and from labels alone attention is slow
to learn what an outline is.

Shapes: B images of S x S pixels, N patches of p x p pixels, L tokens, E width of the stream,
K classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from captum_ssm.models.vim import VisionMamba


class PixelReader(nn.Module):
    """A linear head on the tokens of patches, which is trained with a model and then dropped.

    Args:
        width: E.
        patch: p.
        classes: K; a pixel may show the background as well.

    Example:
        >>> import torch
        >>> from captum_ssm_bench.training.pixel_reader import PixelReader
        >>> PixelReader(width=8, patch=4, classes=6)(torch.zeros(2, 9, 8)).shape
        torch.Size([2, 7, 12, 12])
    """

    def __init__(self, width: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patch = patch
        self.head = nn.Linear(width, (classes + 1) * patch**2)

    def forward(self, tokens: Tensor) -> Tensor:
        """What each pixel shows.

        Args:
            tokens: of a square of patches, row by row, (B, N, E).

        Returns:
            Logits of the background and of the classes, (B, K + 1, S, S).
        """
        side = math.isqrt(tokens.shape[1])
        read = self.head(tokens).mT.unflatten(2, (side, side))  # (B, (K + 1) p p, S / p, S / p)
        return F.pixel_shuffle(read, self.patch)


@contextmanager
def patch_tokens(model: Any) -> Iterator[list[Tensor]]:
    """Keep the tokens of the patches that a classifier's last norm returns.

    Args:
        model: a :class:`~captum_ssm.models.VisionMamba` with one cls token, or a
            ``ViTForImageClassification`` of transformers.

    Yields:
        A list that holds (B, N, E) once the model has run.
    """
    kept: list[Tensor] = []

    def keep(norm: nn.Module, args: tuple[Any, ...], tokens: Tensor) -> None:
        at = model.cls_positions(tokens.shape[1] - 1)[0] if isinstance(model, VisionMamba) else 0
        kept.append(tokens[:, [t for t in range(tokens.shape[1]) if t != at]])

    norm = model.norm_f if isinstance(model, VisionMamba) else model.vit.layernorm
    handle = norm.register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()
