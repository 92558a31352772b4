"""Targets for models that return logits for every pixel, as in segmentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError, OutputError
from .targets import logits_of


def mean_over(model: Callable[..., Any], mask: Any = None) -> Callable[..., Tensor]:
    """Return a ``forward_func`` that computes each class's mean logit over some pixels.

    The function returns (B, K), like a classifier, so a target is a class. To explain a single
    pixel, pass the model itself and target=(class, row, column).

    Args:
        model: a model that returns logits (B, K, H, W), or an object with the attribute
            ``logits``. For volumes the logits are (B, K, D, H, W).
        mask: booleans (H, W), or (B, H, W) for each example, True for pixels in the mean. For
            volumes, (D, H, W) or (B, D, H, W). Default: None, for each class the pixels at which
            the class has the largest logit. A mean over no pixels is 0.

    Returns:
        A function with the arguments of ``model``.

    Raises:
        InputError: if the mask is not boolean or has no True; or, when the function is called, if
            the mask does not fit the logits.
        OutputError: when the function is called, if the model has no logits for every pixel.

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
    booleans = None if mask is None else _check_mask(mask)

    def means(*args: Any, **kwargs: Any) -> Tensor:
        """Run the model; return the weighted mean of each class's logits over pixels, (B, K)."""
        logits = logits_of(model(*args, **kwargs))
        if logits.dim() < 4:
            raise OutputError(
                f"mean_over() needs logits for every pixel (B, K, H, W), but the model returned "
                f"{tuple(logits.shape)}. Pass the model itself as forward_func, without mean_over."
            )
        weights = _is_largest(logits) if booleans is None else _fit_mask(booleans, logits)
        pixel_dims = tuple(range(2, logits.dim()))
        return (logits * weights).sum(pixel_dims) / weights.sum(pixel_dims).clamp_min(1)  # 0 / 1

    return means


def _check_mask(mask: Any) -> Tensor:
    """Check that the mask is boolean and selects a pixel; return the mask as a tensor."""
    tensor = torch.as_tensor(mask)
    if tensor.dtype != torch.bool or not bool(tensor.any()):
        content = f"a tensor of {tensor.dtype}" if tensor.dtype != torch.bool else "no True"
        raise InputError(
            f"mask contains {content}. Pass booleans (H, W) or (B, H, W), True for pixels in the "
            "mean."
        )
    return tensor


def _is_largest(logits: Tensor) -> Tensor:
    """Return (B, K, H, W): 1 at pixels where a class has the largest logit, else 0."""
    is_largest = F.one_hot(logits.detach().argmax(1), logits.shape[1])  # (B, H, W, K)
    return is_largest.movedim(-1, 1).to(logits.dtype)


def _fit_mask(mask: Tensor, logits: Tensor) -> Tensor:
    """Check the mask's shape; return the mask as numbers (1 or B, 1, H, W) for logits."""
    batch, sizes = len(logits), tuple(logits.shape[2:])
    if tuple(mask.shape) not in (sizes, (batch, *sizes)):
        raise InputError(
            f"mask has shape {tuple(mask.shape)}, but the model returned logits for {batch} "
            f"examples of {sizes} pixels. Pass a mask of shape {sizes} or {(batch, *sizes)}; with "
            f"internal_batch_size, only {sizes}."
        )
    with_batch = mask if mask.dim() == logits.dim() - 1 else mask[None]
    return with_batch[:, None].to(logits)
