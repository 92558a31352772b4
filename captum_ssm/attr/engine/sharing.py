"""One traced forward run for several methods, for the time of a ``with``.

Every method runs the model by itself.  Inside :func:`shared_forward` the first one asked does, and
those that follow with the same call are given its record, and the gradients taken of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...tracing import Graph, Layer, Trace, require_deterministic, require_layers, trace
from ...tracing.hooks import Running
from ...tracing.places import Origin, Places
from ...tracing.places.chain import Chain, NotAChain, arrange
from ..call.inputs import call_model, explained_ids
from ..call.layout import ImageProbe
from ..call.targets import logits_of, select
from .run import Taken


@dataclass(frozen=True, eq=False)
class Request:
    """What a traced forward run follows from.

    Attributes:
        forward_func: what runs the model.
        model: the module.
        layers: names or modules of the mixers to record, or None for all.
        inputs: the one input.
        additional: further arguments of forward_func.
    """

    forward_func: Callable[..., Any]
    model: nn.Module
    layers: Sequence[str | nn.Module] | None
    inputs: Tensor
    additional: tuple[Any, ...]

    def same_as(self, other: Request) -> bool:
        """Whether the other's run is as good."""
        return (
            self.forward_func == other.forward_func
            and self.model is other.model
            and _listed(self.layers) == _listed(other.layers)
            and len(self.additional) == len(other.additional)
            and all(map(_same, (self.inputs, *self.additional), (other.inputs, *other.additional)))
        )


@dataclass(frozen=True)
class Kept:
    """What is kept of a traced forward run.

    Attributes:
        graph: which autograd graph.
        streams: whether the residual stream entering each mixer's block is.
        verify: whether operators are held to what their modules returned. Default: True.
        folds: whether layers have to be a chain. Default: True.
    """

    graph: Graph
    streams: bool
    verify: bool = True
    folds: bool = True


@dataclass(frozen=True, eq=False)
class Forward:
    """A traced forward run.

    Attributes:
        record: the recorded layers.
        output: what the model returned, as a tensor.
        chain: how the tokens of its layers lie; None where that is not known.
        shared: whether methods that follow use it too, so that it keeps its graph.
    """

    record: Trace
    output: Tensor
    chain: Chain | None
    shared: bool
    _selected: list[tuple[Tensor | None, Tensor, Taken]] = field(default_factory=list)

    @property
    def layers(self) -> list[Layer]:
        """The recorded layers, in the order in which they ran."""
        return self.record.layers

    def selected(self, index: Tensor | None) -> tuple[Tensor, Taken | None]:
        """A target's number per example (B,), and the gradients taken of it if they are shared.

        Args:
            index: the target's indices, or None.
        """
        if not self.shared:
            return select(self.output, index), None
        for known, number, taken in self._selected:
            if _same(known, index):
                return number, taken
        self._selected.append((index, select(self.output, index), {}))
        return self._selected[-1][1:]


class Sharing:
    """What methods called on the same input one after the other have in common.

    Args:
        kept: what is kept of a forward run, enough for all of them.
    """

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._latest: tuple[Request, Forward] | None = None
        self._probe: ImageProbe | None = None

    def forward(self, request: Request) -> Forward:
        """The latest run if it is of the same call, else a new one in its place."""
        if self._latest is None or not request.same_as(self._latest[0]):
            self._latest = None  # the old graph goes before the new one comes
            self._latest = request, _run(request, self._kept, shared=True)
        return self._latest[1]

    def probe(self, model: nn.Module) -> ImageProbe:
        """A probe that knows the patch grid which an earlier method saw in the run."""
        if self._probe is None or self._probe.model is not model:
            self._probe = ImageProbe(model)
        return self._probe


#: Of this thread, or asynchronous task, alone.
_current: ContextVar[Sharing | None] = ContextVar("captum_ssm_sharing", default=None)


@contextmanager
def shared_forward(kept: Kept) -> Iterator[None]:
    """Let the methods called inside the ``with`` share a forward run where they ask for the same.

    One run is held at a time, and none once the ``with`` ends.

    Args:
        kept: what is kept of it, enough for all of the methods: the graph ``"all"`` if any of
            them takes gradients, else ``"tail"``, by which queries are found.
    """
    before = _current.set(Sharing(kept))
    try:
        yield
    finally:
        _current.reset(before)


def forward_of(request: Request, kept: Kept) -> Forward:
    """The traced forward run of a request, which may have been made before.

    Args:
        request: what to run.
        kept: what to keep of the run if it is not shared.
    """
    sharing = _current.get()
    return _run(request, kept, shared=False) if sharing is None else sharing.forward(request)


def probe_of(model: nn.Module) -> ImageProbe:
    """The probe to watch the model's forward run with."""
    sharing = _current.get()
    return ImageProbe(model) if sharing is None else sharing.probe(model)


def _run(request: Request, kept: Kept, shared: bool) -> Forward:
    model, layers = request.model, request.layers
    require_deterministic(model)
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(kept.graph in ("outputs", "all")))
        tokens = followed(model, layers, stack)
        record = stack.enter_context(
            trace(
                model,
                layers=layers,
                graph=kept.graph,
                verify=kept.verify,
                streams=kept.streams,
                follow=tokens,
            )
        )
        if tokens is not None:
            stack.enter_context(tokens)
        begin(tokens, explained_ids(request.inputs, request.additional))
        output = logits_of(call_model(request.forward_func, request.inputs, request.additional))
        origin = None if tokens is None else tokens.origin(output)
    require_layers(record, model)
    return Forward(record, output, chained(record, origin, kept.folds), shared)


def followed(
    model: nn.Module, layers: Sequence[str | nn.Module] | None, stack: ExitStack
) -> Places | None:
    """What follows tokens through a run, to be switched on for it.

    Args:
        model: the module.
        layers: the mixers that the user chose, who then vouches for the rest: None is returned.
        stack: until it is left, the names of modules that run are known.
    """
    if layers is not None:
        return None
    running = Running(model)
    running.watch(stack)
    return Places(running.name)


def begin(tokens: Places | None, inputs: Tensor) -> None:
    """Declare the explained input; tokens of an image begin with its first block."""
    if tokens is not None and inputs.dim() in (2, 3):
        tokens.begin(inputs)


def chained(record: Trace, output: Origin | None, folds: bool = True) -> Chain | None:
    """How the tokens of a run lie; None where that was not followed, or lies in maps.

    Args:
        record: of the run.
        output: where its output comes from.
        folds: whether layers have to be a chain. Default: True.
    """
    if not record.reads or any(layer.map is not None for layer in record.layers):
        return None
    try:
        return arrange(record.layers, record.reads, output)
    except NotAChain:
        if folds:
            raise
    for layer in record.layers:  # each by itself, in the order in which it reads the tokens
        layer.arrange(None, None, None)
    return None


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are one object, or tensors with the same numbers."""
    if a is b:
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return alike and torch.equal(a, b)


def _listed(layers: Sequence[str | nn.Module] | None) -> list[str | nn.Module] | None:
    return None if layers is None else list(layers)
