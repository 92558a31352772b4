"""Models made fit for autograd to record their run, for the time of a ``with``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .changes import Undo, instead, lasting, of_this_thread
from .hooks import swap_first

Function = Callable[..., Any]
#: The dictionary of a module's parameters or buffers.
Named = dict[str, Any]

#: Attribute of modules of transformers for the function that they checkpoint with.
_CHECKPOINTING = "_gradient_checkpointing_func"


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
    """Detach tensors of the run that the model keeps as plain attributes.

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

    def drop() -> None:
        for module, held in before.items():
            for name, tensor in _graph_attributes(module).items():
                if held.get(name) is not tensor:
                    setattr(module, name, tensor.detach())

    with lasting(lambda: drop):
        yield


def in_graph(x: Tensor) -> Tensor:
    """Return the same values as part of an autograd graph.

    A frozen model on token ids records nothing by itself.
    """
    return x if x.requires_grad else begun(x)


def begun(x: Tensor) -> Tensor:
    """Return the same values at the start of an autograd graph.

    They are no leaf, for the model may write to them; :meth:`.Layer.check_unchanged` sees that.
    """
    return x.detach() - x.new_zeros((), requires_grad=True)


def _graph_attributes(module: nn.Module) -> dict[str, Tensor]:
    attributes = vars(module).items()
    return {n: t for n, t in attributes if isinstance(t, Tensor) and t.grad_fn is not None}


@contextmanager
def _checkpoints_without_reentry(model: nn.Module) -> Iterator[None]:
    """Let transformers checkpoint in the form that has a graph inside layers, not "reentrant"."""
    with ExitStack() as stack:
        for module in model.modules():
            present = of_this_thread(module, _CHECKPOINTING)
            if isinstance(present, functools.partial) and "use_reentrant" in present.keywords:
                other = functools.partial(present, use_reentrant=False)
                other = functools.partial(_from_live, other)
                stack.enter_context(instead(module, _CHECKPOINTING, other))
        yield


def _from_live(checkpoint: Function, function: Function, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a function after its first argument has joined the graph.

    Hooks on a layer of transformers 4 run inside its checkpoint; a graph that begins in a hook
    would be gone when the backward pass runs the layer again.
    """
    live = swap_first(args, in_graph)[0] if torch.is_grad_enabled() else args
    return checkpoint(function, *live, **kwargs)


@contextmanager
def checkpoints_off(model: nn.Module) -> Iterator[None]:
    """Let transformers keep the graph of layers that it would checkpoint, and run them once."""
    with ExitStack() as stack:
        for module in model.modules():
            if _CHECKPOINTING in vars(module):
                stack.enter_context(instead(module, _CHECKPOINTING, _at_once))
        yield


def _at_once(function: Function, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@dataclass
class _Lent:
    """An inference tensor that a copy replaces, and how many threads use the copy."""

    original: Tensor
    users: int


_lent: dict[tuple[int, str], _Lent] = {}


def _ordinary_tensors(model: nn.Module) -> AbstractContextManager[None]:
    """Replace inference tensors among parameters and buffers by copies, until the last user leaves.

    Shared tensors share one copy.
    """

    def lend() -> Undo:
        copies: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for module in model.modules():
                for named in (module._parameters, module._buffers):
                    for name, tensor in named.items():
                        if tensor is not None and _lend(named, name, tensor, copies):
                            stack.callback(_take_back, named, name)
            return stack.pop_all().close

    return lasting(lend)


def _lend(named: Named, name: str, tensor: Tensor, copies: dict[int, Tensor]) -> bool:
    """Put a copy into an entry that is an inference tensor; return whether it has one now."""
    key = (id(named), name)
    if key in _lent:
        _lent[key].users += 1
        return True
    if not tensor.is_inference():
        return False
    if id(tensor) not in copies:
        copies[id(tensor)] = _ordinary(tensor)
    _lent[key] = _Lent(tensor, users=1)
    named[name] = copies[id(tensor)]
    return True


def _take_back(named: Named, name: str) -> None:
    """Put the inference tensor back, unless another thread still has its copy."""
    key = (id(named), name)
    _lent[key].users -= 1
    if not _lent[key].users:
        named[name] = _lent.pop(key).original


def _ordinary(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
