"""Arguments in the forms of Captum, transformers, inseq and SHAP, converted to Captum's forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ..._names import suggest
from ...errors import ArgumentError, InputError, ModelNotFoundError, TargetError
from ...tracing import find_model
from ..text.codec import Codec
from .checks import as_integer, in_place_of
from .inputs import KEYS, MASK_KEYS, ids_if_unpadded, positional_arguments
from .progress import bar
from .targets import CONTRASTS, Each

Function = TypeVar("Function", bound=Callable[..., Any])

#: Advice in the error for an argument that only other methods or other tools have.
_ADVICE = {
    "baselines": "This method does not replace the inputs. Leave baselines out; to compare with a "
    "different output, pass contrast= if the method has it, or explain both and subtract.",
    "feature_mask": "Relevance is computed for each token. Leave feature_mask out, and sum over "
    "each feature: torch.zeros(B, features).scatter_add(1, feature_mask, relevance).",
    "n_steps": "This method takes no steps between two inputs. Leave n_steps out.",
    "layer": "Use LayerLatimFlow(model, layer) to explain a layer; layers=[...] chooses mixers.",
    "layers": "Pass knock_out(model, Edges(layers=[3], sources=[7], targets=-1)).",
    "tokenizer": "Pass it when you call attribute(text, target=' fox', tokenizer=tokenizer).",
}


def with_argument_advice(function: Function) -> Function:
    """Wrap a function or ``__init__`` so that errors for wrong arguments include advice."""
    signature = inspect.signature(function)

    @in_place_of(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        """Call the function; errors show its name, or the class's name for ``__init__``."""
        name = args[0].name if function.__name__ == "__init__" else function.__name__
        bound = bind_arguments(signature, name, args, kwargs)
        return function(*bound.args, **bound.kwargs)

    return wrapper


def bind_arguments(
    signature: inspect.Signature,
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    advice: Mapping[str, str] = _ADVICE,
) -> inspect.BoundArguments:
    """Bind arguments; errors show the function's ``name``, and ``advice`` by unknown argument."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = [x for x in signature.parameters if x != "self"]
        extra = next((x for x in kwargs if x not in parameters), None)
        if extra is not None and extra in advice:
            raise ArgumentError(f"{extra} is not an argument of {name}. {advice[extra]}") from None
        hint = "" if extra is None else suggest(extra, parameters)
        raise ArgumentError(f"{name}: {error}.{hint} Pass only {', '.join(parameters)}.") from None


def check_model(forward_func: Any, model: Any) -> None:
    """Raise if ``forward_func`` is a string, or if ``model`` is a tokenizer: both are mistakes."""
    if isinstance(forward_func, str):
        raise ModelNotFoundError(
            f"forward_func={forward_func!r} is a string. Load the model, for example with "
            "transformers' AutoModelForCausalLM.from_pretrained(...), and pass the model."
        )
    if hasattr(model, "encode") and hasattr(model, "decode"):
        raise ModelNotFoundError(
            f"model is a tokenizer, {type(model).__name__}. {_ADVICE['tokenizer']}"
        )


def accept_texts(function: Function, name: str) -> Function:
    """Wrap a method to accept texts, a tokenizer's output, ``tokenizer`` and ``show_progress``."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    extra_names = {*KEYS, *MASK_KEYS, "tokenizer"} - parameters.keys()
    has_bar = "show_progress" in parameters

    @in_place_of(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert the arguments to Captum's forms, and call the method with a progress bar."""
        extra = {key: kwargs.pop(key) for key in extra_names & kwargs.keys()}
        input_name = next((key for key in KEYS if key in extra), None)  # such as input_ids
        if input_name is not None:
            kwargs["inputs"] = extra.pop(input_name)
        # a function without this parameter must not get the argument
        show = kwargs.get("show_progress", False) if has_bar else kwargs.pop("show_progress", False)
        bound = bind_arguments(signature, f"{self.name}.{name}", (self, *args), kwargs)
        reader = Reader(extra.pop("tokenizer", None), self.forward_func, self.model)
        reader.convert(bound.arguments, extra)
        with bar(self.name, show):
            return function(*bound.args, **bound.kwargs)

    return wrapper


class Reader:
    """Converts inputs and targets from the forms of other tools to Captum's forms.

    Args:
        tokenizer: a tokenizer or :class:`.Codec`; None for the tokenizer of a pipeline.
        forward_func: the function that runs the model.
        model: the module, if it cannot be found from forward_func. Default: None.
    """

    def __init__(self, tokenizer: Any, forward_func: Any, model: nn.Module | None = None) -> None:
        tokenizer = tokenizer or getattr(forward_func, "tokenizer", None)
        is_codec = tokenizer is None or isinstance(tokenizer, Codec)
        self.codec = tokenizer if is_codec else Codec(tokenizer)
        self._forward_func, self._model = forward_func, model

    def convert(self, arguments: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Convert a call's ``arguments`` in place; add the model's ``tensors``, such as a mask."""
        inputs = ids_if_unpadded(arguments["inputs"])
        if isinstance(inputs, Mapping):  # a tokenizer's output with padding: split off the masks
            key = next((key for key in KEYS if key in inputs), None)
            if key is not None and inputs.keys() <= {key, *MASK_KEYS}:
                tensors = {**inputs, **tensors}
                inputs = tensors.pop(key)
        arguments["inputs"] = self.inputs(inputs)
        tensors = {key: value for key, value in tensors.items() if value is not None}
        if tensors and arguments.get("additional_forward_args") is not None:
            names = " and ".join(f"{key}=" for key in tensors)
            raise InputError(f"{names} and additional_forward_args are both set. Pass only one.")
        if tensors:
            additional = positional_arguments(self._forward_func, arguments["inputs"], tensors)
            arguments["additional_forward_args"] = additional
        for name in ("target", "targets", "contrast"):
            if name in arguments:
                arguments[name] = self.target(arguments[name], name)
        # without a position of its own, the contrast is a token at the target's position
        contrast = arguments.get("contrast")
        if isinstance(contrast, _TextTarget) and isinstance(arguments.get("target"), tuple):
            arguments["contrast"] = contrast[-1]

    def inputs(self, inputs: Any) -> Any:
        """Convert texts, conversations, lists of ids and arrays to a tensor; keep other values."""
        if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "iuf":  # integers or floats
            return torch.as_tensor(inputs)
        if not isinstance(inputs, str | list) or not inputs:
            return inputs
        # a list of texts, conversations or lists of ids; not one conversation or one list of ids
        is_batch = isinstance(inputs, list) and isinstance(inputs[0], str | list) and inputs[0]
        if is_batch and as_integer(inputs[0][0]) is not None:
            try:
                return torch.tensor(inputs)
            except (TypeError, ValueError):  # lists of different lengths; refused by the method
                return inputs
        texts = inputs if is_batch else [inputs]
        if self.codec is None or not all(map(is_text, texts)):
            return inputs
        rows = [self.codec.ids_of(text) for text in texts]
        if len({len(ids) for ids in rows}) > 1:
            raise InputError(
                f"inputs holds texts of different lengths: {[len(ids) for ids in rows]} tokens. "
                "Pass a padded batch: tokenizer(texts, padding=True, return_tensors='pt')."
            )
        parameter = next(find_model(self._forward_func, self._model).parameters(), torch.empty(0))
        return torch.stack(rows).to(parameter.device)

    def target(self, target: Any, name: str = "target") -> Any:
        """Convert a target to Captum's forms; a text is a class name or the text of a token."""
        if isinstance(target, Each):
            return Each([self.target(entry, name) for entry in target.targets])
        if isinstance(target, list):
            return [self.target(entry, name) for entry in target]
        # a pair is a position and the text of a token
        is_pair = isinstance(target, tuple) and len(target) == 2 and isinstance(target[1], str)
        if not is_pair and (
            not isinstance(target, str) or (name == "contrast" and target in CONTRASTS)
        ):
            return target  # no text, or the name of a contrast
        if isinstance(target, str):
            classes = classes_of(find_model(self._forward_func, self._model))
            if target in classes:
                return classes[target]
        if self.codec is None:
            return target
        position, text = target if is_pair else (-1, target)
        try:
            token = self.codec.token(text)
        except InputError as error:
            raise TargetError(f"{name}={target!r}: {error}") from None
        return (position, token) if is_pair else _TextTarget((position, token))


def classes_of(model: nn.Module) -> dict[str, int]:
    """Return a classifier's class indices by class name, from the model's configuration."""
    named = getattr(getattr(model, "config", None), "id2label", None) or {}
    return {str(name): int(number) for number, name in named.items()}


class _TextTarget(tuple[int, int]):
    """A target (-1, token id) from a text, for which the user did not choose the position -1."""


def is_text(text: Any) -> bool:
    """Return True for a string, and for a conversation, which is a list of message dictionaries."""
    if isinstance(text, list) and text:
        return all(isinstance(message, Mapping) for message in text)
    return isinstance(text, str)
