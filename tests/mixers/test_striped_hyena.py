"""StripedHyena 2: gated convolutions of three lengths, attention, and the models they make up."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import contract
from oracles import dna, relative_error
from torch import Tensor
from zoo.mamba import randomise

from captum_ssm import LatimFlow
from captum_ssm.errors import OptionError
from captum_ssm.mixers import Call
from captum_ssm.mixers.striped_hyena import attention, cascade
from captum_ssm.models import OneHot, StripedHyena, load_striped_hyena
from captum_ssm.models.dna import HyenaCascade, StripedAttention

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "se": {"length": 4, "groups": 3},
    "mr": {"length": 128, "groups": 2},
    "li": {"state_size": 3},
}
SIZES: dict[str, Any] = {
    "heads": 2,
    "inner_mlp_size": 10,
    "se_length": 4,
    "se_groups": 2,
    "mr_groups": 4,
    "state_size": 3,
}


def mixer(kind: str) -> Any:
    module = randomise(HyenaCascade(6, kind, **KINDS[kind]))
    if kind == "li":  # what grows would hide all else
        with torch.no_grad():
            module.log_poles.copy_(-module.log_poles.abs())
    return module


def model(**options: Any) -> Any:
    layout = ("se", "mr", "li", "attention", "se")
    made = randomise(StripedHyena(layout, 8, 16, **(SIZES | options)))
    with torch.no_grad():
        made.blocks[2].filter.log_poles.copy_(-made.blocks[2].filter.log_poles.abs())
    return made


def weights_of(module: Any) -> dict[str, Tensor]:
    return {name: w.detach().double() for name, w in module.state_dict().items()}


def test_coefficients_come_with_their_graphs() -> None:
    u, hidden = torch.randn(1, 5, 18, requires_grad=True), torch.randn(1, 5, 8, requires_grad=True)
    one, other = mixer("li"), randomise(StripedAttention(8, heads=2))
    made_of = cascade(one, Call((u,), {}, one(u))).made_of
    assert {role: len(found) for role, found in made_of.items()} == {"content": 1, "gate": 2}
    made_of |= attention(other, Call((hidden,), {}, other(hidden))).made_of
    assert set(made_of) == {"content", "gate", "key", "query"}
    assert all(x.requires_grad for found in made_of.values() for x in found)


def test_the_model_computes_the_formula() -> None:
    made, ids = model().double(), torch.randint(16, (2, 9))
    wanted = [dna.striped_hyena(weights_of(made), each, heads=2) for each in ids]
    assert relative_error(made(ids), torch.stack(wanted)) <= 1e-12


def test_relevance_adds_up() -> None:
    made, ids = model().double(), torch.randint(7, 11, (2, 9))
    for rule in ("frozen", "half", "equal", "centred"):
        found = LatimFlow(made).attribute(ids, (-1, 3), rule=rule, return_convergence_delta=True)
        assert found[1].abs().max() <= 1e-12
    x = torch.nn.functional.one_hot(ids - 7, 4).mT.double()
    found = LatimFlow(OneHot(made)).attribute(x, (-1, 3))
    assert relative_error(found.sum(1), LatimFlow(made).attribute(ids, (-1, 3))) <= 1e-9


def released(width: int, vocab: int, inner: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the first five blocks of Evo 2, 1B: se, mr, li, attention, se."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding_layer.weight": (vocab, width),
        "norm.scale": (width,),
    }
    kinds = {0: "se", 1: "mr", 2: "li", 3: "attention", 4: "se"}
    for i, kind in kinds.items():
        block = f"blocks.{i}"
        shapes |= {
            f"{block}.pre_norm.scale": (width,),
            f"{block}.post_norm.scale": (width,),
            f"{block}.mlp.l1.weight": (inner, width),
            f"{block}.mlp.l2.weight": (inner, width),
            f"{block}.mlp.l3.weight": (width, inner),
        }
        if kind == "attention":
            shapes |= {
                f"{block}.inner_mha_cls.Wqkv.weight": (3 * width, width),
                f"{block}.inner_mha_cls.out_proj.weight": (width, width),
                f"{block}.inner_mha_cls.out_proj.bias": (width,),
                f"{block}.inner_mha_cls.rotary_emb.inv_freq": (64,),
            }
            continue
        own: dict[str, dict[str, tuple[int, ...]]] = {
            "se": {"h": (128, 1, 7)},
            "mr": {"h": (128, 1, 128), "D": (width,)},
            "li": {"log_poles": (width, 16, 1), "residues": (width, 16), "D": (width,)},
        }
        shapes |= {
            f"{block}.filter.short_filter_weight": (3 * width, 1, 3),
            f"{block}.projections.weight": (3 * width, width),
            f"{block}.out_filter_dense.weight": (width, width),
            f"{block}.out_filter_dense.bias": (width,),
            **{f"{block}.filter.{name}": shape for name, shape in own[kind].items()},
        }
    return shapes


def test_the_released_names_and_shapes() -> None:
    with torch.device("meta"):
        made = StripedHyena(
            ("se", "mr", "li", "attention", "se"),
            1920,
            heads=15,
            inner_mlp_size=5120,
            se_groups=128,
            mr_groups=128,
        )
    found = {name: tuple(w.shape) for name, w in made.state_dict().items()}
    assert found == released(1920, 512, 5120)


def test_a_checkpoint_is_read_off_its_weights(tmp_path: Path) -> None:
    """As of the published code, with bytes of a kernel for numbers of eight bits beside it."""
    made, ids = model(mr_length=130, short_filter_length=2), torch.randint(16, (2, 9))
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


@pytest.mark.parametrize("kind", KINDS)
def test_contract(kind: str) -> None:
    module, u = mixer(kind), torch.randn(2, 9, 18)
    wanted = torch.stack([dna.cascade(weights_of(module), each.double()) for each in u])
    assert relative_error(module(u), wanted) <= 1e-5
    contract.holds(module, 18, refuses={"bfloat16": "off by"} if kind == "li" else {})
    made_of = cascade(module, Call((u,), {}, module(u))).operator.leaves()
    assert ("skip" in {leaf.component for leaf in made_of}) is (kind != "se")


def test_contract_of_attention() -> None:
    module, hidden = StripedAttention(8, heads=2, base=50.0, scaling=2.0), torch.randn(2, 7, 8)
    randomise(module)
    wanted = [dna.striped_attention(weights_of(module), h.double(), 2, 2.0) for h in hidden]
    assert relative_error(module(hidden), torch.stack(wanted)) <= 1e-5
    contract.holds(module, 8)
