"""Text perturbation against a loop over tokens, with padding on both sides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zoo.small import VOCABULARY, classifier, mamba_lm, token_ids

from captum_ssm.metrics import Texts, text_activation, text_perturbation, text_pruning

UNK = 0
LENGTHS = [9, 4, 7]


def padded(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Ids padded on either side, their mask, and relevance that padding has most of."""
    ids, mask = torch.randint(1, VOCABULARY, (3, 10)), torch.zeros(3, 10).long()
    for row, (start, length) in enumerate(zip([1, 6, 0], LENGTHS, strict=True)):
        mask[row, start : start + length] = 1
    relevance = torch.randn(3, 10, dtype=dtype)
    relevance[mask == 0] = 50
    return ids, mask, relevance


def first_tokens(relevance: list[float], share: float, most_first: bool) -> set[int]:
    order = sorted(range(len(relevance)), key=lambda i: relevance[i], reverse=most_first)
    return set(order[: int(len(order) * share + 1e-9)])


@torch.no_grad()
def run_alone(model, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids]))[0].double()


@pytest.mark.parametrize(("how", "most_first"), [("mask", True), ("delete", False)])
def test_like_a_loop_over_tokens(how, most_first):
    model = classifier().double()
    ids, mask, relevance = padded()
    shares, target = [0.0, 0.2, 0.5, 0.74], [2, 0, 4]
    texts = Texts(model, ids, UNK, mask, internal_batch_size=3)
    found = text_perturbation(
        texts, relevance, target, most_first=most_first, fractions=shares, how=how
    )
    pruned = text_pruning(texts, relevance, fractions=shares, how=how)
    for row in range(3):
        real = mask[row].bool()
        tokens, scores = ids[row][real].tolist(), relevance[row][real].tolist()
        whole = run_alone(model, tokens)
        for step, share in enumerate(shares):
            for first, curve in ((most_first, None), (False, pruned)):
                gone = first_tokens(scores, share, first)
                changed = [
                    UNK if i in gone else t
                    for i, t in enumerate(tokens)
                    if how == "mask" or i not in gone
                ]
                logits = run_alone(model, changed)
                if curve is None:
                    chance = logits.softmax(-1)[target[row]].item()
                    assert found.probability.values[row, step].item() == pytest.approx(chance)
                    right = float(logits.argmax() == target[row])
                    assert found.correct.values[row, step].item() == right
                    logit = found.logit.values[row, step].item()
                    assert logit == pytest.approx(logits[target[row]].item())
                else:
                    error = (logits - whole).square().mean().item()
                    assert curve.values[row, step].item() == pytest.approx(error, abs=1e-12)


def test_activation_reveals_the_most_relevant_first():
    model = classifier().double()
    ids, mask, relevance = padded()
    fixed = torch.zeros_like(mask)
    fixed[0, 3] = fixed[1, 9] = fixed[2, 0] = 1
    found = text_activation(Texts(model, ids, UNK, mask, fixed), relevance, 1)
    for row in range(3):
        real = mask[row].bool()
        tokens, scores = ids[row][real].tolist(), relevance[row][real].tolist()
        kept = set(fixed[row][real].nonzero().flatten().tolist())
        free = [i for i in range(len(tokens)) if i not in kept]
        for step, share in enumerate(i / 10 for i in range(11)):
            shown = first_tokens([scores[i] for i in free], share, most_first=True)
            visible = kept | {free[i] for i in shown}
            changed = [t if i in visible else UNK for i, t in enumerate(tokens)]
            chance = run_alone(model, changed).softmax(-1)[1].item()
            assert found.values[row, step].item() == pytest.approx(chance)
    assert found.values[:, -1].tolist() == pytest.approx(
        [run_alone(model, ids[r][mask[r].bool()].tolist()).softmax(-1)[1].item() for r in range(3)]
    )


def test_language_models_are_read_at_the_last_token():
    model = mamba_lm().double()
    ids = token_ids(2, 7)
    relevance = torch.randn(2, 7)
    found = text_perturbation(Texts(model, ids, UNK), relevance, [3, 4], how="delete")
    for row in range(2):
        gone = first_tokens(relevance[row].tolist(), 0.5, most_first=True)
        left = [t for i, t in enumerate(ids[row].tolist()) if i not in gone]
        with torch.no_grad():
            chance = model(torch.tensor([left])).logits[0, -1].softmax(-1)[3 + row].item()
        assert found.probability.values[row, 4].item() == pytest.approx(chance)
