"""LatimFlow on models that make it hard."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from helpers.versions import transformers5
from torch import Tensor, nn
from zoo import attention, mamba2
from zoo.mamba import randomise
from zoo.small import mamba_lm, token_ids

from captum_ssm import LatimFlow

pytestmark = pytest.mark.slow

TARGET = (-1, 3)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> bool:
    return oracles.relative_error(found, wanted) <= tolerance


@pytest.mark.parametrize("family", ["mamba2", "bamba"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family, dtype):
    model, ids = mamba2.make_model(family), token_ids()
    wanted = LatimFlow(model).attribute(ids, TARGET)
    found, delta = LatimFlow(model.to(dtype)).attribute(ids, TARGET, return_convergence_delta=True)
    assert torch.isfinite(found).all() and torch.isfinite(delta).all()
    assert close(found, wanted, 0.2)
    assert delta.abs().max() <= 0.1 * wanted.abs().sum(1).max()


def test_experts_with_biases():
    """Tokens of several examples meet in an expert, whose bias belongs to them all."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(12, 3)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(12, 7), nn.SiLU(), nn.Linear(7, 12)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, x.shape[-1])
            weights, chosen = self.router(flat).softmax(-1).topk(2)
            out = torch.zeros_like(flat)
            for index, expert in enumerate(self.experts):
                token, rank = torch.where(chosen == index)
                part = expert(flat[token]) * weights[token, rank, None]
                out.index_add_(0, token, part)
            return out.view_as(x)

    model = mamba2.make_model("bamba")
    for layer in model.model.layers:
        layer.feed_forward = randomise(Experts())
    explain, ids = LatimFlow(model), token_ids(4)
    found = explain.decompose(ids, TARGET)
    assert (found.delta.abs() / found.inputs.abs().flatten(1).sum(1)).max() <= 1e-5
    alone = torch.cat([explain.attribute(row[None], TARGET) for row in ids])
    assert close(found.tokens, alone)


@transformers5
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_of_transformers(implementation):
    model, ids = attention.attention_model("jamba"), token_ids(3)
    wanted = LatimFlow(model).attribute(ids, TARGET)
    model.set_experts_implementation(implementation)
    assert close(LatimFlow(model).attribute(ids, TARGET), wanted)


def test_a_residual_stream_that_is_changed_in_place():
    class InPlace(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            x = self.model.backbone.embeddings(ids)
            x *= 1.5
            for block in self.model.backbone.layers:
                x += block.mixer(block.norm(x))
            return self.model.lm_head(self.model.backbone.norm_f(x).mul_(2))

    model, ids = InPlace(mamba_lm()).eval(), token_ids()
    found = LatimFlow(model).decompose(ids, TARGET)
    assert (found.delta.abs() / found.inputs.abs().flatten(1).sum(1)).max() <= 1e-5
    with torch.no_grad():
        assert torch.allclose(found.output, model(ids)[:, -1, 3], rtol=1e-4, atol=1e-5)
    assert len(found.mixers) == 3 and found.inputs.any()
