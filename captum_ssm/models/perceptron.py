"""The perceptron of several models, and the scale of their initial weights."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

#: Standard deviation of initial weights.
INIT_STD = 0.02


def perceptron(width: int, hidden: int, approximate: str = "none") -> nn.Sequential:
    """Return a perceptron with one hidden layer: linear, GELU, linear."""
    fc1, fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
    return nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU(approximate), fc2=fc2))
