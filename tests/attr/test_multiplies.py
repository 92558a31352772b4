"""Which methods say contributions of the input itself, and which say weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo.small import VOCABULARY, mamba_lm

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
    ids = torch.randperm(VOCABULARY)[None, :7]
    target = int(ids[0, -1])  # no token of the prompt: embedding and head are tied
    ids, silent = ids[:, :-1], torch.arange(6) == 2
    with torch.no_grad():
        model.get_input_embeddings().weight[ids[0, 2]] = 0
        model.get_input_embeddings().weight[ids[0, 4]] *= 2
    options = {"baselines": 0} if name == "LatimFlow" else {}  # nothing, not the mean of the tokens
    relevance = asked.attribute(ids, target=(-1, target), **options)[0]
    if name != "LatimLogit":  # its map of the earlier layers has shares for every token
        assert not relevance[silent].any()
    assert relevance[~silent].all()


@pytest.mark.parametrize("name", CONTRIBUTIONS)
def test_contributions_have_a_delta(name: str) -> None:
    """Captum asks before it computes one."""
    asked, ids = method(name, mamba_lm()), torch.arange(6)[None]
    assert asked.has_convergence_delta()
    relevance, delta = asked.attribute(ids, target=(-1, 3), return_convergence_delta=True)
    assert relevance.shape == ids.shape and delta.shape == (1,)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_not(name: str) -> None:
    asked = method(name, mamba_lm())
    assert not asked.multiplies_by_inputs and not asked.has_convergence_delta()
