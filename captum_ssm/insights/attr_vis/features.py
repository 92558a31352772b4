"""The names of ``captum.insights.attr_vis.features``."""

from ..features import (
    BaseFeature,
    EmptyFeature,
    FeatureOutput,
    GeneralFeature,
    ImageFeature,
    TextFeature,
)

__all__ = [
    "BaseFeature",
    "EmptyFeature",
    "FeatureOutput",
    "GeneralFeature",
    "ImageFeature",
    "TextFeature",
]
