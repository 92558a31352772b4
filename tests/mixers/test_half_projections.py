"""Products with weights in half precision are those of float32; no float32 copy of them stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.stand_in import StandIn
from oracles import kernels as naive
from oracles import relative_error
from torch import Tensor, nn

from benchmarks import budgets
from captum_ssm import trace
from captum_ssm.mixers import linear, run
from captum_ssm.tracing import find_mixers
from captum_ssm.tracing.projection import projection_of

#: Two numbers of bfloat16 keep 16 of the 24 bits of a number of float32.
SPLIT = 2.0**-16
METHODS = (
    "LatimFlow, frozen", "LatimFlow, centered", "ImplicitAttentionRollout", "MambaAttribution",
)  # fmt: skip


@pytest.fixture
def device() -> Iterator[StandIn]:
    with StandIn() as found, budgets.fused(found):
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("call", METHODS)
@pytest.mark.parametrize("family", ["Mamba", "Mamba-2", "softmax"])
def test_no_projection_is_copied(device: StandIn, family: str, call: str) -> None:
    """Only weights beside the large projections are, such as convolutions and biases."""
    model, ids = budgets.FAMILIES[family](2).bfloat16(), torch.zeros(1, 9, dtype=torch.long)
    wanted = budgets.CALLS[call](model, ids)
    model.to("cuda")
    large = [
        x.weight.numel()
        for mixer in find_mixers(model)
        for x in mixer.module.modules()
        if isinstance(x, nn.Linear)
    ]
    device.watch(model)
    found = budgets.CALLS[call](model, ids.to("cuda"))
    assert device.copied < 2 * max(large), "half a float32 copy"
    # roundings to bfloat16 elsewhere; by this rule a kernel's own
    assert relative_error(found.cpu(), wanted) <= (2**-4 if "centered" in call else 2**-6)


class Casting(nn.Sequential):
    """It converts its input to the dtype of its weight, as PEFT's modules do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self[0].weight.dtype))


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_float32(device: StandIn, bias: bool) -> None:
    """Forward and backward, though neither the values nor the gradient are bfloat16."""
    module = nn.Linear(24, 8, bias).bfloat16()
    x, seed = torch.randn(2, 5, 24), torch.randn(2, 5, 8)
    exact = naive.product(x, module.weight) + (module.bias if bias else 0)
    gradient = naive.product(seed, module.weight.T)
    module.to("cuda")
    for project in (
        lambda x: run(module, x),
        lambda x: run(nn.Sequential(module), x),
        lambda x: run(Casting(module), x),
        lambda x: linear(x, module.weight, module.bias),
    ):
        leaf = x.to("cuda").requires_grad_()
        found = project(leaf)
        (of_leaf,) = torch.autograd.grad(found, leaf, seed.to("cuda"))
        assert found.dtype == of_leaf.dtype == torch.float32
        assert 0 < relative_error(found.cpu(), exact) <= SPLIT
        assert 0 < relative_error(of_leaf.cpu(), gradient) <= SPLIT


def test_hooks_and_adapters_take_part(device: StandIn) -> None:
    """And the user's module stays as it was."""

    class Adapted(nn.Linear):
        """A module that is more than its weight."""

        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    for module in (nn.Linear(6, 4), Adapted(6, 4)):
        module.bfloat16().to("cuda")
        handle = module.register_forward_hook(lambda module, given, out: 3 * out)
        weight, x = module.weight, torch.randn(1, 2, 6)
        plain = naive.product(x, weight.cpu()) + module.bias.cpu()
        factor = 6 if isinstance(module, Adapted) else 3
        assert relative_error(run(module, x.to("cuda")).cpu(), factor * plain) <= SPLIT
        assert module.weight is weight and weight.dtype == torch.bfloat16
        handle.remove()
        assert "forward" not in vars(module)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_output_projection_is_the_weight_itself(
    device: StandIn, dtype: torch.dtype, place: str
) -> None:
    """What lasts after the run takes no memory of its own."""
    model = budgets.FAMILIES["Mamba"](1).to(place, dtype)
    with torch.no_grad(), trace(model) as record:
        model(torch.zeros(1, 5, dtype=torch.long, device=place))
    (layer,) = record.layers
    found, weight = projection_of(layer.linear), layer.mixer.module.out_proj.weight
    assert found.stored.data_ptr() == weight.data_ptr() and found.rest is None
    assert found.weight.dtype == torch.float32 and torch.equal(found.weight, weight.T.float())
