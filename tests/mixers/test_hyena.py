"""HyenaDNA's mixer: gates around long convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import contract
from helpers.hybrid_checks import record_one
from oracles import conv_matrices, diagonal_matrices, dna, relative_error
from torch import Tensor
from zoo.mamba import randomise

from captum_ssm import LatimFlow
from captum_ssm.attr.call.components import parse_components
from captum_ssm.errors import InputError
from captum_ssm.mixers import Call
from captum_ssm.mixers.hyena import hyena
from captum_ssm.models import HyenaDNA
from captum_ssm.models.dna import HyenaOperator
from captum_ssm.operators import Mixing

pytestmark = pytest.mark.slow

OPTIONS: list[dict[str, Any]] = [{}, {"order": 3}, {"short_filter_order": 2, "features": 3}]


def mixer(**options: Any) -> Any:
    return randomise(HyenaOperator(**({"d_model": 4, "l_max": 12, "filter_order": 6} | options)))


def weights_of(module: Any) -> dict[str, Tensor]:
    return {name: w.detach().double() for name, w in module.state_dict().items()}


def formula(module: Any, hidden: Tensor) -> Tensor:
    return torch.stack([dna.hyena(weights_of(module), h.double()) for h in hidden])


def test_matrices() -> None:
    """gate (filter + bias) gate conv, of each channel."""
    module, hidden = mixer().double(), torch.randn(1, 7, 4).double()
    w = weights_of(module)
    _, short = dna.hyena_parts(w, hidden[0])
    shape = (1, 7, 4, 1)
    gates = [diagonal_matrices(x[None, ..., None], shape) for x in short.split(4, 1)[:2]]
    long = dna.filters(dna.under(w, "filter_fn."), 7).T[:, None]
    core = conv_matrices(long, list(range(7)), shape)
    core = core + diagonal_matrices(w["filter_fn.bias"].view(1, 1, 4, 1), shape)
    conv = conv_matrices(w["short_filter.weight"][8:], [2, 1, 0], shape)
    wanted = gates[0] @ core @ gates[1] @ conv
    layer = record_one(module, hidden)
    found = layer.linear.restrict(parse_components("exact")).operator.dense(None)
    assert relative_error(found, wanted) <= 1e-12
    scan = layer.linear.restrict({"scan"}).operator
    assert scan.mixing is Mixing.FIXED


def test_gates_come_with_their_graphs() -> None:
    module, hidden = mixer(order=3), torch.randn(1, 5, 4, requires_grad=True)
    made_of = hyena(module, Call((hidden,), {}, module(hidden))).made_of
    assert {role: len(found) for role, found in made_of.items()} == {"content": 1, "gate": 3}
    assert all(x.requires_grad for found in made_of.values() for x in found)


def test_more_tokens_than_the_filters_are_long_are_refused() -> None:
    with pytest.raises(InputError, match="13 tokens were given, but the filters reach over l_max"):
        mixer()(torch.randn(1, 13, 4))


def test_whole_models_add_up() -> None:
    model = randomise(HyenaDNA(d_model=6, n_layer=2, l_max=16, num_classes=3)).double()
    ids = torch.randint(7, 11, (2, 9))
    for rule in ("frozen", "half", "equal", "centred"):
        _, delta = LatimFlow(model).attribute(ids, 1, rule=rule, return_convergence_delta=True)
        assert delta.abs().max() <= 1e-12


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "order 3", "two taps"])
def test_contract(options: dict[str, Any]) -> None:
    module, hidden = mixer(**options), torch.randn(2, 12, 4)
    assert relative_error(module(hidden), formula(module, hidden)) <= 1e-5
    contract.holds(module, 4, refuses={"bfloat16": "off by"})
