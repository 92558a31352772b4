"""What LatimFlow takes, gives and refuses."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo.small import images, mamba_lm, token_ids, vision

from captum_ssm import CaptumSSMError, LatimFlow, MambaLRP
from captum_ssm.errors import GradientModeError, NotLinearError

pytestmark = pytest.mark.slow

METHODS = pytest.mark.parametrize("method", [LatimFlow, MambaLRP])
TARGET = (-1, 3)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> bool:
    return oracles.relative_error(found, wanted) <= tolerance


# --- what is refused -----------------------------------------------------------------------------


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


def test_a_function_that_cannot_be_seen_into_is_named():
    model = mamba_lm()
    forward = lambda ids: Cubed.apply(model(ids).logits)  # noqa: E731
    with pytest.raises(NotLinearError, match="Cubed"):
        LatimFlow(forward, model=model).attribute(token_ids(), TARGET)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_users_own_are_refused(reentrant):
    model = mamba_lm()
    block = model.backbone.layers[1]
    own = block.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda x: own(x, *args, **kwargs), x, use_reentrant=reentrant)

    block.forward = forward
    with pytest.raises(NotLinearError, match=r"torch\.utils\.checkpoint"):
        LatimFlow(model).attribute(token_ids(1), TARGET)


def test_a_function_without_a_rule_is_named():
    model = mamba_lm()

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.lgamma(x)

    model.backbone.norm_f = nn.Sequential(model.backbone.norm_f, Odd())
    with pytest.raises(NotLinearError, match=r"'backbone.norm_f.1'.*lgamma"):
        LatimFlow(model).attribute(token_ids(), TARGET)
    assert issubclass(NotLinearError, CaptumSSMError)


def test_probabilities_are_refused():
    model = mamba_lm()
    with pytest.raises(GradientModeError, match="softmax"):
        LatimFlow(lambda x: model(x).logits.softmax(-1), model=model).attribute(token_ids(), TARGET)


# --- the rule unless another is named ------------------------------------------------------------


@pytest.mark.parametrize(
    "method, zero_bias, rule, other",
    [
        (LatimFlow, False, "frozen", "centred"),
        pytest.param(LatimFlow, True, "frozen", "half", marks=pytest.mark.slow),
        pytest.param(MambaLRP, False, "half", "centred", marks=pytest.mark.slow),
        (MambaLRP, True, "half", "frozen"),
    ],
)
def test_the_rule_unless_another_is_named(method, zero_bias, rule, other):
    assert rule == method.default_rule
    explain, ids = method(mamba_lm(use_bias=True)), token_ids()
    given = explain.attribute(ids, TARGET)
    calls = {
        "attribute": lambda **o: explain.attribute(ids, TARGET, **o),
        "decompose": lambda **o: explain.decompose(ids, TARGET, **o).inputs,
        "decompose_each": lambda **o: explain.decompose_each(ids, [TARGET], **o)[0].inputs,
        "delta": lambda **o: explain.compute_convergence_delta(given, ids, TARGET, **o),
    }
    for name, call in calls.items():
        found = call(zero_bias=zero_bias)
        assert torch.equal(found, call(rule=rule, zero_bias=zero_bias)), name
        assert torch.equal(found, call(rule=None, zero_bias=zero_bias)), name
        if name != "delta" or not zero_bias:  # without constants all rules share one output
            assert not close(found, call(rule=other, zero_bias=zero_bias), 1e-2), name


def test_tokens_are_compared_with_their_mean_unless_told_otherwise():
    model, ids = mamba_lm(), token_ids()
    found = LatimFlow(model).decompose(ids, TARGET, rule="centred")
    told = LatimFlow(model).decompose(ids, TARGET, rule="centred", baselines="mean")
    assert torch.equal(found.inputs, told.inputs) and found.biases["baselines"].all()
    by_nothing = LatimFlow(model).decompose(ids, TARGET, rule="centred", baselines=0)
    assert not close(found.inputs, by_nothing.inputs, 1e-2)


# --- batches, threads, layouts -------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize("grid", [(3, 4), (2, 5)])
def test_pixels_sum_to_patches(method, grid):
    model, pictures = vision("middle", grid), images(2, grid)
    pixels, delta = method(model).attribute(pictures, 1, return_convergence_delta=True)
    patches = method(model).attribute(pictures, 1, per_token=True)
    assert pixels.shape == pictures.shape and patches.shape == (2, *grid)
    assert close(pixels.view(2, 3, grid[0], 4, grid[1], 3).sum((1, 3, 5)), patches)
    assert delta.abs().max() <= 1e-4
