"""Rankings against scikit-learn, against counting by hand, and under reordering."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from captum_ssm.errors import InputError
from captum_ssm.metrics import (
    average_precision,
    kendall,
    pearson,
    precision_at_k,
    recall_at_k,
    roc_auc,
    spearman,
)

SCORES = [roc_auc, average_precision, recall_at_k, precision_at_k]


def batch(count: int = 7, units: int = 23, levels: int = 6) -> tuple[Tensor, Tensor]:
    """Scores with many ties, and gold that holds both kinds of units."""
    scores = torch.randint(levels, (count, units)) / 3.0 - 1
    gold = torch.rand(count, units) < 0.4
    gold[:, 0], gold[:, 1] = True, False
    return scores, gold


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.long])
def test_like_scikit_learn(dtype):
    metrics = pytest.importorskip("sklearn.metrics")
    scores, gold = batch()
    scores = (3 * scores).to(dtype)
    for ours, theirs in [
        (roc_auc, metrics.roc_auc_score),
        (average_precision, metrics.average_precision_score),
    ]:
        expected = [theirs(g, s.double()) for s, g in zip(scores, gold, strict=True)]
        found = ours(scores, gold)
        assert found.dtype == torch.float64
        torch.testing.assert_close(
            found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
        )


def test_worked_by_hand():
    scores = torch.tensor([[0.9, 0.8, 0.8, 0.1]])
    gold = torch.tensor([[0, 1, 0, 1]])
    # pairs (true, false): .8>.8 half, .8<.9, .1<.9, .1<.8
    assert roc_auc(scores, gold).item() == 0.125
    # at .8 one of three is true, at .1 two of four
    assert average_precision(scores, gold).item() == pytest.approx((1 / 3 + 1 / 2) / 2)
    # the second place is drawn from the two of .8
    assert recall_at_k(scores, gold).item() == 0.25
    assert precision_at_k(scores, gold, 1).item() == 0
    assert precision_at_k(scores, gold, 2).item() == 0.25
    # integers that float32 does not tell apart
    assert roc_auc(torch.tensor([[2**24, 2**24 + 1]]), torch.tensor([[0, 1]])).item() == 1


def test_masked_units_do_not_exist():
    scores, gold = batch(4, 19)
    mask = torch.rand(4, 19) < 0.7
    mask[:, :2] = True
    for score in SCORES:
        options = {"mask": mask}
        found = score(scores, gold, **options)
        alone = [score(s[m][None], g[m][None]) for s, g, m in zip(scores, gold, mask, strict=True)]
        torch.testing.assert_close(found, torch.cat(alone), rtol=0, atol=1e-15)


def test_one_class_and_constant_scores():
    scores = torch.randn(3, 5)
    gold = torch.tensor([[0] * 5, [1] * 5, [0, 1, 0, 0, 0]])
    assert roc_auc(scores, gold).isnan().tolist() == [True, True, False]
    assert average_precision(scores, gold).isnan().tolist() == [True, False, False]
    assert average_precision(scores, gold)[1] == 1
    assert recall_at_k(scores, gold).isnan().tolist() == [True, False, False]
    assert recall_at_k(scores, gold)[1] == 1
    flat = torch.full((1, 5), 0.1)
    assert roc_auc(flat, gold[2:]).item() == 0.5
    assert average_precision(flat, gold[2:]).item() == pytest.approx(0.2)
    assert recall_at_k(flat, gold[2:], 2).item() == pytest.approx(0.4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"), [(pearson, "pearsonr"), (spearman, "spearmanr"), (kendall, "kendalltau")]
)
def test_agreement_like_scipy(ours, theirs):
    stats = pytest.importorskip("scipy.stats")
    scores, others = (batch()[0].double() for _ in range(2))
    others[:3] += scores[:3]
    mask = torch.rand(scores.shape) < 0.7
    mask[:, :3] = True
    scores[:, :2], others[:, 1:3] = torch.tensor([5.0, -5.0]), torch.tensor([7.0, -7.0])
    expected = [
        getattr(stats, theirs)(one[kept], other[kept]).statistic
        for one, other, kept in zip(scores, others, mask, strict=True)
    ]
    hidden = scores.masked_fill(~mask, torch.nan)
    torch.testing.assert_close(ours(hidden, others, mask), torch.tensor(expected).double())


@pytest.mark.parametrize("agreement", [pearson, spearman, kendall])
def test_what_is_the_same_everywhere_agrees_with_nothing(agreement):
    scores = torch.rand(2, 11)
    same = torch.full_like(scores, 0.1)
    assert agreement(scores, same).isnan().all() and agreement(same, scores).isnan().all()
    with pytest.raises(InputError, match=r"scores has shape \(2, 11\), but others has \(2, 10\)"):
        agreement(scores, same[:, 1:])
