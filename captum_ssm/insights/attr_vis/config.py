"""The names of ``captum.insights.attr_vis.config``; changes of the tables have an effect."""

from ..config import Config, ConfigParameters, NumberConfig, StrConfig, StrEnumConfig
from ..methods import (
    ATTRIBUTION_METHOD_CONFIG,
    ATTRIBUTION_NAMES_TO_METHODS,
    SUPPORTED_ATTRIBUTION_METHODS,
)

__all__ = [
    "ATTRIBUTION_METHOD_CONFIG",
    "ATTRIBUTION_NAMES_TO_METHODS",
    "SUPPORTED_ATTRIBUTION_METHODS",
    "Config",
    "ConfigParameters",
    "NumberConfig",
    "StrConfig",
    "StrEnumConfig",
]
