"""Scenes: objects of six shapes on textured, cluttered backgrounds, and which pixel is whose.

What an object is can be told by its outline alone.  Its place, size and turn are random, it is
textured as its background is, and lines of the same contrast lie around and beneath it.

Where an object is must not show without a model, or a map that finds it proves nothing.  With the
polarity ``"bright"`` objects are brighter than all else, and plain brightness finds them; with
``"random"`` they are as often darker as brighter, and the colours of objects, lines and backgrounds
are drawn alike.  How far a pixel is from the median color of its image finds them even so.

Shapes: B scenes of S x S pixels, K objects in each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .outlines import SHAPES, random_lines, random_shapes, uniform
from .textures import textures

Polarity = Literal["random", "bright"]

#: More do not find room beside each other.
MOST_OBJECTS = 2

#: By polarity, the brightness of backgrounds from 0 to 1.
_LEVELS = {"random": (0.48, 0.52), "bright": (0.25, 0.35)}
#: How much brighter or darker objects and lines are than their background.
_CONTRAST = (0.22, 0.32)
#: How far channels are from the brightness, and textures of backgrounds and of objects from it.
_TINT, _BACKGROUND, _FILL = 0.08, 0.08, 0.05


@dataclass(frozen=True, eq=False)
class SceneBatch:
    """Scenes.

    Attributes:
        images: as models take them, -1 for black and 1 for white, (B, 3, S, S).
        labels: the class of the object with most pixels, (B,), int64.
        masks: whose each pixel is: 0 for the background, c + 1 for an object of class c,
            (B, S, S), int64.
    """

    images: Tensor
    labels: Tensor
    masks: Tensor


@dataclass(frozen=True)
class SceneTask:
    """Scenes of some size, number of objects and polarity.

    Attributes:
        size: S, height and width in pixels. Default: 32.
        objects: how many there are in each scene, of different classes, none of which covers
            another. Default: 1.
        polarity: ``"random"``, objects are darker or brighter than their background, or
            ``"bright"``, they are brighter than all else. Default: ``"random"``.
        lines: how many lines lie around and beneath the objects. Default: 4.
    """

    size: int = 32
    objects: int = 1
    polarity: Polarity = "random"
    lines: int = 4

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the shapes, in the order of their labels."""
        return tuple(SHAPES)

    def draw(self, count: int, seed: int, held_out: bool = True) -> SceneBatch:
        """Scenes; the same count and seed give the same ones.

        Args:
            count: how many, at least one.
            seed: of all that is random.
            held_out: whether backgrounds come from the halves of the photographs that are kept
                from training. Default: True.

        Returns:
            The scenes, on the CPU.

        Raises:
            ImportError: when scikit-image, whose photographs are the textures, is not installed.
        """
        generator = torch.Generator().manual_seed(seed)
        level = uniform((count, 1, 1, 1), *_LEVELS[self.polarity], generator)
        shade = (level + _tint(count, generator)).expand(-1, -1, self.size, self.size)
        images = shade + _BACKGROUND * self._texture(count, held_out, generator)
        for covered in random_lines(count, self.lines, self.size, generator).unbind(1):
            line = shade + self._shift(count, generator, "clutter")
            images = torch.where(covered[:, None], line, images)
        classes, objects = random_shapes(count, self.objects, self.size, generator)
        for covered in objects.unbind(1):
            texture = self._texture(count, held_out, generator)
            filled = shade + self._shift(count, generator, "object") + _FILL * texture
            images = torch.where(covered[:, None], filled, images)
        pixels = objects.sum((-2, -1))  # (B, K)
        return SceneBatch(
            images=2 * images - 1,
            labels=classes.gather(1, pixels.argmax(1, keepdim=True))[:, 0],
            masks=(objects * (classes + 1)[..., None, None]).sum(1),
        )

    def _texture(self, count: int, held_out: bool, generator: torch.Generator) -> Tensor:
        return textures(count, self.size, held_out, generator)

    def _shift(
        self, count: int, generator: torch.Generator, of: Literal["object", "clutter"]
    ) -> Tensor:
        """How much brighter or darker something is than its background, (B, 3, 1, 1)."""
        contrast = uniform((count, 1, 1, 1), *_CONTRAST, generator)
        darker = torch.rand((count, 1, 1, 1), generator=generator) < 0.5
        shift = torch.where(darker, -contrast, contrast)
        if self.polarity == "bright":
            shift = contrast if of == "object" else shift / 3
        return shift + _tint(count, generator)


def _tint(count: int, generator: torch.Generator) -> Tensor:
    """What channels differ by from their mean, (B, 3, 1, 1)."""
    tint = uniform((count, 3, 1, 1), -_TINT, _TINT, generator)
    return tint - tint.mean(1, keepdim=True)


#: What the bundled image models have learned.
SCENES = SceneTask()
