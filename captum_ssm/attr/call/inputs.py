"""The user's input, in any accepted form: checked, run, and cut into parts of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError, PaddedExampleError
from ...tracing import runnable
from ...tracing.hooks import hooked
from . import checks
from .targets import Against, SumTarget

#: Accepted forms, for the end of an error's message.
_FORMS = "token ids (B, L), embeddings (B, L, E) or images (B, C, H, W)"

#: Names of the one tensor in the results of tokenizers and image processors, the preferred first.
KEYS = ("input_ids", "inputs_embeds", "pixel_values")

#: Torch's errors for an embedding of floating numbers, and of an index outside the table.
_NO_INDEX = "'indices' to have one of the following scalar types"
_NO_SUCH_INDEX = "index out of range in self"


#: Names of further tensors in a tokenizer's result.
BESIDE = ("attention_mask", "token_type_ids")


def behind_inputs(
    forward_func: Callable[..., Any], inputs: Any, beside: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return a tokenizer's further tensors as additional_forward_args, in forward_func's order.

    Args:
        forward_func: the function that takes them.
        inputs: the inputs.
        beside: the tensors by the names of forward_func's parameters.

    Raises:
        InputError: when forward_func takes no such argument by its place, or a tensor has other
            examples than inputs.
    """
    passed = " and ".join(f"{name}=" for name in beside)
    first = inputs[0] if isinstance(inputs, tuple) and inputs else inputs
    for name, value in beside.items():
        sizes = [len(x) if isinstance(x, Tensor) and x.dim() else 1 for x in (value, first)]
        if sizes[0] not in (1, sizes[1]):
            raise InputError(
                f"{name} has {sizes[0]} examples, but inputs has {sizes[1]}. Captum's NoiseTunnel "
                "repeats inputs and additional_forward_args alone: pass it there."
            )
    function = runnable(forward_func)
    called = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(called).parameters
    if isinstance(function, nn.Module) and not beside.keys() <= parameters.keys():
        parameters = inspect.signature(_forward_of_base(function)).parameters
    behind = [each for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
    names = [each.name for each in behind]
    if not beside.keys() <= set(names):
        raise InputError(
            f"{passed} is given, but {getattr(called, '__qualname__', called)} takes it by no name "
            "and place. Pass it as additional_forward_args, in the order of its parameters."
        )
    last = max(names.index(name) for name in beside)
    return tuple(
        beside.get(each.name, None if each.default is each.empty else each.default)
        for each in behind[: last + 1]
    )


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return Captum's additional_forward_args, None, one value or a tuple, as a tuple."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def single_input(inputs: Any, name: str = "inputs") -> tuple[Tensor, bool]:
    """Check the one input tensor; return it, and whether it came in a tuple."""
    inputs = unpadded(inputs)
    in_tuple = isinstance(inputs, tuple)
    if in_tuple and len(inputs) != 1:
        raise InputError(
            f"{name} holds {len(inputs)} tensors; one sequence or image tensor is expected. Pass "
            "the others as additional_forward_args; LatimFlow and MambaLRP explain several at once."
        )
    tensor = inputs[0] if in_tuple else inputs
    if not isinstance(tensor, Tensor):
        raise InputError(
            f"{name} must be a tensor, got {type(tensor).__name__}. {_in_place_of(tensor)}"
        )
    if tensor.dim() < 2:
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)}; a batch dimension is needed: {_FORMS}. Pass "
            f"{name}[None], a batch of one."
        )
    if tensor.numel() == 0:
        raise InputError(f"{name} is empty: shape {tuple(tensor.shape)}.")
    if not tensor.is_floating_point():
        _check_ids(tensor, name)
    return tensor, in_tuple


def several_inputs(inputs: Any, name: str = "inputs") -> tuple[Tensor, tuple[Tensor, ...]]:
    """Check the inputs; return the first, and further ones, such as a text's images."""
    if not isinstance(inputs, tuple) or len(inputs) < 2:
        return single_input(inputs, name)[0], ()
    for number, other in enumerate(inputs[1:], 1):
        if not isinstance(other, Tensor) or not other.is_floating_point() or other.dim() < 2:
            got = type(other).__name__
            if isinstance(other, Tensor):
                got = f"a tensor of dtype {other.dtype} and shape {tuple(other.shape)}"
            raise InputError(
                f"{name}[{number}] is {got}. The first of several inputs is the sequence, as token "
                "ids or embeddings; the others are floating, such as images. Pass a forward_func "
                "that takes them in this order, and all other arguments as additional_forward_args."
            )
    return single_input(inputs[0], f"{name}[0]")[0], inputs[1:]


def unpadded(value: Any) -> Any:
    """Return the ids of a tokenizer's result, if all else in it equals the models' defaults.

    The defaults are a mask that hides nothing, and types that are all 0.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("input_ids"), Tensor):
        return value
    left_out = {"attention_mask": 1, "token_type_ids": 0}
    others = {name: other for name, other in value.items() if name != "input_ids"}
    for name, other in others.items():
        if not isinstance(other, Tensor) or name not in left_out or (other != left_out[name]).any():
            return value
    return value["input_ids"]


def _in_place_of(value: Any) -> str:
    """Return advice for a value that is not a tensor."""
    if isinstance(value, Mapping):
        return f"Pass one of its values, out of {list(value)}. Accepted are {_FORMS}."
    if isinstance(value, str):
        return (
            "Pass tokenizer= beside it, or token ids (B, L), such as "
            "tokenizer(text, return_tensors='pt')['input_ids']."
        )
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return (
            f"Pass one tensor: torch.stack(inputs) of examples of one shape. Accepted are {_FORMS}."
        )
    if isinstance(value, list | tuple) and value and checks.as_integer(value[0]) is not None:
        return "Pass token ids as a tensor (B, L): torch.tensor([inputs])."
    if isinstance(value, list | tuple) and value:
        return f"Pass torch.tensor(inputs), where it holds numbers. Accepted are {_FORMS}."
    return f"Accepted are {_FORMS}."


def _check_ids(ids: Tensor, name: str) -> None:
    """Raise for a tensor that is not floating and cannot be token ids."""
    if ids.is_complex() or ids.is_quantized or ids.dtype == torch.bool:
        raise InputError(f"{name} is of dtype {ids.dtype}. Accepted are {_FORMS}.")
    if ids.dim() == 4:
        raise InputError(
            f"{name} of shape {tuple(ids.shape)} holds integers ({ids.dtype}), but images are "
            "floating: pass the output of the model's image processor."
        )
    if ids.dim() != 2:
        raise InputError(
            f"{name} of shape {tuple(ids.shape)} holds integers ({ids.dtype}), but token ids are "
            "(B, L)."
        )


def check_batch(inputs: Tensor, additional: tuple[Any, ...]) -> None:
    """Raise if an additional tensor with a dimension for tokens cannot belong to this batch.

    Other tensors may be anything, such as images, or target tokens that Captum's wrappers pass.
    """
    for i, value in enumerate(additional):
        of_tokens = isinstance(value, Tensor) and inputs.shape[1] in value.shape[1:]
        if of_tokens and len(value) not in (1, len(inputs)):
            raise InputError(
                f"inputs has a batch of {len(inputs)}, but additional_forward_args[{i}] has "
                f"{len(value)} (shape {tuple(value.shape)})."
            )


def call_model(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    additional: tuple[Any, ...],
    named: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Call forward_func and return its result; embeddings reach models that expect token ids.

    A module whose first parameter is ``input_ids`` receives floating inputs as ``inputs_embeds``
    if it has that parameter, else in place of its embedding layer's output.
    """
    with _embeddable(inputs):
        function = runnable(forward_func)
        embeddings = inputs.is_floating_point() and inputs.dim() == 3
        if embeddings and isinstance(function, nn.Module):
            return _call_on_embeddings(function, inputs, additional, named)
        return function(inputs, *additional, **named)


def _call_on_embeddings(
    function: nn.Module, inputs: Tensor, additional: tuple[Any, ...], named: Mapping[str, Any]
) -> Any:
    """Call a module on embeddings (B, L, E), as its parameters allow."""
    try:
        bound = inspect.signature(_forward_of_base(function)).bind(inputs, *additional, **named)
    except TypeError as error:
        raise InputError(f"additional_forward_args do not fit the model: {error}.") from error
    arguments = dict(bound.arguments)
    if next(iter(arguments)) != "input_ids":
        return function(inputs, *additional, **named)
    if "inputs_embeds" in bound.signature.parameters:
        if arguments.get("inputs_embeds") is not None:
            raise InputError("inputs and additional_forward_args both hold embeddings.")
        bound.arguments.pop("input_ids")
        bound.arguments["inputs_embeds"] = inputs
        return function(**_named(bound))
    with _embedded(function, inputs):
        ids = inputs.new_zeros(inputs.shape[:2]).long()
        return function(ids, *additional, **named)


def embeddings_of(forward_func: Callable[..., Any], ids: Tensor) -> Tensor | None:
    """Return the embeddings (B, L, E) of ids (B, L), or None.

    None if :func:`call_model` cannot pass embeddings in place of ids: it can to a module with an
    embedding layer whose first parameter is ``input_ids``.
    """
    function = runnable(forward_func)
    layer = getattr(function, "get_input_embeddings", lambda: None)()
    if not isinstance(function, nn.Module) or layer is None:
        return None
    if next(iter(inspect.signature(_forward_of_base(function)).parameters)) != "input_ids":
        return None
    with torch.no_grad(), _embeddable(ids):
        found: Tensor = layer(ids)
    return found


@contextmanager
def _embeddable(inputs: Tensor) -> Iterator[None]:
    """Turn torch's errors of an embedding into errors that name the inputs."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        shape, said = tuple(inputs.shape), str(error)
        if inputs.is_floating_point() and _NO_INDEX in said:
            instead = (
                "floating inputs are embeddings (B, L, E)"
                if inputs.dim() == 2
                else "let forward_func take embeddings, as in model(inputs_embeds=inputs)"
            )
            raise InputError(
                f"inputs of shape {shape} is floating ({inputs.dtype}), but the model looks it up "
                f"as token ids, which are integers (B, L). Pass ids, or {instead}. Methods that "
                "add noise or take steps between inputs, such as NoiseTunnel, need embeddings."
            ) from error
        if not inputs.is_floating_point() and _NO_SUCH_INDEX in said:
            raise InputError(
                f"inputs holds token ids from {int(inputs.min())} to {int(inputs.max())}, of which "
                "the model does not embed all. Does the tokenizer belong to this model?"
            ) from error
        raise


def _forward_of_base(model: nn.Module) -> Callable[..., Any]:
    """Return the forward that names its parameters: of a PEFT wrapper the base model's."""
    base = getattr(model, "get_base_model", None)
    forward: Callable[..., Any] = model.forward if base is None else base().forward
    return forward


def _named(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return bound arguments by name, without ``*args``."""
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
    """Let the model's first embedding layer return ``embeddings`` inside the ``with``."""
    layer = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if layer is None:
        raise InputError("inputs are floating, but the model takes input_ids and embeds nothing.")
    with hooked(layer.register_forward_hook, lambda module, args, output: embeddings):
        yield


class BatchPart:
    """Takes the same examples out of every value that has one entry per example."""

    def __init__(self, part: slice, batch: int) -> None:
        self.part, self.batch = part, batch

    def __call__(self, value: Any) -> Any:
        """Take the examples out of a tensor; return any other value as it is."""
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == self.batch:
            value = value[self.part]
            return value.clone() if value.is_inference() else value
        return value

    def target(self, target: Any) -> Any:
        """Take the examples out of a target, in any of Captum's forms, or a contrast."""
        if isinstance(target, Against):
            return Against(self.target(target.target), self.target(target.contrast))
        if isinstance(target, SumTarget):
            return target.part(self)
        per_example = isinstance(target, list) or getattr(target, "ndim", 0) > 0
        if per_example and not isinstance(target, Tensor) and len(target) == self.batch:
            return target[self.part]
        return self(target)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count examples from the first of the whole batch in errors inside the ``with``."""
        try:
            yield
        except PaddedExampleError as error:
            raise PaddedExampleError(self.part.start + error.example) from None


def batch_parts(batch: int, internal_batch_size: int | None) -> Iterator[BatchPart]:
    """Yield the parts of a batch, of at most ``internal_batch_size`` examples; None: one part."""
    size = checks.count("internal_batch_size", internal_batch_size) or batch
    for start in range(0, batch, size):
        yield BatchPart(slice(0, batch) if size >= batch else slice(start, start + size), batch)
