"""Truth by interventions: exact where it can be known, and the same for all methods."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_helpers.tables import read_table
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from captum_ssm_bench.cli import main
from captum_ssm_bench.experiments.causal.experiment import (
    CHOOSING,
    CHOOSING_IMAGES,
    CONFIRMING,
    CONFIRMING_IMAGES,
    agreement,
    first_is_gold,
    questions_of,
)
from captum_ssm_bench.experiments.causal.interventions import (
    PERMUTATIONS,
    Answers,
    coalitions,
    marginal,
)
from captum_ssm_bench.experiments.causal.methods import METHODS
from captum_ssm_bench.experiments.causal.questions import Question
from captum_ssm_bench.harness.experiment import Cell
from captum_ssm_bench.training.loop import RECIPES

WORDS, WIDTH = 11, 5
EXPECTED = Cell("ExpectedGradients", "8 references")


class Sums(nn.Module):
    """A language model whose logits at the last token are a sum over tokens, or its square."""

    def __init__(self, power: int = 1) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.power = power

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, inputs_embeds: Tensor, use_cache: bool = False) -> Any:
        place = torch.arange(1, inputs_embeds.shape[1] + 1) / inputs_embeds.shape[1]
        summed = (place[:, None] * inputs_embeds).cumsum(1)
        return SimpleNamespace(logits=self.head(summed) ** self.power)

    def added(self, ids: Tensor, target: int) -> Tensor:
        """What each token (N, L) adds to a target where nothing is raised to a power."""
        place = torch.arange(1, ids.shape[1] + 1) / ids.shape[1]
        return place * (self.words(ids) @ self.head.weight[target])


@pytest.fixture
def question() -> Question:
    """Of nine tokens, the last of which stays; the others become words 6 to 10."""
    ids = torch.randint(1, 6, (1, 9))
    movable = torch.arange(9) < 8

    def draw(count: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        others = torch.randint(6, 11, (count, 9), generator=generator)
        return torch.where(movable, others, ids)

    return Question("0/7", ids, (-1, 3), draw, movable, movable & (torch.arange(9) == 2))


# --- permutations ------------------------------------------------------------------------------


def test_units_are_let_in_in_an_order_and_in_its_reverse() -> None:
    order = torch.tensor([2, 0, 1])
    said = [set(row.nonzero().flatten().tolist()) for row in coalitions(order)]
    assert said == [set(), {2}, {0, 2}, {0, 1, 2}, {1}, {0, 1}]


def test_all_orders_together_give_the_shapley_values_of_a_game(seed: int) -> None:
    """Against the sum over coalitions that defines them."""
    n = 4
    worth = {frozenset(s): float(torch.randn(())) for k in range(5) for s in subsets(n, k)}
    expected = torch.zeros(n, dtype=torch.float64)
    for unit in range(n):
        for k in range(n):
            for others in subsets(n, k):
                if unit not in others:
                    share = math.factorial(k) * math.factorial(n - k - 1) / math.factorial(n)
                    with_it = worth[frozenset({*others, unit})]
                    expected[unit] += share * (with_it - worth[frozenset(others)])
    found = []
    for order in map(torch.tensor, itertools.permutations(range(n))):
        sets = [frozenset(row.nonzero().flatten().tolist()) for row in coalitions(order)]
        values = torch.tensor([worth[each] for each in sets], dtype=torch.float64)
        found.append(marginal(values, order))
        reverse = [frozenset(x.nonzero().flatten().tolist()) for x in coalitions(order.flip(0))]
        again = torch.tensor([worth[each] for each in reverse], dtype=torch.float64)
        torch.testing.assert_close(marginal(again, order.flip(0)), found[-1])
    torch.testing.assert_close(torch.stack(found).mean(0), expected)


def subsets(n: int, size: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(n), size))


# --- the truth of models that are known -------------------------------------------------------


def test_what_is_added_is_its_own_shapley_value(question: Question) -> None:
    model = Sums()
    answers = Answers(model, question)
    references = question.references("shapley", PERMUTATIONS)
    with torch.no_grad():
        lost = model.added(question.inputs, 3) - model.added(references, 3)  # (P, 9)
        left_out = model.added(question.inputs, 3) - model.added(
            question.references("left out", 8), 3
        )
    torch.testing.assert_close(answers.shapley, lost.double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(answers.left_out, left_out.mean(0).double(), rtol=0, atol=1e-5)
    assert answers.shapley[:, 8].abs().max() == 0, "what stays has no part"


def test_methods_that_hold_for_sums(question: Question) -> None:
    """A gradient along a line is exact where there is nothing but a sum."""
    model = Sums()
    answers = Answers(model, question)
    references = question.references("methods", 8)
    with torch.no_grad():
        own = model.added(question.inputs, 3)
        expected = (own - model.added(references, 3)).mean(0)
        others = question.references("methods", 32)[:, question.movable]
        mean = model.words(others).mean((0, 1)) @ model.head.weight[3]
        zero, from_mean = own[0], own[0] - mean * torch.arange(1, 10) / 9
        from_mean[8] = 0  # which is no different there
    for cell, exact in (
        (EXPECTED, expected),
        (Cell("InputXGradient"), zero),
        (Cell("IntegratedGradients", "from zero"), zero),
        (Cell("IntegratedGradients", "from the mean"), from_mean),
        (Cell("Occlusion", "by the mean"), from_mean),
    ):
        found = METHODS[cell].explain(answers)
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5, msg=str(cell))


# --- scores -------------------------------------------------------------------------------------


def test_agreement_is_of_movable_units() -> None:
    truth = torch.tensor([1.0, 2.0, 3.0, -9.0])
    movable = torch.tensor([True, True, True, False])
    for relevance, rho in (([1.0, 5.0, 6.0, 7.0], 1.0), ([3.0, 2.0, 1.0, 0.0], -1.0)):
        found = agreement(torch.tensor(relevance), truth, movable)
        assert found["spearman"] == found["kendall"] == pytest.approx(rho)
    same = agreement(torch.tensor([0.1, 0.1, 0.1, 4.0]), truth, movable)
    assert set(same.values()) == {0.0}, "which says nothing, and that counts"


def test_the_first_of_the_movable_units(question: Question) -> None:
    relevance = torch.arange(9.0).flip(0)
    assert first_is_gold(relevance, question) == 0
    relevance[2], relevance[8] = 10, 20  # the last one stays
    assert first_is_gold(relevance, question) == 1
    blind = SimpleNamespace(gold=torch.zeros(9, dtype=torch.bool), movable=question.movable)
    assert math.isnan(first_is_gold(relevance, blind))  # type: ignore[arg-type]


# --- questions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("recall-mamba", "translation-mamba2", "two-passkeys-mamba"),
        *("frequent-word-mamba", "scenes-vim"),
    ],
)
def test_units_are_exchanged_for_others_of_their_kind(name: str, seed: int) -> None:
    questions = questions_of(name)
    question = questions.question(f"{seed}/3")
    others = question.references("a", 64)
    assert others.shape == (64, *question.inputs.shape[1:])
    assert torch.equal(others, questions.question(f"{seed}/3").references("a", 64))
    assert not torch.equal(others, question.references("b", 64))
    assert int(question.movable.sum()) >= 6 and bool(question.gold.any())
    if question.grid is not None:
        return
    changed = (others != question.inputs).any(0)
    assert not bool((changed & ~question.movable).any()), "what is the only one of its kind stays"
    assert bool(changed[question.movable].all()), "64 draws of two words or more"
    position, _ = question.target
    assert position == -1, "what follows the asking token is not read"


def test_patches_are_exchanged_whole(seed: int) -> None:
    question = questions_of("scenes-vim").question(f"{seed}/0")
    kept = torch.rand(3, 64) < 0.5
    others = question.references("a", 3)
    mixed = question.exchanged(others, kept)
    for row in range(3):
        for patch in range(64):
            down, across = 4 * (patch // 8), 4 * (patch % 8)
            box = (slice(None), slice(down, down + 4), slice(across, across + 4))
            source = question.inputs[0] if kept[row, patch] else others[row]
            assert torch.equal(mixed[row][box], source[box])
    values = torch.randn(2, 3, 32, 32)
    summed = question.by_unit(values)
    assert summed.shape == (2, 64)
    expected = values[1, :, 4:8, 8:12].sum()  # the second patch down, the third across
    torch.testing.assert_close(summed[1, 10], expected, rtol=1e-4, atol=1e-4)


# --- which models choose ---------------------------------------------------------------------


def test_models_that_choose_confirm_nothing() -> None:
    groups = [*CHOOSING, *CONFIRMING, *CHOOSING_IMAGES, *CONFIRMING_IMAGES]
    assert len(set(groups)) == len(groups)
    others = {"passkey-gated-deltanet", "two-passkeys-gated-deltanet", "scenes-vmamba"}
    assert set(groups) == set(RECIPES) - others - {"chains-mamba", "chains-mamba2"}


# --- the command -----------------------------------------------------------------------------


def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "causal", "--models", "pairs-mamba2", "--examples", "3"]
    arguments += ["--methods", "LatimFlow", "ExpectedGradients", "--out", str(tmp_path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Agreement of relevance with true interventions\nconfirming (1 model), 3" in printed
    assert "gain over ExpectedGradients, 8 references\nconfirming (1 model), 3" in printed
    lines = read_table(tmp_path, "causal")
    assert {line["model"] for line in lines} == {"confirming (1 model)", "pairs-mamba2"}
    by_row = {(line["model"], line["formulation"]): line for line in lines}
    for formulation, passes in (("frozen", 2), ("half", 2), ("8 references", 16)):
        line = by_row["pairs-mamba2", formulation]
        assert line["passes"] == passes and math.isnan(line["mask AP"])
        assert -1 <= line["ρ Shapley"] <= 1
        assert by_row["confirming (1 model)", formulation]["examples"] == 3
    gains = read_table(tmp_path, "causal-against")
    for line in (line for line in gains if line["model"] == "pairs-mamba2"):
        one, other = (
            by_row["pairs-mamba2", line["formulation"]],
            by_row["pairs-mamba2", EXPECTED[1]],
        )
        for column, sign in (("insertion", 1), ("deletion", -1), ("passes", -1)):
            gain = sign * (one[column] - other[column])
            assert line[column] == pytest.approx(gain, abs=1e-4)
    records = tmp_path / "causal" / "records.jsonl"
    before = records.read_bytes()
    assert main([*arguments, "--against", "LatimFlow, frozen"]) == 0
    assert records.read_bytes() == before, "nothing is measured anew"
    assert "gain over LatimFlow, frozen" in capsys.readouterr().out


def test_a_row_that_nobody_measures_is_not_held_against(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "causal", "--methods", "LatimFlow", "--against", "ExpectedGradients"]
    assert main(arguments) != 0
    assert "--against 'ExpectedGradients': none of the rows" in capsys.readouterr().err
