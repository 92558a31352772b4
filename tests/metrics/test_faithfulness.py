"""Maps against gold matrices, what decompositions miss, and tokens that have become alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from captum_ssm.metrics import (
    average_precision,
    recall_at_k,
    relevance_mass,
    roc_auc,
    token_faithfulness,
    token_similarity,
)


def test_rows_are_ranked_by_themselves():
    maps, gold = torch.randn(2, 5, 7), torch.rand(2, 5, 7) < 0.4
    gold[0, 0], gold[0, 1] = False, True  # no ranking of these says anything
    scale = torch.rand(2, 5, 1) * 10 + 0.1
    found = token_faithfulness(maps, gold, per_row=True)
    for b in range(2):
        rows = [t for t in range(5) if gold[b, t].any() and not gold[b, t].all()]
        for ours, score in zip(found, (roc_auc, average_precision, recall_at_k), strict=True):
            each = [score(maps[b, t][None], gold[b, t][None]).item() for t in rows]
            assert ours[b].item() == pytest.approx(sum(each) / len(each))
    again = token_faithfulness(scale * maps, gold, per_row=True)
    for ours, theirs in zip(found, again, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_relevance_mass():
    relevance = torch.tensor([[3.0, -5.0, 1.0], [-1.0, -2.0, 0.0], [1.0, 1.0, 2.0]])
    gold = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 1]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 1]])
    found = relevance_mass(relevance, gold, mask)
    assert found[0].item() == 0.75 and found[1].isnan()
    assert found[2].item() == pytest.approx(2 / 3)


def test_similarity_by_pairs():
    tokens = (torch.randn(3, 7, 5) + 0.5).bfloat16()
    tokens[0, 2] = 0
    mask = torch.rand(3, 7) < 0.8
    mask[:, :3] = True
    query = torch.tensor([0, -5, 6])
    found = token_similarity(tokens, mask, query=query)
    for b in range(3):
        kept = [i for i in range(7) if mask[b, i] and i != query[b] % 7]
        pairs = [
            F.cosine_similarity(tokens[b, i].double(), tokens[b, j].double(), dim=0).item()
            for i in kept
            for j in kept
            if i != j
        ]
        assert found[b].item() == pytest.approx(sum(pairs) / len(pairs), abs=1e-7)


def test_equal_and_few_tokens():
    same = torch.randn(2, 1, 4).expand(2, 6, 4)
    torch.testing.assert_close(token_similarity(same), torch.ones(2).double(), rtol=0, atol=1e-7)
    assert token_similarity(torch.randn(1, 1, 3)).isnan()
    assert token_similarity(torch.randn(1, 2, 3), query=0).isnan()
    opposite = torch.stack([same[:, 0], -same[:, 0]], 1)
    assert token_similarity(opposite).tolist() == pytest.approx([-1, -1])
