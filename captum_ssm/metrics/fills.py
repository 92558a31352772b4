"""Compute the values that replace removed pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError, OptionError

#: The value of removed pixels: a number, values (C,) or (B or 1, C, H, W), or one of NAMES.
Fill = float | str | Tensor

NAMES = ("mean", "blur")


def black(mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return the value of a black pixel in normalized images: -mean / std for each channel.

    Args:
        mean, std: the mean and standard deviation of the normalization, one number per channel.

    Returns:
        Values (C,), float64, for the argument ``fill`` of
        :func:`~captum_ssm.metrics.image_perturbation`.

    Raises:
        OptionError: when mean or std is not one number per channel, or std is not above 0.

    Example:
        >>> from captum_ssm.metrics import black
        >>> black(mean=[0.5, 0.5, 0.4], std=[0.25, 0.5, 0.2]).tolist()
        [-2.0, -1.0, -2.0]
    """
    shift, scale = (torch.as_tensor(x, dtype=torch.float64) for x in (mean, std))
    if shift.dim() != 1 or shift.shape != scale.shape or not bool((scale > 0).all()):
        raise OptionError(
            f"mean={mean!r}, std={std!r}: pass one number per channel for each, with std above 0."
        )
    return -shift / scale


def blurred(images: Tensor, sigma: float = 11.0) -> Tensor:
    """Blur images with a Gaussian of standard deviation ``sigma`` pixels.

    At the edges, images are padded with the values of the edge pixels.

    Args:
        images: a batch of images (B, C, H, W); the result has the same shape and dtype.
        sigma: the standard deviation. Default: 11, as in published code for images of 224 pixels.

    Raises:
        OptionError: when sigma is not above 0.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import blurred
        >>> point = torch.tensor([[[[0.0, 0.0, 1.0, 0.0, 0.0]]]], dtype=torch.float64)
        >>> blurred(point, sigma=0.5).round(decimals=2).flatten().tolist()
        [0.0, 0.11, 0.79, 0.11, 0.0]
    """
    if not sigma > 0:
        raise OptionError(f"sigma={sigma} is not above 0. Pass a number above 0.")
    radius = max(1, math.ceil(3 * sigma))
    out = images if images.dtype == torch.float64 else images.float()
    offsets = torch.arange(-radius, radius + 1, dtype=out.dtype, device=out.device)
    weight = torch.exp(-0.5 * (offsets / sigma) ** 2)
    weight = weight / weight.sum()
    for dim in (2, 3):  # a Gaussian is separable: blur along H, then along W
        pixel_rows = out.movedim(dim, -1)
        flat_rows = pixel_rows.reshape(-1, 1, pixel_rows.shape[-1])
        padded = F.pad(flat_rows, (radius, radius), mode="replicate")
        out = F.conv1d(padded, weight[None, None]).view(pixel_rows.shape).movedim(-1, dim)
    return out.to(images.dtype)


def filled(images: Tensor, fill: Fill) -> Tensor:
    """Return the values that replace pixels, in a shape that can be broadcast to (B, C, H, W).

    Args:
        images: a batch of images (B, C, H, W).
        fill: a number; a number per channel (C,), such as :func:`black`; images of the same shape;
            ``"mean"``, each image's mean color; or ``"blur"``, :func:`blurred`.
    """
    if isinstance(fill, str):
        if fill not in NAMES:
            raise OptionError(f"fill={fill!r}: pass one of {NAMES}, a number or a tensor.")
        return blurred(images) if fill == "blur" else images.mean((2, 3), keepdim=True)
    values = torch.as_tensor(fill, dtype=images.dtype, device=images.device)
    if values.dim() == 1 and len(values) in (1, images.shape[1]):
        return values[:, None, None]
    is_image_shape = values.dim() == 4 and values.shape[1:] == images.shape[1:]
    if values.dim() and not (is_image_shape and len(values) in (1, len(images))):
        raise InputError(
            f"fill has shape {tuple(values.shape)} for images of shape {tuple(images.shape)}: pass "
            "a number, one number per channel, or images of the same shape."
        )
    return values
