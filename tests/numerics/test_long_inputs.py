"""Over 16,384 tokens, float32 still says what float64 does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
import transformers
from torch import Tensor
from zoo.mamba import randomise

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


def mamba() -> Any:
    config = transformers.MambaConfig(
        vocab_size=19, hidden_size=6, state_size=3, num_hidden_layers=2, conv_kernel=3
    )
    return transformers.MambaForCausalLM(config)


def mamba2() -> Any:
    config = transformers.Mamba2Config(
        vocab_size=19,
        hidden_size=6,
        state_size=3,
        num_hidden_layers=2,
        conv_kernel=3,
        head_dim=4,
        num_heads=3,
        n_groups=1,
        chunk_size=64,
    )
    return transformers.Mamba2ForCausalLM(config)


def lasting(model: Any) -> Any:
    """Random parameters, with decays so slow that hundreds of tokens add up."""
    randomise(model)
    with torch.no_grad():
        for block in model.backbone.layers:
            block.mixer.A_log.uniform_(-6, -2)
    return model


MAKE = {"mamba": mamba, "mamba2": mamba2}


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_float32_is_float64(family: str) -> None:
    model = lasting(MAKE[family]())
    double = copy.deepcopy(model).double()
    ids = torch.randint(19, (1, TOKENS))
    for name, explain in ROWS.items():
        found, wanted = explain(model, ids), explain(double, ids)
        assert (found.dtype, wanted.dtype) == (torch.float32, torch.float64)
        assert oracles.relative_error(found, wanted) <= LIMIT, name


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_rows_divided_by_their_sums(family: str) -> None:
    """Decays are ordinary here: no row sums to almost zero, which would magnify all rounding."""
    model = randomise(MAKE[family]())
    double = copy.deepcopy(model).double()
    ids = torch.randint(19, (1, TOKENS))
    found, wanted = (
        ImplicitAttentionRollout(each).attribute(ids, normalize_rows=True)
        for each in (model, double)
    )
    assert oracles.relative_error(found, wanted) <= LIMIT
