"""One traced forward run and the questions to it; several methods may share one.

Every method runs the model by itself. Inside :func:`shared_forward` later methods with the same
call reuse the first one's record and gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from captum.attr import InterpretableInput
from torch import Tensor, nn

from ...errors import GradientModeError, InputError
from ...linear import DirectPaths, Site, direct_paths
from ...operators.kernels.arithmetic import unseen
from ...operators.kernels.truths import ask_anew, is_doubted
from ...tracing import (
    Graph,
    Layer,
    Trace,
    find_mixers,
    repaired_scans,
    require_deterministic,
    require_layers,
    require_real_tokens,
    runnable,
    trace,
)
from ...tracing.caches import sparing_caches
from ...tracing.joins import join
from ...tracing.repair.fused import unfused
from ...tracing.replays import Beginning, Replays
from ...tracing.structure import NotAChain, TokenOrder, arrange, note_streams
from ..call.head import Kept
from ..call.inputs import BatchPart, call_model
from ..call.layout import ImageProbe, TokenLayout
from ..call.targets import logits_of, select
from .fold import stages

#: Elements of the tensors kept from one question to the next (1 GiB in float32).
_KEPT_ELEMENTS = 2**28

#: Gradients by the tensor they belong to; None if none arrived.
Taken = dict[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class Inner:
    """A number inside a run, in place of one of the model's output.

    Attributes:
        site: the activation.
        chosen: the number per example (B,) that is chosen of its tensors, given which tokens (B, L)
            are real, or None if all are.
    """

    site: Site
    chosen: Callable[[Sequence[Tensor], Tensor | None], Tensor]


@dataclass(frozen=True, eq=False)
class Request:
    """A run's arguments, and the records to keep.

    Attributes:
        forward_func: runs the model.
        model: the module.
        layers: names or modules of the mixers to record, or None for all.
        inputs: the one input.
        additional: further arguments of forward_func.
        others: further inputs, passed between ``inputs`` and ``additional``. Default: none.
        graph: which autograd graph is kept. Default: ``"none"``.
        streams: whether to keep the residual stream entering each mixer's block. Default: False.
        verify: whether to check operators against their modules' outputs. Default: True.
        folds: whether layers have to be a chain. Default: True.
        direct: whether the run leaves the graph of its direct paths. Default: False.
        kept: the positions at which the model's head runs. Default: None, all.
        begins: the activation that is explained in place of the inputs. Default: None.
        cuts: further activations at which the graph ends and begins anew. Default: none.
        ends: the number that is explained in place of the output. Default: None.
    """

    forward_func: Callable[..., Any]
    model: nn.Module
    layers: Sequence[str | nn.Module] | None
    inputs: Tensor
    additional: tuple[Any, ...]
    others: tuple[Tensor, ...] = ()
    graph: Graph = "none"
    streams: bool = False
    verify: bool = True
    folds: bool = True
    direct: bool = False
    kept: Kept | None = None
    begins: Site | None = None
    cuts: Sequence[Site] = ()
    ends: Inner | None = None

    @property
    def ids(self) -> Tensor:
        """The explained ids, or the floating input.

        Captum's wrappers of language models hand their forward function marks of the features that
        are kept, and the prompt that they are features of.
        """
        prompt = next((x for x in self.additional if isinstance(x, InterpretableInput)), None)
        return self.inputs if prompt is None else prompt.to_model_input(self.inputs)

    @property
    def is_model(self) -> bool:
        """Return True if forward_func is the model or its method, without code of the user."""
        function: Any = runnable(self.forward_func)
        owner = getattr(function, "__self__", function)
        return owner is self.model and isinstance(owner, nn.Module)

    def output(self, start: Tensor, others: Sequence[Tensor] | None = None) -> Tensor:
        """Run the model, and return its output as a tensor.

        Args:
            start: the input, in place of :attr:`inputs`.
            others: the further inputs, in place of :attr:`others`. Default: None, those.

        Raises:
            TrainingModeError: when a module is random, such as a dropout in training.
        """
        require_deterministic(self.model)
        # lets the head run at the kept positions alone
        named = {} if self.kept is None else self.kept.arguments
        more = (*(self.others if others is None else others), *self.additional)
        return logits_of(call_model(self.forward_func, start, more, named))

    @functools.cached_property
    def output_alone(self) -> Tensor:
        """Return the output of forward_func without hooks; its errors pass through.

        Methods that share a run share its request, and so this as well.
        """
        # a CPU runs no fused kernel of a package, so that torch's functions compute there, too
        on_cpu = self.inputs.device.type == "cpu"
        with ExitStack() as stack:
            for context in (torch.no_grad(), repaired_scans(), sparing_caches(self.model)):
                stack.enter_context(context)
            if on_cpu:
                stack.enter_context(unfused())
            return self.output(self.inputs)

    def one_output(self, start: Tensor) -> Tensor:
        """Return one example of it."""
        first = BatchPart(slice(0, 1), len(self.inputs))
        return logits_of(call_model(self.forward_func, start, tuple(map(first, self.additional))))

    def same_as(self, other: Request) -> bool:
        """Return True if the other request's run can be reused."""
        return (
            self.forward_func == other.forward_func
            and self.model is other.model
            and _listed(self.layers) == _listed(other.layers)
            and len(self.additional) == len(other.additional)
            and all(map(same, (self.inputs, *self.additional), (other.inputs, *other.additional)))
        )


@dataclass(frozen=True, eq=False)
class Question:
    """A question to a run.

    Attributes:
        target: in one of Captum's forms.
        weights: the query as row weights (B, L).
        selected: the target's value per example (B,), part of the graph; None for methods
            without gradients. Default: None.
        constant: a summand of ``selected`` that no module added (B,). Default: None.
        taken: the gradients of ``selected`` that methods sharing the run have taken; None if the
            run is not shared. Default: None.
        asked: from the first to the last nonzero token of ``weights``. Default: None, not known.
    """

    target: Any
    weights: Tensor
    selected: Tensor | None = None
    constant: Tensor | None = None
    taken: Taken | None = None
    asked: range | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """One traced forward run of a (sub-)batch.

    Attributes:
        request: its arguments.
        record: the record of its layers.
        output: the model's output.
        mask: True for real tokens (B, L), or None.
        chain: the token order of its layers; None if not known.
        shared: whether later methods use it too, so it keeps its graph.
        questions: questions to it, the current one first; the graph is kept for later ones.
            Default: none.
        paths: the direct paths, if they were kept. Default: None.
        kept: cache of :meth:`once` for all questions.
    """

    request: Request
    record: Trace
    output: Tensor
    mask: Tensor | None
    chain: TokenOrder | None
    shared: bool = False
    questions: Sequence[Question] = ()
    paths: DirectPaths | None = None
    kept: dict[Layer, Tensor] = field(default_factory=dict)
    _selected: list[tuple[Tensor | None, Tensor, Taken]] = field(default_factory=list)

    @property
    def layers(self) -> list[Layer]:
        """The recorded layers, in the order in which they ran."""
        return self.record.layers

    @property
    def given(self) -> Tensor | None:
        """Return the input token of each token of the first layer (B, L), -1 from elsewhere.

        It is None if they are the same.
        """
        return None if self.chain is None else self.chain.given

    @functools.cached_property
    def streams(self) -> Mapping[Layer, Tensor | None]:
        """The residual stream (B, L, E) entering each layer's block; None if none was kept."""
        return {layer: layer.residual_in_order for layer in self.layers}

    @property
    def weights(self) -> Tensor:
        """The query as row weights (B, L)."""
        return self.questions[0].weights

    def laid_out(self, rows: Sequence[Tensor], layout: TokenLayout) -> list[Tensor]:
        """Lay relevance (B, L) of the first layer's tokens out in the shape of the input."""
        token_map = self.layers[0].map if self.request.inputs.dim() == 4 else None
        return layout.laid_out(rows, self.mask, self.given, token_map, self.request.one_output)

    def asked(self, questions: Sequence[Question]) -> Iterator[Run]:
        """Yield the same run with one question after the other; its cache is for these alone."""
        kept: dict[Layer, Tensor] = {}
        for first, question in enumerate(questions):
            ask_anew(question.weights.shape[-1], question.asked)
            yield replace(self, questions=questions[first:], kept=kept)

    def select(self, index: Tensor | None) -> tuple[Tensor, Taken | None]:
        """Return a target's number per example (B,), and its shared gradients, if any."""
        if not self.shared:
            return select(self.output, index), None
        for known, number, taken in self._selected:
            if same(known, index):
                return number, taken
        self._selected.append((index, select(self.output, index), {}))
        return self._selected[-1][1:]

    def once(
        self, layer: Layer, elements: int, room: int, make: Callable[[], Tensor]
    ) -> Tensor | None:
        """Return a layer's tensor that is the same for all questions, made for the first and kept.

        Args:
            layer: the layer.
            elements: how many the tensor has.
            room: how many may be kept of all layers.
            make: makes the tensor.

        Returns:
            The tensor; None if there is no room, or no further question that would use it.
        """
        if layer not in self.kept:
            held = sum(tensor.numel() for tensor in self.kept.values())
            if len(self.questions) == 1 or held + elements > min(room, _KEPT_ELEMENTS):
                return None
            self.kept[layer] = make()
        return self.kept[layer]

    def gradients(self, tensors: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
        """Return d(selected, summed over the batch) / d(each tensor)."""
        selected = self.questions[0].selected
        if selected is None or not selected.requires_grad:
            raise GradientModeError(
                "The model's output records no gradients although they are enabled here. Does its "
                "forward run under no_grad, or detach?"
            )
        shared = self.questions[0].taken
        again = len(self.questions) > 1 or shared is not None
        taken: Taken = {} if shared is None else shared
        wanted = [x for x in tensors if x not in taken]
        if wanted:
            try:
                found = torch.autograd.grad(
                    selected.sum(), wanted, retain_graph=again, allow_unused=True
                )
            except RuntimeError as error:
                if "no autograd formula" in str(error) or "derivative for" in str(error):
                    raise GradientModeError(
                        f"A function of the model has no backward pass: {error} Or use a method "
                        "without gradients: LatimALTI, LatimNorm, ImplicitAttentionRollout."
                    ) from error
                if "inplace" not in str(error):
                    raise
                raise GradientModeError(
                    "The model changes a tensor in place that its own backward pass needs, so that "
                    "it has no gradients. Use the out-of-place form, x = x + y in place of x += y, "
                    "or a method without them: LatimFlow, LatimALTI, ImplicitAttentionRollout."
                ) from error
            taken.update(zip(wanted, found, strict=True))
        gradients = [taken[x] for x in tensors]
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                raise GradientModeError(
                    f"No gradient of the target reaches layer {name!r}. Is it cut off by detach, "
                    "no_grad or gradient checkpointing, or unused by this target? Leave it out "
                    "with layers=[...]."
                )
        return [gradient.detach() for gradient in gradients if gradient is not None]


def traced(request: Request, *, shared: bool = False) -> Run:
    """Run the model of a request, its mixers recorded; ``shared`` if later methods use the run."""
    model, layers, paths = request.model, request.layers, None
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(request.graph in ("outputs", "all")))
        beginning = Beginning(model, find_mixers(model), request.ids)
        stack.enter_context(beginning.seen())
        if request.direct:
            paths = stack.enter_context(direct_paths(model, request.ids, layers=layers))
        record = stack.enter_context(
            trace(
                model,
                layers=layers,
                graph=request.graph,
                verify=request.verify,
                watchers=() if paths is None else (paths,),
            )
        )
        start = request.inputs if paths is None else paths.mode.begun(request.inputs)
        output = request.output(start)
    require_layers(record, model)
    if request.graph == "tail" and not record.layers[-1].output.requires_grad:
        # the model's last mixer, where the tail begins, did not run, or not as the last one
        return traced(replace(request, graph="outputs"), shared=shared)
    tail, batch = record.layers[-1], len(request.inputs)
    for found, what in ((tail.in_order(tail.output), "mixers see"), (output, "output has")):
        if len(found) != batch:
            raise InputError(
                f"inputs has a batch of {batch}, but the model's {what} a batch of {len(found)}: "
                "each example must be explained by itself."
            )
    with unseen():
        mask = record.mask
    require_real_tokens(mask)
    chain = _replayed(request, record, beginning, output, mask, paths)
    return Run(request, record, output, mask, chain, shared, paths=paths)


def _replayed(
    request: Request,
    record: Trace,
    beginning: Beginning,
    output: Tensor,
    mask: Tensor | None,
    paths: DirectPaths | None,
) -> TokenOrder | None:
    """Return the token order of a run; None if the user vouches for it, or tokens lie in maps."""
    layers, chosen, chain = record.layers, request.layers is not None, None
    if chosen and not request.folds and not request.streams:
        return None
    replays = Replays(layers, beginning, request.output, request.inputs, vouched=chosen)
    if not chosen and not any(layer.map is not None for layer in layers):
        try:
            chain = arrange(replays, output, mask, is_model=request.is_model)
        except NotAChain:
            if request.folds:
                raise
    if chain is None:
        for layer in layers:  # each by itself, in the order in which it reads the tokens
            layer.arrange(None, None)
        if request.folds or request.streams:
            note_streams(replays)
    if request.streams:
        join(replays, stages(layers), None if chain is None else chain.output)
    if paths is not None and chain is not None:
        paths.place(replays, stages(layers), chain.given, chain.output)
    return chain


def same(a: Any, b: Any) -> bool:
    """Return True if two arguments are one object, or tensors with the same numbers."""
    if a is b:
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return alike and torch.equal(a, b)


def _listed(layers: Sequence[str | nn.Module] | None) -> list[str | nn.Module] | None:
    return None if layers is None else list(layers)


class Sharing:
    """State shared by methods that are called on the same input one after the other."""

    def __init__(self, graph: Graph, streams: bool) -> None:
        self._graph = graph
        self._streams = streams
        self._latest: Run | None = None
        self._probe: ImageProbe | None = None

    def run(self, request: Request) -> Run:
        """Return the latest run if it is of the same call, else a new one in its place."""
        if self._latest is not None and not is_doubted():
            known = self._latest.request
            if (known.streams or not request.streams) and request.same_as(known):
                return self._latest
        self._latest = None  # the old graph goes before the new one comes
        request = replace(request, graph=self._graph, streams=self._streams or request.streams)
        self._latest = traced(replace(request, verify=True, folds=True), shared=True)
        return self._latest

    def probe(self, model: nn.Module) -> ImageProbe:
        """Return a probe that knows the patch grid which an earlier method saw in the run."""
        if self._probe is None or self._probe.model is not model:
            self._probe = ImageProbe(model)
        return self._probe


#: Of this thread, or asynchronous task, alone.
_current: ContextVar[Sharing | None] = ContextVar("captum_ssm_sharing", default=None)


@contextmanager
def shared_forward(graph: Graph, *, streams: bool = False) -> Iterator[None]:
    """Let methods inside the ``with`` share a forward run if their calls are the same.

    One run is held at a time, and none once the ``with`` ends.

    Args:
        graph: the autograd graph to keep: ``"all"`` if any method takes gradients, else ``"tail"``,
            which is enough to find queries.
        streams: whether to keep the residual stream entering each mixer's block. Default: False.
    """
    before = _current.set(Sharing(graph, streams))
    try:
        yield
    finally:
        _current.reset(before)


def run_of(request: Request) -> Run:
    """Return the traced forward run of a request, which may have been made before."""
    sharing = _current.get()
    return traced(request) if sharing is None or request.direct else sharing.run(request)


@contextmanager
def layout_of(request: Request, per_token: bool) -> Iterator[TokenLayout]:
    """Yield the layout of token relevance, while a probe watches the requested run."""
    inputs = request.inputs
    if inputs.dim() != 4 or not inputs.is_floating_point():
        yield TokenLayout(inputs, per_token, None)
        return
    sharing = _current.get()
    probe = ImageProbe(request.model) if sharing is None else sharing.probe(request.model)
    with probe.watch():
        yield TokenLayout(inputs, per_token, probe)
