"""What the package's methods are held against on images: Captum's methods, activations, pictures.

Shapes: T classes asked about, C colour channels, h and w patches or pixels down and across, N
patches, L tokens, E width of the stream.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from captum.attr import FeatureAblation, InputXGradient, IntegratedGradients, Saliency
from torch import Tensor, nn

from captum_ssm.attr.call.layout import ImageProbe
from captum_ssm.attr.call.targets import logits_of
from captum_ssm.linear.norms import frozen_norms
from captum_ssm.tracing import repaired_scans, trace

from ..harness.experiment import Cell

#: (model, image (1, C, H, W), classes) to maps (T, h, w).
Explain = Callable[..., Tensor]

#: Of the integral of integrated gradients.
STEPS = 20
#: A signed map's formulation that tells where relevance lies, be it for a class or against it.
ABSOLUTE = "patches, absolute"


def grid_of(model: nn.Module, image: Tensor) -> tuple[int, int]:
    """The patches (h, w) that a model, whose first mixer gets all of them, makes of an image."""
    probe = ImageProbe(model)
    with torch.no_grad(), probe.watch(), trace(model) as record:
        model(image)
    return probe.patches(model, image, record.layers[0].tokens)[1]


def absolute(explain: Explain) -> Explain:
    """Means over patches of the absolute values of a map of pixels."""
    return partial(_averaged, explain=lambda *given: explain(*given).abs())


def captum_maps() -> dict[Cell, Explain]:
    """Captum's own methods, by pixels and by patches; occlusion by patches alone."""
    maps: dict[Cell, Explain] = {}
    for kind in (Saliency, InputXGradient, IntegratedGradients):
        explain = partial(_gradients, kind=kind)
        maps |= _of_pixels(kind.__name__, explain)
        if kind is not Saliency:  # which has no sign
            maps[Cell(kind.__name__, ABSOLUTE)] = absolute(explain)
    held = "norms held, less the mean"
    averaged = partial(_averaged, explain=_norms_held)
    maps[Cell("InputXGradient", f"{held}, patches")] = averaged
    maps[Cell("InputXGradient", f"{held}, {ABSOLUTE}")] = absolute(_norms_held)
    maps[Cell("FeatureAblation", "patches")] = _ablation
    return maps


def picture_maps() -> dict[Cell, Explain]:
    """What can be said without the model."""
    return {
        **_of_pixels("brightness", partial(_of_picture, draw=brightness)),
        **_of_pixels("contrast", partial(_of_picture, draw=contrast)),
        **_of_pixels("edges", partial(_of_picture, draw=edges)),
        **_of_pixels("random", partial(_of_picture, draw=noise)),
    }


def brightness(image: Tensor) -> Tensor:
    """The mean over colour channels, (1, C, H, W) to (1, H, W)."""
    return image.mean(1)


def contrast(image: Tensor) -> Tensor:
    """How far each pixel is from the median of its colour channel, (1, C, H, W) to (1, H, W)."""
    median = image.flatten(2).median(-1).values[..., None, None]
    return (image - median).abs().sum(1)


def edges(image: Tensor) -> Tensor:
    """The length of Sobel's gradient, over the colour channels, (1, C, H, W) to (1, H, W)."""
    across = image.new_tensor([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    kernels = torch.stack([across, across.mT])[:, None]  # (2, 1, 3, 3)
    padded = F.pad(image, (1, 1, 1, 1), mode="replicate")[0, :, None]  # (C, 1, H + 2, W + 2)
    return F.conv2d(padded, kernels).square().sum((0, 1)).sqrt()[None]


def noise(image: Tensor) -> Tensor:
    """Random numbers that follow from the image, (1, C, H, W) to (1, H, W)."""
    generator = torch.Generator().manual_seed(zlib.crc32(image.cpu().numpy().tobytes()))
    return torch.rand(1, *image.shape[2:], generator=generator).to(image)


def _of_pixels(method: str, explain: Explain) -> dict[Cell, Explain]:
    """A method's maps of pixels, and their means over patches."""
    return {
        Cell(method, "patches"): partial(_averaged, explain=explain),
        Cell(method, "pixels"): explain,
    }


def _averaged(model: nn.Module, image: Tensor, classes: Sequence[int], explain: Explain) -> Tensor:
    return F.adaptive_avg_pool2d(explain(model, image, classes), grid_of(model, image))


def _of_picture(
    model: nn.Module, image: Tensor, classes: Sequence[int], draw: Callable[[Tensor], Tensor]
) -> Tensor:
    return draw(image).expand(len(classes), -1, -1)


def _logits(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda images: logits_of(model(images))


def _gradients(model: nn.Module, image: Tensor, classes: Sequence[int], kind: Any) -> Tensor:
    repeated = image.repeat(len(classes), 1, 1, 1).requires_grad_()
    options = {"n_steps": STEPS} if kind is IntegratedGradients else {}
    with repaired_scans(), torch.enable_grad():
        found = kind(_logits(model)).attribute(repeated, target=list(classes), **options)
    summed: Tensor = found.sum(1).detach()
    return summed


def _norms_held(model: nn.Module, image: Tensor, classes: Sequence[int]) -> Tensor:
    """The gradient with the statistics of norms held, times the image less its mean colour."""
    repeated = image.repeat(len(classes), 1, 1, 1).requires_grad_()
    with repaired_scans(), torch.enable_grad(), frozen_norms():
        found = Saliency(_logits(model)).attribute(repeated, target=list(classes), abs=False)
    summed: Tensor = ((image - image.mean((2, 3), keepdim=True)) * found).sum(1).detach()
    return summed


def _ablation(model: nn.Module, image: Tensor, classes: Sequence[int]) -> Tensor:
    """One patch after the other is given the image's mean colour."""
    height, width = grid_of(model, image)
    numbers = torch.arange(height * width, device=image.device).view(1, 1, height, width)
    mask = F.interpolate(numbers.float(), size=image.shape[2:], mode="nearest").long()
    ablate = FeatureAblation(_logits(model))
    with torch.no_grad():
        found = [
            ablate.attribute(
                image,
                baselines=image.mean((2, 3), keepdim=True),
                target=target,
                feature_mask=mask,
                perturbations_per_eval=height * width,
            )
            for target in classes
        ]
    return F.adaptive_avg_pool2d(torch.cat(found)[:, 0], (height, width))
