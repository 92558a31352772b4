"""Alignment error rates against sets of pairs."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from captum_ssm.metrics import (
    LinkCounts,
    alignment_rates,
    best_links,
    link_counts,
    words_of_tokens,
)

Pairs = set[tuple[int, int]]


def rates_of_sets(sentences: list[tuple[Pairs, Pairs, Pairs]]) -> tuple[float, float, float]:
    """Och and Ney's formulas on sets: predicted, sure, possible."""
    predicted = sum(len(a) for a, _, _ in sentences)
    sure = sum(len(s) for _, s, _ in sentences)
    hit_sure = sum(len(a & s) for a, s, _ in sentences)
    hit_possible = sum(len(a & (p | s)) for a, s, p in sentences)
    error = 1 - (hit_sure + hit_possible) / (predicted + sure)
    return error, hit_possible / predicted, hit_sure / sure


def drawn(targets: int = 6, sources: int = 5) -> tuple[Pairs, Pairs, Pairs]:
    every = [(t, s) for t in range(targets) for s in range(sources)]
    a, s, p = (set(random.sample(every, random.randint(3, 12))) for _ in range(3))
    return a | {every[0]}, s | {every[1]}, p


def matrix(pairs: Pairs, targets: int = 6, sources: int = 5) -> Tensor:
    out = torch.zeros(targets, sources, dtype=torch.bool)
    for pair in pairs:
        out[pair] = True
    return out


def batch(sentences: list[tuple[Pairs, Pairs, Pairs]]) -> list[Tensor]:
    return [torch.stack([matrix(x) for x in column]) for column in zip(*sentences, strict=True)]


def test_like_sets_of_pairs():
    sentences = [drawn() for _ in range(8)]
    predicted, sure, possible = batch(sentences)
    each = alignment_rates(link_counts(predicted, sure, possible))
    for i, sentence in enumerate(sentences):
        assert [x[i].item() for x in each] == pytest.approx(rates_of_sets([sentence]))
    counts = link_counts(predicted.float(), sure.long(), possible)
    together = alignment_rates(LinkCounts(*(x.sum() for x in counts)))
    assert [x.item() for x in together] == pytest.approx(rates_of_sets(sentences))


def test_perfect_and_empty():
    gold = torch.eye(4, dtype=torch.bool)[None]
    assert [x.item() for x in alignment_rates(link_counts(gold, gold))] == [0, 1, 1]
    nothing = torch.zeros_like(gold)
    assert [x.item() for x in alignment_rates(link_counts(~gold, gold))] == [1, 0, 0]
    error, precision, recall = (x.item() for x in alignment_rates(link_counts(nothing, gold)))
    assert error == 1 and math.isnan(precision) and recall == 0
    assert all(x.isnan() for x in alignment_rates(link_counts(nothing, nothing)))


def test_best_links():
    maps = torch.tensor([[[0.1, 0.7, 0.2], [0.5, 0.5, 0.4], [0.3, 0.3, 0.3], [9.0, 1.0, 2.0]]])
    mask = torch.ones_like(maps)
    mask[0, 3, 0] = 0
    assert best_links(maps, mask)[0].long().tolist() == [[0, 1, 0], [1, 1, 0], [1, 1, 1], [0, 0, 1]]
    mask[0, 3] = 0
    assert not best_links(maps, mask)[0, 3].any()
    nothing = best_links(torch.zeros(1, 1, 2), torch.tensor([[[1, 0]]]))
    assert nothing.tolist() == [[[True, False]]]
    negative = -torch.rand(1, 2, 3)
    assert best_links(negative).sum() == 2


def test_words_of_tokens():
    maps = torch.randn(2, 3, 5, 4)
    target, source = [0, 0, -1, 2, 2], [1, -1, 0, 1]
    found = words_of_tokens(maps, target, source)
    assert found.shape == (2, 3, 3, 2)
    rows = torch.stack([maps[..., :2, :].mean(-2), torch.zeros(2, 3, 4), maps[..., 3:, :].mean(-2)])
    expected = torch.stack([rows[..., 2], rows[..., 0] + rows[..., 3]], -1).movedim(0, -2)
    torch.testing.assert_close(found, expected)
