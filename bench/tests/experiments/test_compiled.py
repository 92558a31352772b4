"""Compiled circuits compute what they claim, and their Shapley values are exact."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from captum_ssm_bench.circuits.games import Circuit, left_out, shapley
from captum_ssm_bench.circuits.modules import inverse_silu, silu
from captum_ssm_bench.circuits.programs import HARDENED, SEEN, circuit
from captum_ssm_bench.experiments.compiled import (
    KINDS,
    METHODS,
    OWN,
    SHAPLEY,
    Compiled,
    rounded,
    source_first,
)
from captum_ssm_bench.harness.experiment import Cell

REGISTERED = Path(__file__).parents[2] / "REGISTERED.md"
#: Rows that are no methods.
BESIDE = {SHAPLEY, Cell("random"), Cell("leave-one-out", "exact")}
#: The least margin of the right answer's logit over others: the answer is never a tie.
MARGIN = 2.0
#: Circuits that every change runs on all inputs; the whole session runs the others.
QUICK = ("brackets, Mamba-2", "marked value, RWKV", "dense recall, Mamba-2")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in [*SEEN, *HARDENED]
    ],
)
def test_module_computes_the_program_on_all_inputs(name: str) -> None:
    answered, margin = circuit(name).checked()
    assert answered >= 1000
    assert margin >= MARGIN


def test_a_broken_weight_is_noticed() -> None:
    of = circuit("brackets, Mamba-2")
    model = HARDENED["brackets, Mamba-2"]().model
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert Circuit(model, of.words, of.kinds, of.program).checked()[1] < 0


@pytest.mark.parametrize("name", QUICK)
def test_weights_are_not_left_to_chance(name: str) -> None:
    torch.manual_seed(3)
    again = HARDENED[name]().model.state_dict()
    assert all(torch.equal(x, again[key]) for key, x in circuit(name).model.state_dict().items())


def test_dense_letters_are_dense() -> None:
    model = circuit("dense recall, Mamba-2").model
    mixer = model.backbone.layers[0].mixer
    assert (model.get_input_embeddings().weight.abs() > 1e-4).float().mean() > 0.95
    assert (mixer.in_proj.weight[32:36].abs() > 1e-4).float().mean() > 0.95


@pytest.mark.parametrize("y", [-0.25, 0.0, 0.25, 1.5])
def test_silu_is_inverted(y: float) -> None:
    assert silu(inverse_silu(y)) == pytest.approx(y, abs=1e-9)


def test_shapley_values_are_means_over_all_orders() -> None:
    game = np.random.default_rng(0).normal(size=(2,) * 4)
    wanted = np.zeros(4)
    orders = list(itertools.permutations(range(4)))
    for order in orders:
        inside = [0] * 4
        for player in order:
            before = game[tuple(inside)]
            inside[player] = 1
            wanted[player] += (game[tuple(inside)] - before) / len(orders)
    assert shapley(game) == pytest.approx(wanted)
    assert shapley(game).sum() == pytest.approx(game[1, 1, 1, 1] - game[0, 0, 0, 0])
    assert left_out(game)[2] == pytest.approx(game[1, 1, 1, 1] - game[1, 1, 0, 1])


def test_coalitions_are_means_of_the_modules_own_outputs() -> None:
    of = circuit("marked value, RWKV")
    example, kept = of.example(3, 0), (0, 5, 6)
    same = (of.letters[:, kept] == np.array(example.letters)[list(kept)]).all(1)
    with torch.no_grad():
        logits = of.model(input_ids=of.ids(of.letters[same]), use_cache=False).logits[:, -1]
    wanted = float(logits[:, of.answer_id(example.answer)].double().mean())
    place = tuple(int(player in kept) for player in of.players)
    assert of.coalitions(example)[place] == pytest.approx(wanted, abs=1e-5)


def test_examples_are_answered_and_differ() -> None:
    of = circuit("marked value, RWKV")
    found = [of.example(index, seed) for seed in (0, 1) for index in range(5)]
    assert all(of.program(one.letters)[0] == one.answer >= 0 for one in found)
    assert len({tuple(one.letters) for one in found}) == 10


def test_source_first_counts_ties_in_part() -> None:
    content = torch.tensor([True, False, False])
    assert source_first(torch.tensor([2.0, 2.0 + 1e-6, -3.0]), content) == 0.5
    assert source_first(torch.zeros(3), content) == 0.0
    assert torch.equal(rounded(torch.tensor([1.0, 1.0 + 1e-6])), torch.tensor([1e4, 1e4]))


def test_exact_values_have_no_error() -> None:
    experiment = Compiled()
    subject = next(s for s in experiment.subjects() if s.name == "marked value, RWKV")
    example = experiment.example(subject, 0, 0)
    for cell in experiment.chosen(["Shapley values", "InputXGradient"], [""]):
        numbers = experiment.measure(subject.load(torch.device("cpu")), example, cell)[""]
        exact = cell.method == "Shapley values"
        assert (numbers["roles"] < 1e-9) == (numbers["spearman"] > 0.999) == exact


def test_rows_and_circuits_were_registered() -> None:
    told = REGISTERED.read_text("utf-8")
    assert all(f"\n| {name} |" in told for name in HARDENED)
    for cell in METHODS.keys() - BESIDE:
        rule = ", ".join(filter(None, cell)).removesuffix(f", {OWN}").removesuffix(f", {KINDS}")
        assert f"\n| {rule}" in told, rule
