"""What is put right for autograd, and put back."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo.mamba import transformers_model

from captum_ssm import trace
from captum_ssm.tracing.gradients import graphs_dropped, recordable


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.last: Tensor | None = None
        self.mine = self.linear.weight * 2

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        return self.last


def test_graphs_of_the_run_are_dropped_and_no_others() -> None:
    model, x = Remembering(), torch.randn(2, 3)
    mine = model.mine
    with graphs_dropped(model):
        out = model(x)
        assert model.last is out
    assert model.mine is mine and mine.grad_fn is not None
    assert model.last is not None and model.last.grad_fn is None
    assert torch.equal(model.last, out) and out.requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_have_a_graph_inside(reentrant: bool) -> None:
    model: Any = nn.Linear(3, 3)
    options: list[dict[str, Any]] = []

    def noting(function: Any, *args: Any, **given: Any) -> Any:
        options.append(given)
        return checkpoint(function, *args, **given)

    mine = functools.partial(noting, preserve_rng_state=False, use_reentrant=reentrant)
    model._gradient_checkpointing_func = mine
    x, passed = torch.randn(2, 3), torch.randn(2, 3)
    with recordable(model):
        out = model._gradient_checkpointing_func(lambda _, x: (x.requires_grad, 2 * x), None, x)
        with torch.no_grad():
            assert model._gradient_checkpointing_func(lambda x: x, passed) is passed
    assert out[0] and not x.requires_grad and torch.equal(out[1], 2 * x)
    assert out[1].requires_grad
    assert options == [{"preserve_rng_state": False, "use_reentrant": False}] * 2
    assert model._gradient_checkpointing_func is mine


@pytest.mark.parametrize("graph", ["tail", "outputs", "all"])
def test_a_trace_of_a_model_made_under_inference_mode(graph: Any) -> None:
    plain, ids = transformers_model("mamba"), torch.randint(19, (2, 5))
    with torch.inference_mode():
        model = copy.deepcopy(plain)
    gradients = []
    for each in (plain, model):
        with trace(each, graph=graph) as t:
            score = each(ids).logits[:, -1, 3].sum()
        gradients.append(torch.autograd.grad(score, t.layers[-1].output)[0])
    assert bool(gradients[0].any()) and torch.equal(*gradients)
    assert all(p.is_inference() for p in model.parameters())
