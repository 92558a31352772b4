"""Finding sources: the gold of examples, the numbers of maps, and every method once."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

pytest.importorskip("transformers")

from captum_ssm_bench import EXPERIMENTS
from captum_ssm_bench.experiments.finding_sources import LinkedExample, of_text, source_scores
from captum_ssm_bench.tasks import SHORT_COPIES, CopyingTask


def example(seed: int) -> LinkedExample:
    return of_text(SHORT_COPIES.batch(SHORT_COPIES.draw(1, seed)))


def test_the_gold_of_a_copy(seed: int) -> None:
    task = CopyingTask(symbols=5, shortest=4, longest=4)
    (text,) = task.draw(1, seed)
    found = of_text(task.batch([text]))
    assert [token for _, token in found.targets] == task.vocabulary.encode(" ".join(text))
    assert [position for position, _ in found.targets] == [4, 5, 6, 7]
    assert found.context.tolist() == [True] * 4 + [False] * 5
    assert torch.equal(found.sure[:, :4], torch.eye(4, dtype=torch.bool))
    band = torch.ones(4, 4).triu(-1).tril(1).bool()
    assert torch.equal(found.wide[:, :4], band) and not found.wide[:, 4:].any()


def test_a_perfect_map_and_its_opposite(seed: int) -> None:
    given = example(seed)
    right = source_scores(given.sure.float(), given)
    wrong = source_scores(-given.wide.float(), given)
    assert right["top1"] == 1 and right["hit_sure"] == right["sure"] == right["predicted"]
    assert wrong["auc"] == 0 and wrong["top1"] == 0 and wrong["hit_possible"] == 0


def test_the_numbers_of_a_random_map(seed: int) -> None:
    given = example(seed)
    found = torch.randn(given.sure.shape)
    numbers = source_scores(found, given)
    inside, wide = found[:, given.context], given.wide[:, given.context]
    flat = wide.flatten().numpy(), inside.flatten().numpy()
    assert numbers["auc"] == pytest.approx(roc_auc_score(*flat))
    assert numbers["ap"] == pytest.approx(average_precision_score(*flat))
    best = inside.argmax(1)
    hits = given.sure[:, given.context][torch.arange(len(best)), best]
    assert numbers["hit_sure"] == int(hits.sum()) and numbers["predicted"] == len(best)


def test_every_cell_has_its_numbers() -> None:
    copying = EXPERIMENTS["copying"]
    (subject,) = (each for each in copying.subjects() if each.name == "copying-mamba")
    model = subject.load(torch.device("cpu"))
    given = copying.example(subject, 0, 0)
    for cell in copying.cells():
        rows = copying.measure(model, given, cell)
        layered = cell.method in ("ImplicitAttention", "LatimALTI") or "Norm" in cell.method
        assert list(rows) == (["layer 0", "layer 1", "mean"] if layered else [""]), cell
        for numbers in rows.values():
            assert set(numbers) == {name for c in copying.columns for name in c.numbers}
            assert all(math.isfinite(x) for x in numbers.values())
