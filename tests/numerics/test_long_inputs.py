"""Over 16,384 tokens, float32 still says what float64 does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from torch import Tensor
from zoo.extreme import token_ids
from zoo.mamba import transformers_model
from zoo.mamba2 import make_model

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, LatimFlow

pytestmark = pytest.mark.slow
TOKENS = 16_384

#: Relative to the greatest entry.
LIMIT = 1e-5

ROWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "raw": lambda model, ids: ImplicitAttention(model).attribute(ids),
    "rollout": lambda model, ids: ImplicitAttentionRollout(model).attribute(ids),
    "flow": lambda model, ids: LatimFlow(model).attribute(ids, (-1, 3)),
}


def lasting(model: Any) -> Any:
    """Decays so slow that hundreds of tokens add up."""
    with torch.no_grad():
        for block in model.backbone.layers:
            block.mixer.A_log.uniform_(-6, -2)
    return model


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_float32_is_float64(family: str) -> None:
    mamba2 = family == "mamba2"
    model = lasting(make_model(family, chunk_size=64) if mamba2 else transformers_model(family))
    double = copy.deepcopy(model).double()
    ids = token_ids(1, TOKENS)
    for name, explain in ROWS.items():
        found, wanted = explain(model, ids), explain(double, ids)
        assert (found.dtype, wanted.dtype) == (torch.float32, torch.float64)
        assert oracles.relative_error(found, wanted) <= LIMIT, name
