"""Choice of the examples to show, and of the method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from captum.attr import IntegratedGradients

from .._names import known_as, meant
from ..errors import OptionError
from .methods import ATTRIBUTION_NAMES_TO_METHODS

#: All examples, those that the model has right, or those that it has wrong.
PREDICTIONS = ("all", "correct", "incorrect")
#: More examples than this are not explained at a time.
MOST_EXAMPLES = 100
#: More methods than this are not shown beside the first.
MOST_BESIDE = 3


class OutputScore(NamedTuple):
    """A class, and its score by a model.

    Attributes:
        score: the result of ``score_func`` for the model's output.
        index: the index of the class.
        label: the name of the class.
    """

    score: float
    index: int  # type: ignore[assignment]  # hides tuple.index, as Captum's does
    label: str


class FilterConfig(NamedTuple):
    """The choices of a user.

    Attributes:
        attribution_method: the method's name. Default: ``"Integrated Gradients"``.
        attribution_arguments: its arguments. Default: {}; those left out have their defaults.
        prediction: ``"all"``, ``"correct"`` or ``"incorrect"``; an example without a label is
            neither of the latter. Default: ``"all"``.
        classes: names of the accepted predictions. Default: [], any.
        num_examples: number of examples at a time. Default: 4.
        beside: further methods, each its name and its arguments, shown beside the first.
            Default: (), none.

    Raises:
        OptionError: when a visualizer does not know one of the choices.

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
        """All methods that are shown, each its name and its arguments."""
        first = (self.attribution_method, self.attribution_arguments)
        return [first, *((name, arguments) for name, arguments in self.beside)]

    def checked(self, classes: Sequence[str]) -> FilterConfig:
        """Return the same with the method's listed name; raise for unknown choices."""
        method = _method("attribution_method", self.attribution_method)
        if not isinstance(self.attribution_arguments, Mapping):
            raise OptionError(
                f"attribution_arguments={self.attribution_arguments!r} must be values by name."
            )
        beside = self._checked_beside()
        if self.prediction not in PREDICTIONS:
            raise OptionError(f"prediction={self.prediction!r}: use one of {PREDICTIONS}.")
        chosen = self.classes
        if not isinstance(chosen, list | tuple) or any(name not in classes for name in chosen):
            raise OptionError(
                f"classes={chosen!r} must be a list of names that the visualizer's classes hold."
            )
        count = self.num_examples
        if type(count) is not int or not 1 <= count <= MOST_EXAMPLES:
            raise OptionError(f"num_examples={count!r}: use 1 to {MOST_EXAMPLES}.")
        return self._replace(attribution_method=method, beside=beside)

    def _checked_beside(self) -> list[tuple[str, Mapping[str, Any]]]:
        beside, checked = self.beside, []
        if not isinstance(beside, list | tuple) or len(beside) > MOST_BESIDE:
            raise OptionError(f"beside={beside!r} must be a list of at most {MOST_BESIDE} methods.")
        for one in beside:
            if (
                not isinstance(one, list | tuple)
                or len(one) != 2
                or not isinstance(one[1], Mapping)
            ):
                raise OptionError(
                    f"beside holds {one!r}; each must be a method and its arguments, for example "
                    "('LatimFlow', {'rule': 'frozen'})."
                )
            checked.append((_method("beside", one[0]), one[1]))
        return checked

    def passes(self, predicted: Sequence[OutputScore], actual: OutputScore | None) -> bool:
        """Return True if an example with predictions, likeliest first, and a label passes."""
        best = predicted[0] if predicted else None
        if self.classes and (best is None or best.label not in self.classes):
            return False
        if self.prediction == "all":
            return True
        if best is None or actual is None:
            return False
        return (best.index == actual.index) == (self.prediction == "correct")


def _method(argument: str, name: Any) -> str:
    """Return a method's name as it is listed."""
    known = list(ATTRIBUTION_NAMES_TO_METHODS)
    found = known_as(name, known)
    if found is None:
        raise OptionError(
            f"{argument}={name!r} is not known.{meant(name, known)} Use one of: {', '.join(known)}."
        )
    return found
