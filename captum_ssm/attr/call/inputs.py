"""Check the user's inputs, run the model on inputs, and split a batch into parts."""

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

#: Accepted forms of inputs, for error messages.
_FORMS = "token ids (B, L), embeddings (B, L, E) or images (B, C, H, W)"

#: Names of the input tensor in the output of tokenizers and image processors, by preference.
KEYS = ("input_ids", "inputs_embeds", "pixel_values")

#: Words in torch's errors if an embedding layer gets floats, or an id beyond the vocabulary.
_NO_INDEX = "'indices' to have one of the following scalar types"
_NO_SUCH_INDEX = "index out of range in self"

#: Names of the tensors in a tokenizer's output besides the input.
MASK_KEYS = ("attention_mask", "token_type_ids")


def positional_arguments(
    forward_func: Callable[..., Any], inputs: Any, tensors: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return tensors such as attention_mask as additional_forward_args, in forward_func's order.

    ``tensors`` are by parameter name. Raise if forward_func has no such positional parameter, or
    if a tensor's batch size is neither 1 nor the batch size of ``inputs``.
    """
    passed = " and ".join(f"{name}=" for name in tensors)
    first = inputs[0] if isinstance(inputs, tuple) and inputs else inputs
    for name, value in tensors.items():
        sizes = [len(x) if isinstance(x, Tensor) and x.dim() else 1 for x in (value, first)]
        if sizes[0] not in (1, sizes[1]):
            raise InputError(
                f"{name} has {sizes[0]} examples, but inputs has {sizes[1]}. Pass equally many. "
                f"With Captum's NoiseTunnel, pass {name} in additional_forward_args instead."
            )
    function = runnable(forward_func)
    called = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(called).parameters
    if isinstance(function, nn.Module) and not tensors.keys() <= parameters.keys():
        # a PEFT wrapper's forward has only *args and **kwargs
        parameters = inspect.signature(_forward_of_base(function)).parameters
    after_inputs = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    names = [p.name for p in after_inputs]
    if not tensors.keys() <= set(names):
        raise InputError(
            f"{passed} is given, but {getattr(called, '__qualname__', called)} has no positional "
            "parameter of this name. Pass additional_forward_args, in the order of its parameters."
        )
    last = max(names.index(name) for name in tensors)
    return tuple(  # up to the last tensor; parameters before it get their defaults
        tensors.get(p.name, None if p.default is p.empty else p.default)
        for p in after_inputs[: last + 1]
    )


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return additional_forward_args (None, one value or a tuple) as a tuple."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def single_input(inputs: Any, name: str = "inputs") -> tuple[Tensor, bool]:
    """Check that ``inputs`` is one tensor; return it, and whether it was in a tuple."""
    inputs = ids_if_unpadded(inputs)
    in_tuple = isinstance(inputs, tuple)
    if in_tuple and len(inputs) != 1:
        raise InputError(
            f"{name} holds {len(inputs)} tensors, but this method explains one. Pass the others as "
            "additional_forward_args, or use LatimFlow or MambaLRP, which explain several."
        )
    tensor = inputs[0] if in_tuple else inputs
    if not isinstance(tensor, Tensor):
        raise InputError(
            f"{name} is of type {type(tensor).__name__}, not a tensor. {_advice_for(tensor)}"
        )
    if tensor.dim() < 2:
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)}, without a batch dimension. Pass {_FORMS}, "
            f"such as {name}[None] for a batch of one."
        )
    if tensor.numel() == 0:
        raise InputError(f"{name} of shape {tuple(tensor.shape)} is empty. Pass tokens or pixels.")
    if not tensor.is_floating_point():
        _check_ids(tensor, name)
    return tensor, in_tuple


def several_inputs(inputs: Any, name: str = "inputs") -> tuple[Tensor, tuple[Tensor, ...]]:
    """Check one input or a tuple; return the first input, and the others, such as images."""
    if not isinstance(inputs, tuple) or len(inputs) < 2:
        return single_input(inputs, name)[0], ()
    for index, other in enumerate(inputs[1:], 1):
        if not isinstance(other, Tensor) or not other.is_floating_point() or other.dim() < 2:
            kind = type(other).__name__
            if isinstance(other, Tensor):
                kind = f"a tensor of dtype {other.dtype} and shape {tuple(other.shape)}"
            raise InputError(
                f"{name}[{index}] is {kind}. In a tuple, pass first the sequence, as token ids or "
                "embeddings, and then floating tensors, such as images. forward_func must take "
                "them in this order. Pass all other arguments as additional_forward_args."
            )
    return single_input(inputs[0], f"{name}[0]")[0], inputs[1:]


def ids_if_unpadded(value: Any) -> Any:
    """Return the ids of a tokenizer's output without padding; return other values unchanged.

    A mask of ones and token types of zeros are the models' defaults, so they can be left out.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("input_ids"), Tensor):
        return value
    defaults = {"attention_mask": 1, "token_type_ids": 0}
    others = {name: x for name, x in value.items() if name != "input_ids"}
    for name, x in others.items():
        if not isinstance(x, Tensor) or name not in defaults or (x != defaults[name]).any():
            return value
    return value["input_ids"]


def _advice_for(value: Any) -> str:
    """Return the advice in the error for inputs that are not a tensor."""
    if isinstance(value, Mapping):
        return f"Pass one of the tensors in it ({list(value)}), such as {_FORMS}."
    if isinstance(value, str):
        return (
            "Pass tokenizer= beside it, or token ids (B, L), such as "
            "tokenizer(text, return_tensors='pt')['input_ids']."
        )
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return (
            f"Pass one tensor, torch.stack(inputs), if all have one shape. Accepted are {_FORMS}."
        )
    if isinstance(value, list | tuple) and value and checks.as_integer(value[0]) is not None:
        return "Pass token ids as a tensor (B, L): torch.tensor([inputs])."
    if isinstance(value, list | tuple) and value:
        return f"Pass torch.tensor(inputs) if it holds numbers. Accepted are {_FORMS}."
    return f"Pass {_FORMS}."


def _check_ids(ids: Tensor, name: str) -> None:
    """Raise if a tensor that is not floating cannot be token ids."""
    if ids.is_complex() or ids.is_quantized or ids.dtype == torch.bool:
        raise InputError(f"{name} has dtype {ids.dtype}, which is not accepted. Pass {_FORMS}.")
    if ids.dim() == 4:
        raise InputError(
            f"{name} of shape {tuple(ids.shape)} holds integers ({ids.dtype}), but images must be "
            "floating. Pass the output of the model's image processor."
        )
    if ids.dim() != 2:
        raise InputError(
            f"{name} of shape {tuple(ids.shape)} holds integers ({ids.dtype}). Pass token ids of "
            "shape (B, L), or floating embeddings (B, L, E)."
        )


def check_batch(inputs: Tensor, additional: tuple[Any, ...]) -> None:
    """Raise if an additional tensor with L tokens has a different batch size than the inputs.

    Tensors without a dimension of size L are not checked; they may be images, for example.
    """
    for i, value in enumerate(additional):
        of_tokens = isinstance(value, Tensor) and inputs.shape[1] in value.shape[1:]
        if of_tokens and len(value) not in (1, len(inputs)):
            raise InputError(
                f"inputs has a batch of {len(inputs)}, but additional_forward_args[{i}] has "
                f"{len(value)} (shape {tuple(value.shape)}). Pass {len(inputs)} or 1 examples."
            )


def call_model(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    additional: tuple[Any, ...],
    named: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Call forward_func with ``inputs``, the ``additional`` positional arguments, and keywords.

    If ``inputs`` are embeddings and a module's first parameter is ``input_ids``, the embeddings are
    passed as ``inputs_embeds``, or without this parameter replace the embedding layer's output.
    """
    with _name_embedding_errors(inputs):
        function = runnable(forward_func)
        embeddings = inputs.is_floating_point() and inputs.dim() == 3
        if embeddings and isinstance(function, nn.Module):
            return _call_on_embeddings(function, inputs, additional, named)
        return function(inputs, *additional, **named)


def _call_on_embeddings(
    function: nn.Module, inputs: Tensor, additional: tuple[Any, ...], named: Mapping[str, Any]
) -> Any:
    """Call a module with embeddings (B, L, E) in place of ids, as :func:`call_model` describes."""
    try:  # is the first parameter `input_ids`?
        bound = inspect.signature(_forward_of_base(function)).bind(inputs, *additional, **named)
    except TypeError as error:
        problem = f"additional_forward_args do not fit {type(function).__name__}.forward: {error}."
        raise InputError(f"{problem} Pass the positional arguments that follow inputs.") from error
    arguments = dict(bound.arguments)
    if next(iter(arguments)) != "input_ids":
        return function(inputs, *additional, **named)
    if "inputs_embeds" in bound.signature.parameters:
        if arguments.get("inputs_embeds") is not None:
            raise InputError(
                "inputs are embeddings, but additional_forward_args has inputs_embeds, too. Pass "
                "None for inputs_embeds in additional_forward_args."
            )
        bound.arguments.pop("input_ids")
        bound.arguments["inputs_embeds"] = inputs
        return function(**_as_keywords(bound))
    with _replace_embeddings(function, inputs):
        ids = inputs.new_zeros(inputs.shape[:2]).long()  # only their shape has an effect
        return function(ids, *additional, **named)


def embeddings_of(forward_func: Callable[..., Any], ids: Tensor) -> Tensor | None:
    """Return the embeddings (B, L, E) of token ids (B, L).

    Return None if :func:`call_model` cannot pass embeddings to forward_func. It needs a module with
    an embedding layer, whose first parameter is ``input_ids``.
    """
    function = runnable(forward_func)
    layer = getattr(function, "get_input_embeddings", lambda: None)()
    if not isinstance(function, nn.Module) or layer is None:
        return None
    if next(iter(inspect.signature(_forward_of_base(function)).parameters)) != "input_ids":
        return None
    with torch.no_grad(), _name_embedding_errors(ids):
        embeddings: Tensor = layer(ids)
    return embeddings


@contextmanager
def _name_embedding_errors(inputs: Tensor) -> Iterator[None]:
    """Replace torch's errors in an embedding layer with errors that name ``inputs``."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        shape, message = tuple(inputs.shape), str(error)
        if inputs.is_floating_point() and _NO_INDEX in message:
            advice = (
                "embeddings of shape (B, L, E)"
                if inputs.dim() == 2
                else "a forward_func that takes embeddings, such as model(inputs_embeds=inputs)"
            )
            raise InputError(
                f"inputs of shape {shape} is floating ({inputs.dtype}), but the model's embedding "
                f"layer needs integer token ids (B, L). Pass token ids, or {advice}. Methods that "
                "add noise or take steps between inputs, such as NoiseTunnel, need embeddings."
            ) from error
        if not inputs.is_floating_point() and _NO_SUCH_INDEX in message:
            raise InputError(
                f"inputs holds token ids from {int(inputs.min())} to {int(inputs.max())}, which "
                "are not all in the model's vocabulary. Pass ids from the tokenizer of this model."
            ) from error
        raise


def _forward_of_base(model: nn.Module) -> Callable[..., Any]:
    """Return the model's ``forward``, or for a PEFT wrapper the ``forward`` of the base model."""
    base = getattr(model, "get_base_model", None)
    forward: Callable[..., Any] = model.forward if base is None else base().forward
    return forward


def _as_keywords(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return bound arguments as keyword arguments, because one was renamed since binding."""
    keywords: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            keywords.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise InputError(
                f"additional_forward_args holds {len(value)} values for *{name} of the model's "
                "forward, which cannot be passed with embeddings. Pass a forward_func that takes "
                "embeddings."
            )
        else:
            keywords[name] = value
    return keywords


@contextmanager
def _replace_embeddings(model: nn.Module, embeddings: Tensor) -> Iterator[None]:
    """Make the model's first embedding layer return ``embeddings`` inside the ``with``."""
    layer = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if layer is None:
        raise InputError("inputs are floating, but the model has no nn.Embedding. Pass token ids.")
    with hooked(layer.register_forward_hook, lambda module, args, output: embeddings):
        yield


class BatchPart:
    """A function that selects the slice ``part`` of a batch of size ``batch`` from any argument."""

    def __init__(self, part: slice, batch: int) -> None:
        self.part, self.batch = part, batch

    def __call__(self, value: Any) -> Any:
        """Select the examples from a tensor; return values without a batch dimension unchanged."""
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == self.batch:
            value = value[self.part]
            # autograd cannot record a view of an inference tensor
            return value.clone() if value.is_inference() else value
        return value

    def target(self, target: Any) -> Any:
        """Select the examples from a target (in any of Captum's forms) or a contrast."""
        if isinstance(target, Against):
            return Against(self.target(target.target), self.target(target.contrast))
        if isinstance(target, SumTarget):
            return target.part(self)
        per_example = isinstance(target, list) or getattr(target, "ndim", 0) > 0
        if per_example and not isinstance(target, Tensor) and len(target) == self.batch:
            return target[self.part]  # a list or an array
        return self(target)  # a tensor; or an int or a tuple, which is for all examples

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Convert example indices in errors inside the ``with`` to indices in the whole batch."""
        try:
            yield
        except PaddedExampleError as error:
            raise PaddedExampleError(self.part.start + error.example) from None


def batch_parts(batch: int, internal_batch_size: int | None) -> Iterator[BatchPart]:
    """Yield parts of at most ``internal_batch_size`` examples; one part if it is None."""
    size = checks.count("internal_batch_size", internal_batch_size) or batch
    for start in range(0, batch, size):
        yield BatchPart(slice(0, batch) if size >= batch else slice(start, start + size), batch)
