"""Call adapters, and check each result before anything is computed from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import AdapterError, CaptumSSMError, InputError
from ..mixers.base import Call, LinearMixer
from ..mixers.registry import class_path, how_to
from ..operators import Operator
from ..operators.base import COMPONENTS
from ..operators.kernels.portions import ran_out_of_memory
from .find import Mixer


def linear_form(mixer: Mixer, call: Call) -> LinearMixer:
    """Call the mixer's adapter, and check the result; errors name the mixer and the adapter."""
    try:
        with _blaming(mixer, "raised"):
            result: Any = mixer.linearize(mixer.module, call)
    except AdapterError as error:
        mismatched = _argument_with_other_batch_size(call)
        if mismatched is None:
            raise
        batch, shape = len(call.hidden_states), tuple(mismatched.shape)
        raise InputError(
            f"Layer {mixer.name!r} was called with {batch} examples, but also with a tensor of "
            f"shape {shape}. If forward_func uses a mask of the whole batch, pass the mask as "
            "additional_forward_args, so that internal_batch_size splits the mask as well."
        ) from error
    complaint = _complaint(result, call)
    if complaint is not None:
        raise _error(mixer, complaint)
    linear: LinearMixer = result
    return replace(linear, project=_with_checks(mixer, linear, call.output_tensor.shape[-1]))


def _argument_with_other_batch_size(call: Call) -> Tensor | None:
    """Return an argument of another batch size, such as a mask of the whole batch, or None."""
    batch, tokens = call.hidden_states.shape[:2]
    tensors = (x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor))
    of_tokens = (x for x in tensors if x.dim() >= 2 and tokens in x.shape[1:])
    return next((x for x in of_tokens if len(x) not in (1, batch)), None)


@contextmanager
def _blaming(mixer: Mixer, action: str) -> Iterator[None]:
    """Turn an exception of an adapter's code into an error that names the mixer and the adapter."""
    try:
        yield
    except Exception as error:
        if _is_reraised(error):
            raise
        raise _error(mixer, f"{action} {type(error).__name__}: {error}") from error


def _is_reraised(error: Exception) -> bool:
    """Return True for errors that the adapter did not cause, such as running out of memory."""
    if isinstance(error, RuntimeError) and ran_out_of_memory(error):
        return True
    # torch's checkpoints stop a forward that they repeat early, by an exception
    by_checkpoint = type(error).__module__ == "torch.utils.checkpoint"
    return by_checkpoint or isinstance(error, CaptumSSMError | ImportError | MemoryError)


def _complaint(result: Any, call: Call) -> str | None:
    """Describe the mistake in an adapter's result and the expected form; None if it is right."""
    if not isinstance(result, LinearMixer):
        return f"returned {_named(result)} in place of a captum_ssm.mixers.LinearMixer"
    # as Any, because an adapter may have set fields of other types than declared
    fields: tuple[Any, ...] = result.values, result.operator, result.project, result.mask
    values, operator, project, mask = fields
    if not (isinstance(values, Tensor) and values.dim() == 4 and values.is_floating_point()):
        return f"returned values={_named(values)} in place of a floating tensor (B, L, H, P)"
    if not isinstance(operator, Operator):
        return f"returned operator={_named(operator)} in place of a captum_ssm.operators.Operator"
    if not callable(project):
        return f"returned project={_named(project)} in place of a function"
    shape, returned = tuple(values.shape), tuple(call.output_tensor.shape)
    acts_on = tuple(getattr(operator, "shape", ()))
    if acts_on != shape:
        return f"returned values of shape {shape} but an operator of shape {acts_on or 'unknown'}"
    if result.end_to_end:
        tokens = shape[0] * shape[1] if mask is None else int(mask.sum())
        if (1, tokens) != returned[:2]:
            return (
                f"returned an end_to_end operator on {tokens} tokens for a module that returned "
                f"{returned}: the module's output must be (1, {tokens}, E)"
            )
    elif result.map is None and shape[:2] != returned[:2]:
        return (
            f"returned values of shape {shape} for a module that returned {returned}: (B, L, H, P) "
            f"must begin with {returned[:2]}"
        )
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool
    if mask is not None and not (is_mask and tuple(mask.shape) == shape[:2]):
        return f"returned mask={_named(mask)} in place of booleans (B, L) = {shape[:2]}"
    components = (None, *COMPONENTS)
    unknown = next((leaf for leaf in operator.leaves() if leaf.component not in components), None)
    if unknown is not None:
        return (
            f"returned an operator with a {type(unknown).__name__} of component="
            f"{unknown.component!r}, which no value of components= selects, so it would always be "
            f"left out. Use one of {sorted(COMPONENTS)}, or None for a part that is always kept"
        )
    if _is_live(call.hidden_states) and not values.requires_grad:
        return _cut_off_complaint("values", "call.hidden_states")
    return None


def _with_checks(mixer: Mixer, linear: LinearMixer, width: int) -> Callable[[Tensor], Tensor]:
    """Wrap the output projection so that each call checks its argument and its result."""
    project: Callable[[Tensor], Any] = linear.project
    shape, live = tuple(linear.operator.shape), linear.values.requires_grad
    expected = (*shape[:2], width)

    def guarded(y: Tensor) -> Tensor:
        check_operator(mixer, shape, y)
        if live and torch.is_grad_enabled() and not y.requires_grad:
            raise _error(mixer, _cut_off_complaint("the operator's output", "its values"))
        with _blaming(mixer, "returned a project that raised"):
            out = project(y)
        if not (isinstance(out, Tensor) and tuple(out.shape) == expected):
            raise _error(
                mixer, f"returned a project that returns {_named(out)}, not a tensor of {expected}"
            )
        if _is_live(y) and not out.requires_grad:
            raise _error(mixer, _cut_off_complaint("project's output", "its argument"))
        return out

    return guarded


def check_operator(mixer: Mixer, shape: tuple[int, ...], y: Tensor) -> None:
    """Raise if the operator's output ``y`` does not have the shape of the operator's values."""
    if tuple(y.shape) != shape:
        complaint = f"turns values of shape {shape} into {tuple(y.shape)}: the shape must be kept"
        raise _error(mixer, f"returned an operator that {complaint}")


def _is_live(x: Tensor) -> bool:
    """Return True if autograd must record the results that are computed from ``x``."""
    return torch.is_grad_enabled() and x.requires_grad


def _cut_off_complaint(result: str, source: str) -> str:
    """Return the complaint about a result that has no gradient with respect to its source."""
    return (
        f"cut {result} off from {source} in the autograd graph, so no gradient and no relevance "
        "reaches the input. Remove detach, no_grad and .data from this computation"
    )


def _named(value: Any) -> str:
    """Describe a value for an error message: a tensor's shape and dtype, or an object's class."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return "None" if value is None else f"an object of class {type(value).__name__}"


def _error(mixer: Mixer, complaint: str) -> AdapterError:
    """Return an error that names the mixer, its class and its adapter before the complaint."""
    adapter = mixer.linearize
    name = getattr(adapter, "__qualname__", type(adapter).__qualname__)
    module_name = getattr(adapter, "__module__", type(adapter).__module__)
    like = mixer.architecture.like
    served = f", which is served with like={like!r}" if like else ""
    return AdapterError(
        f"Layer {mixer.name!r}, a {class_path(type(mixer.module))}{served}: its adapter "
        f"{module_name}.{name} {complaint}. Correct the adapter as described in {how_to()}."
    )
