"""Frozen linear token mixers, as operators on tensors.  This package imports no model code.

``base`` defines the interface, and ``generic`` implements it slowly for any operator.  Elementary
operators are in ``diagonal``, ``conv``, ``long_conv``, ``heads``, ``reorder`` and ``recurrences``.
``chain`` and ``combine`` build products and sums of operators; ``reduction`` combines the channels'
matrices.  ``kernels`` contains the fast algorithms; a table there lists the kernel that each
operation uses.
"""

from .base import Operator, Shape
from .chain import Chain
from .combine import DirectSum, Sum
from .conv import ShortConv
from .diagonal import Diagonal
from .heads import DenseHeads, HeadCentering
from .long_conv import LongConv
from .recurrences.delta_product import DeltaProduct
from .recurrences.delta_rule import DeltaRule
from .recurrences.elementwise import WKV, ElementwiseRecurrence
from .recurrences.feedback import FeedbackRecurrence
from .recurrences.scalar_decay import ScalarDecayHeads
from .recurrences.selective_scan import SelectiveScan
from .recurrences.vector_decay import VectorDecayHeads
from .reduction import Reduce, discard_smallest
from .reorder import Permute

__all__ = [
    "WKV",
    "Chain",
    "DeltaProduct",
    "DeltaRule",
    "DenseHeads",
    "Diagonal",
    "DirectSum",
    "ElementwiseRecurrence",
    "FeedbackRecurrence",
    "HeadCentering",
    "LongConv",
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
]
