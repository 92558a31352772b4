"""Caduceus: the operator is the mixer, on one strand and on both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.hybrid_checks import record_one
from oracles import dna, relative_error
from oracles import vim as vim_oracle
from torch import Tensor

from captum_ssm import LatimFlow
from captum_ssm.attr.call.components import parse_components
from captum_ssm.mixers import Call
from captum_ssm.mixers.caduceus import bi_mamba, both_strands
from captum_ssm.models import Caduceus
from captum_ssm.models.dna import BiMamba, StrandsMixer

pytestmark = pytest.mark.slow

OPTIONS: list[dict[str, Any]] = [{}, {"bias": True, "conv_bias": False, "d_conv": 2}]


def mixer(both: bool, **options: Any) -> Any:
    one = BiMamba(d_model=5, **({"d_state": 3} | options))
    return vim_oracle.randomise(StrandsMixer(one) if both else one)


def width(both: bool) -> int:
    return 10 if both else 5


def formula(module: Any, hidden: Tensor, both: bool) -> Tensor:
    weights = vim_oracle.double_weights(module)
    mix = dna.both_strands if both else dna.bi_mamba
    return torch.stack([mix(weights, h.double()) for h in hidden])


def test_the_directions_are_mambas_of_mamba_ssm(mamba_ssm: Any) -> None:
    module = mixer(both=False)
    hidden = torch.randn(2, 9, 5)
    one, other = (mamba_ssm.Mamba(d_model=5, d_state=3, use_fast_path=False) for _ in range(2))
    one.load_state_dict(module.mamba_fwd.state_dict())
    other.load_state_dict(module.mamba_rev.state_dict())
    wanted = one(hidden) + other(hidden.flip(1)).flip(1)
    assert relative_error(module(hidden), wanted) <= 1e-6


def test_matrices_of_the_heads_of_both_strands() -> None:
    """Those of the second half are those of the reverse complement, seen from the other end."""
    module, hidden = mixer(both=True).double(), torch.randn(1, 6, 10).double()
    one, other = hidden.chunk(2, -1)
    exact = parse_components("exact")
    found = record_one(module, hidden).linear.restrict(exact).operator.dense(None)
    alone = [
        record_one(module.submodule, x).linear.restrict(exact).operator.dense(None)
        for x in (one, other.flip(1, 2))
    ]
    wanted = torch.cat([alone[0], alone[1].flip(-1, -2)], 1)
    assert relative_error(found, wanted) <= 1e-12


@pytest.mark.parametrize("both", [False, True], ids=["Ph", "PS"])
def test_keys_queries_steps_and_gates_come_with_their_graphs(both: bool) -> None:
    module = mixer(both)
    hidden = torch.randn(1, 5, width(both), requires_grad=True)
    adapter = both_strands if both else bi_mamba
    made_of = adapter(module, Call((hidden,), {}, module(hidden))).made_of
    assert set(made_of) == {"content", "key", "query", "gate", "step"}
    assert all(x.requires_grad for found in made_of.values() for x in found)


@pytest.mark.parametrize("fused", [True, False])
def test_relevance_of_the_other_strand_is_that_of_the_strand(fused: bool) -> None:
    model = Caduceus(d_model=6, n_layer=3, num_classes=3, fused=fused, d_state=3)
    model = vim_oracle.randomise(model).double()
    ids = torch.randint(7, 11, (2, 9))
    other = torch.tensor(dna.OTHER)[ids].flip(1)
    for rule in ("frozen", "centred"):
        found, delta = LatimFlow(model).attribute(ids, 1, rule=rule, return_convergence_delta=True)
        assert delta.abs().max() <= 1e-12
        if rule == "frozen":  # references of the other run from the first token on
            of_other = LatimFlow(model).attribute(other, 1, rule=rule)
            assert relative_error(of_other.flip(1), found) <= 1e-10


def test_a_copy_is_served_by_itself() -> None:
    """Nothing of the operator hangs on the module that was traced."""
    module, hidden = mixer(both=True), torch.randn(1, 5, 10)
    layer = record_one(copy.deepcopy(module), hidden)
    assert relative_error(layer.linear.output(), module(hidden)) <= 1e-6


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "biases"])
@pytest.mark.parametrize("both", [False, True], ids=["one strand", "both strands"])
def test_contract(both: bool, options: dict[str, Any]) -> None:
    module, hidden = mixer(both, **options), torch.randn(2, 7, width(both))
    assert relative_error(module(hidden), formula(module, hidden, both)) <= 1e-6
    contract.holds(module, width(both))
