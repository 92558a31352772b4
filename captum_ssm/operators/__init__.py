"""The mathematics: frozen linear token mixers.  Knows tensors, no model."""

from .base import Operator, Shape
from .compose import Chain
from .conv import ShortConv
from .decay_heads import ScalarDecayHeads
from .delta_rule import DeltaRule
from .diagonal import Diagonal
from .heads import DenseHeads, HeadCentering
from .long_conv import LongConv
from .mixing import Mixing
from .permute import Permute
from .recurrence import ElementwiseRecurrence, wkv
from .reduction import Reduce, discard_smallest
from .selective_scan import SelectiveScan
from .sums import Sum
from .vector_decay_heads import VectorDecayHeads

__all__ = [
    "Chain",
    "DeltaRule",
    "DenseHeads",
    "Diagonal",
    "ElementwiseRecurrence",
    "HeadCentering",
    "LongConv",
    "Mixing",
    "Operator",
    "Permute",
    "Reduce",
    "ScalarDecayHeads",
    "SelectiveScan",
    "Shape",
    "ShortConv",
    "Sum",
    "VectorDecayHeads",
    "discard_smallest",
    "wkv",
]
