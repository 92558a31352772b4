"""The successor of Captum Insights: examples, models' predictions, and their explanations.

A script written for Captum 0.8 runs with ``captum.insights`` replaced by ``captum_ssm.insights`` in
its imports, or unchanged after :func:`install_alias`.
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
