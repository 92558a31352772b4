"""``import captum.insights`` where Captum has none any more."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module

import captum

_OURS = "captum_ssm.insights"
_THEIRS = "captum.insights"
#: The modules that scripts of Captum 0.8 import.
_MODULES = (
    "",
    ".attr_vis",
    ".attr_vis.app",
    ".attr_vis.attribution_calculation",
    ".attr_vis.config",
    ".attr_vis.features",
)


def install_alias() -> None:
    """Lets ``import captum.insights`` find :mod:`captum_ssm.insights`, for this process.

    A Captum that has an Insights of its own (0.8) keeps it.

    Example:
        >>> import importlib.util
        >>> from captum_ssm.insights import install_alias
        >>> install_alias()  # from here: from captum.insights import AttributionVisualizer
        >>> importlib.util.find_spec("captum.insights") is not None
        True
    """
    if _THEIRS not in sys.modules and importlib.util.find_spec(_THEIRS) is not None:
        return
    for name in _MODULES:
        sys.modules.setdefault(_THEIRS + name, import_module(_OURS + name))
    captum.insights = sys.modules[_THEIRS]
