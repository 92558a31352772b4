"""Show the examples of a dataset with predictions and explanations, on a page or in a notebook."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from captum.log import log_usage
from torch import Tensor

from .._files import make_folder, write_whole
from ..edges import Edge, Edges
from ..errors import OptionError
from ..explain.knockout import Cut
from ..viz.html.page import framed
from .calculation import AttributionCalculation, VisualizationOutput, explanation
from .config import described
from .dataset import DatasetExample, Pages, SearchResult, Seen, search
from .features import BaseFeature
from .filters import FilterConfig
from .flow import Flow
from .methods import ATTRIBUTION_METHOD_CONFIG, ATTRIBUTION_NAMES_TO_METHODS, RECOMMENDED
from .vocabularies import check_sizes

if TYPE_CHECKING:
    from .server import Server

#: Height of a snapshot in a notebook, in pixels.
_HEIGHT = 900

#: The lock of all model runs: only one model runs at a time, because runs register hooks.
_RUNNING = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock in a forked process, where a thread that held the lock is missing."""
    global _RUNNING
    _RUNNING = threading.RLock()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_renew_lock)


class AttributionVisualizer:
    """Show examples of a dataset with models' predictions and explanations of the predictions.

    The class has the interface of Captum Insights. :meth:`serve` serves a page that only this
    machine can open, :meth:`render` shows the page in a notebook, :meth:`snapshot` writes the page
    to one file, and :meth:`visualize` returns the data. The server ends with the script, by
    :meth:`close`, or at the end of a ``with`` block of the visualizer.

    Args:
        models: a model, or a list of models to compare.
        classes: the names of the classes, in the order of the model's outputs.
        features: the features, one for each input of the models.
        dataset: batches of examples.
        score_func: function from the model's output (1, classes) to displayed scores, for example a
            softmax. Default: None, the output itself.
        use_label_for_attr: True to pass the class as the target of methods; False for models that
            return one number. Default: True.

    Raises:
        OptionError: when there is no model or no feature, or the models have vocabularies of
            different sizes.
        InputError: when examples do not have one input for each feature, or the model returns more
            scores than there are class names.

    Example:
        >>> import torch
        >>> from captum_ssm.insights import AttributionVisualizer, Batch
        >>> from captum_ssm.insights.features import GeneralFeature
        >>> visualizer = AttributionVisualizer(
        ...     torch.nn.Linear(2, 3), ["a", "b", "c"], GeneralFeature("size", ["width", "height"]),
        ...     [Batch(torch.rand(5, 2), labels=None)])
        >>> [len(models) for models in visualizer.visualize()]
        [1, 1, 1, 1]
        >>> with visualizer:  # the server ends with the block  # doctest: +ELLIPSIS
        ...     port = visualizer.serve()
        <BLANKLINE>
        Fetch data and view Captum Insights at http://127.0.0.1:...
        <BLANKLINE>
    """

    def __init__(
        self,
        models: Any,
        classes: Sequence[str],
        features: Sequence[BaseFeature] | BaseFeature,
        dataset: Iterable[Any],
        score_func: Callable[[Tensor], Tensor] | None = None,
        use_label_for_attr: bool = True,
    ) -> None:
        self.models = list(models) if isinstance(models, list | tuple) else [models]
        self.classes = list(classes)
        self.features = list(features) if isinstance(features, Sequence) else [features]
        if not self.models or not self.features:
            empty = "features" if self.models else "models"
            raise OptionError(f"{empty} is empty. Pass at least one.")
        check_sizes(self.models)
        self.dataset = dataset
        self.attribution_calculation = AttributionCalculation(
            self.models, self.classes, self.features, score_func, use_label_for_attr
        )
        self._stream = Pages(dataset)
        self._config: FilterConfig | None = None
        self._server: Server | None = None

    @property
    def config(self) -> FilterConfig:
        """The choice of methods and examples; at first LatimFlow, or the first method that fits."""
        if self._config is None:
            self._config = self._first_config()
        return self._config

    @config.setter
    def config(self, config: FilterConfig) -> None:
        self._config = config.checked(self.classes)

    def obstacles(self) -> dict[str, list[str | None]]:
        """Return for each method and model the reason why they do not fit, or None.

        The next example is used as input. If the dataset is empty, all entries are None.
        """
        calculation = self.attribution_calculation
        with _RUNNING:
            example = self._stream.first()
            inputs = None if example is None else calculation.transformed(example)
        if inputs is None:
            return {name: [None] * len(self.models) for name in ATTRIBUTION_NAMES_TO_METHODS}
        return {
            name: [calculation.obstacle(name, model, inputs) for model in self.models]
            for name in ATTRIBUTION_NAMES_TO_METHODS
        }

    def get_insights_config(self) -> dict[str, Any]:
        """Return the page's lists of classes, methods and arguments, and the selected method."""
        return {
            "classes": self.classes,
            "methods": list(ATTRIBUTION_NAMES_TO_METHODS),
            "method_arguments": {
                name: described(parameters)
                for name, parameters in ATTRIBUTION_METHOD_CONFIG.items()
            },
            "method_help": {
                name: parameters.help_info for name, parameters in ATTRIBUTION_METHOD_CONFIG.items()
            },
            "selected_method": self.config.attribution_method,
        }

    @log_usage()  # type: ignore[untyped-decorator]
    def visualize(self) -> list[list[VisualizationOutput]]:
        """Return the explanations of the next examples that pass the filter, a list per example.

        A call stops early at the end of the dataset, and after
        :data:`~captum_ssm.insights.dataset.MOST_SEARCHED` examples; the next call continues there.
        """
        return [outputs for _, outputs in self.search(self.view).examples]

    def search(
        self, view: Callable[[DatasetExample, int], Seen | None], again: bool = False
    ) -> SearchResult[Seen]:
        """Search the dataset until enough examples pass the filter.

        Args:
            view: function from an example and an index to an explanation, or to None if the example
                does not pass the filter; see :meth:`view` for the index.
            again: True to repeat the last search from its start. Default: False, continue.
        """
        with _RUNNING:
            views = len(self.models) * len(self.config.methods)
            return search(self._stream, self.config.num_examples, views, view, again)

    def view(self, example: DatasetExample, index: int) -> VisualizationOutput | None:
        """Explain a model's prediction with one method; return None if the filter excludes it.

        Args:
            example: a batch of one example.
            index: the model's index times the number of methods, plus the method's index.
        """
        model, method = divmod(index, len(self.config.methods))
        return self.explain(example, model, filtered=True, method_index=method)

    def explain(
        self,
        example: DatasetExample,
        model_index: int,
        target: int | None = None,
        filtered: bool = False,
        method_index: int = 0,
    ) -> VisualizationOutput | None:
        """Explain a model's prediction for an example with one method.

        Args:
            example: a batch of one example.
            model_index: index of the model.
            target: the class to explain. Default: None, the predicted class.
            filtered: return None if the example does not pass the filter. Default: False.
            method_index: index of the method. Default: 0, the first method.
        """
        with _RUNNING:
            return explanation(
                self.attribution_calculation,
                self.config,
                example,
                model_index,
                target,
                filtered,
                method_index,
            )

    def layers(self) -> list[list[str]]:
        """Return for each model the names of the layers whose messages can be cut."""
        return [self.attribution_calculation.layers(model) for model in self.models]

    def messages(self, example: DatasetExample, model_index: int, target: int) -> list[Edge]:
        """Return the messages between words with the largest estimated effects on a class.

        Args:
            example, model_index, target: the text, the index of the model, and the class index.
        """
        with _RUNNING:
            return self.attribution_calculation.messages(self.models[model_index], example, target)

    def cut(
        self, example: DatasetExample, model_index: int, target: int, edges: Sequence[Edges]
    ) -> Cut:
        """Return a model's predictions for a text with and without some messages between words.

        Args:
            example, model_index, target: the text, the index of the model, and the class index.
            edges: the messages to cut, see :func:`~captum_ssm.knock_out`.
        """
        with _RUNNING:
            model = self.models[model_index]
            return self.attribution_calculation.cut(model, example, target, edges)

    def flow(self, example: DatasetExample, model_index: int, target: int) -> Flow:
        """Return the flow of relevance from a text's words through the layers to a class.

        Args:
            example, model_index, target: the text, the index of the model, and the class index.
        """
        with _RUNNING:
            return self.attribution_calculation.flow(self.models[model_index], example, target)

    @property
    def url(self) -> str:
        """The page's address, including the token that opens the page."""
        if self._server is None:
            raise OptionError("the visualizer has no page yet. Call serve() or render() first.")
        return self._server.url

    @log_usage()  # type: ignore[untyped-decorator]
    def serve(
        self,
        blocking: bool = False,
        debug: bool = False,
        port: int | None = None,
        bind_all: bool = False,
    ) -> int:
        """Serve the page to browsers on this machine, print its address, and return the port.

        A second call only prints the address again.

        Args:
            blocking: wait until the server ends, for example by Ctrl-C. Default: False.
            debug: print requests and the tracebacks of errors. Default: False.
            port: the server's port. Default: None, a free port.
            bind_all: must be False; in Captum Insights, True serves the page to the whole network.
                Default: False.

        Raises:
            OptionError: when bind_all is True, or the port cannot be used.
        """
        if bind_all:
            raise OptionError(
                "bind_all=True would let every machine of the network run your models and see your "
                "data, so it is refused. To open the page on a second machine, forward the port: "
                "ssh -L PORT:127.0.0.1:PORT HOST."
            )
        server = self._started(debug, port)
        print(f"\nFetch data and view Captum Insights at {server.url}\n", flush=True)
        if blocking:
            try:
                server.wait()
            except KeyboardInterrupt:
                pass
            finally:
                self.close()
        return server.port

    def snapshot(self, path: str | Path | None = None, *, classes: int = 2) -> str:
        """Return the page as HTML with its present examples; it needs no server and no network.

        The HTML can be opened as a file, or displayed in notebooks, also with a remote kernel. To
        search for further examples or to cut messages, use :meth:`serve`.

        Args:
            path: the file to write; its folder is created. Default: None, no file.
            classes: the number of likeliest classes of each example to explain. Default: 2.

        Raises:
            OptionError: when classes is not an integer of at least 1.
            WriteError: when the file cannot be written.
        """
        from .api import Api
        from .page import snapshot_page

        if type(classes) is not int or classes < 1:
            raise OptionError(f"classes={classes!r}: use a whole number of at least 1.")
        page = snapshot_page(Api(self).snapshot_data(classes))
        if path is not None:
            file = Path(path)
            make_folder(file.parent)
            write_whole(file, page)
        return page

    def _repr_html_(self) -> str:
        """Return a snapshot in a frame, which notebooks display for a visualizer."""
        return framed(self.snapshot(), "Insights", _HEIGHT)

    @log_usage()  # type: ignore[untyped-decorator]
    def render(self, debug: bool = True) -> None:
        """Show the page in a notebook whose kernel runs on the browser's machine.

        With a remote kernel, such as Colab's, write the visualizer itself as the last line of a
        cell, which displays a :meth:`snapshot`.

        Args:
            debug: print requests and the tracebacks of errors. Default: True.
        """
        try:
            from IPython.display import IFrame, display
        except ImportError as error:
            raise ImportError("render() needs IPython: pip install ipython") from error
        frame = IFrame(self._started(debug, None).url, width="100%", height=900)
        display(frame)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the server if it runs; :meth:`serve` can start it again."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def __enter__(self) -> AttributionVisualizer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _started(self, debug: bool, port: int | None) -> Server:
        """Return the server, which is started first if it does not run."""
        from .api import Api
        from .server import Server

        if self._server is None:
            self._server = Server(Api(self), port, debug)
        elif port not in (None, 0, self._server.port):
            raise OptionError(
                f"port={port}, but the page is already served on port {self._server.port}. Call "
                "close() first, or leave port out."
            )
        return self._server

    def _first_config(self) -> FilterConfig:
        """Return :data:`RECOMMENDED`, or the first method that fits the first model."""
        obstacles = self.obstacles()
        recommended, *beside = RECOMMENDED
        if obstacles[recommended[0]][0] is None:
            return FilterConfig(*recommended, beside=beside)
        for name, reasons in obstacles.items():
            if reasons[0] is None:
                return FilterConfig(name)
        return FilterConfig()
