"""Inputs and additional arguments that models of all kinds take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.every_method import each_method
from helpers.rules import frozen_flow
from torch import Tensor, nn
from zoo.small import WIDTH, classifier, mamba_lm, token_ids

from captum_ssm import MambaAttribution
from captum_ssm.errors import InputError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fused", [False, True])
@each_method
def test_embeddings_of_a_model_with_input_ids_only(
    fused: bool, method: Any, request: pytest.FixtureRequest
) -> None:
    package = request.getfixturevalue("mamba_ssm_fused" if fused else "mamba_ssm")
    model, ids = package.make_lm(d_model=WIDTH).eval(), torch.randint(16, (3, 6))
    expected = method(model).attribute(ids, target=(4, 3))
    embeddings = model.backbone.embedding(ids).detach()
    found = method(model).attribute(embeddings, target=(4, 3))
    torch.testing.assert_close(found.sum(-1), expected, rtol=1e-5, atol=1e-6)
    # it is these embeddings that run, not those of some token
    other = method(model).attribute(embeddings + 1, target=(4, 3))
    assert not torch.allclose(other, found, rtol=1e-3)


class TakesMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = mamba_lm()

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, *scales: Tensor) -> Any:
        return self.lm(input_ids, inputs_embeds=inputs_embeds).logits * sum(scales, 1)


def test_arguments_without_a_name_do_not_vanish_with_embeddings() -> None:
    model, ids = TakesMore(), token_ids(1, 5)
    embeddings = model.lm.get_input_embeddings()(ids).detach()
    with pytest.raises(InputError, match=r"holds 1 values for \*scales"):
        frozen_flow(model).attribute(embeddings, (-1, 3), (None, torch.ones(())))


class Series(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.mix, self.inner = classifier("last").backbone, nn.Linear(4, WIDTH, bias=False)
        self.stride = stride

    def forward(self, series: Tensor) -> Tensor:
        return self.mix(inputs_embeds=self.inner(series[:, :: self.stride])).last_hidden_state[
            :, -1
        ]


@pytest.mark.parametrize("stride", [1, 2])
@each_method
def test_a_model_that_takes_sequences_of_features(method: Any, stride: int) -> None:
    model, series = Series(stride).eval(), torch.randn(2, 9, 4)
    explains = frozen_flow if method.__name__ == "LatimFlow" else method
    found = explains(model).attribute(series, target=2)
    assert found.shape == (2, 9, 4) and (stride == 1 or not found[:, 1::2].any())
    read = model.inner(series[:, ::stride]).detach()
    expected = explains(model.mix).attribute(read, target=(-1, 2), per_token=True)
    torch.testing.assert_close(found[:, ::stride].sum(-1), expected, rtol=1e-4, atol=1e-6)


TARGETS = {
    "tuple": (3, 2),
    "list of tuples": [(3, 2), (0, 4), (-1, 1), (5, 0), (2, 2)],
    "tensor": torch.tensor([[3, 2], [0, 4], [5, 1], [5, 0], [2, 2]]),
    "array": torch.tensor([[3, 2], [0, 4], [5, 1], [5, 0], [2, 2]]).numpy(),
}


@pytest.mark.parametrize("target", TARGETS)
def test_parts_with_targets_of_every_form(target: str) -> None:
    explain, inputs = MambaAttribution(mamba_lm()), token_ids(5, 6)
    whole = explain.attribute(inputs, TARGETS[target])
    for size in (2, 3, 100):
        parts = explain.attribute(inputs, TARGETS[target], internal_batch_size=size)
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    assert len({tuple(row.flatten().tolist()) for row in whole}) == len(whole)


class Scaled(nn.Module):
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
