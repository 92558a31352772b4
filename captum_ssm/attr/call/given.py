"""Arguments in the forms of Captum, transformers, inseq and SHAP, converted to Captum's forms."""

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

#: Advice in the error for an argument that only other methods or other tools have.
_INSTEAD = {
    "baselines": "This method does not replace the inputs. Leave baselines out; to compare with a "
    "different output, pass contrast= if the method has it, or explain both and subtract.",
    "feature_mask": "Relevance is computed for each token. Leave feature_mask out, and sum over "
    "each feature: torch.zeros(B, features).scatter_add(1, feature_mask, relevance).",
    "n_steps": "This method takes no steps between two inputs. Leave n_steps out.",
    "layer": "Use LayerLatimFlow(model, layer) to explain a layer; layers=[...] chooses mixers.",
    "layers": "Pass knock_out(model, Edges(layers=[3], sources=[7], targets=-1)).",
    "tokenizer": "Pass it when you call attribute(text, target=' fox', tokenizer=tokenizer).",
}


def called_by_name(function: Function) -> Function:
    """Wrap a function or ``__init__`` so that errors for wrong arguments include advice."""
    signature = inspect.signature(function)

    @in_place_of(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        name = args[0].name if function.__name__ == "__init__" else function.__name__
        found = bound(signature, name, args, kwargs)
        return function(*found.args, **found.kwargs)

    return called


def bound(
    signature: inspect.Signature,
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    instead: Mapping[str, str] = _INSTEAD,
) -> inspect.BoundArguments:
    """Bind arguments to a signature; an error shows the function's ``name`` and advice."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        taken = [each for each in signature.parameters if each != "self"]
        other = next((each for each in kwargs if each not in taken), None)
        if other is not None and other in instead:
            raise ArgumentError(f"{other} is not an argument of {name}. {instead[other]}") from None
        hint = "" if other is None else meant(other, taken)
        raise ArgumentError(f"{name}: {error}.{hint} Pass only {', '.join(taken)}.") from None


def check_model(forward_func: Any, model: Any) -> None:
    """Raise if ``forward_func`` is a string, or if ``model`` is a tokenizer."""
    if isinstance(forward_func, str):
        raise ModelNotFoundError(
            f"forward_func={forward_func!r} is a string. Load the model, for example with "
            "transformers' AutoModelForCausalLM.from_pretrained(...), and pass the model."
        )
    if hasattr(model, "encode") and hasattr(model, "decode"):
        raise ModelNotFoundError(
            f"model is a tokenizer, {type(model).__name__}. {_INSTEAD['tokenizer']}"
        )


def reads_any(function: Function, name: str) -> Function:
    """Wrap a method to accept texts, a tokenizer's output, ``tokenizer`` and ``show_progress``."""
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
    """Converts inputs and targets from the forms of other tools to Captum's forms.

    Args:
        tokenizer: a tokenizer or :class:`.Codec`; None for the tokenizer of a pipeline.
        forward_func: the function that runs the model.
        model: the module, if it cannot be found from forward_func. Default: None.
    """

    def __init__(self, tokenizer: Any, forward_func: Any, model: nn.Module | None = None) -> None:
        tokenizer = tokenizer or getattr(forward_func, "tokenizer", None)
        is_read = tokenizer is None or isinstance(tokenizer, Codec)
        self.codec = tokenizer if is_read else Codec(tokenizer)
        self._forward_func, self._model = forward_func, model

    def read(self, arguments: dict[str, Any], beside: dict[str, Any]) -> None:
        """Convert a call's ``arguments`` in place; add ``beside``, such as an attention_mask."""
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
            raise InputError(f"{passed} and additional_forward_args are both set. Pass only one.")
        if beside:
            behind = behind_inputs(self._forward_func, arguments["inputs"], beside)
            arguments["additional_forward_args"] = behind
        for name in ("target", "targets", "contrast"):
            if name in arguments:
                arguments[name] = self.target(arguments[name], name)
        contrast = arguments.get("contrast")
        if isinstance(contrast, _TextTarget) and isinstance(arguments.get("target"), tuple):
            arguments["contrast"] = contrast[-1]

    def inputs(self, inputs: Any) -> Any:
        """Convert texts, conversations, lists of ids and arrays to a tensor; keep other values."""
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
                f"inputs holds texts of different lengths: {[len(ids) for ids in found]} tokens. "
                "Pass a padded batch: tokenizer(texts, padding=True, return_tensors='pt')."
            )
        first = next(find_model(self._forward_func, self._model).parameters(), torch.empty(0))
        return torch.stack(found).to(first.device)

    def target(self, target: Any, name: str = "target") -> Any:
        """Convert a target to Captum's forms; a text is a class name or the text of a token."""
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
        return (position, token) if at else _TextTarget((position, token))


def classes_of(model: nn.Module) -> dict[str, int]:
    """Return a classifier's class indices by class name, from the model's configuration."""
    named = getattr(getattr(model, "config", None), "id2label", None) or {}
    return {str(name): int(number) for number, name in named.items()}


class _TextTarget(tuple[int, int]):
    """A target (-1, token id), made from a text that the user passed without a position."""


def is_text(text: Any) -> bool:
    """Return True for a string, and for a conversation, which is a list of message dictionaries."""
    if isinstance(text, list) and text:
        return all(isinstance(message, Mapping) for message in text)
    return isinstance(text, str)
