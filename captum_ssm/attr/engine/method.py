"""What all methods share: Captum's arguments in, one traced run, Captum's shapes out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from captum.attr import Attribution
from torch import Tensor, nn

from ...errors import GradientModeError, InputError, OptionError
from ...operators import Reduce
from ...operators.kernels.arithmetic import full_precision
from ...tracing import (
    Graph,
    find_mixers,
    find_model,
    graphs_dropped,
    repaired_scans,
    require_real_tokens,
    weights_blamed,
)
from ..call import checks
from ..call.components import parse_components
from ..call.inputs import as_tuple, batch_parts, check_batch, single_input
from ..call.layout import ImageProbe, of_given, spread_over_features, spread_over_image
from ..call.query import Query, check_query, needs_readers, query_weights
from ..call.targets import Each, as_asked, each_of, require_real_target, several, target_index
from .fold import Options
from .run import Question, Run
from .sharing import Kept, Request, forward_of, probe_of

RECIPES = ("paper", "published_code")


class ImplicitMethod(Attribution):
    """Base of the methods that read a model through its linearised mixers.

    Args:
        forward_func: the model, wrapped or not, one of its bound methods, or any function that
            runs it; called as ``forward_func(inputs, *additional_forward_args)``.
        model: the module, where forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.
    """

    #: shown by Captum; get_name() would otherwise tear acronyms apart
    name = ""
    #: whether the run keeps its autograd graph, and the stream entering each mixer's block
    needs_gradient = False
    needs_streams = False

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: nn.Module | None = None,
        layers: Sequence[str | nn.Module] | None = None,
    ) -> None:
        super().__init__(forward_func)
        self.model = model
        self.layers = layers
        find_mixers(find_model(forward_func, model), layers)  # fail at once, not at the first call

    @classmethod
    def get_name(cls) -> str:
        """The name that Captum shows."""
        return cls.name

    @property
    def multiplies_by_inputs(self) -> bool:
        """The values are not multiplied in: relevance is that of the mixing, not of the inputs."""
        return False

    def attribute_future(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered; Captum's remote methods alone have it."""
        raise NotImplementedError(f"{self.name} has no asynchronous form; call attribute().")

    def compute_convergence_delta(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered: these relevances do not sum to the output."""
        raise NotImplementedError(
            f"{self.name} has no convergence delta: its relevances do not sum to the output."
        )

    def attribute_each(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        targets: Sequence[Any],
        additional_forward_args: Any = None,
        **options: Any,
    ) -> Tensor:
        """What ``attribute`` says of several targets, per token, at the cost of one forward run.

        Args:
            inputs, additional_forward_args: as in ``attribute``, with the same defaults.
            targets: targets in Captum's forms, each for the whole batch.
            **options: further arguments of ``attribute``, with the same defaults.

        Returns:
            (len(targets), B, L), or for images what ``per_token=True`` gives of each target.

        Raises:
            TargetError: when ``targets`` is empty, or one of them does not fit.
        """
        each = each_of(targets)
        tensor, _ = single_input(inputs)
        found: Tensor = self.attribute(
            tensor, each, additional_forward_args, per_token=True, **options
        )
        return found

    def _check_mode(self) -> None:
        """Raise if gradients are needed and cannot be recorded."""
        if self.needs_gradient and torch.is_inference_mode_enabled():
            raise GradientModeError(
                f"{self.name} takes gradients, which torch.inference_mode() forbids. Call it "
                "outside, or under torch.no_grad(), where it enables gradients itself."
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
        """Run the model, apply ``relevance`` to each sub-batch, and lay the result out.

        A target that is an :class:`Each` gives a result per target, stacked in front.  ``graph`` is
        what is kept of the run's where gradients are needed.
        """
        checks.flags(per_token=per_token)
        tensor, in_tuple = single_input(inputs)
        additional = as_tuple(additional_forward_args)
        check_batch(tensor, additional)
        check_query(query, len(tensor))
        self._check_mode()
        verify = checks.tolerance("verify", verify)
        model, parts = find_model(self.forward_func, self.model), []
        for cut in batch_parts(len(tensor), internal_batch_size):
            with torch.inference_mode(False), cut.counting(), weights_blamed(model):
                results = self._one_batch(
                    cut(tensor),
                    Each([cut.target(t) for t in several(target)]),
                    tuple(cut(a) for a in additional),
                    relevance,
                    query=cut(query),
                    per_token=per_token,
                    graph=graph,
                    verify=verify,
                )
            parts.append([result.detach() for result in results])
        wholes = [torch.cat(batches) for batches in zip(*parts, strict=True)]
        out = as_asked(wholes, target).to(tensor.device).contiguous()
        return (out,) if in_tuple else out

    def _one_batch(
        self,
        inputs: Tensor,
        target: Any,
        additional: tuple[Any, ...],
        relevance: Callable[[Run], Tensor],
        *,
        query: Query,
        per_token: bool,
        graph: Graph,
        verify: bool | float,
    ) -> list[Tensor]:
        """The relevance laid out, for each target."""
        is_image = inputs.dim() == 4 and inputs.is_floating_point()
        probe: ImageProbe | None = None
        model = find_model(self.forward_func, self.model)
        with ExitStack() as stack:
            if is_image:
                probe = probe_of(model)
                stack.enter_context(probe.watch())
            if self.needs_gradient:
                # until the backward is done: checkpointed layers run their forward again in it
                stack.enter_context(repaired_scans())
                stack.enter_context(graphs_dropped(model))
            run = self._run(inputs, target, additional, query, stack, graph, verify=verify)
            for device in {layer.output.device for layer in run.layers}:
                stack.enter_context(full_precision(device))
            rows = [relevance(asked) for asked in run.each()]
            token_map = run.layers[0].map if is_image else None
        if run.mask is not None:
            rows = [row * run.mask.to(row) for row in rows]
        if run.given is not None:
            rows = [of_given(row, run.given, inputs.shape[1]) for row in rows]
        if probe is None:
            return [spread_over_features(row, inputs, per_token) for row in rows]
        if token_map is not None:
            grids = [row.view(-1, *token_map.size) for row in rows]
        else:
            try:
                tokens = rows[0].shape[1]
                index, grid = probe.patches(self.forward_func, inputs, additional, tokens)
            except InputError:
                if per_token:
                    return rows
                raise
            grids = [row[:, index.to(row.device)].view(-1, *grid) for row in rows]
        return grids if per_token else [spread_over_image(grid, inputs) for grid in grids]

    def _run(
        self,
        inputs: Tensor,
        target: Any,
        additional: tuple[Any, ...],
        query: Query,
        stack: ExitStack,
        graph: Graph = "outputs",
        *,
        verify: bool | float = True,
        folds: bool = True,
    ) -> Run:
        """One traced forward run; its graph lives as long as ``stack``.

        A target that is an :class:`Each` gives a question per target.
        """
        if not self.needs_gradient:
            graph = "tail" if needs_readers(query) else "none"
        stack.enter_context(torch.set_grad_enabled(self.needs_gradient))
        model = find_model(self.forward_func, self.model)
        request = Request(self.forward_func, model, self.layers, inputs, additional)
        kept = Kept(graph, self.needs_streams, verify is not False, folds)
        forward = forward_of(request, kept)
        layers, output, chain = forward.layers, forward.output, forward.chain
        tail = layers[-1]
        seen = tail.in_order(tail.output)
        for found, what in ((seen, "mixers see"), (output, "output has")):
            if len(found) != len(inputs):
                raise InputError(
                    f"inputs has a batch of {len(inputs)}, but the model's {what} a batch of "
                    f"{len(found)}: each example must be explained by itself."
                )
        mask, questions = forward.record.mask, []
        require_real_tokens(mask)
        for index in [target_index(each, output) for each in several(target)]:
            require_real_target(index, output, mask)
            selected, taken = forward.selected(index) if self.needs_gradient else (None, None)
            weights = query_weights(query, output, index, tail, mask)
            if chain is not None and chain.output is not None:
                weights = weights.index_select(1, chain.output.argsort().to(weights.device))
            questions.append(Question(weights.detach(), selected, taken=taken))
        if self.needs_gradient:  # the backward pass takes the most memory of all
            forward.record.forget()
        given = None if chain is None else chain.given
        return Run(layers, mask, questions, given=given)


def options(
    components: str | Collection[str],
    reduce: Reduce,
    heads: Sequence[int] | None,
    start_layer: int,
    recipe: str,
    show_progress: bool,
    verify: bool | float,
    *,
    keep_channels: bool = False,
) -> Options:
    """The user's choices, checked before anything runs."""
    reduce = checks.reduction(reduce)
    if not keep_channels and (reduce is None or reduce == "heads"):
        raise OptionError(
            f"reduce={reduce!r} keeps several matrices per layer; relevance needs one. Use 'mean', "
            "'max', 'min', 'product', or a function over channels."
        )
    checks.choice("recipe", recipe, RECIPES)
    if recipe == "published_code" and reduce != "mean":
        raise OptionError("recipe='published_code' fixes the reduction; leave reduce='mean'.")
    checks.flags(show_progress=show_progress)
    chosen = None
    if heads is not None:
        chosen = checks.integers("heads", heads, "heads (for Mamba-1: channels)")
        checks.no_repeats("heads", chosen)
    start_layer = checks.integer("start_layer", start_layer)
    verify = checks.tolerance("verify", verify)
    return Options(
        parse_components(components), reduce, chosen, start_layer, recipe, show_progress, verify
    )
