"""Answer the requests of the web page in JSON."""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from ..attr.text.tokens import Tokens
from ..edges import Edge, Edges
from ..errors import OptionError
from ..viz.labels import as_words
from .calculation import VisualizationOutput
from .dataset import DatasetExample
from .filters import FilterConfig

if TYPE_CHECKING:
    from .visualizer import AttributionVisualizer

#: The number of shown examples that are stored for later requests of the page.
_REMEMBERED = 256


class _Messages(NamedTuple):
    """The messages with the largest effects in an example, as the page expects them."""

    messages: list[Edge]


class Api:
    """Answers the page's requests to a visualizer; ``"config"`` or ``"cut"`` names a request."""

    def __init__(self, visualizer: AttributionVisualizer) -> None:
        self._visualizer = visualizer
        self._shown: OrderedDict[int, DatasetExample] = OrderedDict()
        self._identities = itertools.count(1)
        self._lock = threading.Lock()
        #: True to print the tracebacks of errors that are sent to the page
        self.debug = False

    def answer(self, question: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; requests run one at a time, as they share one filter."""
        questions: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "config": self._config,
            "examples": self._examples,
            "relevance": self._relevance,
            "messages": self._messages,
            "cut": self._cut,
            "flow": self._flow,
        }
        with self._lock:
            return questions[question](request)

    def snapshot_data(self, classes: int) -> dict[str, Any]:
        """Return the answers that a page needs without a server, for the likeliest classes."""
        with self._lock:
            config = self._config({})
            choices = config["filter"]
            response = self._examples({"filter": choices._asdict(), "again": True})
            relevance = {}
            for example in response["examples"]:
                for output in example["models"]:
                    for score in output.get("predicted", [])[:classes]:
                        model, method = output["model_index"], output["method_index"]
                        place = self._shown[example["id"]], model, method
                        answer = (
                            output
                            if score.index == output["active_index"]
                            else self._explanation(*place, score.index, filtered=False)
                        )
                        key = f"{example['id']},{model},{method},{score.index}"
                        relevance[key] = answer
            layers: list[list[str]] = [[] for _ in config["models"]]  # cutting needs a server
            answers = {"config": config | {"layers": layers, "filter": choices._asdict()}}
            data: dict[str, Any] = plain(answers | {"examples": response, "relevance": relevance})
            return data

    def _config(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the lists and the state that the page needs when it opens."""
        visualizer = self._visualizer
        return {
            **visualizer.get_insights_config(),
            "models": [type(model).__name__ for model in visualizer.models],
            "layers": visualizer.layers(),
            "obstacles": visualizer.obstacles(),
            "filter": visualizer.config,
        }

    def _examples(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the next examples that pass the filter, and store them for later requests."""
        visualizer = self._visualizer
        visualizer.config = _parse_filter(request)
        result = visualizer.search(self._view, again=bool(request.get("again")))
        examples = []
        for example, outputs in result.examples:
            identity = next(self._identities)
            self._shown[identity] = example
            examples.append({"id": identity, "number": example.number, "models": outputs})
        while len(self._shown) > _REMEMBERED:
            self._shown.popitem(last=False)
        return {
            "examples": examples,
            "searched": result.searched,
            "ended": result.ended,
            "labelled": result.labelled,
        }

    def _relevance(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the explanation of one class by one method, for an example shown before."""
        visualizer = self._visualizer
        visualizer.config = _parse_filter(request)
        example, model, target = self._requested(request)
        method = request.get("method", 0)
        count = len(visualizer.config.methods)
        if type(method) is not int or not 0 <= method < count:
            raise OptionError(f"method={method!r} is not a method's number. Use 0 to {count - 1}.")
        return self._explanation(example, model, method, target, filtered=False) or {}

    def _explanation(
        self,
        example: DatasetExample,
        model: int,
        method: int,
        target: int | None,
        *,
        filtered: bool,
    ) -> dict[str, Any] | None:
        """Return the fields of an explanation, or of its error; None if the filter excludes it."""
        explain = self._visualizer.explain
        arguments = example, model, target, filtered, method
        response = self._result(model, lambda: _for_page(explain(*arguments)))
        return None if response is None else response | {"method_index": method}

    def _cut(self, request: Mapping[str, Any]) -> dict[str, Any]:
        example, model, target = self._requested(request)
        messages = request.get("edges")
        if not isinstance(messages, list) or not messages:
            raise OptionError(f"edges={messages!r}. Pass a list of one or more messages to cut.")
        edges, cut = list(map(_parse_edges, messages)), self._visualizer.cut
        return self._result(model, lambda: cut(example, model, target, edges)) or {}

    def _messages(self, request: Mapping[str, Any]) -> dict[str, Any]:
        example, model, target = self._requested(request)

        def strongest() -> _Messages:
            return _Messages(self._visualizer.messages(example, model, target))

        return self._result(model, strongest) or {}

    def _flow(self, request: Mapping[str, Any]) -> dict[str, Any]:
        example, model, target = self._requested(request)
        return self._result(model, lambda: self._visualizer.flow(example, model, target)) or {}

    def _requested(self, request: Mapping[str, Any]) -> tuple[DatasetExample, int, int]:
        """Return the example, model index and class index that a request names."""
        visualizer = self._visualizer
        identity, model, target = (request.get(key) for key in ("id", "model", "target"))
        if type(identity) is not int or identity not in self._shown:
            raise OptionError(f"id={identity!r} is no longer stored. Show the examples again.")
        models, classes = len(visualizer.models), len(visualizer.classes)
        if type(model) is not int or not 0 <= model < models:
            raise OptionError(f"model={model!r} is none of the {models} models. Pass its index.")
        if type(target) is not int or not 0 <= target < classes:
            raise OptionError(f"target={target!r} is none of the {classes} classes. Pass an index.")
        return self._shown[identity], model, target

    def _view(self, example: DatasetExample, index: int) -> dict[str, Any] | None:
        """Return the explanation at an index of :meth:`AttributionVisualizer.view`, as fields."""
        model, method = divmod(index, len(self._visualizer.config.methods))
        return self._explanation(example, model, method, None, filtered=True)

    def _result(self, model: int, explain: Callable[[], Any]) -> dict[str, Any] | None:
        """Return the fields of ``explain()``, or the error; the page still shows other models."""
        try:
            output = explain()
        except Exception as error:
            if self.debug:
                traceback.print_exc(file=sys.stderr)
            return {"model_index": model, "error": str(error) or type(error).__name__}
        return None if output is None else dict(output._asdict())


def encoded(value: Any) -> bytes:
    """Return a value as JSON in bytes; NaN and infinity, which JSON lacks, become null."""
    return json.dumps(plain(value), allow_nan=False).encode()


def plain(value: Any) -> Any:
    """Convert a value to JSON types: dicts, lists, strings and numbers; NaN becomes None."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if hasattr(value, "__iter__"):
        return [plain(inner) for inner in value]
    return str(value)


def _for_page(output: VisualizationOutput | None) -> VisualizationOutput | None:
    """Prepare an explanation for the page: drop images that have rasters, join tokens to words."""
    if output is None:
        return None
    features = []
    for feature, rasters in zip(output.feature_outputs, output.rasters, strict=True):
        if rasters and feature.type == "image":
            feature = feature._replace(modified=None)
        elif isinstance(feature.base, Tokens):
            feature = feature._replace(base=as_words(feature.base))
        features.append(feature)
    return output._replace(feature_outputs=features)


def _parse_edges(message: Any) -> Edges:
    """Convert a message of a request (layer name, source and target position) to ``Edges``."""
    message = message if isinstance(message, Mapping) else {}
    layer, source, target = (message.get(key) for key in ("name", "source", "target"))
    if not isinstance(layer, str):
        raise OptionError(f"name={layer!r}. Pass the name of a layer as a string.")
    for end, position in (("source", source), ("target", target)):
        if type(position) is not int:
            raise OptionError(f"{end}={position!r}. Pass the position of a word as an integer.")
    return Edges(layer, source, target)


def _parse_filter(request: Mapping[str, Any]) -> FilterConfig:
    """Return a request's choices of examples and methods, with defaults for missing choices."""
    choices = request.get("filter", {})
    if not isinstance(choices, Mapping):
        raise OptionError(f"filter={choices!r}. Pass a JSON object.")
    if unknown := set(choices) - set(FilterConfig._fields):
        raise OptionError(
            f"filter has the unknown field {sorted(unknown)[0]!r}. Use {FilterConfig._fields}."
        )
    return FilterConfig(**choices)
