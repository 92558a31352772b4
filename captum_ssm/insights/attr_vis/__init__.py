"""The module paths of Captum 0.8's Insights, for scripts that import from them."""

from ..dataset import Batch
from ..visualizer import AttributionVisualizer

__all__ = ["AttributionVisualizer", "Batch"]
