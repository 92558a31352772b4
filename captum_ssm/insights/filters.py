"""The user's choice of examples and methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from captum.attr import IntegratedGradients

from .._names import find_name, suggest
from ..errors import OptionError
from .methods import ATTRIBUTION_NAMES_TO_METHODS

#: Select all examples, those with a correct prediction, or those with an incorrect one.
PREDICTIONS = ("all", "correct", "incorrect")
#: The largest number of examples that are explained at a time.
MOST_EXAMPLES = 100
#: The largest number of methods in addition to the first.
MOST_BESIDE = 3


class OutputScore(NamedTuple):
    """A class and its predicted score.

    Attributes:
        score: the class's score in the result of ``score_func``.
        index: the index of the class.
        label: the name of the class.
    """

    score: float
    index: int  # type: ignore[assignment]  # hides tuple.index, as Captum's does
    label: str


class FilterConfig(NamedTuple):
    """The user's choice of methods and examples.

    Attributes:
        attribution_method: the method's name. Default: ``"Integrated Gradients"``.
        attribution_arguments: arguments of the method; missing ones have their defaults.
            Default: {}.
        prediction: ``"all"`` examples, or those with a ``"correct"`` or ``"incorrect"`` prediction,
            which excludes examples without a label. Default: ``"all"``.
        classes: show only examples whose predicted class is in this list. Default: [], all.
        num_examples: number of examples at a time. Default: 4.
        beside: further methods for each example, as pairs of a name and a dict of arguments.
            Default: (), none.

    Raises:
        OptionError: when a visualizer does not accept one of the choices.

    Example:
        >>> from captum_ssm.insights import FilterConfig
        >>> from captum_ssm.insights.filters import OutputScore
        >>> wrong = FilterConfig("Saliency", {"abs": False}, prediction="incorrect")
        >>> wrong.passes(predicted=[OutputScore(0.9, 1, "dog")], actual=OutputScore(1.0, 0, "cat"))
        True
    """

    attribution_method: str = IntegratedGradients.get_name()
    attribution_arguments: Mapping[str, Any] = {}
    prediction: str = "all"
    classes: Sequence[str] = []
    num_examples: int = 4
    beside: Sequence[tuple[str, Mapping[str, Any]]] = ()

    @property
    def methods(self) -> list[tuple[str, Mapping[str, Any]]]:
        """All chosen methods, as pairs of a name and a dict of arguments."""
        first = (self.attribution_method, self.attribution_arguments)
        return [first, *((name, arguments) for name, arguments in self.beside)]

    def checked(self, classes: Sequence[str]) -> FilterConfig:
        """Return the choices with method names as listed; raise unless all are accepted."""
        method = _listed_name("attribution_method", self.attribution_method)
        if not isinstance(self.attribution_arguments, Mapping):
            raise OptionError(
                f"attribution_arguments={self.attribution_arguments!r}. Pass a dict of arguments."
            )
        beside = self._checked_beside()
        if self.prediction not in PREDICTIONS:
            raise OptionError(f"prediction={self.prediction!r}: use one of {PREDICTIONS}.")
        names = self.classes
        if not isinstance(names, list | tuple) or any(name not in classes for name in names):
            raise OptionError(
                f"classes={names!r}. Pass a list of names from the visualizer's classes."
            )
        count = self.num_examples
        if type(count) is not int or not 1 <= count <= MOST_EXAMPLES:
            raise OptionError(f"num_examples={count!r}: use 1 to {MOST_EXAMPLES}.")
        return self._replace(attribution_method=method, beside=beside)

    def _checked_beside(self) -> list[tuple[str, Mapping[str, Any]]]:
        beside, checked = self.beside, []
        if not isinstance(beside, list | tuple) or len(beside) > MOST_BESIDE:
            raise OptionError(f"beside={beside!r}. Pass a list of at most {MOST_BESIDE} methods.")
        for entry in beside:
            if (
                not isinstance(entry, list | tuple)
                or len(entry) != 2
                or not isinstance(entry[1], Mapping)
            ):
                raise OptionError(
                    f"beside contains {entry!r}. Pass pairs of a method and its arguments, such as "
                    "('LatimFlow', {'rule': 'frozen'})."
                )
            checked.append((_listed_name("beside", entry[0]), entry[1]))
        return checked

    def passes(self, predicted: Sequence[OutputScore], actual: OutputScore | None) -> bool:
        """Return True if an example with these predictions (likeliest first) and label passes."""
        best = predicted[0] if predicted else None
        if self.classes and (best is None or best.label not in self.classes):
            return False
        if self.prediction == "all":
            return True
        if best is None or actual is None:
            return False
        return (best.index == actual.index) == (self.prediction == "correct")


def _listed_name(argument: str, name: Any) -> str:
    """Return a method's name as the page lists it; for unknown names, blame ``argument``."""
    names = list(ATTRIBUTION_NAMES_TO_METHODS)
    match = find_name(name, names)
    if match is None:
        raise OptionError(
            f"{argument}={name!r} is not known.{suggest(name, names)} Use one of: "
            f"{', '.join(names)}."
        )
    return match
