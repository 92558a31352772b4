"""Models, and the package's contribution vectors put together, for the tests of LATIM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import architectures, networks

from captum_ssm.attr.vectors.contributions import Contributions, tiles
from captum_ssm.tracing import Layer
from helpers.contract import record as record


def a_model(name: str, patch: pytest.MonkeyPatch) -> architectures.Case:
    make = networks.NETWORKS.get(name) or networks.NETWORKS[f"{name} with attention"]
    return make(patch)


@torch.no_grad()
def all_vectors(layer: Layer, activation: str = "linearized", queries: Any = None) -> Tensor:
    """T (B, Q, L, E) put together from its tiles."""
    parts = Contributions(layer, activation)
    batch, tokens = parts.shape[:2]
    index = torch.as_tensor(range(tokens) if queries is None else queries).expand(batch, -1)
    out = parts.weight.new_zeros(*index.shape, tokens, parts.weight.shape[1])
    for tile in tiles([parts], index):
        assert not out[:, tile.queries, tile.sources].any(), "tiles overlap"
        out[:, tile.queries, tile.sources] = tile.vectors
    return out
