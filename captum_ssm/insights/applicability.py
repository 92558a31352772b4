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
        return _of_mixers(model, inputs)
    if issubclass(method, GradientAttribution):
        return _of_gradients(method, model, inputs)
    return None


def _of_mixers(model: Any, inputs: tuple[Tensor, ...]) -> str | None:
    if len(inputs) != 1:
        return f"it explains one input, but the model has {len(inputs)}"
    shape, floating = tuple(inputs[0].shape), inputs[0].is_floating_point()
    if not (len(shape) in (3, 4) and floating) and not (len(shape) == 2 and not floating):
        kind = str(inputs[0].dtype).removeprefix("torch.")
        return f"it explains token ids, embeddings or images, not {kind} of shape {shape}"
    try:
        find_mixers(find_model(model))
    except CaptumSSMError as error:
        return str(error).partition(". ")[0]  # without advice on adapters
    return None


def _of_gradients(method: type[Attribution], model: Any, inputs: tuple[Tensor, ...]) -> str | None:
    if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in inputs):
        return "it needs gradients of the inputs, but the inputs are integers"
    of_relu = issubclass(method, GuidedBackprop | Deconvolution)
    if not (of_relu or issubclass(method, DeepLift)):
        return None
    if not isinstance(model, nn.Module):
        return f"it needs a torch.nn.Module, not a {type(model).__name__}"
    if of_relu and not any(isinstance(module, nn.ReLU) for module in model.modules()):
        return "it changes gradients of torch.nn.ReLU, but the model has no such module"
    return None
