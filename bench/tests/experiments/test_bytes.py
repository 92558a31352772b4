"""Words of bytes are exchanged and summed as wholes."""

from __future__ import annotations

import pytest
import torch

from captum_ssm_bench.experiments.causal.bytes import Bytes, question
from captum_ssm_bench.experiments.causal.interventions import Answers
from captum_ssm_bench.experiments.causal.methods import METHODS
from captum_ssm_bench.harness.experiment import Cell
from captum_ssm_bench.tasks.byte_texts import KINDS, MECHANISMS
from captum_ssm_bench.training.byte_recipe import load_bytes, stored
from captum_ssm_bench.training.fresh import ENOUGH


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_words_are_exchanged_whole(mechanism: str, seed: int) -> None:
    found = question(f"{seed}/0", mechanism)
    assert found.words is not None and len(found.words) == found.inputs.shape[1]
    kept = torch.rand(4, len(found.movable)) < 0.5
    references = found.references("a", 4)
    mixed = found.exchanged(references, kept)
    known = {word for words in KINDS.values() for word in words}
    for row in range(4):
        for unit in range(len(found.movable)):
            place = found.words == unit
            source = found.inputs[0] if kept[row, unit] else references[row]
            assert torch.equal(mixed[row, place], source[place])
            word = bytes(references[row, place].tolist()).decode()
            stays = torch.equal(references[row, place], found.inputs[0, place])
            assert word in known if found.movable[unit] else stays
    assert int(found.places.sum()) == sum(
        int((found.words == unit).sum()) for unit in found.movable.nonzero()
    )
    assert int(found.gold.sum()) == 1 and bool(found.movable[found.gold])


def test_relevance_is_summed_over_the_bytes_of_a_word() -> None:
    found = question("0/0", "pairs")
    values = torch.randn(2, found.inputs.shape[1], 5)
    first = values[:, :3].sum((1, 2))  # the key of the first pair
    torch.testing.assert_close(found.by_unit(values)[:, 0], first)
    torch.testing.assert_close(found.by_unit(values).sum(1), values.sum((1, 2)))


def test_what_occlusion_and_the_rules_say_is_of_words() -> None:
    answers = Answers(load_bytes(), question("0/1", "names"))
    for cell in (Cell("LatimFlow", "balanced"), Cell("Occlusion", "by the mean")):
        relevance = METHODS[cell].explain(answers)
        assert relevance.shape == answers.question.movable.shape
    assert not bool(relevance[~answers.question.movable].any()), "what stays is not left out"


def test_mechanisms_that_count_are_measured() -> None:
    found = {subject.name.removeprefix("bytes-") for subject in Bytes().subjects()}
    assert found == {name for name, answered in stored().items() if answered >= ENOUGH}
