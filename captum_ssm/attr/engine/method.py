"""Base classes of all methods: read Captum's arguments, run the model, return Captum's shapes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from captum.attr import Attribution, LLMGradientAttribution
from captum.log import log_usage
from torch import Tensor, nn

from ...errors import ArgumentError, GradientModeError, OptionError
from ...operators import Reduce
from ...operators.kernels.arithmetic import full_precision
from ...operators.kernels.truths import read_together
from ...tracing import (
    Graph,
    Layer,
    exact_products,
    find_mixers,
    find_model,
    graphs_dropped,
    repaired_scans,
)
from ..call import checks
from ..call.given import accept_texts, check_model, with_argument_advice
from ..call.inputs import BatchPart, as_tuple, batch_parts, check_batch, single_input
from ..call.progress import shown
from ..call.query import Query, asked_tokens, check_query, needs_readers, query_weights
from ..call.targets import (
    Against,
    SumTarget,
    as_asked,
    contrasted,
    each_of,
    require_real_target,
    several,
    target_index,
)
from .alone import require_alone
from .fold import Options, at_indices
from .run import Question, Request, Run, layout_of, run_of

T = TypeVar("T")

RECIPES = ("paper", "published_code")


class Explainer:
    """Base of all classes that explain runs of a model.

    Args:
        forward_func: the model, wrapped or not, one of its bound methods, or any function that
            runs it; called as ``forward_func(inputs, *additional_forward_args)``.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.
    """

    #: the displayed name, which is the class name; Captum's default inserts spaces in it
    name = ""
    #: whether the run keeps its autograd graph
    needs_gradient = False
    #: whether the run keeps the residual stream that enters each mixer's block
    needs_streams = False
    #: the largest number of tokens that are run at once; examples then run one by one
    chunk_tokens: int | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Set the displayed name, and let methods with ``inputs`` accept all forms of inputs."""
        super().__init_subclass__(**options)
        cls.name = vars(cls).get("name", cls.__name__)
        for name, function in list(vars(cls).items()):
            if name == "__init__":
                setattr(cls, name, with_argument_advice(function))
            elif not name.startswith("_") and "inputs" in _parameters(function):
                setattr(cls, name, accept_texts(function, name))

    @with_argument_advice
    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: nn.Module | None = None,
        layers: Sequence[str | nn.Module] | None = None,
    ) -> None:
        self.forward_func = forward_func
        self.model = model
        self.layers = layers
        check_model(forward_func, model)
        find_mixers(find_model(forward_func, model), layers)  # fail at once, not at the first call

    def __repr__(self) -> str:
        arguments = [_name_of(self.forward_func)]
        arguments += [] if self.model is None else [f"model={_name_of(self.model)}"]
        if self.layers is not None:
            arguments.append(f"layers=[{', '.join(map(_name_of, self.layers))}]")
        if hasattr(self, "layer"):
            arguments.append(f"layer={_name_of(self.layer)}")
        # only if the user passed a rule; else it is an attribute of the class
        rule = vars(self).get("default_rule", vars(self).get("rule"))
        arguments += [] if rule is None else [f"rule={rule!r}"]
        arguments += ["recompute=True"] if getattr(self, "recompute", False) else []
        arguments += [] if self.chunk_tokens is None else [f"chunk_tokens={self.chunk_tokens}"]
        return f"{self.name}({', '.join(arguments)})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error that names ``attribute``, because methods are not functions."""
        raise ArgumentError(
            f"{self.name} cannot be called. Call {self.name}(model).attribute(inputs, target)."
        )

    def _by_parts(
        self,
        inputs: Tensor,
        targets: Sequence[Any],
        additional_forward_args: Any,
        internal_batch_size: int | None,
        explain: Callable[[Request, Sequence[Any], BatchPart], Sequence[T]],
        others: tuple[Tensor, ...] = (),
    ) -> list[tuple[T, ...]]:
        """Split the batch into parts, and return a tuple of the parts' results for each target.

        Args:
            internal_batch_size: the largest number of examples in a part; None for all.
            explain: function of a run's arguments, targets and part; returns one result per target.
            others: inputs after the first, which cannot be split by example. Default: none.
        """
        additional = as_tuple(additional_forward_args)
        if not others:
            check_batch(inputs, additional)
        elif internal_batch_size is not None and internal_batch_size < len(inputs):
            raise OptionError(
                f"internal_batch_size={internal_batch_size} cannot split a batch of {len(inputs)} "
                "with several inputs, because further inputs may have no batch dimension. Pass "
                "internal_batch_size=None, or explain the examples one by one."
            )
        if self.needs_gradient and torch.is_inference_mode_enabled():
            raise GradientModeError(
                f"{self.name} computes gradients, which torch.inference_mode() forbids. Call it "
                "outside of torch.inference_mode(). torch.no_grad() is accepted."
            )
        model, results = find_model(self.forward_func, self.model), []
        one_by_one = self.chunk_tokens is not None and not others  # chunks are of one example
        cuts = list(batch_parts(len(inputs), 1 if one_by_one else internal_batch_size))

        def request_for(cut: BatchPart) -> Request:
            """Return the arguments of a run on one part of the batch."""
            with torch.inference_mode(False):  # slices for a graph must not be inference tensors
                of_part = tuple(map(cut, additional))
                request = Request(self.forward_func, model, self.layers, cut(inputs), of_part)
            return replace(request, others=others, streams=self.needs_streams)

        # the lambda runs the model as it is, to measure the rounding that exact products leave out
        with exact_products(model, lambda: request_for(cuts[0]).output_alone):
            for cut in shown(cuts):
                with torch.inference_mode(False), cut.counting():
                    request, part_targets = request_for(cut), list(map(cut.target, targets))
                    # checks of tensors on a GPU are read at the end of each part
                    results.append(
                        read_together(functools.partial(explain, request, part_targets, cut))
                    )
        return list(zip(*results, strict=True))

    @contextmanager
    def _read(
        self, inputs: Any, additional_forward_args: Any, verify: bool | float
    ) -> Iterator[Run]:
        """Run the model without a target, and yield the run, so that its layers can be read."""
        tensor, _ = single_input(inputs)
        # adapters and replays may use it in a graph, which an inference tensor forbids
        tensor = tensor.clone() if tensor.is_inference() else tensor
        additional = as_tuple(additional_forward_args)
        check_batch(tensor, additional)
        model = find_model(self.forward_func, self.model)
        request = Request(self.forward_func, model, self.layers, tensor, additional)
        request = replace(
            request, streams=self.needs_streams, verify=verify is not False, folds=False
        )
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
            # plain runs with other products: copies, because a request caches its output
            copy_of = functools.partial(replace, request)
            stack.enter_context(exact_products(model, lambda: copy_of().output_alone))
            run = run_of(request)
            for device in {layer.output.device for layer in run.layers}:
                stack.enter_context(full_precision(device))
            yield run

    def _of_layers(
        self,
        inputs: Any,
        layers: Sequence[int] | None,
        additional_forward_args: Any,
        layer_options: Options,
        make: Callable[[Run, Any], T],
        split: Callable[[Sequence[Layer]], Sequence[Any]] = list,
    ) -> list[T]:
        """Run the model, and return ``make(run, layer)`` for each requested layer.

        Args:
            layers: indices of layers, with repetitions allowed; None for all.
            make: function that returns the result for a run and a layer, or group of layers.
            split: function that groups layers, if indices count groups. Default: no grouping.
        """
        indices = None if layers is None else checks.integers("layers", layers, "layers")
        with self._read(inputs, additional_forward_args, layer_options.verify) as run:
            items, results = at_indices(split(run.layers), indices), dict[int, T]()
            for item in shown(items):
                if id(item) not in results:  # groups are lists, which cannot be keys
                    results[id(item)] = make(run, item)
            return [results[id(item)] for item in items]


def _name_of(value: Any) -> str:
    """Return a short name for ``repr``: a module's class, a function's name, a quoted string."""
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, nn.Module):
        return type(value).__name__
    return getattr(value, "__qualname__", None) or repr(value)


def _parameters(function: Any) -> Collection[str]:
    """Return the names of a function's parameters; empty for objects that are not functions."""
    return inspect.signature(function).parameters if inspect.isfunction(function) else ()


class SSMAttribution(Explainer, Attribution):
    """Base of all attribution methods: an :class:`Explainer` with Captum's interface."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap ``attribute`` for Captum's usage log and for LLMGradientAttribution."""
        super().__init_subclass__(**options)
        if "attribute" in vars(cls):
            cls.attribute = log_usage(part_of_slo=True)(_for_captum(cls.attribute))

    @classmethod
    def get_name(cls) -> str:
        """Return the name that Captum shows."""
        return cls.name

    def attribute_future(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError, because no method is asynchronous."""
        raise NotImplementedError(f"{self.name} is not asynchronous. Call attribute().")

    def attribute_each(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        targets: Sequence[Any],
        additional_forward_args: Any = None,
        **options: Any,
    ) -> Tensor:
        """Attribute several targets to tokens at the cost of one forward run.

        Args:
            inputs, additional_forward_args: as in ``attribute``, with the same defaults.
            targets: targets in Captum's forms, each for the whole batch.
            **options: further arguments of ``attribute``, with the same defaults.

        Returns:
            Relevance (len(targets), B, L); for images, the stacked results of ``per_token=True``.

        Raises:
            TargetError: if ``targets`` is empty, or one of them does not fit the output.
        """
        all_targets = each_of(targets)
        tensor, _ = single_input(inputs)
        relevance: Tensor = self.attribute(
            tensor, all_targets, additional_forward_args, per_token=True, **options
        )
        return relevance


#: Captum's LLMGradientAttribution accepts only methods of the listed classes.
LLMGradientAttribution.SUPPORTED_METHODS += (SSMAttribution,)


def _for_captum(attribute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method's ``attribute`` so that Captum's LLMGradientAttribution can call it, too.

    Captum passes a forward function that extends the input with skipped tokens and the text
    generated so far. It expects relevance of all these tokens, (1, L, features).
    """

    @checks.in_place_of(attribute)
    def wrapped(self: SSMAttribution, *args: Any, **kwargs: Any) -> Any:
        """Call ``attribute``, for Captum with the log-probability of its token as the target."""
        llm_attribution = getattr(self.forward_func, "attr", None)
        if not isinstance(llm_attribution, LLMGradientAttribution):
            return attribute(self, *args, **kwargs)
        # Captum's arguments: the prompt, the generated text, and the token of it to explain
        prompt, text, position = kwargs.pop("additional_forward_args")
        ids = prompt.to_model_input(*args)
        ids = torch.cat([ids, text[None, :position].to(ids)], 1)

        def log_probability(ids: Tensor) -> Tensor:
            logits: Tensor = llm_attribution.model(ids).logits[:, -1]
            return logits.log_softmax(-1)[:, text[position], None]

        method = copy(self)
        method.forward_func, method.model = log_probability, llm_attribution.model
        relevance: Tensor = attribute(method, ids, 0, **kwargs)
        return relevance[..., None] if relevance.dim() == 2 else relevance

    return wrapped


class ImplicitMethod(SSMAttribution):
    """Base of methods that multiply the layers' matrices, from the query to the input tokens."""

    @property
    def multiplies_by_inputs(self) -> bool:
        """Return False: relevance measures the mixing of tokens and has no factor of the input."""
        return False

    def compute_convergence_delta(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError, because relevance does not sum to the output."""
        raise NotImplementedError(
            f"{self.name} has no delta: relevance does not sum to the output. Use LatimFlow."
        )

    def _attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any,
        additional_forward_args: Any,
        relevance: Callable[[Run], Tensor],
        *,
        query: Query,
        per_token: bool,
        internal_batch_size: int | None,
        verify: bool | float,
        graph: Graph = "outputs",
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the model, compute relevance (B, L) per sub-batch, and reshape it like the input.

        ``relevance`` computes it for the run's current target, the first of its questions. For an
        :class:`Each` target, results are stacked in a new first dimension. ``graph`` names the
        autograd graph to keep if the method needs gradients.
        """
        checks.flags(per_token=per_token)
        verify = checks.tolerance("verify", verify)
        tensor, in_tuple = single_input(inputs)
        check_query(query, len(tensor))
        if not self.needs_gradient:  # the end of the graph, if the query's tokens are found by it
            graph = "tail" if needs_readers(query) else "none"

        def explain(request: Request, targets: Sequence[Any], cut: BatchPart) -> list[Tensor]:
            """Return relevance in the input's shape for each target, for a part of the batch."""
            request = replace(request, graph=graph, verify=verify is not False)
            with ExitStack() as stack:
                layout = stack.enter_context(layout_of(request, per_token))
                if self.needs_gradient:
                    # active during the backward pass, which runs checkpointed layers again
                    stack.enter_context(repaired_scans())
                    stack.enter_context(graphs_dropped(request.model))
                stack.enter_context(torch.set_grad_enabled(self.needs_gradient))
                run = run_of(request)
                questions = self._questions(run, targets, cut(query))
                for device in {layer.output.device for layer in run.layers}:
                    stack.enter_context(full_precision(device))
                rows = [relevance(current) for current in run.for_each(questions)]
                explained = [
                    (Against(question.target, None), question.selected.detach())
                    for question in questions
                    if question.selected is not None
                ]
                if explained:
                    require_alone(run, verify, explained)
                return [row.detach() for row in run.laid_out(rows, layout)]

        by_target = self._by_parts(
            tensor, several(target), additional_forward_args, internal_batch_size, explain
        )
        out = as_asked(list(map(torch.cat, by_target)), target).to(tensor.device).contiguous()
        return (out,) if in_tuple else out

    def _questions(self, run: Run, targets: Sequence[Any], query: Query) -> list[Question]:
        """Return one :class:`Question` per target, with the target's value and query weights."""
        tail, output, chain = run.layers[-1], run.output, run.chain
        questions = []
        for target in targets:
            index = target_index(target, output)
            require_real_target(index, output, run.mask)
            # a sum has no single index by which gradients could be shared between methods
            selected, cache = None, None
            if self.needs_gradient and isinstance(target, SumTarget):
                selected, _ = contrasted(output, target)
            elif self.needs_gradient:
                selected, cache = run.select(index)
            weights = query_weights(query, output, index, tail, run.mask)
            query_range = asked_tokens(query, output, index, weights.shape[1], run.mask)
            if chain is not None and chain.output is not None:
                query_range = None  # weights are moved to the layers' order of tokens
                weights = weights.index_select(1, chain.output.argsort().to(weights.device))
            questions.append(
                Question(target, weights.detach(), selected, cache=cache, query_range=query_range)
            )
        if self.needs_gradient:  # free memory for the backward pass, which takes the most
            run.record.forget()
        return questions


def options(
    components: str | Collection[str],
    reduce: Reduce,
    heads: Sequence[int] | None,
    start_layer: int,
    recipe: str,
    verify: bool | float,
    *,
    keep_channels: bool = False,
) -> Options:
    """Check the options of an implicit-attention method before the model runs."""
    reduce = checks.reduction(reduce)
    if not keep_channels and (reduce is None or reduce == "heads"):
        raise OptionError(
            f"reduce={reduce!r} keeps several matrices per layer, but relevance needs one. Pass "
            "'mean', 'max', 'min', 'product', or a function that reduces the channels."
        )
    checks.choice("recipe", recipe, RECIPES)
    if recipe == "published_code" and reduce != "mean":
        raise OptionError(f"recipe={recipe!r} excludes reduce={reduce!r}. Pass reduce='mean'.")
    head_indices = None
    if heads is not None:
        head_indices = checks.integers("heads", heads, "heads (for Mamba-1: channels)")
        checks.no_repeats("heads", head_indices)
    start_layer = checks.integer("start_layer", start_layer)
    verify = checks.tolerance("verify", verify)
    names = checks.parse_components(components)
    return Options(names, reduce, head_indices, start_layer, recipe, verify)
