"""Run compiled modules uncompiled, so that hooks set after compilation fire."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..errors import NoMixerError
from .changes import Shared, Undo, lasting


@contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Run compiled code uncompiled in the whole process, until the last nested context exits."""
    # without dynamo nothing was compiled; without set_stance torch is older than 2.6
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        if _has_compiled_parts(model):
            raise NoMixerError(
                "Parts of the model are compiled, and torch before 2.6 cannot run them uncompiled "
                "for the hooks to fire. Explain the model before compiling it, or update torch."
            )
        yield
        return
    with lasting(_switch.enter):
        yield


def _switch_off() -> Undo:
    stance = torch.compiler.set_stance("force_eager")  # this call has an effect at once
    return lambda: stance.__exit__(None, None, None)


_switch = Shared(_switch_off)


def _has_compiled_parts(model: nn.Module) -> bool:
    return any(
        getattr(m, "_compiled_call_impl", None) is not None or "_orig_mod" in m._modules
        for m in model.modules()
    )
