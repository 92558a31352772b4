"""What kernels written for Triton share, which is imported once one of them runs."""

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
    """A kernel as Triton compiles it, to be launched on a grid.

    Triton looks for names where a function was written: in place of ``tl`` and of the helpers there
    stands afterwards what they are to it.

    Args:
        kernel: reads, computes and writes.
        helpers: functions of the same module that it calls.
    """
    triton, names = import_module("triton"), kernel.__globals__
    names["tl"] = import_module("triton.language")
    for helper in filter(inspect.isfunction, helpers):  # and not one that another kernel calls, too
        names[helper.__name__] = triton.jit(helper)
    return triton.jit(kernel)


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of a tensor the current one, on which Triton launches.

    Of a model on several GPUs, it need not be.

    Args:
        x: the tensor; on a processor, where Triton's interpreter runs, nothing is done.
    """
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def composed(decay, state, next_decay, next_state):  # type: ignore[no-untyped-def]
    """Two steps of a recurrence, each from a state to its decay times it and what is added, as one.

    For kernels, as a helper: Triton compiles it.
    """
    return decay * next_decay, next_decay * state + next_state


def power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()
