"""A catalogue of the methods, with the meaning, cost, required arguments and options of each.

The command line, Insights, the report and the documentation use this list.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, NamedTuple

from captum.attr import (
    Attribution,
    Deconvolution,
    DeepLift,
    FeatureAblation,
    GuidedBackprop,
    InputXGradient,
    IntegratedGradients,
    Occlusion,
    Saliency,
)

from .._names import find_name, suggest
from ..errors import OptionError
from ..linear import FAMILY, Rule
from .call.checks import PRESETS
from .call.targets import CONTRASTS
from .engine.method import RECIPES, SSMAttribution
from .flow import LatimFlow, MambaLRP
from .implicit_attention import ImplicitAttention
from .latim_alti import AGGREGATES, LatimALTI
from .latim_logit import LatimLogit
from .latim_norm import LatimNorm
from .mamba_attribution import CLAMPS, MambaAttribution
from .rollout import ImplicitAttentionRollout
from .transformer_attribution import TransformerAttribution
from .vectors.logit import MIXINGS

#: Arguments of ``attribute`` that are common to all methods, and so not listed as options.
_COMMON_ARGUMENTS = {
    "self",
    "inputs",
    "target",
    "additional_forward_args",
    "per_token",
    "internal_batch_size",
    "memory_budget",
    "return_convergence_delta",
    "show_progress",
    "verify",
}
#: Strings that each option accepts; some options accept other values, too.
_WORDS: dict[str, Collection[str]] = {
    "aggregate": AGGREGATES,
    "baselines": ("mean",),
    "clamp": CLAMPS,
    "components": PRESETS,
    "contrast": CONTRASTS,
    "mixing": MIXINGS,
    "query": ("last", "mean", "cls"),
    "recipe": RECIPES,
    "reduce": ("mean", "max", "min", "product"),
    "rule": tuple(FAMILY),
}
#: The smallest and the largest number that each option accepts; None for no limit.
_LIMITS: dict[str, tuple[float | None, float | None]] = {
    "discard_ratio": (0.0, 0.999),
    "start_layer": (0, None),
}


class Option(NamedTuple):
    """An argument of ``attribute`` that only some methods have.

    Attributes:
        name: the name of the argument.
        default: the default of the argument.
        words: strings that the argument accepts, with None if the default is None; may be empty.
        limits: the smallest and the largest accepted number; None if numbers are not accepted.
    """

    name: str
    default: Any
    words: tuple[str | None, ...]
    limits: tuple[float | None, float | None] | None


class Cost(NamedTuple):
    """The cost of a method in addition to the model's forward run.

    Attributes:
        makes: a phrase for the rows or maps computed from the mixers' operators; may be empty.
        backward: the number of backward passes. Default: 0.
        linear: whether time and memory are linear in the number of tokens. Default: False,
            quadratic.

    Example:
        >>> from captum_ssm.attr.catalogue import Cost
        >>> str(Cost("1 row per layer", backward=1, linear=True))
        '1 row per layer, 1 backward, linear'
    """

    makes: str
    backward: int = 0
    linear: bool = False

    def __str__(self) -> str:
        passes = f"{self.backward} backward" if self.backward else ""
        return ", ".join(filter(None, (self.makes, passes, "linear" if self.linear else "")))


class Entry(NamedTuple):
    """The catalogue's description of a method.

    Attributes:
        method: the class of the method.
        cost: the cost of a call.
        says: a phrase for the meaning of the relevance.
        needs: phrases for the requirements beside the inputs, such as ``"a target"``.
        holds_identity: whether the method multiplies matrices I + M, so that the identity adds to
            the relevance of the query token. Default: False.
    """

    method: type[SSMAttribution]
    cost: Cost
    says: str
    needs: tuple[str, ...]
    holds_identity: bool = False

    @property
    def name(self) -> str:
        """The class name of the method."""
        return self.method.__name__

    @property
    def options(self) -> list[Option]:
        """The options of the method, in the order of its signature.

        Example:
            >>> from captum_ssm.attr.catalogue import METHODS
            >>> [option.name for option in METHODS[0].options]
            ['contrast', 'rule', 'baselines', 'zero_bias']
            >>> METHODS[0].options[1].words
            (None, 'frozen', 'half', 'centered', 'balanced')
        """
        parameters = inspect.signature(self.method.attribute).parameters.values()
        return [_option(p.name, p.default) for p in parameters if p.name not in _COMMON_ARGUMENTS]


def _option(name: str, default: Any) -> Option:
    """Return an argument as an :class:`Option`, with the strings and numbers it accepts."""
    words: tuple[str | None, ...] = tuple(_WORDS.get(name, ()))
    if words and default is None:
        words = (None, *words)
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    return Option(name, default, words, _LIMITS.get(name, (None, None)) if is_number else None)


_GRADIENT = ("a target", "gradients")
_ROW = ("a position",)

#: The methods, in the order in which they are listed.
METHODS: tuple[Entry, ...] = (
    Entry(
        LatimFlow,
        Cost("", backward=1, linear=True),
        "each token's exact addition to an output",
        _GRADIENT,
    ),
    Entry(
        MambaLRP, Cost("", backward=1, linear=True), "layer-wise relevance propagation", _GRADIENT
    ),
    Entry(
        ImplicitAttentionRollout,
        Cost("1 row", linear=True),
        "the query's row through all layers",
        _ROW,
        holds_identity=True,
    ),
    Entry(ImplicitAttention, Cost("1 row", linear=True), "the query's row, mean over layers", _ROW),
    Entry(
        MambaAttribution,
        Cost("1 L x L map per layer", backward=1),
        "rollout weighted by the gradient",
        _GRADIENT,
        holds_identity=True,
    ),
    Entry(
        TransformerAttribution,
        Cost("1 L x L map per head", backward=2),
        "rollout weighted by relevance and gradient",
        _GRADIENT,
        holds_identity=True,
    ),
    Entry(
        LatimNorm,
        Cost("1 row of vectors per layer", linear=True),
        "lengths of contribution vectors",
        _ROW,
    ),
    Entry(
        LatimLogit,
        Cost("all rows of vectors of earlier layers"),
        "additions to an output, by layer",
        _GRADIENT,
    ),
    Entry(
        LatimALTI,
        Cost("all rows of vectors of every layer"),
        "the share of each source token in a token",
        _ROW,
    ),
)

#: The question that LatimFlow answers under each rule.
QUESTIONS: Mapping[Rule, str] = MappingProxyType(
    {"balanced": "What mattered?", "frozen": "Which token was it copied from?"}
)

#: The default methods, by name in results: LatimFlow under each rule of QUESTIONS.
DEFAULT: Mapping[str, type[Attribution]] = MappingProxyType(
    {f"{LatimFlow.get_name()}, {rule}": LatimFlow for rule in QUESTIONS}
)

#: Captum's methods that users can also choose, in the order in which they are listed.
OF_CAPTUM: tuple[type[Attribution], ...] = (
    IntegratedGradients,
    Saliency,
    InputXGradient,
    DeepLift,
    GuidedBackprop,
    Deconvolution,
    FeatureAblation,
    Occlusion,
)

#: All methods that users can choose by name.
OFFERED: tuple[type[Attribution], ...] = (*(entry.method for entry in METHODS), *OF_CAPTUM)


def holds_identity(method: Any) -> bool:
    """Return True if a method's relevance of the query token includes the identity matrix.

    Args:
        method: the method, the class, or the name that Captum shows.

    Example:
        >>> from captum_ssm import LatimFlow
        >>> from captum_ssm.attr.catalogue import holds_identity
        >>> [holds_identity(method) for method in ("MambaAttribution", LatimFlow)]
        [True, False]
    """
    classes = tuple(entry.method for entry in METHODS if entry.holds_identity)
    if isinstance(method, str):
        return method in {x.get_name() for x in classes}
    return issubclass(method if isinstance(method, type) else type(method), classes)


def with_rules(
    methods: Any, options: Mapping[str, Mapping[str, Any]] | None
) -> Mapping[str, Mapping[str, Any]] | None:
    """Return options by method, with a rule for each of the default methods.

    Args:
        methods: the ``methods`` argument of the user.
        options: options by method name; LatimFlow's options apply to both default methods.

    Example:
        >>> from captum_ssm.attr.catalogue import DEFAULT, with_rules
        >>> with_rules(DEFAULT, {"LatimFlow": {"baselines": "mean"}})["LatimFlow, frozen"]
        {'rule': 'frozen', 'baselines': 'mean'}
    """
    if methods is not DEFAULT:
        return options
    by_method = dict(options or {})
    of_both = by_method.pop(LatimFlow.get_name(), {})
    rules = zip(DEFAULT, QUESTIONS, strict=True)
    default = {name: {"rule": rule, **of_both, **by_method.pop(name, {})} for name, rule in rules}
    return default | by_method


def method_named(name: str, argument: str) -> type[Attribution]:
    """Return the class of a method of this package, of Captum, or of an installed package.

    Args:
        name: the class name, the name that Captum shows, or an entry point of an installed package
            for ``captum_ssm.methods``. Case, spaces, dashes and underscores are ignored.
        argument: the name of the user's argument, for the error.

    Example:
        >>> from captum_ssm.attr.catalogue import method_named
        >>> [method_named(name, "methods").__name__ for name in ("latim_flow", "Input X Gradient")]
        ['LatimFlow', 'InputXGradient']
    """
    known: dict[str, Any] = {x.__name__: x for x in OFFERED}
    key = find_name(name, known)
    if key is None:  # only then, because it reads the metadata of all installed packages
        known |= {x.name: x for x in entry_points(group="captum_ssm.methods")}
        key = find_name(name, known)
    if key is None:
        raise OptionError(
            f"{argument} contains {name!r}, which is not a method.{suggest(name, known)} Pass one "
            f"of {', '.join(known)}."
        )
    offered = known[key]
    method: type[Attribution] = offered if isinstance(offered, type) else offered.load()
    return method
