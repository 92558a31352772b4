"""The same numbers in any precision, on any device, with masks and gold wherever they are.

Scores are small multiples of 1/8, which every dtype holds exactly, so that nothing but the metric
itself can make a difference.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.stand_in import StandIn
from torch import Tensor

from captum_ssm.metrics import (
    PseudoMaskScores,
    Sample,
    SegmentationScores,
    Texts,
    alignment_rates,
    average_precision,
    best_links,
    change_order,
    image_perturbation,
    kendall,
    link_accuracy,
    link_counts,
    misclassification_confidence,
    pearson,
    pseudo_masks,
    recall_at_k,
    relevance_mass,
    roc_auc,
    span_relevance,
    spearman,
    text_activation,
    text_perturbation,
    text_pruning,
    token_faithfulness,
    token_similarity,
    words_of_tokens,
)

COUNT, ROWS, COLUMNS = 3, 5, 7
VARIANTS = [
    (torch.float32, "cpu"),
    (torch.bfloat16, "cpu"),
    (torch.float16, "cpu"),
    pytest.param((torch.float64, "cuda"), marks=pytest.mark.gpu),
    pytest.param((torch.float32, "cuda"), marks=pytest.mark.gpu),
    pytest.param((torch.bfloat16, "cuda"), marks=pytest.mark.gpu),
]


class Data:
    """Drawn once on the CPU; ``scores`` alone are handed out in a precision and on a device."""

    def __init__(self) -> None:
        self.maps = torch.randint(-16, 17, (COUNT, ROWS, COLUMNS)) / 8
        self.gold = torch.rand(COUNT, ROWS, COLUMNS) < 0.4
        self.gold[:, 0, :2] = torch.tensor([True, False])
        self.mask = torch.rand(COUNT, ROWS, COLUMNS) < 0.8
        self.mask[:, :, :2] = self.mask[:, 2::2] = True
        self.images = torch.randint(-16, 17, (COUNT, 2, ROWS, COLUMNS)) / 8
        self.ids = torch.randint(1, 9, (COUNT, COLUMNS))
        self.weight = torch.randint(-4, 5, (2 * ROWS * COLUMNS, 4)) / 8
        self.table = torch.randint(-8, 9, (9, 4)) / 8


def gathered(scores: object, *given: Tensor) -> Tensor:
    scores.update(*given)
    found = scores.compute()
    return torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in found])


def exact(x: Tensor) -> Tensor:
    return x if x.device.type == "mps" else x.double()


def texts(d: Data, x: Callable[[Tensor], Tensor]) -> Texts:
    device = x(d.maps).device
    table = exact(d.table.to(device))
    return Texts(lambda ids: table[ids].sum(1), d.ids.to(device), 0, d.mask[:, 0])


CASES: dict[str, Callable[[Data, Callable[[Tensor], Tensor]], Tensor]] = {
    "roc_auc": lambda d, x: roc_auc(x(d.maps[:, 0]), d.gold[:, 0], d.mask[:, 0]),
    "average_precision": lambda d, x: average_precision(x(d.maps[:, 0]), d.gold[:, 0]),
    "recall": lambda d, x: recall_at_k(x(d.maps[:, 0]), d.gold[:, 0], 3, d.mask[:, 0]),
    "agreement": lambda d, x: torch.cat(
        [f(x(d.maps[:, 0]), x(d.maps[:, 1]), d.mask[:, 0]) for f in (pearson, spearman, kendall)]
    ),
    "faithfulness": lambda d, x: torch.stack(token_faithfulness(x(d.maps), d.gold, d.mask)),
    "per row": lambda d, x: torch.stack(token_faithfulness(x(d.maps), d.gold, per_row=True)),
    "mass": lambda d, x: relevance_mass(x(d.maps), d.gold, d.mask),
    "order": lambda d, x: change_order(x(d.maps[:, 0]), most_first=True, mask=d.mask[:, 0]),
    "random order": lambda d, x: change_order(
        x(d.maps[:, 0]), most_first=False, generator=torch.Generator().manual_seed(1)
    ),
    "segmentation": lambda d, x: gathered(SegmentationScores(0.5), x(d.maps), d.gold.long()),
    "pseudo masks": lambda d, x: gathered(
        PseudoMaskScores(3), pseudo_masks(x(d.images), torch.ones(COUNT, 2), 0.25), d.gold.long()
    ),
    "links": lambda d, x: torch.stack(
        alignment_rates(link_counts(best_links(x(d.maps), d.mask), d.gold))
    ),
    "link accuracy": lambda d, x: link_accuracy(x(d.maps), d.gold, d.mask),
    "words": lambda d, x: words_of_tokens(x(d.maps), [0, 0, 1, 2, -1], [0, 0, 1, 1, 2, 3, 3]),
    "similarity": lambda d, x: token_similarity(x(d.maps), d.mask[..., 2], query=1),
    "spans": lambda d, x: span_relevance(x(d.maps[:, 0]), [(0, 4), (3, 7)]),
    "confidence": lambda d, x: misclassification_confidence(x(d.maps[:, 0]), [0, 1, 2]),
    "sample": lambda d, x: _sample(x(d.maps[:, 0])),
    "images": lambda d, x: torch.cat(
        [
            curve.values
            for curve in image_perturbation(
                lambda images: exact(images).flatten(1) @ exact(d.weight.to(images.device)),
                x(d.images),
                x(d.maps),
                fill=0.5,
            )
        ]
    ),
    "texts": lambda d, x: (
        text_perturbation(texts(d, x), x(d.maps[:, 0]), how="delete").logit.values
    ),
    "activation": lambda d, x: text_activation(texts(d, x), x(d.maps[:, 0]), [0, 1, 2]).values,
    "pruning": lambda d, x: text_pruning(texts(d, x), x(d.maps[:, 0])).values,
}


def _sample(values: Tensor) -> Tensor:
    sample = Sample()
    sample.update(values)
    return torch.stack(sample.interval(resamples=20))


@pytest.mark.parametrize("variant", VARIANTS)
def test_like_float64(variant):
    data, (dtype, device) = Data(), variant
    for name, metric in CASES.items():
        expected = metric(data, torch.Tensor.double)
        found = metric(data, lambda x: x.to(device, dtype)).cpu()
        assert expected.isfinite().all(), f"{name} would not show anything"
        limits = {"rtol": 0, "atol": 2e-6, "msg": lambda said, name=name: f"{name}: {said}"}
        torch.testing.assert_close(found.double(), expected.double(), **limits)


def test_what_does_not_count_may_be_anything():
    data = Data()
    hidden = data.maps.masked_fill(~data.mask, torch.nan)
    for score in (
        lambda maps: torch.stack(token_faithfulness(maps, data.gold, data.mask)),
        lambda maps: best_links(maps, data.mask),
        lambda maps: roc_auc(maps[:, 0], data.gold[:, 0], data.mask[:, 0]),
        lambda maps: relevance_mass(maps, data.gold, data.mask),
        lambda maps: change_order(maps[:, 0], most_first=True, mask=data.mask[:, 0]),
    ):
        assert torch.equal(score(hidden), score(data.maps))
    tokens = data.mask[..., 2]
    hidden = data.maps.masked_fill(~tokens[..., None], torch.inf)
    torch.testing.assert_close(
        token_similarity(hidden, tokens), token_similarity(data.maps, tokens), equal_nan=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("all_there", [False, True])
def test_on_a_device_without_float64(all_there):
    for metric in CASES.values():
        data = Data()
        expected = metric(data, torch.Tensor.double)
        with StandIn(counted=False, kind="mps"):
            if all_there:
                vars(data).update({name: x.to("mps") for name, x in vars(data).items()})
            found = metric(data, lambda x: x.to("mps")).cpu()
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6, check_dtype=False)
