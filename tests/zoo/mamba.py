"""Small real models of transformers with Mamba-1 mixers: nothing in them has a trivial value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from helpers.versions import named
from torch import Tensor, nn


@torch.no_grad()
def randomise(model: nn.Module) -> nn.Module:
    """Every parameter random: no bias 0, no norm weight 1, no structured decay."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape).to(parameter)
        kind = name.rsplit(".", 1)[-1]
        if kind == "A_log":
            parameter.copy_(0.6 * noise)
        elif kind == "D":
            parameter.copy_(noise)
        elif "norm" in name and kind == "weight":
            parameter.copy_(1 + 0.3 * noise)
        elif name.endswith("dt_proj.bias"):
            parameter.copy_(noise - 1)
        elif kind == "bias":
            parameter.copy_(0.4 * noise)
        elif "conv1d" in name or "x_proj" in name:
            parameter.copy_(noise / math.sqrt(parameter[0].numel()))
        else:
            parameter.copy_(0.8 * noise / math.sqrt(parameter.shape[-1]))
    return model.eval()


def transformers_model(family: str = "mamba", **options: Any) -> Any:
    """A MambaForCausalLM or FalconMambaForCausalLM of two layers, of E = 5 and D = 10."""
    name = {"mamba": "Mamba", "falcon_mamba": "FalconMamba"}[family]
    config, model = named(f"{name}Config"), named(f"{name}ForCausalLM")
    small = {
        "vocab_size": 19, "hidden_size": 5, "num_hidden_layers": 2, "state_size": 3,
        "conv_kernel": 4, "time_step_rank": 2,
    }  # fmt: skip
    if family == "falcon_mamba":  # norms of few features that do not blow rounding errors up
        small["mixer_rms_eps"] = 0.05
    return randomise(model(config(**small | options)))


def padded_batch(lengths: Sequence[int], vocabulary: int = 19) -> tuple[Tensor, Tensor]:
    """Token ids and a mask, padded on the left."""
    tokens = max(lengths)
    ids = torch.randint(vocabulary, (len(lengths), tokens))
    mask = torch.zeros(len(lengths), tokens, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, tokens - length :] = 1
    return ids, mask
