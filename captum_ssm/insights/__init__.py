"""The successor of Captum Insights: a page of examples, predictions and their explanations.

To run a script for Captum 0.8, import ``captum_ssm.insights`` instead of ``captum.insights``, or
call :func:`install_alias` before the imports.
"""

from . import features
from .captum08 import install_alias, register_with_captum
from .dataset import Batch
from .features import EmptyFeature, GeneralFeature, ImageFeature, TextFeature
from .filters import FilterConfig
from .visualizer import AttributionVisualizer

__all__ = [
    "AttributionVisualizer",
    "Batch",
    "EmptyFeature",
    "FilterConfig",
    "GeneralFeature",
    "ImageFeature",
    "TextFeature",
    "features",
    "install_alias",
    "register_with_captum",
]
