"""The names of ``captum.insights.attr_vis.app``."""

from ..calculation import VisualizationOutput
from ..dataset import Batch
from ..filters import FilterConfig
from ..visualizer import AttributionVisualizer

__all__ = ["AttributionVisualizer", "Batch", "FilterConfig", "VisualizationOutput"]
