"""A call's arguments as users of Captum, transformers, inseq and SHAP write them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ..._names import meant
from ...errors import ArgumentError, InputError, ModelNotFoundError, TargetError
from ...tracing import find_model
from ..text.codec import Codec
from .checks import as_integer, in_place_of
from .inputs import BESIDE, KEYS, behind_inputs, unpadded
from .progress import bar
from .targets import CONTRASTS, Each

Function = TypeVar("Function", bound=Callable[..., Any])

#: Arguments of other tools, and the advice of an error for each.
_INSTEAD = {
    "baselines": "The run is explained as it is, and nothing replaces the inputs. Leave baselines "
    "out; to compare with another output, pass contrast= where a method has it, or explain both "
    "and subtract.",
    "feature_mask": "Each token has its own number. Leave feature_mask out, and add up the tokens "
    "of a feature: torch.zeros(B, features).scatter_add(1, feature_mask, relevance).",
    "n_steps": "There are no steps between two inputs. Leave n_steps out.",
    "layer": "LayerLatimFlow(model, layer) explains a layer; layers=[...] names the mixers to use.",
    "layers": "Pass knock_out(model, Edges(layers=[3], sources=[7], targets=-1)).",
    "tokenizer": "Pass it to the call: attribute(text, target=' fox', tokenizer=tokenizer).",
}


def called_by_name(function: Function) -> Function:
    """Return a function, or a class's ``__init__``, whose errors for arguments give advice."""
    signature = inspect.signature(function)

    @in_place_of(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        name = args[0].name if function.__name__ == "__init__" else function.__name__
        found = bound(signature, name, args, kwargs)
        return function(*found.args, **found.kwargs)

    return called


def bound(
    signature: inspect.Signature, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Bind arguments to a signature; an error names the function and gives advice."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        taken = [each for each in signature.parameters if each != "self"]
        other = next((each for each in kwargs if each not in taken), None)
        if other in _INSTEAD:
            raise ArgumentError(
                f"{other} is not an argument of {name}. {_INSTEAD[other]}"
            ) from None
        hint = "" if other is None else meant(other, taken)
        raise ArgumentError(f"{name}: {error}.{hint} It takes {', '.join(taken)}.") from None


def check_model(forward_func: Any, model: Any) -> None:
    """Raise for a model's name, and for a tokenizer in place of the module."""
    if isinstance(forward_func, str):
        raise ModelNotFoundError(
            f"forward_func={forward_func!r} is a name. Load the model first, for example by "
            "transformers' AutoModelForCausalLM.from_pretrained(...), and pass it."
        )
    if hasattr(model, "encode") and hasattr(model, "decode"):
        raise ModelNotFoundError(
            f"model is a tokenizer, {type(model).__name__}. {_INSTEAD['tokenizer']}"
        )


def reads_any(function: Function, name: str) -> Function:
    """Return a method that also takes texts, a tokenizer's results, ``tokenizer`` and a bar."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    more = {*KEYS, *BESIDE, "tokenizer"} - parameters.keys()
    own_bar = "show_progress" in parameters

    @in_place_of(function)
    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {key: kwargs.pop(key) for key in more & kwargs.keys()}
        key = next((key for key in KEYS if key in given), None)
        if key is not None:
            kwargs["inputs"] = given.pop(key)
        show = kwargs.get("show_progress", False) if own_bar else kwargs.pop("show_progress", False)
        found = bound(signature, f"{self.name}.{name}", (self, *args), kwargs)
        reader = Reader(given.pop("tokenizer", None), self.forward_func, self.model)
        reader.read(found.arguments, given)
        with bar(self.name, show):
            return function(*found.args, **found.kwargs)

    return asked


class Reader:
    """Reads inputs and targets in the forms of other tools.

    Args:
        tokenizer: for texts, or its codec. Default: None, forward_func's own if it is a pipeline.
        forward_func: runs the model.
        model: the module, if forward_func does not reveal it. Default: None.
    """

    def __init__(self, tokenizer: Any, forward_func: Any, model: nn.Module | None = None) -> None:
        tokenizer = tokenizer or getattr(forward_func, "tokenizer", None)
        is_read = tokenizer is None or isinstance(tokenizer, Codec)
        self.codec = tokenizer if is_read else Codec(tokenizer)
        self._forward_func, self._model = forward_func, model

    def read(self, arguments: dict[str, Any], beside: dict[str, Any]) -> None:
        """Bring arguments into Captum's forms, in place; ``beside`` are tensors by name."""
        inputs = unpadded(arguments["inputs"])
        if isinstance(inputs, Mapping):
            key = next((key for key in KEYS if key in inputs), None)
            if key is not None and inputs.keys() <= {key, *BESIDE}:
                beside = {**inputs, **beside}
                inputs = beside.pop(key)
        arguments["inputs"] = self.inputs(inputs)
        beside = {key: value for key, value in beside.items() if value is not None}
        if beside and arguments.get("additional_forward_args") is not None:
            passed = " and ".join(f"{key}=" for key in beside)
            raise InputError(f"{passed} and additional_forward_args are given. Pass one of them.")
        if beside:
            behind = behind_inputs(self._forward_func, arguments["inputs"], beside)
            arguments["additional_forward_args"] = behind
        for name in ("target", "targets", "contrast"):
            if name in arguments:
                arguments[name] = self.target(arguments[name], name)
        contrast = arguments.get("contrast")
        if isinstance(contrast, _Named) and isinstance(arguments.get("target"), tuple):
            arguments["contrast"] = contrast[-1]

    def inputs(self, inputs: Any) -> Any:
        """Return texts, conversations, lists of ids and arrays as a tensor; others as they are."""
        if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "iuf":
            return torch.as_tensor(inputs)
        if not isinstance(inputs, str | list) or not inputs:
            return inputs
        several = isinstance(inputs, list) and isinstance(inputs[0], str | list) and inputs[0]
        if several and as_integer(inputs[0][0]) is not None:
            try:
                return torch.tensor(inputs)
            except (TypeError, ValueError):
                return inputs
        listed = inputs if several else [inputs]
        if self.codec is None or not all(map(is_text, listed)):
            return inputs
        found = [self.codec.ids_of(text) for text in listed]
        if len({len(ids) for ids in found}) > 1:
            raise InputError(
                f"inputs holds texts of {[len(ids) for ids in found]} tokens. Pass them as a "
                "batch: tokenizer(texts, padding=True, return_tensors='pt')."
            )
        first = next(find_model(self._forward_func, self._model).parameters(), torch.empty(0))
        return torch.stack(found).to(first.device)

    def target(self, target: Any, name: str = "target") -> Any:
        """Return a target in Captum's forms; a text in it names a class or the next token."""
        if isinstance(target, Each):
            return Each([self.target(one, name) for one in target.targets])
        if isinstance(target, list):
            return [self.target(one, name) for one in target]
        at = isinstance(target, tuple) and len(target) == 2 and isinstance(target[1], str)
        if not at and (not isinstance(target, str) or (name == "contrast" and target in CONTRASTS)):
            return target
        if isinstance(target, str):
            classes = classes_of(find_model(self._forward_func, self._model))
            if target in classes:
                return classes[target]
        if self.codec is None:
            return target
        position, text = target if at else (-1, target)
        try:
            token = self.codec.token(text)
        except InputError as error:
            raise TargetError(f"{name}={target!r}: {error}") from None
        return (position, token) if at else _Named((position, token))


def classes_of(model: nn.Module) -> dict[str, int]:
    """Return the numbers of a model's classes by the names that its configuration has."""
    named = getattr(getattr(model, "config", None), "id2label", None) or {}
    return {str(name): int(number) for number, name in named.items()}


class _Named(tuple[int, int]):
    """A position and token whose position was not named."""


def is_text(text: Any) -> bool:
    """Return whether a value is a text, or a conversation: a list of messages."""
    if isinstance(text, list) and text:
        return all(isinstance(message, Mapping) for message in text)
    return isinstance(text, str)
