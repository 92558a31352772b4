"""RWKV-7 in plain PyTorch: the operator is the mixer, in float64 and beside fla's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import relative_error
from oracles import rwkv7 as oracle

from captum_ssm import LatimFlow, StateMemory, trace
from captum_ssm.models import RWKV7
from captum_ssm.operators import DeltaRule

pytestmark = pytest.mark.slow

RANKS = {"decay_rank": 4, "step_rank": 3, "value_rank": 2, "gate_rank": 5}


def model(depth: int = 3) -> Any:
    return oracle.randomise(RWKV7(20, 24, depth, 8, 10, **RANKS)).double()


def test_values_reach_later_layers_past_those_between() -> None:
    """Where layers between add nothing, all relevance of a token goes by the first one's values."""
    network, ids = model(2), torch.randint(20, (1, 6))
    first, second = (block.att for block in network.blocks)
    with torch.no_grad():
        first.output.weight.zero_()
        for block in network.blocks:
            block.ffn.value.weight.zero_()
        second.v0.fill_(50.0)  # its own values are not used
        second.value.weight.mul_(100.0)
    before = LatimFlow(network).attribute(ids, (-1, 3))
    with torch.no_grad():
        second.value.weight.zero_()
    assert relative_error(LatimFlow(network).attribute(ids, (-1, 3)), before) <= 1e-9
    assert before[:, :-1].abs().max() > 0


def test_the_state_holds_what_the_tokens_wrote() -> None:
    """Against the state of the loop that computes the logits."""
    network, ids = model(1), torch.randint(20, (1, 8))
    (layer,) = StateMemory(network).of(ids)
    weights = {name: x.squeeze() for name, x in network.state_dict().items()}
    state = torch.zeros(3, 8, 8, dtype=torch.float64)
    before = first = torch.zeros(24, dtype=torch.float64)
    for token in ids[0]:
        x = oracle.norm(network.emb.weight[token], weights, "blocks.0.ln0")
        here = oracle.norm(x, weights, "blocks.0.ln1").detach()
        _, first = oracle.mixed(weights, 0, here, before, state, first)
        before = here
    (found,) = layer.state(-1)
    assert relative_error(found.view(state.shape), state) <= 1e-11


def test_what_erases_has_a_key_of_its_own() -> None:
    network = model(1)
    with torch.no_grad(), trace(network) as t:
        network(torch.randint(20, (1, 5)))
    (scan,) = (leaf for leaf in t.layers[0].operator.leaves() if isinstance(leaf, DeltaRule))
    assert scan.erase is not None and scan.erase_step is not None
    torch.testing.assert_close(scan.erase.norm(dim=-1), torch.ones(1, 5, 3, dtype=torch.float64))
    assert bool((scan.erase_step > 0).all()) and bool((scan.erase_step < 1).all())
