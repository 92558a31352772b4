"""The names of ``captum.insights.attr_vis.app``."""

from ..dataset import Batch
from ..explanation import VisualizationOutput
from ..filters import FilterConfig
from ..visualizer import AttributionVisualizer

__all__ = ["AttributionVisualizer", "Batch", "FilterConfig", "VisualizationOutput"]
