"""What a target is held against: torch's own formulas, and exactly decomposed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zoo.small import classifier, mamba_lm, token_ids

from captum_ssm import LatimFlow, MambaLRP

pytestmark = pytest.mark.slow

LENGTH = 7


def log_odds(logits: Tensor, index: int) -> Tensor:
    probability = logits.double().softmax(-1)[index]
    return torch.log(probability / (1 - probability))


FORMULAS = {
    "none": (None, lambda row, i: row[i]),
    "mean": ("mean", lambda row, i: row[i] - row.mean()),
    "others": ("others", log_odds),
    "all": ("all", lambda row, i: row.log_softmax(-1)[i]),
}
METHODS = pytest.mark.parametrize("method", [LatimFlow, MambaLRP])


def size(found) -> Tensor:
    return found.output.abs() + found.inputs.abs().flatten(1).sum(1)


@METHODS
@pytest.mark.parametrize("contrast", FORMULAS)
def test_formulas(method, contrast):
    option, formula = FORMULAS[contrast]
    model, ids = mamba_lm(), token_ids(3, LENGTH)
    logits = model(ids).logits.detach()
    for target in [(-1, 3), (2, 0), [(6, 1), (0, 4), (3, 18)]]:
        found = method(model).decompose(ids, target, contrast=option)
        each = target if isinstance(target, list) else [target] * 3
        wanted = [formula(row[t], i) for row, (t, i) in zip(logits, each, strict=True)]
        assert (found.output - torch.stack(wanted)).abs().max() <= 1e-5 * logits.abs().max()
        # all are differences of the same logits, however small one of them is
        assert found.delta.abs().max() <= 1e-5 * size(found).max()


@METHODS
def test_a_second_target(method):
    model, ids = mamba_lm(), token_ids(2, LENGTH)
    logits, explain = model(ids).logits.detach(), method(model)
    one, other = explain.attribute(ids, (-1, 3)), explain.attribute(ids, (4, 2))
    found = explain.decompose(ids, (-1, 3), contrast=(4, 2))
    wanted = logits[:, -1, 3] - logits[:, 4, 2]
    torch.testing.assert_close(found.output, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.tokens, one - other, rtol=1e-4, atol=1e-5)
    each = [(2, 5), (6, 1)]
    beside = explain.attribute(ids, (4, 3), contrast=torch.tensor(2))
    assert torch.equal(beside, explain.attribute(ids, (4, 3), contrast=(4, 2)))
    found = explain.decompose(ids, [(0, 3), (6, 2)], contrast=each)
    wanted = torch.stack([logits[0, 0, 3] - logits[0, 2, 5], logits[1, 6, 2] - logits[1, 6, 1]])
    torch.testing.assert_close(found.output, wanted, rtol=1e-5, atol=1e-6)
    in_parts = explain.attribute(ids, [(0, 3), (6, 2)], contrast=each, internal_batch_size=1)
    torch.testing.assert_close(in_parts, found.tokens, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", ["mean", "others", "all", 2, [2, 0]])
def test_classes(option):
    model, ids = classifier("mean"), token_ids(2, LENGTH)
    logits = model(ids).detach()
    found = LatimFlow(model).decompose(ids, [1, 3], contrast=option)
    for row, i, second, value in zip(logits, [1, 3], [2, 0], found.output, strict=True):
        if isinstance(option, str):
            wanted = FORMULAS[option][1](row, i)
        else:
            wanted = row[i] - row[second if isinstance(option, list) else option]
        assert (value - wanted).abs() <= 1e-5 * row.abs().max()
    assert found.delta.abs().max() <= 1e-5 * size(found).max()


def test_the_entropy_is_named_among_the_constants():
    model, ids = mamba_lm(), token_ids(2, LENGTH)
    shares = model(ids).logits[:, -1].softmax(-1)
    found = LatimFlow(model).decompose(ids, (-1, 3), contrast="all")
    entropy = -(shares * shares.log()).sum(-1)
    torch.testing.assert_close(found.biases["output"], -entropy, rtol=1e-4, atol=1e-6)
