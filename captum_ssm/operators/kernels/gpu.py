"""Helpers of kernels written for Triton, which is imported once one of them runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def jitted(kernel: Callable[..., None], *helpers: Callable[..., Any]) -> Any:
    """Wrap a kernel for Triton, to be launched on a grid.

    Triton looks names up in the function's module: this sets ``tl`` and the helpers there to
    Triton's language and to the wrapped helpers.

    Args:
        kernel: the function.
        helpers: functions of the same module that it calls.
    """
    triton, names = import_module("triton"), kernel.__globals__
    names["tl"] = import_module("triton.language")
    for helper in filter(inspect.isfunction, helpers):  # and not one that another kernel calls, too
        names[helper.__name__] = triton.jit(helper)
    return triton.jit(kernel)


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which a tensor's GPU is the current one, on which Triton launches.

    A model may be on several GPUs.  On a processor, where Triton's interpreter runs, nothing
    changes.
    """
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def composed(decay, state, next_decay, next_state):  # type: ignore[no-untyped-def]
    """Compose two steps h -> decay h + state of a recurrence; a helper that Triton compiles."""
    return decay * next_decay, next_decay * state + next_state


def power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()
