"""Check whether a method fits a model and its inputs, without running the model."""

from __future__ import annotations

from typing import Any

from captum.attr import Attribution, Deconvolution, DeepLift, GradientAttribution, GuidedBackprop
from torch import Tensor, nn

from ..attr.engine.method import SSMAttribution
from ..errors import CaptumSSMError
from ..tracing import find_mixers, find_model


def obstacle(method: type[Attribution], model: Any, inputs: tuple[Tensor, ...]) -> str | None:
    """Return the reason why a method cannot explain a model with these inputs, or None.

    Args:
        method: the class of the method.
        model: the model.
        inputs: a batch of the model's inputs, one tensor per feature.
    """
    if issubclass(method, SSMAttribution):
        return _mixer_obstacle(model, inputs)
    if issubclass(method, GradientAttribution):
        return _grad_obstacle(method, model, inputs)
    return None


def _mixer_obstacle(model: Any, inputs: tuple[Tensor, ...]) -> str | None:
    """Return why methods of this package cannot explain the model or its inputs, or None."""
    if len(inputs) != 1:
        return f"it explains one input, but the model has {len(inputs)}"
    shape, is_floating = tuple(inputs[0].shape), inputs[0].is_floating_point()
    if not (len(shape) in (3, 4) and is_floating) and not (len(shape) == 2 and not is_floating):
        dtype = str(inputs[0].dtype).removeprefix("torch.")
        return f"it explains token ids, embeddings or images, not {dtype} of shape {shape}"
    try:
        find_mixers(find_model(model))
    except CaptumSSMError as error:
        return str(error).partition(". ")[0]  # without advice on adapters
    return None


def _grad_obstacle(method: type[Attribution], model: Any, inputs: tuple[Tensor, ...]) -> str | None:
    if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in inputs):
        return "it needs gradients of the inputs, but the inputs are integers"
    changes_relu = issubclass(method, GuidedBackprop | Deconvolution)
    if not (changes_relu or issubclass(method, DeepLift)):
        return None
    if not isinstance(model, nn.Module):
        return f"it needs a torch.nn.Module, not a {type(model).__name__}"
    if changes_relu and not any(isinstance(module, nn.ReLU) for module in model.modules()):
        return "it changes gradients of torch.nn.ReLU, but the model has no such module"
    return None
