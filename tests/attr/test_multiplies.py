"""Which methods say contributions of the input itself, and which say weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import mamba_lm, token_ids

import captum_ssm

CONTRIBUTIONS = ["LatimFlow", "LatimLogit", "MambaLRP"]
WEIGHTS = [
    "ImplicitAttention",
    "ImplicitAttentionRollout",
    "LatimALTI",
    "LatimNorm",
    "MambaAttribution",
    "TransformerAttribution",
]


def method(name: str, model: Any) -> Any:
    return getattr(captum_ssm, name)(model)


@pytest.mark.parametrize("name", CONTRIBUTIONS)
def test_contributions_are_multiplied_by_the_input(name: str) -> None:
    """What the embedding does not hold contributes nothing."""
    model = mamba_lm().double()
    asked = method(name, model)
    assert asked.multiplies_by_inputs
    ids = token_ids(1, 6)
    with torch.no_grad():
        model.get_input_embeddings().weight[ids[0, 2]] = 0
        model.get_input_embeddings().weight[ids[0, 4]] *= 2
    silent = ids[0] == ids[0, 2]
    relevance = asked.attribute(ids, target=(-1, 3))[0]
    if name != "LatimLogit":  # its map of the earlier layers has shares for every token
        assert not relevance[silent].any()
    assert relevance[~silent].all()


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_not(name: str) -> None:
    assert not method(name, mamba_lm()).multiplies_by_inputs
