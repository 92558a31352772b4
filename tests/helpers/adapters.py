"""Adapters of the package's own, with something added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from captum_ssm import register_mixer
from captum_ssm.mixers import Call, LinearMixer, registry
from captum_ssm.mixers.table import Joins

Adapter = Callable[[Any, Call], LinearMixer]


def adapter_of(mixer: nn.Module) -> Adapter:
    found = registry.adapter_for(mixer)
    assert found is not None, f"{type(mixer).__name__} is no mixer"
    return found[1]


def joins_of(mixer: nn.Module) -> Joins:
    """How its output joins the stream."""
    found = registry.adapter_for(mixer)
    assert found is not None, f"{type(mixer).__name__} is no mixer"
    return found[0].joins


def forgetting_the_skip(mixer: nn.Module) -> None:
    """Register an adapter for the mixer's class that leaves its skip connection out."""
    right = adapter_of(mixer)

    def without_skip(module: Any, call: Call) -> LinearMixer:
        return right(module, call).restrict({"conv", "activation", "scan", "gate"})

    register_mixer(type(mixer), without_skip)


def cut_from_their_graphs(mixer: nn.Module) -> None:
    """Register an adapter for the mixer's class all of whose coefficients are detached."""
    right = adapter_of(mixer)

    def detached(module: Any, call: Call) -> LinearMixer:
        with torch.no_grad():
            operator = right(module, call).operator
        return replace(right(module, call), operator=operator)

    register_mixer(type(mixer), detached)
