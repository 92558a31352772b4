"""Outlines: which pixels random shapes and lines cover.

A shape is a function of coordinates that tells the points inside; it fits into the circle of radius
1 about the origin, so that it can be turned in any way.

Shapes: B images of S x S pixels, K shapes or lines in each; P images that are drawn anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Shape = Callable[[Tensor, Tensor], Tensor]

#: Corners of a star, and how far its inner ones are from the centre.
_CORNERS, _INNER = 5, 0.4


def disc(x: Tensor, y: Tensor) -> Tensor:
    return _within(x, y, 0.8)


def ring(x: Tensor, y: Tensor) -> Tensor:
    return _within(x, y, 0.95) & ~_within(x, y, 0.55)


def bar(x: Tensor, y: Tensor) -> Tensor:
    return (x.abs() <= 0.95) & (y.abs() <= 0.3)


def cross(x: Tensor, y: Tensor) -> Tensor:
    return bar(x, y) | bar(y, x)


def triangle(x: Tensor, y: Tensor) -> Tensor:
    # its sides are at half the distance of its corners
    return (y >= -0.5) & (math.sqrt(3) * x.abs() + y <= 1)


def star(x: Tensor, y: Tensor) -> Tensor:
    # by symmetry, one straight line from an outer corner, at angle 0, to an inner one
    half = math.pi / _CORNERS
    angle = torch.atan2(x, y).remainder(2 * half)
    angle = torch.minimum(angle, 2 * half - angle)
    across, along = angle.sin(), angle.cos()
    line = (
        _INNER
        * math.sin(half)
        / (across * (1 - _INNER * math.cos(half)) + along * _INNER * math.sin(half))
    )
    return torch.hypot(x, y) <= line


def _within(x: Tensor, y: Tensor, radius: float) -> Tensor:
    return x.square() + y.square() <= radius**2


SHAPES: dict[str, Shape] = {
    shape.__name__: shape for shape in (disc, ring, bar, cross, triangle, star)
}

#: Radii of shapes and widths of lines, in sides of the image.
RADII, WIDTHS = (0.26, 0.34), (1 / 32, 2 / 32)
#: How often several shapes are drawn at once before it is looked whether they lie apart.
_TRIES = 16


def uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    """Numbers from low to high."""
    return low + (high - low) * torch.rand(shape, generator=generator)


def random_shapes(
    count: int, number: int, side: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Shapes of different classes, turned and placed at random, inside and beside each other.

    Returns their classes (B, K) and the pixels that each covers, (B, K, S, S) of booleans.
    """
    classes = torch.rand(count, len(SHAPES), generator=generator).argsort(1)[:, :number]
    covered = torch.zeros(count, number, side, side, dtype=torch.bool)
    pending, tries = torch.arange(count), 1 if number == 1 else _TRIES
    while len(pending):
        again = classes[pending].repeat_interleave(tries, 0)
        drawn = _drawn(again, side, generator).view(-1, tries, number, side, side)
        apart = (drawn.sum(2) <= 1).flatten(2).all(-1)
        covered[pending] = drawn[torch.arange(len(pending)), apart.int().argmax(1)]
        pending = pending[~apart.any(1)]
    return classes, covered


def _drawn(classes: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Shapes of given classes (P, K), each inside the image, (P, K, S, S)."""
    shape = (*classes.shape, 1, 1)
    radius = side * uniform(shape, *RADII, generator)
    angle = uniform(shape, 0, 2 * math.pi, generator)
    # from one radius inside of one edge to one radius inside of the other
    x, y = (
        centres - (radius + (side - 2 * radius) * torch.rand(shape, generator=generator))
        for centres in _pixels(side)
    )
    turned_x = (x * angle.cos() + y * angle.sin()) / radius
    turned_y = (y * angle.cos() - x * angle.sin()) / radius
    covered = torch.zeros(turned_x.shape, dtype=torch.bool)
    for index, inside in enumerate(SHAPES.values()):
        own = classes == index
        covered[own] = inside(turned_x[own], turned_y[own])
    return covered


def random_lines(count: int, number: int, side: int, generator: torch.Generator) -> Tensor:
    """The pixels that straight lines between random points cover, (B, K, S, S) of booleans."""
    x, y = _pixels(side)
    from_x, from_y, to_x, to_y = uniform((4, count, number, 1, 1), 0, side, generator)
    along_x, along_y = to_x - from_x, to_y - from_y
    length = along_x.square() + along_y.square()
    share = ((x - from_x) * along_x + (y - from_y) * along_y) / length.clamp(min=1e-12)
    share = share.clamp(0, 1)  # the nearest point of the line, from 0 at its start to 1 at its end
    distance = torch.hypot(x - from_x - share * along_x, y - from_y - share * along_y)
    return 2 * distance <= side * uniform((count, number, 1, 1), *WIDTHS, generator)


def _pixels(side: int) -> tuple[Tensor, Tensor]:
    """Coordinates of the centres of pixels, (1, S) from left to right and (S, 1) downwards."""
    centres = torch.arange(side) + 0.5
    return centres[None, :], centres[:, None]
