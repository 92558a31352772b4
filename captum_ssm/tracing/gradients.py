"""Prepare a model so that autograd can record its runs inside a ``with``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .changes import Undo, lasting, replaced_in_thread, value_in_thread
from .hooks import swap_first

Function = Callable[..., Any]
#: The dictionary of a module's parameters or buffers.
Tensors = dict[str, Any]

#: Attribute in which transformers' modules store their checkpointing function.
_CHECKPOINTING = "_gradient_checkpointing_func"


@contextmanager
def recordable(model: nn.Module) -> Iterator[None]:
    """Prepare the model for autograd inside the ``with``, and drop stored graphs at exit.

    Weights made under ``torch.inference_mode``, which autograd refuses, are replaced by copies.
    """
    with ExitStack() as stack:
        stack.enter_context(_ordinary_tensors(model))
        stack.enter_context(_checkpoints_without_reentry(model))
        stack.enter_context(graphs_dropped(model))
        yield


@contextmanager
def graphs_dropped(model: nn.Module) -> Iterator[None]:
    """Detach the tensors that a run has stored as plain attributes of the model's modules.

    RecurrentGemma, for example, stores its last state. An attached state would keep the graph of
    the whole run in memory, and the model could neither be copied nor pickled.

    Args:
        model: the module that runs inside the ``with``.

    Example:
        >>> import torch
        >>> from captum_ssm.tracing import graphs_dropped
        >>> model = torch.nn.Linear(2, 2)
        >>> with graphs_dropped(model):
        ...     model.state = model(torch.ones(1, 2))
        >>> model.state.requires_grad
        False
    """
    before = _graph_attributes(model)  # of the user, which stay

    def drop() -> None:
        for (module, name), tensor in _graph_attributes(model).items():
            if before.get((module, name)) is not tensor:
                setattr(module, name, tensor.detach())

    with lasting(lambda: drop):  # no change now, but an undo at exit
        yield


def in_graph(x: Tensor) -> Tensor:
    """Return ``x`` if it is part of an autograd graph; else begin a graph at its values.

    Without this call autograd records nothing for a frozen model that runs on token ids.
    """
    return x if x.requires_grad else new_graph(x)


def new_graph(x: Tensor) -> Tensor:
    """Return the values of ``x`` as a tensor at which an autograd graph begins.

    The tensor is not a leaf, so that the model may change it in place.
    :meth:`.Layer.check_unchanged` detects such a change.
    """
    return x.detach() - x.new_zeros((), requires_grad=True)


def _graph_attributes(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Return the tensors with a graph that are plain attributes of a model's modules."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    }


@contextmanager
def _checkpoints_without_reentry(model: nn.Module) -> Iterator[None]:
    """Make transformers use non-reentrant checkpoints, which keep a graph inside layers."""
    with ExitStack() as stack:
        for module in model.modules():
            checkpoint = value_in_thread(module, _CHECKPOINTING)
            if isinstance(checkpoint, functools.partial) and "use_reentrant" in checkpoint.keywords:
                non_reentrant = functools.partial(checkpoint, use_reentrant=False)
                replacement = functools.partial(_checkpoint_run, non_reentrant)
                stack.enter_context(replaced_in_thread(module, _CHECKPOINTING, replacement))
        yield


def _checkpoint_run(checkpoint: Function, function: Function, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a function after making its first tensor argument part of the autograd graph.

    Hooks on a layer of transformers 4 run inside the layer's checkpoint. A graph that begins in
    such a hook would be lost when the backward pass runs the layer again.
    """
    live = swap_first(args, in_graph)[0] if torch.is_grad_enabled() else args
    return checkpoint(function, *live, **kwargs)


@contextmanager
def checkpoints_off(model: nn.Module) -> Iterator[None]:
    """Switch off transformers' gradient checkpointing, so that each layer runs only once."""
    with ExitStack() as stack:
        for module in model.modules():
            if _CHECKPOINTING in vars(module):
                stack.enter_context(replaced_in_thread(module, _CHECKPOINTING, _run_directly))
        yield


def _run_directly(function: Function, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@dataclass
class _ReplacedTensor:
    """An inference tensor that a copy replaces, and the number of runs that use the copy."""

    original: Tensor
    users: int


_replaced: dict[tuple[int, str], _ReplacedTensor] = {}


def _ordinary_tensors(model: nn.Module) -> AbstractContextManager[None]:
    """Replace inference tensors among parameters and buffers by copies inside the ``with``.

    A tensor shared by several modules is copied once. The last nested context restores it.
    """

    def replace_all() -> Undo:
        copies: dict[int, Tensor] = {}
        with ExitStack() as stack:  # restores what was replaced if a copy needs too much memory
            for module in model.modules():
                for tensors in (module._parameters, module._buffers):
                    for name, tensor in tensors.items():
                        if tensor is not None and _replace(tensors, name, tensor, copies):
                            stack.callback(_restore, tensors, name)
            return stack.pop_all().close

    return lasting(replace_all)


def _replace(tensors: Tensors, name: str, tensor: Tensor, copies: dict[int, Tensor]) -> bool:
    """Replace an inference tensor by a copy, or count one more user of its copy.

    Return True if :func:`_restore` has to be called. ``copies`` has the copies by their originals'
    ids, for tensors that modules share.
    """
    key = (id(tensors), name)
    if key in _replaced:  # by another run
        _replaced[key].users += 1
        return True
    if not tensor.is_inference():
        return False
    if id(tensor) not in copies:
        copies[id(tensor)] = _ordinary_copy(tensor)
    _replaced[key] = _ReplacedTensor(tensor, users=1)
    tensors[name] = copies[id(tensor)]
    return True


def _restore(tensors: Tensors, name: str) -> None:
    """Restore the inference tensor ``tensors[name]`` once no other run uses the copy."""
    key = (id(tensors), name)
    _replaced[key].users -= 1
    if not _replaced[key].users:
        tensors[name] = _replaced.pop(key).original


def _ordinary_copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
