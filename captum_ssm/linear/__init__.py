"""Freeze a whole network into a linear map of its input."""

from .blocks import along_all_paths, outside
from .constants import Ledger, contribution
from .direct import DirectPaths, Local, direct_paths
from .mode import Linearizing
from .network import Network, Step, linearized
from .shares import FAMILY, Rule
from .sites import Site, find_site

__all__ = [
    "FAMILY",
    "DirectPaths",
    "Ledger",
    "Linearizing",
    "Local",
    "Network",
    "Rule",
    "Site",
    "Step",
    "along_all_paths",
    "contribution",
    "direct_paths",
    "find_site",
    "linearized",
    "outside",
]
