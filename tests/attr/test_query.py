"""Which token's row is asked for, and what ``query=None`` finds."""

from __future__ import annotations

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


# --- given queries -------------------------------------------------------------------------------


def test_a_position_for_all_examples():
    model, ids = mamba_lm(), token_ids(3, 7)
    rows = dense_rollout(model, ids)
    for query in (0, 3, 6):
        assert error(asked(model, ids, query), rows[:, query]) <= 1e-5
        negative = asked(model, ids, query - 7)
        assert torch.equal(negative, asked(model, ids, query))
        assert torch.equal(negative, asked(model, ids, torch.tensor(query)))


def test_the_mean_of_several_positions():
    model, ids = mamba_lm(), token_ids(3, 7)
    rows = dense_rollout(model, ids)
    assert error(asked(model, ids, [1, 4, -1]), rows[:, [1, 4, 6]].mean(1)) <= 1e-5
    assert error(asked(model, ids, [5]), rows[:, 5]) <= 1e-5
    assert error(asked(model, ids, (2, 3)), rows[:, [2, 3]].mean(1)) <= 1e-5
    # as often as it is named
    expected = (2 * rows[:, 1] + rows[:, 4]) / 3
    assert error(asked(model, ids, [1, 1, 4]), expected) <= 1e-5


def test_a_list_is_common_to_all_examples_even_if_it_has_one_entry_each():
    model, ids = mamba_lm(), token_ids(2, 7)
    rows = dense_rollout(model, ids)
    assert error(asked(model, ids, [0, 6]), (rows[:, 0] + rows[:, 6]) / 2) <= 1e-5


def test_positions_of_each_example():
    model, ids = mamba_lm(), token_ids(3, 7)
    rows = dense_rollout(model, ids)
    expected = torch.stack([rows[0, 2], rows[1, 6], rows[2, 0]])
    for query in ([2, 6, 0], [2, -1, -7]):
        assert error(asked(model, ids, torch.tensor(query)), expected) <= 1e-5
        assert error(asked(model, ids, torch.tensor(query)[:, None]), expected) <= 1e-5
    several = torch.tensor([[2, 1], [6, 0], [-1, -1]])
    expected = torch.stack([rows[0, [1, 2]].mean(0), rows[1, [0, 6]].mean(0), rows[2, 6]])
    assert error(asked(model, ids, several), expected) <= 1e-5


def test_names():
    model, ids = mamba_lm(), token_ids(2, 7)
    rows = dense_rollout(model, ids)
    assert error(asked(model, ids, "last"), rows[:, 6]) <= 1e-5
    assert error(asked(model, ids, "mean"), rows.mean(1)) <= 1e-5


# --- queries found -------------------------------------------------------------------------------


@each_of_queries
def test_a_language_models_query_is_the_targets_position(method):
    model, ids = mamba_lm(), token_ids(3, 7)
    attribute = method(model).attribute
    expected = attribute(ids, target=(4, 2), query=4)
    assert torch.equal(attribute(ids, target=(4, 2)), expected)
    assert torch.equal(attribute(ids, target=(-3, 2)), expected)
    found = attribute(ids, target=[(4, 2), (0, 5), (-1, 1)])
    for example, (position, token) in enumerate([(4, 2), (0, 5), (6, 1)]):
        one = attribute(ids, target=(position, token), query=position)[example]
        torch.testing.assert_close(found[example], one, rtol=1e-5, atol=1e-6)


def test_without_target_it_is_the_last_token():
    model, ids = mamba_lm(), token_ids(2, 7)
    assert torch.equal(asked(model, ids, None), asked(model, ids, 6))
    base = model.backbone
    assert torch.equal(asked(base, ids, None), asked(base, ids, 6))


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


@each_of_queries
def test_a_head_that_reads_the_last_token_asks_for_it(method):
    model, ids = classifier("last"), token_ids(2, 6)
    attribute = method(model).attribute
    assert torch.equal(attribute(ids, target=1), attribute(ids, target=1, query="last"))
    assert torch.equal(attribute(ids, target=1), attribute(ids, target=1, query="cls"))


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_pooling_over_a_padded_batch(pool):
    model, ids = classifier(pool), token_ids(3, 7)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 2 + [1] * 5])
    found = asked(model, ids, None, additional_forward_args=mask)
    if pool == "last":
        expected = asked(model, ids, torch.tensor([6, 3, 6]), additional_forward_args=mask)
    else:
        each = [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3], [2, 3, 4, 5, 6]]
        rows = [
            torch.stack(
                [
                    asked(model, ids[b : b + 1], q, additional_forward_args=mask[b : b + 1])
                    for q in queries
                ]
            ).mean(0)
            for b, queries in enumerate(each)
        ]
        expected = torch.cat(rows)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_query_is_found_when_the_output_is_a_probability():
    """A softmax's outputs sum to a constant, whose gradient is zero."""
    model, pictures = vision("middle"), images(2)
    probabilities = nn.Sequential(model, nn.Softmax(-1))
    found = asked(probabilities, pictures, None)
    assert torch.equal(found, asked(model, pictures, model.cls_position))


def test_the_query_is_found_when_the_output_is_one_number_per_example():
    model, pictures = vision("middle"), images(2)
    expected = asked(model, pictures, model.cls_position)
    for score in (lambda x: model(x)[:, 1], lambda x: model(x)[:, 1:2]):
        method = ImplicitAttentionRollout(score, model=model)
        assert torch.equal(method.attribute(pictures, per_token=True), expected)


@pytest.mark.parametrize("query", [torch.tensor([1.0, 2.0]), torch.tensor([True, False])])
def test_positions_are_integers(query):
    model, ids = mamba_lm(), token_ids(2, 6)
    with pytest.raises(ValueError, match=rf"query must hold integer positions, got {query.dtype}"):
        asked(model, ids, query)


def test_cls_means_a_single_token():
    model, ids = classifier("mean"), token_ids(2, 6)
    with pytest.raises(ValueError, match=r"query='cls'.*no cls token.*'last', 'mean'"):
        asked(model, ids, "cls")
