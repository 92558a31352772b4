"""The names of ``captum.insights.attr_vis.attribution_calculation``."""

from ..calculation import AttributionCalculation
from ..filters import OutputScore

__all__ = ["AttributionCalculation", "OutputScore"]
