"""Spreading a model over devices, as ``device_map`` of transformers does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from captum_ssm._optional import optional
from captum_ssm.errors import OptionError
from captum_ssm.tracing import find_mixers

#: As accelerate understands them.
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def placed(model: nn.Module, device_map: str) -> nn.Module:
    """The model spread over devices by accelerate; blocks stay whole."""
    accelerate = optional("accelerate", "accelerate", "device_map")
    if device_map not in STRATEGIES:
        return _dispatched(accelerate, model, {"": _device(device_map)})
    blocks = sorted({type(block).__name__ for m in find_mixers(model) for block in m.blocks})
    room = None
    if device_map != "sequential":
        room = accelerate.utils.get_balanced_memory(
            model, no_split_module_classes=blocks, low_zero=device_map == "balanced_low_0"
        )
    places = accelerate.infer_auto_device_map(
        model, max_memory=room, no_split_module_classes=blocks
    )
    return _dispatched(accelerate, model, places)


def _device(name: str) -> str:
    try:
        return str(torch.device(name))
    except RuntimeError:
        raise OptionError(
            f"device_map={name!r} is neither a device nor one of {STRATEGIES}."
        ) from None


def _dispatched(accelerate: Any, model: nn.Module, places: dict[str, Any]) -> nn.Module:
    """With hooks also where there is one place only, so that inputs are moved in any case."""
    spread: nn.Module = accelerate.dispatch_model(model, places, force_hooks=True)
    return spread
