"""Which token's row is asked for, and what ``query=None`` finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.every_method import each_of_queries
from oracles.dense import UNIFIED, Run, add_identity, error, rollout
from torch import nn
from zoo.small import classifier, images, mamba_lm, token_ids, vision

from captum_ssm import ImplicitAttentionRollout

pytestmark = pytest.mark.slow


def dense_rollout(model, *inputs, **options):
    """All rows of the rollout, (B, L, L)."""
    alphas = Run(model, *inputs).alphas(UNIFIED, **options)
    return rollout([add_identity(alpha) for alpha in alphas])


def asked(model, inputs, query, **options):
    return ImplicitAttentionRollout(model).attribute(inputs, query=query, per_token=True, **options)


#: By the query of 3 examples of 7 tokens: the rows of each example whose mean is shown.
GIVEN: dict[Any, list[list[int]]] = {
    **{query: [[query % 7]] * 3 for query in (0, 3, -1)},
    torch.tensor(3): [[3]] * 3,
    (1, 4, -1): [[1, 4, 6]] * 3,
    (1, 1, 4): [[1, 1, 4]] * 3,  # as often as it is named
    (0, 6, 3): [[0, 6, 3]] * 3,  # common to all examples even if it has one entry each
    torch.tensor([2, -1, -7]): [[2], [6], [0]],
    torch.tensor([[2], [6], [0]]): [[2], [6], [0]],
    torch.tensor([[2, 1], [6, 0], [-1, -1]]): [[1, 2], [0, 6], [6]],
    "last": [[6]] * 3,
    "mean": [[0, 1, 2, 3, 4, 5, 6]] * 3,
}


@pytest.mark.parametrize("query", GIVEN, ids=str)
def test_given_queries(query: Any) -> None:
    model, ids = mamba_lm(), token_ids(3, 7)
    rows = dense_rollout(model, ids)
    expected = torch.stack([rows[b, some].mean(0) for b, some in enumerate(GIVEN[query])])
    given = [query, [*query]] if isinstance(query, tuple) else [query]
    assert all(error(asked(model, ids, each), expected) <= 1e-5 for each in given)


def test_without_target_it_is_the_last_unpadded_token():
    model, ids = mamba_lm(), token_ids(3, 7)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 2 + [1] * 4 + [0]])
    found = asked(model, ids, None, additional_forward_args=mask)
    expected = asked(model, ids, torch.tensor([6, 3, 5]), additional_forward_args=mask)
    assert torch.equal(found, expected)
    assert torch.equal(found, asked(model, ids, "last", additional_forward_args=mask))


@pytest.mark.parametrize("cls", ["head", "middle"])
@each_of_queries
def test_a_cls_token_is_found_wherever_it_is(cls, method):
    model, pictures = vision(cls), images(2)
    options = {"target": 1, "per_token": True}
    attribute = method(model).attribute
    expected = attribute(pictures, query=model.cls_position, **options)
    for query in (None, "cls"):
        assert torch.equal(attribute(pictures, query=query, **options), expected)
    assert not torch.equal(attribute(pictures, query="last", **options), expected)


@each_of_queries
def test_a_head_that_pools_by_mean_asks_for_all_tokens(method):
    model, pictures = vision(None), images(2)
    options = {"target": 1, "per_token": True}
    attribute = method(model).attribute
    expected = attribute(pictures, query="mean", **options)
    torch.testing.assert_close(attribute(pictures, **options), expected, rtol=1e-5, atol=1e-6)
    text, ids = classifier("mean"), token_ids(2, 6)
    attribute = method(text).attribute
    torch.testing.assert_close(
        attribute(ids, target=1), attribute(ids, target=1, query="mean"), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_pooling_over_a_padded_batch(pool: str) -> None:
    model, ids = classifier(pool), token_ids(3, 7)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 2 + [1] * 5])
    found = asked(model, ids, None, additional_forward_args=mask)
    some = [[6], [3], [6]] if pool == "last" else [range(7), range(4), range(2, 7)]
    for b, queries in enumerate(some):
        one = {"additional_forward_args": mask[b : b + 1]}
        rows = [asked(model, ids[b : b + 1], query, **one)[0] for query in queries]
        torch.testing.assert_close(found[b], sum(rows) / len(rows), rtol=1e-5, atol=1e-6)


def test_the_query_is_found_whatever_the_output_is() -> None:
    """A softmax's outputs sum to a constant, whose gradient is zero."""
    model, pictures = vision("middle"), images(2)
    expected = asked(model, pictures, model.cls_position)
    assert torch.equal(asked(nn.Sequential(model, nn.Softmax(-1)), pictures, None), expected)
    for score in (lambda x: model(x)[:, 1], lambda x: model(x)[:, 1:2]):
        method = ImplicitAttentionRollout(score, model=model)
        assert torch.equal(method.attribute(pictures, per_token=True), expected)


def test_cls_means_a_single_token():
    model, ids = classifier("mean"), token_ids(2, 6)
    with pytest.raises(ValueError, match=r"query='cls'.*needs a class token.*'last', 'mean'"):
        asked(model, ids, "cls")
