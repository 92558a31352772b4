"""A recorded layer: its operator, its error, and what voids the record."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from oracles import mamba1_parts, relative_error
from torch import Tensor, nn

from captum_ssm import trace
from captum_ssm.errors import InputError, ReconstructionError


def ids() -> Tensor:
    return torch.randint(19, (2, 5))


def test_bias_is_the_constant_term(model: Any) -> None:
    with torch.no_grad(), trace(model) as t:
        model(ids())
    for layer in t.layers:
        parts = mamba1_parts(layer.mixer.module, layer.call.hidden_states)
        values = parts.values
        wanted = parts.before_projection - torch.einsum(
            "bdij,bjd->bid", oracles.alpha(parts, "exact"), values
        )
        assert relative_error(layer.bias.flatten(2), wanted) <= 2e-5


# --- tampering -------------------------------------------------------------------------------


class Overwriting(nn.Module):
    def __init__(self, mixer: nn.Module, what: str) -> None:
        super().__init__()
        self.mixer, self.what = mixer, what

    def forward(self, hidden: Tensor) -> Tensor:
        inner = hidden * 1
        out = self.mixer(inner)
        if self.what == "output":
            out += hidden
        elif self.what == "slice":
            out[:, 0] = 0
        elif self.what == "input":
            inner.mul_(2)
        else:
            out = out + inner
        return out


@pytest.mark.parametrize("graph", ["none", "outputs"])
@pytest.mark.parametrize("what", ["output", "slice", "input", "nothing"])
def test_changes_in_place_are_noticed(model: Any, what: str, graph: Any) -> None:
    overwriting = Overwriting(model.backbone.layers[0].mixer, what)
    with torch.set_grad_enabled(graph != "none"), trace(overwriting, graph=graph) as t:
        overwriting(torch.randn(2, 4, 5))
    (layer,) = t.layers
    if what == "nothing":
        layer.verify()
        return
    for ask in (lambda: layer.operator, lambda: layer.values, layer.reconstruction_error):
        with pytest.raises(InputError, match="in place") as caught:
            ask()
    assert repr(layer.name) in str(caught.value)


# --- verify ----------------------------------------------------------------------------------


@pytest.mark.parametrize("parameter", ["out_proj.weight", "D", "conv1d.weight", "in_proj.weight"])
def test_verify_notices_other_weights(model: Any, parameter: str) -> None:
    with torch.no_grad(), trace(model, operators=False) as t:
        model(ids())
    part, _, name = f"backbone.layers.1.mixer.{parameter}".rpartition(".")
    other = nn.Parameter(1.01 * model.get_parameter(f"{part}.{name}").detach())
    setattr(model.get_submodule(part), name, other)
    t.layers[0].verify()
    with pytest.raises(ReconstructionError) as caught:
        t.layers[1].verify()
    assert "'backbone.layers.1.mixer'" in str(caught.value) and "Mamba" in str(caught.value)
    assert f"{t.layers[1].reconstruction_error():.1e}" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    t.layers[1].verify(tolerance=1.0)


def test_operators_are_those_of_the_run(model: Any) -> None:
    tokens = ids()
    others = {
        name: 1.5 * value.detach() if ".mixer." in name else value.detach()
        for name, value in model.named_parameters()
    }
    with torch.no_grad(), trace(model) as t:
        torch.func.functional_call(model, others, (tokens,))
    for layer in t.layers:
        assert layer.reconstruction_error() <= 2e-5


def test_weights_changed_in_place_void_the_record(model: Any) -> None:
    with torch.no_grad(), trace(model) as t:
        model(ids())
        model.backbone.layers[1].mixer.out_proj.weight.mul_(1.01)
    assert t.layers[0].reconstruction_error() <= 2e-5
    with pytest.raises(InputError, match=r"layers\.1\.mixer': weights .* changed in place"):
        t.layers[1].linear  # noqa: B018
