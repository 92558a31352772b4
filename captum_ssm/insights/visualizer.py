"""Show a dataset's examples with explanations of the models' predictions."""

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
from .dataset import DatasetExample, Found, Pages, Seen, search
from .features import BaseFeature
from .filters import FilterConfig
from .flow import Flow
from .methods import ATTRIBUTION_METHOD_CONFIG, ATTRIBUTION_NAMES_TO_METHODS, RECOMMENDED
from .vocabularies import check_sizes

if TYPE_CHECKING:
    from .server import Server

#: Height of a snapshot in a notebook, in pixels.
_HEIGHT = 900

#: Lets only one model run at a time, because runs register hooks on models.
_RUNNING = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock of a forked process, which another thread may have held."""
    global _RUNNING
    _RUNNING = threading.RLock()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_renew_lock)


class AttributionVisualizer:
    """Show examples of a dataset, models' predictions, and their explanations.

    The successor of Captum Insights, with its interface. :meth:`serve` shows a page that only this
    machine can open, :meth:`render` shows it in a notebook, :meth:`snapshot` writes one file,
    :meth:`visualize` returns its data. The server ends with the script, :meth:`close`, or a
    ``with`` of the visualizer.

    Args:
        models: a model, or several to be shown side by side.
        classes: the names of the classes, in the order of the model's outputs.
        features: the features, one for each input of the models.
        dataset: batches of examples.
        score_func: converts the model's output (1, classes) to the displayed scores, for example a
            softmax. Default: None, the output itself.
        use_label_for_attr: whether methods are given the class as their target; False for models
            that return one number. Default: True.

    Raises:
        OptionError: when there is no model or no feature, or models read vocabularies of different
            sizes.
        InputError: when examples do not have one input for each feature, or the model has more
            scores than there are names of classes.

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
            what = "features" if self.models else "models"
            raise OptionError(f"{what} is empty. Name at least one.")
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
        """The choices. At first, any example by LatimFlow, or by the first method that fits."""
        if self._config is None:
            self._config = self._first_config()
        return self._config

    @config.setter
    def config(self, config: FilterConfig) -> None:
        self._config = config.checked(self.classes)

    def obstacles(self) -> dict[str, list[str | None]]:
        """Return for each method and model the reason why it cannot be explained, or None.

        The inputs come from the next example; without any example, all methods seem to fit.
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
        """Return the choices: classes, methods and their arguments, and the chosen method."""
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
        """Return the next examples that pass the filter, each with its explanations.

        Fewer are returned at the end of the dataset, where the next call begins again, and after
        :data:`~captum_ssm.insights.dataset.MOST_SEARCHED` examples.
        """
        return [outputs for _, outputs in self.search(self.view).examples]

    def search(
        self, view: Callable[[DatasetExample, int], Seen | None], again: bool = False
    ) -> Found[Seen]:
        """Search the dataset until enough examples pass the filter.

        Args:
            view: returns an example's view by an index, which counts models, and within them
                methods; None if it does not pass.
            again: begin at the start of the last search. Default: False, at its end.
        """
        with _RUNNING:
            views = len(self.models) * len(self.config.methods)
            return search(self._stream, self.config.num_examples, views, view, again)

    def view(self, example: DatasetExample, index: int) -> VisualizationOutput | None:
        """Explain an example by a model and a method, if it passes the filter.

        Args:
            example: a batch of one.
            index: number of the model, times the number of methods, plus the method's.
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
        """Explain an example by a model and a method.

        Args:
            example: a batch of one.
            model_index: number of the model.
            target: the class to explain. Default: None, the predicted one.
            filtered: return None if the example does not pass the filter. Default: False.
            method_index: number of the method. Default: 0, the first.
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
        """Return the messages between a text's words of the largest estimated effects on a class.

        Args:
            example: a batch of one.
            model_index: number of the model.
            target: the class.
        """
        with _RUNNING:
            return self.attribution_calculation.messages(self.models[model_index], example, target)

    def cut(
        self, example: DatasetExample, model_index: int, target: int, edges: Sequence[Edges]
    ) -> Cut:
        """Return a model's predictions for a text without messages between its words.

        Args:
            example: a batch of one.
            model_index: number of the model.
            target: the class whose effects are measured.
            edges: the messages, as :func:`~captum_ssm.knock_out` takes them.
        """
        with _RUNNING:
            model = self.models[model_index]
            return self.attribution_calculation.cut(model, example, target, edges)

    def flow(self, example: DatasetExample, model_index: int, target: int) -> Flow:
        """Return the flow through a model's layers from the words of a text to a class.

        Args:
            example: a batch of one.
            model_index: number of the model.
            target: the class.
        """
        with _RUNNING:
            return self.attribution_calculation.flow(self.models[model_index], example, target)

    @property
    def url(self) -> str:
        """The page's address, with the token that opens it."""
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
        """Show the page to this machine alone, at the printed address.

        Called again, it prints the address again.

        Args:
            blocking: return when the server has ended, for example by Ctrl-C. Default: False.
            debug: print requests and the tracebacks of errors. Default: False.
            port: of the server. Default: None, a free one.
            bind_all: Captum Insights then answered every machine of the network. Refused if True:
                forward the port instead. Default: False.

        Returns:
            The port.

        Raises:
            OptionError: when bind_all is True, or the port cannot be had.
        """
        if bind_all:
            raise OptionError(
                "bind_all=True would let every machine of the network run your models and see your "
                "data; the page is for this machine alone. To see it from another one, forward "
                "the port: ssh -L PORT:127.0.0.1:PORT HOST."
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
        """Return the page with its present examples, which needs no server and no network.

        It opens from the disk, and in notebooks with a remote kernel, as the value of a cell.
        Searching on and cutting messages need :meth:`serve`.

        Args:
            path: a file to write it to; its folder is created. Default: None, none.
            classes: number of the likeliest classes of each example to explain. Default: 2.

        Returns:
            The HTML.

        Raises:
            OptionError: when classes is not an integer of at least 1.
            WriteError: when the file cannot be written.
        """
        from .api import Api
        from .page import kept_page

        if type(classes) is not int or classes < 1:
            raise OptionError(f"classes={classes!r}: use a whole number of at least 1.")
        page = kept_page(Api(self).kept(classes))
        if path is not None:
            file = Path(path)
            make_folder(file.parent)
            write_whole(file, page)
        return page

    def _repr_html_(self) -> str:
        """Return the snapshot, as notebooks show the value of a cell."""
        return framed(self.snapshot(), "Insights", _HEIGHT)

    @log_usage()  # type: ignore[untyped-decorator]
    def render(self, debug: bool = True) -> None:
        """Show the page in a notebook whose kernel runs on the browser's machine.

        With a remote kernel, such as Colab's, let the visualizer itself be the value of the cell:
        it shows a :meth:`snapshot`.

        Args:
            debug: as in :meth:`serve`. Default: True.
        """
        try:
            from IPython.display import IFrame, display
        except ImportError as error:
            raise ImportError("render() needs a notebook: pip install ipython") from error
        frame = IFrame(self._started(debug, None).url, width="100%", height=900)
        display(frame)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the server, if there is one. It can be started again."""
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
        from .api import Api
        from .server import Server

        if self._server is None:
            self._server = Server(Api(self), port, debug)
        elif port not in (None, 0, self._server.port):
            raise OptionError(
                f"port={port}, but the page is already served on {self._server.port}. Call "
                "close() first."
            )
        return self._server

    def _first_config(self) -> FilterConfig:
        obstacles = self.obstacles()
        first, *beside = RECOMMENDED
        if obstacles[first[0]][0] is None:
            return FilterConfig(*first, beside=beside)
        for name, reasons in obstacles.items():
            if reasons[0] is None:
                return FilterConfig(name)
        return FilterConfig()
