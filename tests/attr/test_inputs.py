"""Ids, embeddings, tuples, sub-batches and additional arguments."""

from __future__ import annotations

import pytest
import torch
from helpers.sessions import sampled
from torch import nn
from zoo.small import (
    WIDTH,
    classifier,
    falcon_lm,
    images,
    mamba_lm,
    token_ids,
    vision,
)

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, MambaAttribution

METHODS = [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution]

pytestmark = pytest.mark.parametrize("method", METHODS)


@pytest.mark.parametrize("make", [mamba_lm, falcon_lm])
def test_ids_and_embeddings_agree(method, make):
    model, ids = make(), token_ids(2, 7)
    expected = method(model).attribute(ids, target=(-1, 3))
    assert expected.shape == (2, 7)
    embeddings = model.get_input_embeddings()(ids)
    for inputs in (embeddings, embeddings.detach()):
        found = method(model).attribute(inputs, target=(-1, 3))
        assert found.shape == (2, 7, WIDTH)
        torch.testing.assert_close(found.sum(-1), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(found, found[..., :1].expand_as(found))  # spread evenly
        per_token = method(model).attribute(inputs, target=(-1, 3), per_token=True)
        torch.testing.assert_close(per_token, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(method(model).attribute(ids, target=(-1, 3), per_token=True), expected)


def test_embeddings_with_a_mask(method):
    model, ids = mamba_lm(), token_ids(2, 7)
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    expected = method(model).attribute(ids, (-1, 3), mask)
    found = method(model).attribute(model.get_input_embeddings()(ids), (-1, 3), mask)
    torch.testing.assert_close(found.sum(-1), expected, rtol=1e-5, atol=1e-6)


def test_embeddings_of_a_model_with_input_ids_only(method, mamba_ssm):
    model, ids = mamba_ssm.make_lm(d_model=WIDTH).eval(), torch.randint(16, (3, 6))
    expected = method(model).attribute(ids, target=(4, 3))
    embeddings = model.backbone.embedding(ids).detach()
    found = method(model).attribute(embeddings, target=(4, 3))
    assert found.shape == (3, 6, WIDTH)
    torch.testing.assert_close(found.sum(-1), expected, rtol=1e-5, atol=1e-6)
    # it is these embeddings that run, not those of some token
    other = method(model).attribute(embeddings + 1, target=(4, 3))
    assert not torch.allclose(other, found, rtol=1e-3)
    assert not model.backbone.embedding._forward_hooks


def test_embeddings_of_a_fused_model(method, mamba_ssm_fused):
    model = mamba_ssm_fused.make_lm(d_model=WIDTH).eval()
    ids = torch.randint(16, (2, 6))
    expected = method(model).attribute(ids, target=(4, 3))
    found = method(model).attribute(model.backbone.embedding(ids).detach(), target=(4, 3))
    torch.testing.assert_close(found.sum(-1), expected, rtol=1e-5, atol=1e-6)


def test_a_model_that_takes_sequences_of_features(method):
    """No ids anywhere: the first argument is the sequence itself."""
    backbone = classifier("last").backbone

    class Series(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = backbone
            self.inner = nn.Linear(4, WIDTH)

        def forward(self, series):
            return self.mix(inputs_embeds=self.inner(series)).last_hidden_state[:, -1]

    model, series = Series().eval(), torch.randn(2, 9, 4)
    found = method(model).attribute(series, target=2)
    assert found.shape == (2, 9, 4)
    expected = method(backbone).attribute(model.inner(series), target=(-1, 2), per_token=True)
    torch.testing.assert_close(found.sum(-1), expected, rtol=1e-5, atol=1e-6)


def test_a_tuple_in_gives_a_tuple_out(method):
    model, ids = mamba_lm(), token_ids(2, 7)
    for inputs in (ids, model.get_input_embeddings()(ids)):
        found = method(model).attribute((inputs,), target=(-1, 3))
        assert type(found) is tuple and len(found) == 1
        assert torch.equal(found[0], method(model).attribute(inputs, target=(-1, 3)))
    picture_model, pictures = vision(), images(1)
    (found,) = method(picture_model).attribute((pictures,), target=2)
    assert torch.equal(found, method(picture_model).attribute(pictures, target=2))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_sequences_shorter_than_the_convolution(method, tokens):
    model, ids = mamba_lm(), token_ids(1, tokens)
    assert method(model).attribute(ids, target=(-1, 0)).shape == (1, tokens)


# --- internal_batch_size -------------------------------------------------------------------------


def same_in_parts(method, model, inputs, *args, **options):
    whole = method(model).attribute(inputs, *args, **options)
    for size in (1, 2, 3, 5, 100):
        parts = method(model).attribute(inputs, *args, internal_batch_size=size, **options)
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    assert len({tuple(row.flatten().tolist()) for row in whole}) == len(whole)


TARGETS = {
    "tuple": (3, 2),
    "list of tuples": [(3, 2), (0, 4), (-1, 1), (5, 0), (2, 2)],
    "tensor": torch.tensor([[3, 2], [0, 4], [5, 1], [5, 0], [2, 2]]),
    "array": torch.tensor([[3, 2], [0, 4], [5, 1], [5, 0], [2, 2]]).numpy(),
}


@pytest.mark.parametrize("target", sampled(TARGETS, 3))
def test_parts_of_a_batch_of_sequences(method, target):
    same_in_parts(method, mamba_lm(), token_ids(5, 6), TARGETS[target])


@pytest.mark.parametrize(
    "form", sampled([list, tuple, torch.tensor, lambda t: torch.tensor(t).numpy()], 3)
)
def test_parts_with_a_class_for_each_example(method, form):
    if form is tuple:
        same_in_parts(method, classifier("mean"), token_ids(5, 6), (3,))
    else:
        same_in_parts(method, classifier("mean"), token_ids(5, 6), form([3, 1, 0, 4, 2]))


@pytest.mark.full
@pytest.mark.parametrize(
    "query", [torch.tensor([3, 0, 5, 2, 1]), torch.tensor([[1, 2]] * 4 + [[0, 5]]), [1, 0, 2, 3, 4]]
)
def test_parts_with_queries(method, query):
    same_in_parts(method, mamba_lm(), token_ids(5, 6), (5, 1), query=query)


@pytest.mark.full
def test_parts_with_masks(method):
    mask = torch.ones(5, 6).long()
    mask[1, 4:] = 0
    mask[3, :2] = 0
    targets = [(5, 1), (3, 1), (5, 0), (5, 2), (4, 0)]
    same_in_parts(method, mamba_lm(), token_ids(5, 6), targets, mask)
    same_in_parts(method, mamba_lm(), token_ids(5, 6), targets, (mask, None))
    early = [(3, 1), (1, 1), (3, 0), (2, 2), (0, 0)]
    same_in_parts(method, mamba_lm(), token_ids(5, 6), early, (mask[1:2],))  # one for all


def test_parts_of_a_batch_of_images(method):
    same_in_parts(method, vision("middle"), images(5), [0, 1, 2, 3, 4])
    same_in_parts(method, vision(None), images(5), torch.tensor([0, 1, 2, 3, 4]), per_token=True)


# --- additional_forward_args ---------------------------------------------------------------------


class Scaled(nn.Module):
    """A language model with extra arguments of several kinds."""

    def __init__(self):
        super().__init__()
        self.lm = mamba_lm()

    def forward(self, ids, offset=None, scale=1.0, names=()):
        embeddings = self.lm.get_input_embeddings()(ids)
        if offset is not None:
            embeddings = embeddings + offset
        assert isinstance(scale, float) and isinstance(names, tuple | list)
        return self.lm(inputs_embeds=embeddings * scale).logits


def test_additional_arguments(method):
    model, ids = Scaled().eval(), token_ids(2, 6)
    attribute = method(model).attribute
    offset = torch.randn(2, 6, WIDTH)
    plain = attribute(ids, (-1, 2))
    assert torch.equal(attribute(ids, (-1, 2), None), plain)
    assert torch.equal(attribute(ids, (-1, 2), ()), plain)
    assert torch.equal(attribute(ids, (-1, 2), (None, 1.0)), plain)
    one = attribute(ids, (-1, 2), offset)
    assert not torch.allclose(one, plain, rtol=1e-3)
    assert torch.equal(attribute(ids, (-1, 2), (offset,)), one)
    several = attribute(ids, (-1, 2), (offset, 2.0, ["a", "b", "c"]))
    assert not torch.allclose(several, one, rtol=1e-3)
    by_hand = model.lm.get_input_embeddings()(ids)
    expected = method(model.lm).attribute((by_hand + offset) * 2.0, (-1, 2), per_token=True)
    torch.testing.assert_close(several, expected, rtol=1e-4, atol=1e-6)
