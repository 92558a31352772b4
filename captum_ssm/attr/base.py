"""What all methods share: Captum's arguments in, one traced run, Captum's shapes out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from captum.attr import Attribution
from torch import Tensor, nn

from ..errors import GradientModeError, InputError, OptionError
from ..operators import Reduce
from ..operators.base import full_precision
from ..operators.reduction import check_reduce
from ..tracing import Graph, Layer, find_mixers, find_model, repaired_scans, require_layers, trace
from .components import parse_components
from .fold import Options
from .forward import as_tuple, call_model, check_batch, single_input
from .layout import ImageProbe, spread_over_features, spread_over_image
from .query import Query, check_query, needs_readers, query_weights
from .targets import logits_of, select, target_index

RECIPES = ("paper", "published_code")


@dataclass(frozen=True, eq=False)
class Run:
    """One traced forward run of a (sub-)batch.

    Attributes:
        layers: the recorded layers, in the order in which they ran.
        weights: the query as row weights (B, L).
        mask: True for real tokens (B, L), or None.
        selected: the target's value per example (B,), part of the graph; None for methods
            without gradients.
    """

    layers: Sequence[Layer]
    weights: Tensor
    mask: Tensor | None
    selected: Tensor | None

    def gradients(self, tensors: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
        """d(selected, summed over the batch) / d(each tensor)."""
        if self.selected is None or not self.selected.requires_grad:
            raise GradientModeError(
                "The model's output records no gradients although they are enabled here. Does its "
                "forward run under no_grad, or detach?"
            )
        found = torch.autograd.grad(self.selected.sum(), list(tensors), allow_unused=True)
        for name, gradient in zip(names, found, strict=True):
            if gradient is None:
                raise GradientModeError(
                    f"No gradient of the target reaches layer {name!r}. Is it cut off by detach, "
                    "no_grad or gradient checkpointing, or unused by this target? Leave it out "
                    "with layers=[...]."
                )
        return [gradient.detach() for gradient in found if gradient is not None]


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
    needs_gradient = False

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
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the model, apply ``relevance`` to each sub-batch, and lay the result out."""
        tensor, in_tuple = single_input(inputs)
        additional = as_tuple(additional_forward_args)
        check_batch(tensor, additional)
        check_query(query, len(tensor))
        if self.needs_gradient and torch.is_inference_mode_enabled():
            raise GradientModeError(
                f"{self.name} takes gradients, which torch.inference_mode() forbids. Call it "
                "outside, or under torch.no_grad(), where it enables gradients itself."
            )
        size = len(tensor) if internal_batch_size is None else internal_batch_size
        if size < 1:
            raise OptionError(f"internal_batch_size={internal_batch_size} must be at least 1.")
        whole = slice(0, len(tensor))
        parts = []
        for start in range(0, len(tensor), size):
            part = whole if size >= len(tensor) else slice(start, start + size)
            cut = _Cut(part, len(tensor))
            with torch.inference_mode(False):
                result = self._one_batch(
                    cut(tensor),
                    cut.target(target),
                    tuple(cut(a) for a in additional),
                    relevance,
                    query=cut(query),
                    per_token=per_token,
                )
            parts.append(result.detach())
        out = torch.cat(parts).to(tensor.device).contiguous()
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
    ) -> Tensor:
        is_image = inputs.dim() == 4 and inputs.is_floating_point()
        probe: ImageProbe | None = None
        model = find_model(self.forward_func, self.model)
        with ExitStack() as stack:
            if is_image:
                probe = ImageProbe(model)
                stack.enter_context(probe.watch())
            if self.needs_gradient:
                # until the backward is done: checkpointed layers run their forward again in it
                stack.enter_context(repaired_scans())
            run = self._run(inputs, target, additional, query, stack)
            for device in {layer.output.device for layer in run.layers}:
                stack.enter_context(full_precision(device))
            row = relevance(run)
        if run.mask is not None:
            row = row * run.mask.to(row)
        if probe is None:
            return spread_over_features(row, inputs, per_token)
        try:
            index, grid = probe.patches(self.forward_func, inputs, additional, row.shape[1])
        except InputError:
            if per_token:
                return row
            raise
        patches = row[:, index.to(row.device)].view(-1, *grid)
        return patches if per_token else spread_over_image(patches, inputs)

    def _run(
        self,
        inputs: Tensor,
        target: Any,
        additional: tuple[Any, ...],
        query: Query,
        stack: ExitStack,
    ) -> Run:
        """One traced forward run; its graph lives as long as ``stack``."""
        graph: Graph = "tail" if needs_readers(query) else "none"
        graph = "all" if self.needs_gradient else graph
        stack.enter_context(torch.set_grad_enabled(self.needs_gradient))
        model = find_model(self.forward_func, self.model)
        with trace(model, layers=self.layers, graph=graph) as record:
            output = logits_of(call_model(self.forward_func, inputs, additional))
        require_layers(record, model)
        layers = record.layers
        tail = layers[-1].output
        for found, what in ((tail, "mixers see"), (output, "output has")):
            if len(found) != len(inputs):
                raise InputError(
                    f"inputs has a batch of {len(inputs)}, but the model's {what} a batch of "
                    f"{len(found)}: each example must be explained by itself."
                )
        index = target_index(target, output)
        selected = select(output, index) if self.needs_gradient else None
        mask = record.mask
        weights = query_weights(query, output, index, tail, mask)
        return Run(layers, weights.detach(), mask, selected)


class _Cut:
    """Takes the same examples out of everything that has one entry per example."""

    def __init__(self, part: slice, batch: int) -> None:
        self.part, self.batch = part, batch

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == self.batch:
            value = value[self.part]
            return value.clone() if value.is_inference() else value
        return value

    def target(self, target: Any) -> Any:
        per_example = isinstance(target, list) or getattr(target, "ndim", 0) > 0
        if per_example and not isinstance(target, Tensor) and len(target) == self.batch:
            return target[self.part]
        return self(target)


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
    check_reduce(reduce)
    if not keep_channels and (reduce is None or reduce == "heads"):
        raise OptionError(
            f"reduce={reduce!r} keeps several matrices per layer; relevance needs one. Use 'mean', "
            "'max', 'min', 'product', or a function over channels."
        )
    if recipe not in RECIPES:
        raise OptionError(f"recipe={recipe!r} is not known. Use one of {RECIPES}.")
    if recipe == "published_code" and reduce != "mean":
        raise OptionError("recipe='published_code' fixes the reduction; leave reduce='mean'.")
    if isinstance(heads, int):
        raise OptionError(f"heads={heads} must be a list of heads, for example heads=[{heads}].")
    chosen = None if heads is None else tuple(heads)
    return Options(
        parse_components(components), reduce, chosen, start_layer, recipe, show_progress, verify
    )
