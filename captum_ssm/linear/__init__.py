"""The whole network, frozen into a linear map of its input."""

from .constants import Ledger, contribution
from .direct import DirectPaths, Local, direct_paths
from .network import Network, Step, linearised
from .shares import FAMILY, Rule
from .sites import Site, find_site

__all__ = [
    "FAMILY",
    "DirectPaths",
    "Ledger",
    "Local",
    "Network",
    "Rule",
    "Site",
    "Step",
    "contribution",
    "direct_paths",
    "find_site",
    "linearised",
]
