"""Numbers of models that answer for every pixel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError, OutputError
from .targets import logits_of


def mean_over(model: Callable[..., Any], mask: Any = None) -> Callable[..., Tensor]:
    """Return a ``forward_func`` that gives the mean of each class's logits over some pixels.

    It outputs (B, K), like a classifier, and a target is a class. A single pixel needs no such
    function: its target for the model itself is (class, row, column).

    Args:
        model: returns logits (B, K, H, W), or an object that holds them as ``logits``; of volumes
            (B, K, D, H, W).
        mask: True for the pixels that count, (H, W), or for each example (B, H, W); of volumes with
            as many dimensions more. Default: None, for each class the pixels assigned to it; a
            class without any has the mean 0.

    Returns:
        A function of the arguments of ``model``.

    Raises:
        InputError: when the mask holds something else than booleans, marks no pixel, or, once it
            is called, does not fit the logits.
        OutputError: when, once it is called, the model does not answer for every pixel.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from captum_ssm import LatimFlow
        >>> from captum_ssm.attr import mean_over
        >>> from captum_ssm.models.vmamba import VSSBlock
        >>> class Segmenter(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.block, self.head = (
        ...             nn.Conv2d(3, 8, 1), VSSBlock(8), nn.Conv2d(8, 4, 1))
        ...     def forward(self, images):
        ...         x = self.block(self.embed(images).permute(0, 2, 3, 1))
        ...         return self.head(x.permute(0, 3, 1, 2))
        >>> model, images = Segmenter().eval(), torch.rand(2, 3, 5, 6)
        >>> mask = torch.zeros(5, 6, dtype=torch.bool)
        >>> mask[1:3, 2:4] = True
        >>> LatimFlow(mean_over(model, mask)).attribute(images, target=1).shape
        torch.Size([2, 3, 5, 6])
        >>> LatimFlow(model).attribute(images, target=(1, 2, 3)).shape  # of one pixel
        torch.Size([2, 3, 5, 6])
    """
    chosen = None if mask is None else _checked(mask)

    def means(*args: Any, **kwargs: Any) -> Tensor:
        logits = logits_of(model(*args, **kwargs))
        if logits.dim() < 4:
            raise OutputError(
                f"The model returned {tuple(logits.shape)}, which are no logits for every pixel "
                "(B, K, H, W). Pass its output's classes as targets, without mean_over."
            )
        counted = _of_class(logits) if chosen is None else _fitting(chosen, logits)
        places = tuple(range(2, logits.dim()))
        return (logits * counted).sum(places) / counted.sum(places).clamp_min(1)

    return means


def _checked(mask: Any) -> Tensor:
    found = torch.as_tensor(mask)
    if found.dtype != torch.bool or not bool(found.any()):
        what = f"a tensor of {found.dtype}" if found.dtype != torch.bool else "no True"
        raise InputError(
            f"mask holds {what}. Pass booleans (H, W) or (B, H, W), True for the pixels that count."
        )
    return found


def _of_class(logits: Tensor) -> Tensor:
    """Return for each class the pixels at which its logit is the largest, (B, K, H, W)."""
    largest = F.one_hot(logits.detach().argmax(1), logits.shape[1])
    return largest.movedim(-1, 1).to(logits.dtype)


def _fitting(mask: Tensor, logits: Tensor) -> Tensor:
    """Return the mask, broadcastable to the logits (B, K, H, W); raise if it does not fit."""
    batch, sizes = len(logits), tuple(logits.shape[2:])
    if tuple(mask.shape) not in (sizes, (batch, *sizes)):
        raise InputError(
            f"mask has shape {tuple(mask.shape)}, but the model answers for {batch} examples of "
            f"{sizes} pixels: pass {sizes} or {(batch, *sizes)}. With internal_batch_size, one "
            "mask must be meant for all."
        )
    batched = mask if mask.dim() == logits.dim() - 1 else mask[None]
    return batched[:, None].to(logits)
