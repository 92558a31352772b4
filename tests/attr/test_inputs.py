"""Inputs and additional arguments that models of all kinds take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.every_method import each_method, each_of_queries
from torch import Tensor, nn
from zoo.small import WIDTH, classifier, mamba_lm, token_ids

from captum_ssm import MambaAttribution

pytestmark = pytest.mark.slow


@each_method
def test_embeddings_of_a_model_with_input_ids_only(method: Any, mamba_ssm: Any) -> None:
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


@each_method
def test_embeddings_of_a_fused_model(method: Any, mamba_ssm_fused: Any) -> None:
    model = mamba_ssm_fused.make_lm(d_model=WIDTH).eval()
    ids = torch.randint(16, (2, 6))
    expected = method(model).attribute(ids, target=(4, 3))
    found = method(model).attribute(model.backbone.embedding(ids).detach(), target=(4, 3))
    torch.testing.assert_close(found.sum(-1), expected, rtol=1e-5, atol=1e-6)


@each_method
def test_a_model_that_takes_sequences_of_features(method: Any) -> None:
    """No ids anywhere: the first argument is the sequence itself."""
    backbone = classifier("last").backbone

    class Series(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = backbone
            self.inner = nn.Linear(4, WIDTH, bias=False)

        def forward(self, series: Tensor) -> Tensor:
            return self.mix(inputs_embeds=self.inner(series)).last_hidden_state[:, -1]

    model, series = Series().eval(), torch.randn(2, 9, 4)
    found = method(model).attribute(series, target=2)
    assert found.shape == (2, 9, 4)
    read = model.inner(series).detach()
    expected = method(backbone).attribute(read, target=(-1, 2), per_token=True)
    torch.testing.assert_close(found.sum(-1), expected, rtol=1e-5, atol=1e-6)


@each_method
def test_sequences_shorter_than_the_convolution(method: Any) -> None:
    for tokens in (1, 2, 3):
        found = method(mamba_lm()).attribute(token_ids(1, tokens), target=(-1, 0))
        assert found.shape == (1, tokens)


TARGETS = {
    "tuple": (3, 2),
    "list of tuples": [(3, 2), (0, 4), (-1, 1), (5, 0), (2, 2)],
    "tensor": torch.tensor([[3, 2], [0, 4], [5, 1], [5, 0], [2, 2]]),
    "array": torch.tensor([[3, 2], [0, 4], [5, 1], [5, 0], [2, 2]]).numpy(),
}


def in_parts(method: Any, model: Any, *args: Any, **options: Any) -> None:
    inputs = token_ids(5, 6)
    whole = method(model).attribute(inputs, *args, **options)
    for size in (2, 3, 100):
        parts = method(model).attribute(inputs, *args, internal_batch_size=size, **options)
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    assert len({tuple(row.flatten().tolist()) for row in whole}) == len(whole)


@pytest.mark.parametrize("target", TARGETS)
def test_parts_with_targets_of_every_form(target: str) -> None:
    in_parts(MambaAttribution, mamba_lm(), TARGETS[target])


@pytest.mark.parametrize("query", [torch.tensor([[1, 2]] * 4 + [[0, 5]])])
@each_of_queries
def test_parts_with_queries(method: Any, query: Any) -> None:
    in_parts(method, mamba_lm(), (5, 1), query=query)


class Scaled(nn.Module):
    """A language model with extra arguments of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = mamba_lm()

    def forward(
        self, ids: Tensor, offset: Tensor | None = None, scale: float = 1.0, names: Any = ()
    ) -> Tensor:
        embeddings = self.lm.get_input_embeddings()(ids)
        if offset is not None:
            embeddings = embeddings + offset
        assert isinstance(scale, float) and isinstance(names, tuple | list)
        return self.lm(inputs_embeds=embeddings * scale).logits


@each_method
def test_additional_arguments(method: Any) -> None:
    model, ids = Scaled().eval(), token_ids(2, 6)
    attribute = method(model).attribute
    offset = torch.randn(2, 6, WIDTH)
    plain = attribute(ids, (-1, 2))
    for nothing in (None, (), (None, 1.0)):
        assert torch.equal(attribute(ids, (-1, 2), nothing), plain)
    one = attribute(ids, (-1, 2), offset)
    assert not torch.allclose(one, plain, rtol=1e-3)
    assert torch.equal(attribute(ids, (-1, 2), (offset,)), one)
    several = attribute(ids, (-1, 2), (offset, 2.0, ["a", "b", "c"]))
    assert not torch.allclose(several, one, rtol=1e-3)
    if method.needs_gradient and hasattr(method, "default_rule"):
        return  # which counts the offset as a constant
    by_hand = model.lm.get_input_embeddings()(ids)
    read = ((by_hand + offset) * 2.0).detach()
    expected = method(model.lm).attribute(read, (-1, 2), per_token=True)
    torch.testing.assert_close(several, expected, rtol=1e-4, atol=1e-6)
