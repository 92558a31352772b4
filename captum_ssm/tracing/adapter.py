"""Calls of adapters, whose results are checked before anything is computed from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import AdapterError, CaptumSSMError, InputError
from ..mixers.base import Call, LinearMixer
from ..mixers.registry import HOW_TO, class_path
from ..operators import Operator
from ..operators.base import COMPONENTS
from ..operators.kernels.portions import ran_out_of_memory
from .find import Mixer


def linear_form(mixer: Mixer, call: Call) -> LinearMixer:
    """Call the mixer's adapter, and check its result; errors name the mixer and the adapter."""
    try:
        with _blaming(mixer, "raised"):
            found: Any = mixer.linearize(mixer.module, call)
    except AdapterError as error:
        other = _of_another_batch(call)
        if other is None:
            raise
        batch, shape = len(call.hidden_states), tuple(other.shape)
        raise InputError(
            f"Layer {mixer.name!r} reads {batch} examples, and beside them a tensor of shape "
            f"{shape}. Does forward_func hold a mask of the whole batch, and is "
            "internal_batch_size smaller? Pass it as additional_forward_args, which are cut alike."
        ) from error
    complaint = _complaint(found, call)
    if complaint is not None:
        raise _error(mixer, complaint)
    linear: LinearMixer = found
    return replace(linear, project=_guarded(mixer, linear, call.output_tensor.shape[-1]))


def _of_another_batch(call: Call) -> Tensor | None:
    """Return an argument of the call with the sequence's tokens, but another number of examples."""
    batch, tokens = call.hidden_states.shape[:2]
    tensors = (x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor))
    of_tokens = (x for x in tensors if x.dim() >= 2 and tokens in x.shape[1:])
    return next((x for x in of_tokens if len(x) not in (1, batch)), None)


@contextmanager
def _blaming(mixer: Mixer, what: str) -> Iterator[None]:
    """Turn an exception of an adapter's code into an error that names the mixer and the adapter."""
    try:
        yield
    except Exception as error:
        if _means_something_else(error):
            raise
        raise _error(mixer, f"{what} {type(error).__name__}: {error}") from error


def _means_something_else(error: Exception) -> bool:
    """Return True if an error cannot be the fault of the adapter in which it arose."""
    if isinstance(error, RuntimeError) and ran_out_of_memory(error):
        return True
    # torch's checkpoints end the run of a forward that they repeat by an exception
    by_checkpoint = type(error).__module__ == "torch.utils.checkpoint"
    return by_checkpoint or isinstance(error, CaptumSSMError | ImportError | MemoryError)


def _complaint(found: Any, call: Call) -> str | None:
    """Return the fault of an adapter's result and the expected form; None if it is right."""
    if not isinstance(found, LinearMixer):
        return f"returned {_named(found)} in place of a captum_ssm.mixers.LinearMixer"
    parts: tuple[Any, ...] = found.values, found.operator, found.project, found.mask
    values, operator, project, mask = parts
    if not (isinstance(values, Tensor) and values.dim() == 4 and values.is_floating_point()):
        return f"returned values={_named(values)} in place of a floating tensor (B, L, H, P)"
    if not isinstance(operator, Operator):
        return f"returned operator={_named(operator)} in place of a captum_ssm.operators.Operator"
    if not callable(project):
        return f"returned project={_named(project)} in place of a function"
    shape, returned = tuple(values.shape), tuple(call.output_tensor.shape)
    acts_on = tuple(getattr(operator, "shape", ()))
    if acts_on != shape:
        return f"returned values of shape {shape} and an operator on {acts_on or 'no shape'}"
    if found.end_to_end:
        real = shape[0] * shape[1] if mask is None else int(mask.sum())
        if (1, real) != returned[:2]:
            return (
                f"returned examples of {real} tokens end to end for a module that returned "
                f"{returned}"
            )
    elif found.map is None and shape[:2] != returned[:2]:
        return (
            f"returned values of shape {shape} for a module that returned {returned}: (B, L, H, P) "
            f"must begin with {returned[:2]}"
        )
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool
    if mask is not None and not (is_mask and tuple(mask.shape) == shape[:2]):
        return f"returned mask={_named(mask)} in place of booleans (B, L) = {shape[:2]}"
    known = (None, *COMPONENTS)
    strange = next((leaf for leaf in operator.leaves() if leaf.component not in known), None)
    if strange is not None:
        return (
            f"returned an operator with a {type(strange).__name__} of component="
            f"{strange.component!r}: no choice of components names it, so that it would be left "
            f"out of all. Use one of {sorted(COMPONENTS)}, or None for a part that is always kept"
        )
    if _follows(call.hidden_states) and not values.requires_grad:
        return _cut_off("values", "call.hidden_states")
    return None


def _guarded(mixer: Mixer, linear: LinearMixer, width: int) -> Callable[[Tensor], Tensor]:
    """Return the output projection with checks of its argument and result at each call."""
    project: Callable[[Tensor], Any] = linear.project
    shape, live = tuple(linear.operator.shape), linear.values.requires_grad
    expected = (*shape[:2], width)

    def guarded(y: Tensor) -> Tensor:
        check_operator(mixer, shape, y)
        if live and torch.is_grad_enabled() and not y.requires_grad:
            raise _error(mixer, _cut_off("the operator's output", "its values"))
        with _blaming(mixer, "returned a project that raised"):
            out = project(y)
        if not (isinstance(out, Tensor) and tuple(out.shape) == expected):
            raise _error(
                mixer, f"returned a project that makes {_named(out)} in place of {expected}"
            )
        if _follows(y) and not out.requires_grad:
            raise _error(mixer, _cut_off("project's output", "its argument"))
        return out

    return guarded


def check_operator(mixer: Mixer, shape: tuple[int, ...], y: Tensor) -> None:
    """Raise for an operator that does not keep the shape of its values."""
    if tuple(y.shape) != shape:
        raise _error(mixer, f"returned an operator that makes {tuple(y.shape)} of {shape}")


def _follows(x: Tensor) -> bool:
    """Return True if results computed from ``x`` have to be in its graph."""
    return torch.is_grad_enabled() and x.requires_grad


def _cut_off(what: str, source: str) -> str:
    return (
        f"cut {what} off from {source}: no gradient gets through, and no relevance. Leave out "
        "detach, no_grad and .data there"
    )


def _named(value: Any) -> str:
    """Return a value in few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return "None" if value is None else f"an object of class {type(value).__name__}"


def _error(mixer: Mixer, complaint: str) -> AdapterError:
    adapter = mixer.linearize
    name = getattr(adapter, "__qualname__", type(adapter).__qualname__)
    where = getattr(adapter, "__module__", type(adapter).__module__)
    like = mixer.architecture.like
    served = f", which is served with like={like!r}" if like else ""
    return AdapterError(
        f"Layer {mixer.name!r}, a {class_path(type(mixer.module))}{served}: its adapter "
        f"{where}.{name} {complaint}. {HOW_TO} says what an adapter returns."
    )
