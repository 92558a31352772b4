"""Effects by norms as they are without a message: against norms called one by one, and truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import relative_error as close
from oracles.messages import whole_matrix
from torch import Tensor, nn
from zoo.small import mamba_lm

from captum_ssm import EdgeEffects, Edges, knock_out, trace
from captum_ssm.errors import OptionError


class TanhNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.tanh()


def model_with(norm: Any = None) -> Any:
    model = mamba_lm()
    width = model.config.hidden_size
    for block in model.backbone.layers if norm else ():
        block.norm = norm(width)
    if norm:
        model.backbone.norm_f = norm(width)
        for parameter in model.backbone.norm_f.parameters():
            nn.init.uniform_(parameter, 0.5, 2)
    return model.double()


def norm_by_norm(model: Any, ids: Tensor, target: tuple[int, int], number: int) -> Tensor:
    """Effects of a layer's edges (B, L, L), each norm called without each message."""
    norms = [block.norm for block in model.backbone.layers[number + 1 :]] + [model.backbone.norm_f]
    calls: list[tuple[Tensor, Tensor]] = []
    handles = [n.register_forward_hook(lambda _, a, out: calls.append((a[0], out))) for n in norms]
    with trace(model, graph="outputs") as record:
        output = model(ids).logits[:, target[0], target[1]]
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(output.sum(), [out for _, out in calls])
    linear = record.layers[number].linear
    alpha, values = whole_matrix(linear.operator), linear.values.flatten(2)
    found = torch.zeros(*ids.shape, ids.shape[1], dtype=torch.float64)
    with torch.no_grad():
        at_rest = linear.project(torch.zeros_like(linear.values))
        for target_token in range(ids.shape[1]):
            for source in range(ids.shape[1]):
                sent = torch.einsum(
                    "bcd,bd->bc", alpha[:, target_token, :, source], values[:, source]
                )
                before = torch.zeros_like(values)
                before[:, target_token] = sent
                message = linear.project(before.view(linear.values.shape)) - at_rest
                for norm, (x, out), gradient in zip(norms, calls, gradients, strict=True):
                    lost = gradient * (out - norm(x - message))
                    found[:, target_token, source] += lost.sum((1, 2))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("norm", [None, nn.LayerNorm])
def test_norms_called_one_by_one(norm: Any) -> None:
    model, ids = model_with(norm), torch.randint(15, (2, 6))
    effects = EdgeEffects(model, exact_norms=True).attribute(ids, (-2, 3))
    assert not effects.first_order
    for number in range(3):
        expected = norm_by_norm(model, ids, (-2, 3), number)
        assert close(effects.matrix(number), expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("norm", [None, nn.LayerNorm])
def test_behind_the_last_mixer_they_are_the_truth(norm: Any) -> None:
    model, ids = model_with(norm), torch.randint(15, (2, 8))
    last = ["backbone.layers.2.mixer"]
    truth = EdgeEffects(model, layers=last, exact_norms=True).validate(ids, (-1, 3))
    assert close(truth.estimated, truth.true) < 1e-4
    first = EdgeEffects(model, layers=last, exact_norms=False).validate(ids, (-1, 3))
    assert close(first.estimated, first.true) > 1e-3
    effects = EdgeEffects(model, exact_norms=True).attribute(ids, (-1, 3))
    together = [Edges(2, [0, 1, 5], -1), Edges(2), Edges(2, 3, -1, component="gate")]
    with torch.no_grad():
        before = model(ids).logits[:, -1, 3]
        for edges in together:
            with knock_out(model, edges):
                after = model(ids).logits[:, -1, 3]
            assert close(effects.of(edges), before - after) < 1e-4


def test_layers_behind_which_a_norm_is_not_known_are_named() -> None:
    model, ids = model_with(), torch.randint(15, (2, 7))
    model.backbone.layers[1].norm = TanhNorm(model.config.hidden_size).double()
    effects = EdgeEffects(model, exact_norms=True).attribute(ids, (-1, 3))
    assert effects.first_order == effects.names[:1]
    first = EdgeEffects(model, exact_norms=False).attribute(ids, (-1, 3))
    assert torch.equal(effects.matrix(0), first.matrix(0))
    assert close(effects.matrix(1), first.matrix(1)) > 1e-3
    model.backbone.norm_f = TanhNorm(model.config.hidden_size).double()
    effects = EdgeEffects(model, exact_norms=True).attribute(ids, (-1, 3))
    assert effects.first_order == effects.names


def test_wrong_arguments() -> None:
    for options in ({"rule": "half", "exact_norms": True}, {"exact_norms": 2}):
        with pytest.raises(OptionError, match="exact_norms"):
            EdgeEffects(mamba_lm(), **options)
