"""Models of DNA: the released names load, the logits are those of plain loops, one-hot inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.rules import frozen_flow
from oracles import dna, relative_error
from oracles import vim as vim_oracle
from torch import Tensor, nn
from zoo.mamba import randomise

from captum_ssm.errors import CheckpointError, InputError, OptionError
from captum_ssm.models import Caduceus, HyenaDNA, OneHot, load_caduceus, load_hyenadna
from captum_ssm.models.dna import COMPLEMENTS

pytestmark = pytest.mark.slow

KINDS: list[dict[str, Any]] = [
    {},
    {"fused": False},
    {"rcps": False},
    {"num_classes": 3},
    {"rcps": False, "num_classes": 3},
    {"bias": True, "conv_bias": False, "d_conv": 2},
]
NAMES = ["PS", "PS unfused", "Ph", "PS classifier", "Ph classifier", "biases"]


def small(**options: Any) -> Any:
    return vim_oracle.randomise(Caduceus(**({"d_model": 6, "n_layer": 3, "d_state": 3} | options)))


def small_hyena(**options: Any) -> Any:
    sizes = {"d_model": 6, "n_layer": 2, "l_max": 12, "filter_order": 5, "features": 7}
    return randomise(HyenaDNA(**(sizes | options)))


def some_ids(batch: int = 2, tokens: int = 9) -> Tensor:
    return torch.randint(7, 12, (batch, tokens))


def entries(model: nn.Module) -> tuple[int, int]:
    """How many tensors and numbers a checkpoint of the model has."""
    weights = model.state_dict().values()
    return len(weights), sum(w.numel() for w in weights)


@pytest.mark.parametrize(("rcps", "wanted"), [(True, (309, 14020896)), (False, (307, 14020864))])
def test_caduceus_has_the_released_size(rcps: bool, wanted: tuple[int, int]) -> None:
    """The formulas below read the released names."""
    with torch.device("meta"):
        model = Caduceus(d_model=256, n_layer=16, rcps=rcps)
    assert entries(model) == wanted
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 7.7  # as published


@pytest.mark.parametrize("options", KINDS, ids=NAMES)
def test_caduceus_computes_the_formula(options: dict[str, Any]) -> None:
    model, ids = small(**options).double(), some_ids()
    weights = vim_oracle.double_weights(model)
    rcps, fused = options.get("rcps", True), options.get("fused", True)
    wanted = [dna.caduceus(weights, each, 3, rcps, fused) for each in ids]
    assert relative_error(model(ids), torch.stack(wanted)) <= 1e-12


@pytest.mark.parametrize("fused", [True, False])
def test_the_other_strand_is_told_alike(fused: bool) -> None:
    ids = some_ids()
    other = torch.tensor(COMPLEMENTS)[ids].flip(1)
    model = small(fused=fused)
    assert relative_error(model(other).flip(1)[..., list(COMPLEMENTS)], model(ids)) <= 1e-5
    classifier = small(fused=fused, num_classes=3)
    assert relative_error(classifier(other), classifier(ids)) <= 1e-5
    one_way = small(rcps=False, num_classes=3)
    assert relative_error(one_way(other), one_way(ids)) > 1e-2


@pytest.mark.slow
def test_caduceus_is_read_off_its_weights(tmp_path: Path) -> None:
    for options in (*KINDS, {"rms_norm": False}, {"bias": True, "d_conv": 3}):
        model, ids = small(**options), some_ids()
        torch.save({"state_dict": model.state_dict()}, tmp_path / "caduceus.pt")
        loaded = load_caduceus(tmp_path / "caduceus.pt")
        assert not loaded.training and torch.equal(loaded(ids), model(ids))


def test_what_is_shared_may_be_stored_once(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, ids = small(), some_ids()
    weights = model.state_dict()
    stored = {
        name: w
        for name, w in weights.items()
        if "mamba_rev.in_proj" not in name
        and "mamba_rev.out_proj" not in name
        and name != "lm_head.lm_head.weight"
    }
    assert len(stored) == len(weights) - 7
    safetensors.save_file(stored, tmp_path / "model.safetensors")
    assert torch.equal(load_caduceus(tmp_path / "model.safetensors")(ids), model(ids))


def test_directions_that_share_nothing_are_refused(tmp_path: Path) -> None:
    weights = {name: w.clone() for name, w in small().state_dict().items()}
    weights["caduceus.backbone.layers.0.mixer.submodule.mamba_rev.in_proj.weight"] += 1
    torch.save(weights, tmp_path / "caduceus.pt")
    with pytest.raises(CheckpointError, match=r"mamba_fwd.in_proj.* are different"):
        load_caduceus(tmp_path / "caduceus.pt")


def test_bad_options() -> None:
    for options, what in (
        ({"pool": "sum"}, "pool='sum' is not known"),
        ({"n_layer": 0}, "n_layer=0: use 1 or more"),
        ({"vocab_size": 12}, "complements has 16 entries, but vocab_size=12"),
    ):
        with pytest.raises(OptionError, match=what):
            Caduceus(**options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="pool='max' is not known"):
        HyenaDNA(pool="max")  # type: ignore[arg-type]
    for given in ({}, {"input_ids": some_ids(), "inputs_embeds": torch.zeros(2, 9, 12)}):
        with pytest.raises(InputError, match="either input_ids or inputs_embeds"):
            small()(**given)


def test_hyenadna_has_the_released_size() -> None:
    with torch.device("meta"):
        assert entries(HyenaDNA(d_model=128, n_layer=2, l_max=1026)) == (60, 450968)


@pytest.mark.parametrize(
    "options", [{}, {"num_classes": 3}, {"order": 3, "short_filter_order": 2}, {"inner": 1}]
)
def test_hyenadna_computes_the_formula(options: dict[str, Any]) -> None:
    model, ids = small_hyena(**options).double(), some_ids()
    weights = vim_oracle.double_weights(model)
    wanted = torch.stack([dna.hyenadna(weights, each, 2) for each in ids])
    assert relative_error(model(ids), wanted) <= 1e-12


@pytest.mark.parametrize("form", ["hub", "first release", "checkpointed", "stored once"])
def test_forms_of_hyenadna(form: str, tmp_path: Path) -> None:
    model, ids = small_hyena(), some_ids()
    weights = model.state_dict()
    if form in ("first release", "checkpointed"):
        weights = {f"model.{name.removeprefix('hyena.')}": w for name, w in weights.items()}
    if form == "checkpointed":
        weights = {
            name.replace(".mixer.", ".mixer.layer.").replace(".mlp.", ".mlp.layer."): w
            for name, w in weights.items()
        }
    if form == "stored once":
        weights = {
            name: w
            for name, w in weights.items()
            if not name.endswith(("3.freq", "5.freq", "lm_head.weight"))
        }
    torch.save({"state_dict": weights}, tmp_path / "weights.ckpt")
    assert torch.equal(load_hyenadna(tmp_path / "weights.ckpt")(ids), model(ids))


def one_hot(ids: Tensor) -> Tensor:
    """(B, 4, L); of N all zeros."""
    return torch.nn.functional.one_hot(ids - 7, 5)[..., :4].mT.float()


@pytest.mark.parametrize("make", [small, small_hyena], ids=["caduceus", "hyenadna"])
@pytest.mark.parametrize("bases_first", [True, False])
def test_one_hot_inputs_are_the_tokens(make: Any, bases_first: bool) -> None:
    model, ids = make(num_classes=3), torch.randint(7, 11, (2, 9))
    x = one_hot(ids) if bases_first else one_hot(ids).mT
    wrapped = OneHot(model, bases_first=bases_first)
    assert relative_error(wrapped(x), model(ids)) <= 1e-6
    relevance, delta = frozen_flow(wrapped).attribute(x, 1, return_convergence_delta=True)
    assert relevance.shape == x.shape and delta.abs().max() <= 1e-5
    assert not relevance[x == 0].any()
    of_tokens = frozen_flow(model).attribute(ids, 1)
    assert relative_error(relevance.sum(1 if bases_first else 2), of_tokens) <= 1e-4


def test_bad_one_hot_inputs() -> None:
    model = small(num_classes=3)
    for shape in ((2, 9, 4), (2, 5, 9), (4, 9)):
        with pytest.raises(InputError, match=r"not one-hot DNA \(B, 4, L\)"):
            OneHot(model)(torch.zeros(shape))
    with pytest.raises(OptionError, match="pass the four ids"):
        OneHot(model, base_ids=[7, 8, 9])
    with pytest.raises(OptionError, match=r"Linear without get_input_embeddings"):
        OneHot(nn.Linear(2, 2))
