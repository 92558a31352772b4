"""One traced forward run, and the targets that are explained from it.

By default every method runs the model. Inside :func:`shared_forward`, later methods with the same
arguments reuse the run and the gradients of the first method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from captum.attr import InterpretableInput
from torch import Tensor, nn

from ...errors import GradientModeError, InputError
from ...linear import DirectPaths, Site, direct_paths
from ...operators.kernels.arithmetic import unseen
from ...operators.kernels.truths import begin_query, is_doubted
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

#: Largest number of tensor elements cached from one target to the next (1 GiB in float32).
_KEPT_ELEMENTS = 2**28

#: The target's gradient at each tensor; None if the target does not depend on the tensor.
GradientCache = dict[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class Inner:
    """A value computed from an activation, explained in place of the model's output.

    Attributes:
        site: the activation.
        value_of: function that returns one value per example (B,), given the activation's tensors
            and a mask (B, L) of unpadded tokens (None if there is no padding).
    """

    site: Site
    value_of: Callable[[Sequence[Tensor], Tensor | None], Tensor]


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of a run, and the tensors that the run keeps.

    Attributes:
        forward_func: the function that runs the model.
        model: the module.
        layers: names or modules of the mixers to record, or None for all.
        inputs: the first input.
        additional: the additional_forward_args of forward_func.
        others: further inputs, passed between ``inputs`` and ``additional``. Default: none.
        graph: the part of the autograd graph that is kept. Default: ``"none"``.
        streams: whether to keep the residual stream entering each mixer's block. Default: False.
        verify: whether to check operators against their modules' outputs. Default: True.
        folds: whether each layer must read the previous layer's output. Default: True.
        direct: whether the graph has only direct paths, which bypass later mixers. Default: False.
        operators: whether operators built during the run are kept. Default: True.
        kept: the positions at which the model's head runs. Default: None, all.
        begins: the activation that is explained in place of the inputs. Default: None.
        cuts: further activations that are detached and start a new graph. Default: none.
        ends: the value that is explained in place of the output. Default: None.
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
    operators: bool = True
    kept: Kept | None = None
    begins: Site | None = None
    cuts: Sequence[Site] = ()
    ends: Inner | None = None

    @property
    def ids(self) -> Tensor:
        """The token ids of the input, or the floating input.

        For a Captum wrapper of a language model, ``inputs`` is a mask of kept features, and
        ``additional`` has the prompt that turns this mask into token ids.
        """
        prompt = next((x for x in self.additional if isinstance(x, InterpretableInput)), None)
        return self.inputs if prompt is None else prompt.to_model_input(self.inputs)

    @property
    def is_model(self) -> bool:
        """Return True if forward_func is the model or its method, without any user code."""
        function: Any = runnable(self.forward_func)
        owner = getattr(function, "__self__", function)
        return owner is self.model and isinstance(owner, nn.Module)

    def output(self, start: Tensor, others: Sequence[Tensor] | None = None) -> Tensor:
        """Run the model, and return its output as a tensor.

        Args:
            start: the input that replaces :attr:`inputs`.
            others: further inputs that replace :attr:`others`. Default: None, :attr:`others`.

        Raises:
            TrainingModeError: if a module is random, such as a dropout in training mode.
        """
        require_deterministic(self.model)
        # the head runs only at the kept positions
        named = {} if self.kept is None else self.kept.arguments
        arguments = (*(self.others if others is None else others), *self.additional)
        return logits_of(call_model(self.forward_func, start, arguments, named))

    @functools.cached_property
    def output_alone(self) -> Tensor:
        """The output of forward_func in a plain run without hooks, cached for all methods."""
        with self.plain_settings():
            return self.output(self.inputs)

    @contextmanager
    def plain_settings(self) -> Iterator[None]:
        """Inside the ``with``, run the model without gradients, hooks and changes of caches."""
        # a CPU has no fused kernels, so torch functions replace them in the plain run, too
        as_on_cpu = unfused() if self.inputs.device.type == "cpu" else nullcontext()
        with torch.no_grad(), repaired_scans(), sparing_caches(self.model), as_on_cpu:
            yield

    def one_output(self, start: Tensor) -> Tensor:
        """Return the output (1, ...) for an image ``start``, with the first example's arguments."""
        first = BatchPart(slice(0, 1), len(self.inputs))
        return logits_of(call_model(self.forward_func, start, tuple(map(first, self.additional))))

    def same_as(self, other: Request) -> bool:
        """Return True if both requests have equal arguments, so that methods can share a run."""
        return (
            self.forward_func == other.forward_func
            and self.model is other.model
            and _listed(self.layers) == _listed(other.layers)
            and len(self.additional) == len(other.additional)
            and all(map(same, (self.inputs, *self.additional), (other.inputs, *other.additional)))
        )


@dataclass(frozen=True, eq=False)
class Question:
    """One target to explain from a run.

    Attributes:
        target: the target, in one of Captum's forms.
        weights: the weight of each token as a query (B, L).
        selected: the target's value per example (B,), with its graph; None for methods without
            gradients. Default: None.
        constant: a summand of ``selected`` that no module added (B,). Default: None.
        cache: gradients of ``selected``, for methods that share the run; None if the run is not
            shared. Default: None.
        query_range: a range that includes all tokens with ``weights``. Default: None, not known.
    """

    target: Any
    weights: Tensor
    selected: Tensor | None = None
    constant: Tensor | None = None
    cache: GradientCache | None = None
    query_range: range | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """One traced forward run of a (sub-)batch.

    Attributes:
        request: the arguments of the run.
        record: the record of the layers.
        output: the model's output.
        mask: True for unpadded tokens (B, L), or None.
        chain: the token order of the layers; None if not known.
        shared: whether later methods may reuse the run, so that it keeps its graph.
        questions: the targets left to explain, the current one first. Default: none.
        paths: the direct paths, if they were kept. Default: None.
        cache: the tensors cached by :meth:`once` for all targets.
    """

    request: Request
    record: Trace
    output: Tensor
    mask: Tensor | None
    chain: TokenOrder | None
    shared: bool = False
    questions: Sequence[Question] = ()
    paths: DirectPaths | None = None
    cache: dict[Layer, Tensor] = field(default_factory=dict)
    _selected: list[tuple[Tensor | None, Tensor, GradientCache]] = field(default_factory=list)

    @property
    def layers(self) -> list[Layer]:
        """The recorded layers, in the order in which they ran."""
        return self.record.layers

    @property
    def given(self) -> Tensor | None:
        """Indices (B, L) in the input of the first layer's tokens, and -1 for inserted tokens.

        None if the input and the first layer have the same tokens.
        """
        return None if self.chain is None else self.chain.given

    @functools.cached_property
    def streams(self) -> Mapping[Layer, Tensor | None]:
        """The residual stream (B, L, E) entering each layer's block; None if it was not kept."""
        return {layer: layer.residual_in_order for layer in self.layers}

    @property
    def weights(self) -> Tensor:
        """The weight of each token as a query (B, L), for the current target."""
        return self.questions[0].weights

    def laid_out(self, rows: Sequence[Tensor], layout: TokenLayout) -> list[Tensor]:
        """Convert relevance (B, L) of the first layer's tokens to the shape of the input."""
        token_map = self.layers[0].map if self.request.inputs.dim() == 4 else None
        return layout.to_input(rows, self.mask, self.given, token_map, self.request.one_output)

    def for_each(self, questions: Sequence[Question]) -> Iterator[Run]:
        """Yield the run once per target, with this target first and one cache for all targets."""
        cache: dict[Layer, Tensor] = {}
        for first, question in enumerate(questions):
            begin_query(question.weights.shape[-1], question.query_range)
            yield replace(self, questions=questions[first:], cache=cache)

    def select(self, index: Tensor | None) -> tuple[Tensor, GradientCache | None]:
        """Return a target's value per example (B,), and a cache for its gradients.

        Equal targets of several methods share both. If the run is not shared, the cache is None.
        """
        if not self.shared:
            return select(self.output, index), None
        for earlier_index, value, cache in self._selected:
            if same(earlier_index, index):
                return value, cache
        self._selected.append((index, select(self.output, index), {}))
        return self._selected[-1][1:]

    def once(
        self, layer: Layer, elements: int, limit: int, make: Callable[[], Tensor]
    ) -> Tensor | None:
        """Return a layer's tensor, computed once by ``make`` and cached for all targets.

        Return None if no later target can use the tensor, or if its number of ``elements`` would
        fill the cache of all layers above ``limit`` elements.
        """
        if layer not in self.cache:
            cached = sum(tensor.numel() for tensor in self.cache.values())
            if len(self.questions) == 1 or cached + elements > min(limit, _KEPT_ELEMENTS):
                return None
            self.cache[layer] = make()
        return self.cache[layer]

    def gradients(self, tensors: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
        """Return the target's gradient at each tensor; errors use the layers' ``names``."""
        selected = self.questions[0].selected
        if selected is None or not selected.requires_grad:
            raise GradientModeError(
                "The model's output records no gradients. Remove no_grad and detach from the "
                "model and forward_func, or use a method without gradients, such as LatimALTI."
            )
        shared_cache = self.questions[0].cache
        is_used_again = len(self.questions) > 1 or shared_cache is not None
        cache: GradientCache = {} if shared_cache is None else shared_cache
        missing = [x for x in tensors if x not in cache]
        if missing:
            try:
                new_gradients = torch.autograd.grad(
                    selected.sum(), missing, retain_graph=is_used_again, allow_unused=True
                )
            except RuntimeError as error:
                if "no autograd formula" in str(error) or "derivative for" in str(error):
                    raise GradientModeError(
                        f"A function of the model has no backward pass: {error} Use a method "
                        "without gradients: LatimALTI, LatimNorm, ImplicitAttentionRollout."
                    ) from error
                if "checkpoint" in str(error):
                    raise GradientModeError(
                        "A part of the model cannot run again in a backward pass. Leave recompute "
                        f"out, and switch off gradient checkpointing. {error}"
                    ) from error
                if "inplace" not in str(error):
                    raise
                raise GradientModeError(
                    "The model changes a tensor in place that the backward pass needs. Use the "
                    "out-of-place form, x = x + y, or a method without such gradients: LatimFlow, "
                    "LatimALTI, ImplicitAttentionRollout."
                ) from error
            cache.update(zip(missing, new_gradients, strict=True))
        gradients = [cache[x] for x in tensors]
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                raise GradientModeError(
                    f"No gradient of the target reaches layer {name!r}. If detach, no_grad or "
                    "gradient checkpointing cuts the graph, switch it off. If the target does not "
                    "depend on the layer, pass layers=[...] without it."
                )
        return [gradient.detach() for gradient in gradients if gradient is not None]


def traced(request: Request, *, shared: bool = False) -> Run:
    """Run the model and record its mixers; with ``shared``, later methods may reuse the run."""
    model, layers, paths = request.model, request.layers, None
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(request.graph in ("outputs", "all")))
        # finds the first embeddings of the ids, at which replays begin
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
        record.room *= request.operators  # room 0: no operator is kept
        model_input = request.inputs if paths is None else paths.mode.begun(request.inputs)
        output = request.output(model_input)
    require_layers(record, model)
    if request.graph == "tail" and not record.layers[-1].output.requires_grad:
        # the graph begins at the model's last mixer, which did not run or did not run last
        return traced(replace(request, graph="outputs"), shared=shared)
    tail, batch = record.layers[-1], len(request.inputs)
    for tensor, owner in ((tail.in_order(tail.output), "mixers get"), (output, "output has")):
        if len(tensor) != batch:
            raise InputError(
                f"inputs has a batch of {batch}, but the model's {owner} a batch of {len(tensor)}. "
                "Pass a forward_func that keeps the batch size, and one example per row of inputs."
            )
    with unseen():
        mask = record.mask
    require_real_tokens(mask)
    chain = _token_order(request, record, beginning, output, mask, paths)
    return Run(request, record, output, mask, chain, shared, paths=paths)


def _token_order(
    request: Request,
    record: Trace,
    beginning: Beginning,
    output: Tensor,
    mask: Tensor | None,
    paths: DirectPaths | None,
) -> TokenOrder | None:
    """Return the token order of a run, found by replays; None if it is not known.

    It is not known for 2-D grids, if the user passed layers, or if the layers form no chain, which
    only requests with ``folds`` refuse. Also note in layers and ``paths`` which streams they read.
    """
    layers, chosen, chain = record.layers, request.layers is not None, None
    if chosen and not request.folds and not request.streams:  # not needed
        return None
    replays = Replays(layers, beginning, request.output, request.inputs, vouched=chosen)
    if not chosen and not any(layer.map is not None for layer in layers):
        try:
            chain = arrange(replays, output, mask, is_model=request.is_model)
        except NotAChain:
            if request.folds:
                raise
    if chain is None:
        for layer in layers:  # without a common order, each layer keeps its own
            layer.arrange(None, None)
        if request.folds or request.streams:
            note_streams(replays)
    if request.streams:
        join(replays, stages(layers), None if chain is None else chain.output)
    if paths is not None and chain is not None:
        paths.place(replays, stages(layers), chain.given, chain.output)
    return chain


def same(a: Any, b: Any) -> bool:
    """Return True if two arguments are the same object, or tensors with equal values."""
    if a is b:
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return alike and torch.equal(a, b)


def _listed(layers: Sequence[str | nn.Module] | None) -> list[str | nn.Module] | None:
    """Return the option ``layers`` as a list, because tuples and lists are never equal."""
    return None if layers is None else list(layers)


class Sharing:
    """The latest run, which several methods reuse if they are called with the same arguments."""

    def __init__(self, graph: Graph, streams: bool) -> None:
        self._graph = graph
        self._streams = streams
        self._latest: Run | None = None
        self._probe: ImageProbe | None = None

    def run(self, request: Request) -> Run:
        """Return the latest run if ``request`` has the same arguments; else run the model again."""
        # not while a call is repeated: the check that failed may have been of the latest run
        if self._latest is not None and not is_doubted():
            latest = self._latest.request
            if (latest.streams or not request.streams) and request.same_as(latest):
                return self._latest
        self._latest = None  # frees the old graph before the new run
        request = replace(request, graph=self._graph, streams=self._streams or request.streams)
        # with all checks, for any method that may follow
        self._latest = traced(replace(request, verify=True, folds=True), shared=True)
        return self._latest

    def probe(self, model: nn.Module) -> ImageProbe:
        """Return the model's :class:`.ImageProbe`, which keeps the patch grid between methods."""
        if self._probe is None or self._probe.model is not model:
            self._probe = ImageProbe(model)
        return self._probe


#: The active sharing of the current thread or asynchronous task.
_current: ContextVar[Sharing | None] = ContextVar("captum_ssm_sharing", default=None)


@contextmanager
def shared_forward(graph: Graph, *, streams: bool = False) -> Iterator[None]:
    """Let methods inside the ``with`` share a forward run if their arguments are the same.

    Only the latest run is kept. It is freed at the end of the ``with``.

    Args:
        graph: the autograd graph to keep: ``"all"`` if any method takes gradients, else ``"tail"``,
            which is enough to find queries.
        streams: whether to keep the residual stream entering each mixer's block. Default: False.
    """
    token = _current.set(Sharing(graph, streams))
    try:
        yield
    finally:
        _current.reset(token)


def run_of(request: Request) -> Run:
    """Return a traced forward run; inside :func:`shared_forward` reuse the latest if possible."""
    sharing = _current.get()
    # a graph with only direct paths would give other methods wrong gradients
    return traced(request) if sharing is None or request.direct else sharing.run(request)


@contextmanager
def layout_of(request: Request, per_token: bool) -> Iterator[TokenLayout]:
    """Yield a :class:`.TokenLayout`; a run inside the ``with`` finds an image's patch grid."""
    inputs = request.inputs
    if inputs.dim() != 4 or not inputs.is_floating_point():
        yield TokenLayout(inputs, per_token, None)
        return
    sharing = _current.get()
    probe = ImageProbe(request.model) if sharing is None else sharing.probe(request.model)
    with probe.watch():
        yield TokenLayout(inputs, per_token, probe)
