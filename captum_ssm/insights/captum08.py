"""Use Insights of this package as ``captum.insights``, or its methods in Captum 0.8's Insights."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import captum
from captum.log import log_usage

from ..attr.engine.method import SSMAttribution
from ..errors import OptionError
from .config import (
    BaselinesConfig,
    BoolConfig,
    Config,
    ContrastConfig,
    NumberConfig,
    StrConfig,
    StrEnumConfig,
    TupleConfig,
)
from .methods import SUPPORTED_ATTRIBUTION_METHODS, parameters_of

#: Values for True, False and None on the page of Captum 0.8, which only offers words and integers.
_YES, _NO, _NOTHING = "yes", "no", "default"

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
    """Make ``import captum.insights`` import :mod:`captum_ssm.insights`, in this process.

    With Captum 0.8, which has its own Insights, nothing changes.

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


def register_with_captum() -> list[str]:
    """Add the methods of this package to ``captum.insights`` of Captum 0.8 or earlier.

    Returns:
        The names of the methods, as Captum's page displays them.

    Raises:
        OptionError: if the installed Captum has no Insights.

    Example:
        Where Captum 0.8, flask and flask-compress are installed:

        >>> from captum_ssm.insights import register_with_captum
        >>> register_with_captum()[:2]  # doctest: +SKIP
        ['LatimFlow', 'MambaLRP']
    """
    try:
        from captum.insights.attr_vis import config
    except ModuleNotFoundError as error:
        raise OptionError(
            f"register_with_captum() needs the Insights of Captum 0.8, with flask and "
            f"flask-compress ({error}). With a newer Captum use captum_ssm.insights, which has "
            "these methods."
        ) from error
    if config.__name__.startswith("captum_ssm."):
        raise OptionError(
            "captum.insights is captum_ssm.insights, which has these methods. Leave "
            "register_with_captum() out."
        )
    ours = [m for m in SUPPORTED_ATTRIBUTION_METHODS if issubclass(m, SSMAttribution)]
    for method in ours:
        name = method.get_name()
        if name not in config.ATTRIBUTION_NAMES_TO_METHODS:
            subclass = _without_baselines_argument(method)
            config.SUPPORTED_ATTRIBUTION_METHODS.append(subclass)
            config.ATTRIBUTION_NAMES_TO_METHODS[name] = subclass
        config.ATTRIBUTION_METHOD_CONFIG[name] = _convert_all(parameters_of(name).params, config)
    return [method.get_name() for method in ours]


def _without_baselines_argument(method: type[SSMAttribution]) -> type[SSMAttribution]:
    """Hide a method's argument ``baselines``: Captum 0.8 would pass 0, which is a token id."""
    if "baselines" not in inspect.signature(method.attribute).parameters:
        return method

    def attribute(self: SSMAttribution, *args: Any, **options: Any) -> Any:
        return method.attribute(self, *args, **options)

    subclass = type(method.__name__, (method,), {})
    subclass.attribute = log_usage(part_of_slo=True)(attribute)  # type: ignore[attr-defined]
    return subclass


def _convert_all(params: Mapping[str, Config], theirs: Any) -> Any:
    """Convert arguments to field types of Captum 0.8, and add functions that read the values."""
    types = {name: _convert_type(kind, theirs) for name, kind in params.items()}
    return theirs.ConfigParameters(
        params=types,
        post_process={name: _value_parser(name, kind) for name, kind in params.items()},
    )


def _convert_type(kind: Config, theirs: Any) -> Any:
    """Return the field of Captum 0.8's page that can display values of an argument's type."""
    if isinstance(kind, NumberConfig) and kind.whole:
        return theirs.NumberConfig(value=kind.value, limit=kind.limit)
    if isinstance(kind, NumberConfig | StrConfig):  # Captum's page would truncate numbers
        return theirs.StrConfig(value=str(kind.value))
    if isinstance(kind, TupleConfig):
        return theirs.StrConfig(value=" ".join(map(str, kind.value or ())))
    if isinstance(kind, BoolConfig):
        return theirs.StrEnumConfig(value=_YES if kind.value else _NO, limit=[_NO, _YES])
    words = [_NOTHING if word is None else word for word in kind.limit]
    return theirs.StrEnumConfig(value=kind.value or _NOTHING, limit=words)


def _value_parser(name: str, kind: Config) -> Callable[[Any], Any]:
    """Return a function that converts a value of Captum 0.8's page to the argument's value."""

    def read(value: Any) -> Any:
        if isinstance(kind, BoolConfig) and value in (_YES, _NO):
            value = value == _YES
        if isinstance(kind, NumberConfig) and isinstance(value, str):
            value = float(value)
        if (
            isinstance(kind, StrEnumConfig | BaselinesConfig | ContrastConfig)
            and value == _NOTHING
            and None in kind.limit
        ):
            value = None
        return kind.parse(name, value)

    return read
