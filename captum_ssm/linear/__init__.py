"""The whole network, frozen into a linear map of its input."""

from .constants import Ledger, contribution
from .direct import DirectPaths, Local, direct_paths
from .network import Network, Step, linearised
from .shares import FAMILY, Rule

__all__ = [
    "FAMILY",
    "DirectPaths",
    "Ledger",
    "Local",
    "Network",
    "Rule",
    "Step",
    "contribution",
    "direct_paths",
    "linearised",
]
