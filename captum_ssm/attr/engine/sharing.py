"""One traced forward run for several methods, for the time of a ``with``.

Every method runs the model by itself.  Inside :func:`shared_forward` the first one asked does, and
those that follow with the same call are given its record, and the gradients taken of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from torch import nn

from ...operators.kernels.truths import is_doubted
from ...tracing import Graph
from ..call.layout import ImageProbe, TokenLayout
from .run import Request, Run, traced


class Sharing:
    """What methods called on the same input one after the other have in common."""

    def __init__(self, graph: Graph, streams: bool) -> None:
        self._graph = graph
        self._streams = streams
        self._latest: Run | None = None
        self._probe: ImageProbe | None = None

    def run(self, request: Request) -> Run:
        """The latest run if it is of the same call, else a new one in its place."""
        if self._latest is None or is_doubted() or not self._serves(request):
            self._latest = None  # the old graph goes before the new one comes
            request = replace(request, graph=self._graph, streams=self._streams or request.streams)
            self._latest = traced(replace(request, verify=True, folds=True), shared=True)
        return self._latest

    def _serves(self, request: Request) -> bool:
        """Whether the latest run is of the same call, and holds all that is wanted of it."""
        assert self._latest is not None
        known = self._latest.request
        return (known.streams or not request.streams) and request.same_as(known)

    def probe(self, model: nn.Module) -> ImageProbe:
        """A probe that knows the patch grid which an earlier method saw in the run."""
        if self._probe is None or self._probe.model is not model:
            self._probe = ImageProbe(model)
        return self._probe


#: Of this thread, or asynchronous task, alone.
_current: ContextVar[Sharing | None] = ContextVar("captum_ssm_sharing", default=None)


@contextmanager
def shared_forward(graph: Graph, *, streams: bool = False) -> Iterator[None]:
    """Let the methods called inside the ``with`` share a forward run where they ask for the same.

    One run is held at a time, and none once the ``with`` ends.

    Args:
        graph: which autograd graph of it is kept, enough for all of the methods: ``"all"`` if any
            of them takes gradients, else ``"tail"``, by which queries are found.
        streams: whether the residual stream entering each mixer's block is. Default: False.
    """
    before = _current.set(Sharing(graph, streams))
    try:
        yield
    finally:
        _current.reset(before)


def run_of(request: Request) -> Run:
    """The traced forward run of a request, which may have been made before."""
    sharing = _current.get()
    return traced(request) if sharing is None or request.direct else sharing.run(request)


@contextmanager
def layout_of(request: Request, per_token: bool) -> Iterator[TokenLayout]:
    """How relevance of tokens is laid out, while the run of a request is watched for it."""
    inputs = request.inputs
    if inputs.dim() != 4 or not inputs.is_floating_point():
        yield TokenLayout(inputs, per_token, None)
        return
    sharing = _current.get()
    probe = ImageProbe(request.model) if sharing is None else sharing.probe(request.model)
    with probe.watch():
        yield TokenLayout(inputs, per_token, probe)
