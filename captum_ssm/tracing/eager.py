"""Running compiled modules as they were written, so that hooks set afterwards fire."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import NoMixerError
from .changes import Undo, lasting

_users = 0
_stance: Any = None


@contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Switch compiled code off until the last user leaves; the switch is the process's own."""
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        if _has_compiled_parts(model):
            raise NoMixerError(
                "Parts of the model are compiled, and torch before 2.6 cannot run them uncompiled "
                "for the hooks to fire. Explain the model before compiling it, or update torch."
            )
        yield
        return
    with lasting(_enter):
        yield


def _enter() -> Undo:
    global _users, _stance
    if _users == 0:
        _stance = torch.compiler.set_stance("force_eager")
    _users += 1
    return _leave


def _leave() -> None:
    global _users, _stance
    _users -= 1
    if _users == 0:
        _stance.__exit__(None, None, None)
        _stance = None


def _has_compiled_parts(model: nn.Module) -> bool:
    return any(
        getattr(m, "_compiled_call_impl", None) is not None or "_orig_mod" in m._modules
        for m in model.modules()
    )
