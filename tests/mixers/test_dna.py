"""Caduceus, HyenaDNA and StripedHyena 2, and RWKV-7 in plain PyTorch."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.contract import record, record_one
from helpers.rules import frozen_flow
from oracles import conv_matrices, diagonal_matrices, dna, relative_error
from oracles import rwkv7 as rwkv7_oracle
from oracles import vim as vim_oracle
from torch import Tensor
from zoo.adapters import fading
from zoo.mamba import randomise

from captum_ssm import LatimFlow, StateMemory
from captum_ssm.attr.call.checks import parse_components
from captum_ssm.errors import InputError, OptionError
from captum_ssm.mixers import Call
from captum_ssm.mixers.registry import adapter_for
from captum_ssm.models import RWKV7, Caduceus, OneHot, StripedHyena, load_striped_hyena
from captum_ssm.models.dna import (
    BiMamba,
    HyenaCascade,
    HyenaOperator,
    StrandsMixer,
    StripedAttention,
)
from captum_ssm.operators import DeltaRule
from captum_ssm.operators.coefficients import live_coefficients

pytestmark = pytest.mark.slow


def weights_of(module: Any) -> dict[str, Tensor]:
    return {name: w.detach().double() for name, w in module.state_dict().items()}


# --- Caduceus ----------------------------------------------------------------------------------


def strands(both: bool, **options: Any) -> Any:
    one = BiMamba(d_model=5, **({"d_state": 3} | options))
    return vim_oracle.randomise(StrandsMixer(one) if both else one)


def test_matrices_of_the_heads_of_both_strands() -> None:
    """Those of the second half are those of the reverse complement, seen from the other end."""
    module, hidden = strands(both=True).double(), torch.randn(1, 6, 10).double()
    one, other = hidden.chunk(2, -1)

    def exact(module: Any, x: Tensor) -> Tensor:
        linear = record_one(module, x).linear
        return linear.restrict(parse_components("exact")).operator.dense(None)

    ahead, back = exact(module.submodule, one), exact(module.submodule, other.flip(1, 2))
    assert relative_error(exact(module, hidden), torch.cat([ahead, back.flip(-1, -2)], 1)) <= 1e-12


@pytest.mark.parametrize("fused", [True, False])
def test_relevance_of_the_other_strand_is_that_of_the_strand(fused: bool) -> None:
    model = Caduceus(d_model=6, n_layer=3, num_classes=3, fused=fused, d_state=3)
    model, ids = vim_oracle.randomise(model).double(), torch.randint(7, 11, (2, 9))
    other = torch.tensor(dna.OTHER)[ids].flip(1)
    found = LatimFlow(model).attribute(ids, 1)  # references of centered ones run from the first on
    assert relative_error(LatimFlow(model).attribute(other, 1).flip(1), found) <= 1e-10


# --- HyenaDNA ----------------------------------------------------------------------------------


def hyena(**options: Any) -> Any:
    return randomise(HyenaOperator(**({"d_model": 4, "l_max": 12, "filter_order": 6} | options)))


def test_more_tokens_than_the_filters_reach() -> None:
    with pytest.raises(InputError, match="has 13 tokens, but the filters have l_max=12"):
        hyena()(torch.randn(1, 13, 4))


def test_matrices_of_hyena() -> None:
    """gate (filter + bias) gate conv, of each channel."""
    module, hidden = hyena().double(), torch.randn(1, 7, 4).double()
    w = weights_of(module)
    _, short = dna.hyena_parts(w, hidden[0])
    shape = (1, 7, 4, 1)
    gates = [diagonal_matrices(x[None, ..., None], shape) for x in short.split(4, 1)[:2]]
    long = dna.filters(dna.under(w, "filter_fn."), 7).T[:, None]
    core = conv_matrices(long, list(range(7)), shape)
    core = core + diagonal_matrices(w["filter_fn.bias"].view(1, 1, 4, 1), shape)
    conv = conv_matrices(w["short_filter.weight"][8:], [2, 1, 0], shape)
    layer = record_one(module, hidden)
    found = layer.linear.restrict(parse_components("exact")).operator.dense(None)
    assert relative_error(found, gates[0] @ core @ gates[1] @ conv) <= 1e-12


# --- StripedHyena 2 ----------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "heads": 2, "inner_mlp_size": 10, "se_length": 4, "se_groups": 2, "mr_groups": 4,
    "state_size": 3,
}  # fmt: skip
LAYOUT = ("se", "mr", "li", "attention", "se")


def striped_hyena(**options: Any) -> Any:
    return fading(StripedHyena(LAYOUT, 8, 16, **(SIZES | options)))


def test_contract_of_striped_attention() -> None:
    module, hidden = (
        randomise(StripedAttention(8, heads=2, base=50.0, scaling=2.0)),
        torch.randn(7, 8),
    )
    wanted = dna.striped_attention(weights_of(module), hidden.double(), 2, 2.0)
    assert relative_error(module(hidden[None])[0], wanted) <= 1e-5
    contract.holds(module, 8)


def test_the_model_computes_the_formula() -> None:
    made, ids = striped_hyena().double(), torch.randint(7, 11, (2, 9))
    wanted = [dna.striped_hyena(weights_of(made), each, heads=2) for each in ids]
    assert relative_error(made(ids), torch.stack(wanted)) <= 1e-12
    x = torch.nn.functional.one_hot(ids - 7, 4).mT.double()
    found = frozen_flow(OneHot(made)).attribute(x, (-1, 3))
    assert relative_error(found.sum(1), frozen_flow(made).attribute(ids, (-1, 3))) <= 1e-9


def test_the_released_size() -> None:
    """Of the first five blocks of Evo 2, 1B; the formula reads the released names."""
    sizes = {"heads": 15, "inner_mlp_size": 5120, "se_groups": 128, "mr_groups": 128}
    with torch.device("meta"):
        weights = StripedHyena(LAYOUT, 1920, **sizes).state_dict().values()
    assert (len(weights), sum(w.numel() for w in weights)) == (54, 222350400)


def test_a_checkpoint_is_read_off_its_weights(tmp_path: Path) -> None:
    """As of the published code, with bytes of a kernel for numbers of eight bits beside it."""
    made, ids = striped_hyena(mr_length=130, short_filter_length=2), torch.randint(16, (2, 9))
    weights: dict[str, Any] = dict(made.state_dict())
    weights["blocks.0.projections._extra_state"] = io.BytesIO(b"scales")
    torch.save(weights, tmp_path / "evo2.pt")
    loaded = load_striped_hyena(tmp_path / "evo2.pt", eps=1e-6)
    assert torch.equal(loaded(ids), made(ids))
    scaled = load_striped_hyena(tmp_path / "evo2.pt", rotary_scaling=4.0)
    assert relative_error(scaled(ids), made(ids)) > 1e-4


def test_bad_options() -> None:
    for options, what in (
        ({"layout": ("se", "mamba")}, "use one of .* for each block"),
        ({"layout": ()}, "use one of .* for each block"),
        ({"layout": ("se",), "se_groups": 3}, "se_groups=3 does not divide hidden_size=8"),
    ):
        with pytest.raises(OptionError, match=what):
            StripedHyena(**({"hidden_size": 8} | SIZES | options))  # type: ignore[arg-type]


#: Modules, the width of their input, and how many tensors play each role.
ROLES: list[tuple[Any, int, dict[str, int]]] = [
    (lambda: strands(False), 5, {"content": 1, "key": 2, "query": 2, "gate": 1, "step": 2}),
    (lambda: strands(True), 10, {"content": 1, "key": 2, "query": 2, "gate": 1, "step": 2}),
    (lambda: hyena(order=3), 4, {"content": 1, "gate": 3}),
    (lambda: fading(HyenaCascade(6, "li", state_size=3)), 18, {"content": 1, "gate": 2}),
    (lambda: randomise(StripedAttention(8, heads=2)), 8, {"content": 1, "key": 1, "query": 1}),
]


@pytest.mark.parametrize(("make", "width", "counts"), ROLES)
def test_roles_come_with_their_graphs(make: Any, width: int, counts: dict[str, int]) -> None:
    module, hidden = make(), torch.randn(1, 5, width, requires_grad=True)
    (_, adapter) = adapter_for(module) or pytest.fail("no adapter")
    mixer = adapter(module, Call((hidden,), {}, module(hidden)))
    live = live_coefficients(mixer.operator)
    assert Counter(["content", *(leaf.roles[name] for leaf, name in live)]) == counts
    assert all(x.requires_grad for x in (mixer.values, *live.values()))


# --- RWKV-7 in plain PyTorch -------------------------------------------------------------------


def rwkv7(depth: int) -> Any:
    ranks = {"decay_rank": 4, "step_rank": 3, "value_rank": 2, "gate_rank": 5}
    return rwkv7_oracle.randomise(RWKV7(20, 24, depth, 8, 10, **ranks)).double()


def test_values_reach_later_layers_past_those_between() -> None:
    """Where layers between add nothing, all relevance of a token goes by the first one's values."""
    network, ids = rwkv7(2), torch.randint(20, (1, 6))
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
    network, ids = rwkv7(1), torch.randint(20, (1, 8))
    (layer,) = StateMemory(network).of(ids)
    weights = {name: x.squeeze() for name, x in network.state_dict().items()}
    state = torch.zeros(3, 8, 8, dtype=torch.float64)
    before = first = torch.zeros(24, dtype=torch.float64)
    for token in ids[0]:
        x = rwkv7_oracle.norm(network.emb.weight[token], weights, "blocks.0.ln0")
        here = rwkv7_oracle.norm(x, weights, "blocks.0.ln1").detach()
        _, first = rwkv7_oracle.mixed(weights, 0, here, before, state, first)
        before = here
    (found,) = layer.state(-1)
    assert relative_error(found.view(state.shape), state) <= 1e-11
    (scan,) = (x for x in record(network, ids)[0].operator.leaves() if isinstance(x, DeltaRule))
    assert scan.erase is not None and scan.erase_step is not None
    torch.testing.assert_close(scan.erase.norm(dim=-1), torch.ones(1, 8, 3, dtype=torch.float64))
    assert bool((scan.erase_step > 0).all()) and bool((scan.erase_step < 1).all())
