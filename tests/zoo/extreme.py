"""Real models pushed to where numbers get small, large or all the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
)
from zoo import mamba2
from zoo.mamba import transformers_model

Explain = Callable[[Any, Tensor], Tensor]

TARGET = (-1, 3)

#: Each method with its defaults, of a model and token ids.
METHODS: dict[str, Explain] = {
    "raw": lambda model, ids: ImplicitAttention(model).attribute(ids),
    "rollout": lambda model, ids: ImplicitAttentionRollout(model).attribute(ids),
    "attribution": lambda model, ids: MambaAttribution(model).attribute(ids, TARGET),
    "norm": lambda model, ids: torch.stack(LatimNorm(model).maps(ids)),
    "alti": lambda model, ids: torch.stack(LatimALTI(model).maps(ids)),
    "logit": lambda model, ids: LatimLogit(model).attribute(ids, TARGET),
    "flow": lambda model, ids: LatimFlow(model).attribute(ids, TARGET),
    "lrp": lambda model, ids: MambaLRP(model).attribute(ids, TARGET),
}

FAMILIES = ("mamba", "mamba2")


def language_model(family: str) -> Any:
    """A small Mamba or Mamba-2 of transformers, in float32."""
    if family == "mamba":
        return transformers_model("mamba")
    return mamba2.make_model("mamba2")


def token_ids(batch: int = 2, tokens: int = 11) -> Tensor:
    return torch.randint(15, (batch, tokens))


def in_double(model: Any) -> Any:
    return copy.deepcopy(model).double()


@torch.no_grad()
def with_extreme_steps(model: Any, least: float = 1e-8, largest: float = 20.0) -> Any:
    """Step sizes from one bound to the other, and decay rates from a thousandth to a thousand.

    They are shuffled against each other, so that some channels keep all, and the decays of others
    underflow in one step.
    """
    for block in model.backbone.layers:
        mixer = block.mixer
        if hasattr(mixer, "dt_proj"):
            bias = mixer.dt_proj.bias
            mixer.dt_proj.weight.mul_(0.1)
        else:
            bias = mixer.dt_bias
            mixer.time_step_limit = (0.0, math.inf)
        steps = torch.logspace(math.log10(least), math.log10(largest), len(bias)).double()
        bias.copy_(steps.expm1().log()[torch.randperm(len(bias))])
        rates = torch.linspace(-3, 3, mixer.A_log.numel()) * math.log(10)
        mixer.A_log.copy_(rates[torch.randperm(len(rates))].view_as(mixer.A_log))
    return model


@torch.no_grad()
def with_silent_mixers(model: Any) -> Any:
    """Every matrix is zero: nothing gets through the convolutions."""
    for block in model.backbone.layers:
        block.mixer.conv1d.weight.zero_()
        block.mixer.conv1d.bias.zero_()
    return model


@torch.no_grad()
def with_large_activations(model: Any, factor: float) -> Any:
    """What enters the mixers is as many times larger."""
    for block in model.backbone.layers:
        block.norm.weight.mul_(factor)
    return model
