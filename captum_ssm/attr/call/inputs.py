"""The user's input, in any accepted form: checked, run, and cut into parts of a batch.

Running the user's model on an input of any accepted kind.

Cutting a batch into parts, with everything that has one entry per example.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...errors import InputError, OptionError, PaddedExampleError
from ...tracing import unwrap
from ...tracing.hooks import hooked
from .targets import Against


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Captum's additional_forward_args: None, one value or a tuple, as a tuple."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def single_input(inputs: Any) -> tuple[Tensor, bool]:
    """The one input tensor, and whether it came in a tuple."""
    in_tuple = isinstance(inputs, tuple)
    if in_tuple and len(inputs) != 1:
        raise InputError(
            f"inputs holds {len(inputs)} tensors; one sequence or image tensor is expected. Pass "
            "the others as additional_forward_args."
        )
    tensor = inputs[0] if in_tuple else inputs
    if not isinstance(tensor, Tensor):
        raise InputError(f"inputs must be a tensor, got {type(tensor).__name__}.")
    if tensor.dim() < 2:
        raise InputError(
            f"inputs has shape {tuple(tensor.shape)}; a batch dimension is needed: token ids "
            "(B, L), embeddings (B, L, E) or images (B, C, H, W)."
        )
    if tensor.numel() == 0:
        raise InputError(f"inputs is empty: shape {tuple(tensor.shape)}.")
    return tensor, in_tuple


def check_batch(inputs: Tensor, additional: tuple[Any, ...]) -> None:
    """Raise if an additional tensor cannot belong to this batch."""
    for i, value in enumerate(additional):
        # a vector may be anything, such as the target tokens Captum's wrappers pass along
        if isinstance(value, Tensor) and value.dim() > 1 and len(value) not in (1, len(inputs)):
            raise InputError(
                f"inputs has a batch of {len(inputs)}, but additional_forward_args[{i}] has "
                f"{len(value)} (shape {tuple(value.shape)})."
            )


def call_model(
    forward_func: Callable[..., Any], inputs: Tensor, additional: tuple[Any, ...]
) -> Any:
    """``forward_func(inputs, *additional)``; embeddings reach models that expect token ids.

    A module whose first parameter is ``input_ids`` receives floating inputs as ``inputs_embeds``
    if it has that parameter, else in place of its embedding layer's output.
    """
    function = unwrap(forward_func) if isinstance(forward_func, nn.Module) else forward_func
    if not (isinstance(function, nn.Module) and inputs.is_floating_point() and inputs.dim() == 3):
        return function(inputs, *additional)
    try:
        bound = inspect.signature(_own_forward(function)).bind(inputs, *additional)
    except TypeError as error:
        raise InputError(f"additional_forward_args do not fit the model: {error}.") from error
    given = dict(bound.arguments)
    if next(iter(given)) != "input_ids":
        return function(inputs, *additional)
    if "inputs_embeds" in bound.signature.parameters:
        if given.get("inputs_embeds") is not None:
            raise InputError("inputs and additional_forward_args both hold embeddings.")
        bound.arguments.pop("input_ids")
        bound.arguments["inputs_embeds"] = inputs
        return function(**_named(bound))
    with _embedded(function, inputs):
        ids = inputs.new_zeros(inputs.shape[:2]).long()
        return function(ids, *additional)


def _own_forward(model: nn.Module) -> Callable[..., Any]:
    """The forward that says which parameters there are: past a PEFT wrapper, that of its base."""
    base = getattr(model, "get_base_model", None)
    forward: Callable[..., Any] = model.forward if base is None else base().forward
    return forward


def _named(bound: inspect.BoundArguments) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is not inspect.Parameter.VAR_POSITIONAL:
            named[name] = value
    return named


@contextmanager
def _embedded(model: nn.Module, embeddings: Tensor) -> Iterator[None]:
    """The model's first embedding layer returns ``embeddings`` instead of its own output."""
    layer = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if layer is None:
        raise InputError("inputs are floating, but the model takes input_ids and embeds nothing.")
    with hooked(layer.register_forward_hook, lambda module, args, output: embeddings):
        yield


class BatchPart:
    """Takes the same examples out of everything that has one entry per example."""

    def __init__(self, part: slice, batch: int) -> None:
        self.part, self.batch = part, batch

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == self.batch:
            value = value[self.part]
            return value.clone() if value.is_inference() else value
        return value

    def target(self, target: Any) -> Any:
        if isinstance(target, Against):
            return Against(self.target(target.target), self.target(target.contrast))
        per_example = isinstance(target, list) or getattr(target, "ndim", 0) > 0
        if per_example and not isinstance(target, Tensor) and len(target) == self.batch:
            return target[self.part]
        return self(target)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Let an error that names an example of the part name it by its number in the batch."""
        try:
            yield
        except PaddedExampleError as error:
            raise PaddedExampleError(self.part.start + error.example) from None


def batch_parts(batch: int, internal_batch_size: int | None) -> Iterator[BatchPart]:
    """The parts of a batch, of at most ``internal_batch_size`` examples each; None: one part."""
    size = batch if internal_batch_size is None else internal_batch_size
    if size < 1:
        raise OptionError(f"internal_batch_size={internal_batch_size} must be at least 1.")
    for start in range(0, batch, size):
        yield BatchPart(slice(0, batch) if size >= batch else slice(start, start + size), batch)
