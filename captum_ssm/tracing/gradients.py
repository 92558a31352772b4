"""What keeps a model's run out of autograd's reach, put right for the time of a ``with``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def recordable(model: nn.Module) -> Iterator[None]:
    """Let autograd record the model's run up to its mixers, and leave nothing of it behind.

    Tensors made under ``torch.inference_mode``, which autograd refuses, are copied meanwhile.
    """
    with ExitStack() as stack:
        stack.enter_context(_ordinary_tensors(model))
        stack.enter_context(_checkpoints_without_reentry(model))
        stack.enter_context(graphs_dropped(model))
        yield


@contextmanager
def graphs_dropped(model: nn.Module) -> Iterator[None]:
    """Detach what the model keeps of its run as plain attributes.

    RecurrentGemma keeps its last state: with it the graph of the whole run, and a model that can
    neither be copied nor pickled.

    Args:
        model: the module that runs inside the ``with``.

    Yields:
        Nothing.

    Example:
        >>> import torch
        >>> from captum_ssm.tracing import graphs_dropped
        >>> model = torch.nn.Linear(2, 2)
        >>> with graphs_dropped(model):
        ...     model.state = model(torch.ones(1, 2))
        >>> model.state.requires_grad
        False
    """
    before = {module: _graph_attributes(module) for module in model.modules()}
    try:
        yield
    finally:
        for module, held in before.items():
            for name, tensor in _graph_attributes(module).items():
                if held.get(name) is not tensor:
                    setattr(module, name, tensor.detach())


def _graph_attributes(module: nn.Module) -> dict[str, Tensor]:
    attributes = vars(module).items()
    return {n: t for n, t in attributes if isinstance(t, Tensor) and t.grad_fn is not None}


@contextmanager
def _checkpoints_without_reentry(model: nn.Module) -> Iterator[None]:
    """Gradient checkpointing of transformers in the form that has a graph inside its layers."""
    with ExitStack() as stack:
        for module in model.modules():
            mine = vars(module).get("_gradient_checkpointing_func")
            if isinstance(mine, functools.partial) and mine.keywords.get("use_reentrant"):
                other = functools.partial(mine, use_reentrant=False)
                _swap(stack, vars(module), "_gradient_checkpointing_func", other)
        yield


@contextmanager
def checkpoints_off(model: nn.Module) -> Iterator[None]:
    """Run what gradient checkpointing of transformers would run twice once, and keep its graph."""
    with ExitStack() as stack:
        for module in model.modules():
            if "_gradient_checkpointing_func" in vars(module):
                _swap(stack, vars(module), "_gradient_checkpointing_func", _at_once)
        yield


def _at_once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@contextmanager
def _ordinary_tensors(model: nn.Module) -> Iterator[None]:
    """Copies in place of parameters and buffers that are inference tensors, shared ones once."""
    copies: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for module in model.modules():
            for named in (module._parameters, module._buffers):
                for name, tensor in named.items():
                    if tensor is None or not tensor.is_inference():
                        continue
                    if id(tensor) not in copies:
                        copies[id(tensor)] = _ordinary(tensor)
                    _swap(stack, named, name, copies[id(tensor)])
        yield


def _ordinary(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def _swap(stack: ExitStack, holder: dict[str, Any], name: str, value: Any) -> None:
    """Put ``value`` in place of an entry until the stack is left."""
    stack.callback(holder.__setitem__, name, holder[name])
    holder[name] = value
