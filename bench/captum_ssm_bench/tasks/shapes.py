"""Shapes: which points of the plane they cover.

Each is a function of coordinates, tensors of one shape, that tells the points inside; it fits into
the circle of radius 1 about the origin, so that it can be turned in any way.
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
