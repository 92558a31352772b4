"""Projections in half precision are multiplied as they are, and steps follow in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks import budgets
from benchmarks.stand_in import StandIn
from captum_ssm import LatimFlow
from captum_ssm.mixers import linear, run
from captum_ssm.tracing import find_mixers


@pytest.mark.parametrize("family", ["Mamba", "Mamba-2", "Gated DeltaNet"])
def test_no_projection_is_copied(family: str) -> None:
    """In float32 it would take twice its memory, and no tensor cores would multiply with it."""
    model = budgets.FAMILIES[family](2).bfloat16()
    sizes = [x.weight.numel() for m in find_mixers(model) for x in projections(m.module)]
    with StandIn() as device, budgets.fused(device):
        model.to("cuda")
        device.watch(model)
        ids = torch.zeros(1, 9, dtype=torch.long, device="cuda")
        LatimFlow(model).attribute(ids, budgets.TARGET)
    assert device.copied < 4 * max(sizes)


def projections(mixer: nn.Module) -> list[nn.Linear]:
    return [x for x in mixer.modules() if isinstance(x, nn.Linear)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", [8, 3])
def test_products_are_those_of_their_own_precision(outputs: int, dtype: torch.dtype) -> None:
    """Those of few channels are in float32, as if the weights had been written in it."""
    module = nn.Linear(24, outputs).to(dtype)
    x = torch.randn(2, 5, 24).to(dtype).float()
    own: Tensor = module(x.to(dtype)).float()
    wide = torch.nn.functional.linear(x, module.weight.float(), module.bias.float())
    wanted = own if outputs == 8 else wide
    assert not torch.equal(own, wide)
    for found in (run(module, x), linear(x, module.weight, module.bias)):
        assert found.dtype == torch.float32 and torch.equal(found, wanted)


def test_a_weight_read_off_is_not_rounded() -> None:
    """The output projection of a fold is the weight itself, though its product is converted."""
    from captum_ssm import trace
    from captum_ssm.tracing.projection import Projection, projection_of

    model = budgets.FAMILIES["Mamba"](1).bfloat16()
    with torch.no_grad(), trace(model) as record:
        model(torch.zeros(1, 5, dtype=torch.long))
    (layer,) = record.layers
    found = projection_of(layer.linear)
    assert isinstance(found, Projection)
    weight = layer.mixer.module.out_proj.weight
    assert found.rest is None and torch.equal(found.weight, weight.T.float())
