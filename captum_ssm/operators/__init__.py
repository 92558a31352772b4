"""The mathematics: frozen linear token mixers.  Knows tensors, no model."""

from .base import Chain, Operator, Shape, Sum
from .conv import ShortConv
from .diagonal import Diagonal
from .reduction import Reduce, discard_smallest
from .selective_scan import SelectiveScan

__all__ = [
    "Chain",
    "Diagonal",
    "Operator",
    "Reduce",
    "SelectiveScan",
    "Shape",
    "ShortConv",
    "Sum",
    "discard_smallest",
]
