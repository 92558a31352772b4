"""Segmentation against scikit-learn, against counting pixels, and the published table's recipe."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from captum_ssm.metrics import (
    PseudoMaskScores,
    SegmentationScores,
    confusion,
    f1,
    foreground,
    iou,
    mean_iou,
    pixel_accuracy,
    pseudo_masks,
    segmentation_average_precision,
)


def scene(count: int = 4, height: int = 7, width: int = 5) -> tuple[Tensor, Tensor]:
    """Maps that know a little of the masks, with some pixels not labelled."""
    gold = (torch.rand(count, height, width) < 0.4).long()
    maps = torch.randn(count, height, width) + gold
    gold[torch.rand(count, height, width) < 0.15] = -1
    gold[:, 0, 0], gold[:, 0, 1] = 0, 1
    return maps, gold


def published(maps: Tensor, gold: Tensor) -> list[float]:
    """The published evaluation, by scikit-learn."""
    metrics = pytest.importorskip("sklearn.metrics")
    given, true, precisions, scores = [], [], [], []
    for one, label in zip(maps.flatten(1).double(), gold.flatten(1), strict=True):
        known, above = label != -1, (one > one.mean()).long()
        one, above, label = one[known], above[known], label[known]
        front = metrics.average_precision_score(label, one)
        back = metrics.average_precision_score(1 - label, -one)
        precisions.append((front + back) / 2)
        scores.append(metrics.f1_score(label, above))
        given += above.tolist()
        true += label.tolist()
    ious = metrics.jaccard_score(true, given, average=None)
    accuracy = metrics.accuracy_score(true, given)
    return [accuracy, ious.mean(), *(sum(x) / len(x) for x in (precisions, scores))]


@pytest.mark.slow
def test_like_the_published_recipe():
    maps, gold = scene(9)
    scores = SegmentationScores()
    for part in (slice(0, 2), slice(2, 9)):
        scores.update(maps[part], gold[part])
    assert list(scores.compute()) == pytest.approx(published(maps, gold), abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7])
def test_constant_maps_have_no_foreground(value):
    maps = torch.full((1, 16, 17), value)
    gold = torch.zeros(1, 16, 17).long()
    gold[0, 0, :4] = 1
    assert not foreground(maps).any()
    scores = SegmentationScores()
    scores.update(maps, gold)
    found = scores.compute()
    share = 4 / (16 * 17)
    assert found == pytest.approx((1 - share, (1 - share) / 2, 0.5, 0))


def test_images_of_one_class():
    maps = torch.randn(2, 3, 3)
    gold = torch.zeros(2, 3, 3).long()
    assert segmentation_average_precision(maps, gold).tolist() == [1, 1]
    assert segmentation_average_precision(maps, gold + 1).tolist() == [1, 1]
    assert segmentation_average_precision(maps, gold - 1).isnan().all()
    scores = SegmentationScores()
    scores.update(maps, gold - 1)
    assert all(math.isnan(x) for x in scores.compute())


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 5])
def test_confusion_like_scikit_learn(classes):
    metrics = pytest.importorskip("sklearn.metrics")
    gold = torch.randint(classes, (3, 6, 7))
    given = torch.randint(classes, (3, 6, 7))
    gold[:, 0] = 255
    counts = confusion(given, gold, classes, ignored=255)
    for image in range(3):
        kept = gold[image] != 255
        true, found = gold[image][kept], given[image][kept]
        labels = list(range(classes))
        expected = metrics.confusion_matrix(true, found, labels=labels)
        assert counts[image].tolist() == expected.tolist()
        assert pixel_accuracy(counts[image]).item() == pytest.approx(
            (true == found).double().mean()
        )
        for ours, theirs in ((iou, metrics.jaccard_score), (f1, metrics.f1_score)):
            expected = theirs(true, found, labels=labels, average=None, zero_division=0)
            absent = torch.tensor([not ((true == k) | (found == k)).any() for k in labels])
            assert torch.equal(ours(counts[image]).isnan(), absent)
            torch.testing.assert_close(ours(counts[image]).nan_to_num(), torch.as_tensor(expected))
    total = counts.sum(0)
    assert mean_iou(total).item() == pytest.approx(iou(total).nanmean().item())


def test_pseudo_masks_by_pixel():
    maps = torch.randn(3, 4, 6, 5)
    present = torch.rand(3, 4) < 0.6
    present[0] = False
    found = pseudo_masks(maps, present, 0.3)
    for b in range(3):
        for r in range(6):
            for c in range(5):
                best, label = 0.3, 0
                for k in range(4):
                    if present[b, k]:
                        score = max(maps[b, k, r, c].item(), 0) / maps[b, k].max().item()
                        if score > best:
                            best, label = score, k + 1
                assert found[b, r, c] == label
    assert not found[0].any()


def test_pseudo_mask_scores():
    gold = torch.randint(4, (6, 5, 5))
    masks = torch.where(torch.rand(6, 5, 5) < 0.7, gold, 0)
    gold[:, 0] = 255
    one, other = PseudoMaskScores(5), PseudoMaskScores(5)
    one.update(masks[:2], gold[:2])
    other.update(masks[2:], gold[2:])
    one.merge(other)
    found = one.compute()
    assert found.shape == (6,) and found[4].isnan()
    for label in range(4):
        kept = gold != 255
        both = ((masks == label) & (gold == label) & kept).sum()
        either = ((masks == label) | (gold == label)) & kept
        assert found[label].item() == pytest.approx((both / either.sum()).item(), abs=1e-6)
    assert found[5].item() == pytest.approx(found[:4].mean().item())
    low, _, high = one.interval(resamples=50)
    assert bool((low[:4] <= high[:4]).all())
