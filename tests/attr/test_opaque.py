"""Functions that nobody can look into: operations without a backward, kernels, scripts, vmap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.every_method import METHODS, each_method, named
from oracles import relative_error
from torch import Tensor, nn
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from zoo.mamba import randomise, transformers_model

from captum_ssm import (
    EdgeEffects,
    LatimFlow,
    LatimLogit,
    MambaAttribution,
    MambaLRP,
    TransformerAttribution,
)
from captum_ssm.errors import GradientModeError, NotLinearError

pytestmark = pytest.mark.slow

WIDTH, TARGET = 8, (-1, 3)
Norm = Callable[[Tensor, Tensor], Tensor]


@torch.library.custom_op("captum_ssm_tests::mlp", mutates_args=())
def opaque_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(x @ up) @ down


@torch.library.custom_op("captum_ssm_tests::norm", mutates_args=())
def opaque_norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(x @ up) @ down


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def bare_norm(x: Tensor, weight: Tensor, make: Any = torch.empty_like) -> Tensor:
    """A kernel that writes to new memory, as one of Triton without autograd does."""
    out, a = make(x), x.detach().numpy()
    scale = np.sqrt(np.square(a).mean(-1, keepdims=True) + 1e-5)
    out.numpy()[...] = a / scale * weight.detach().numpy()
    return out


class Model(nn.Module):
    def __init__(self, norm: Norm = rms_norm, mlp: Any = mlp, last: Norm = rms_norm) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = MambaConfig(hidden_size=WIDTH, state_size=4, num_hidden_layers=3)
        self.embed, self.head = nn.Embedding(19, WIDTH), nn.Linear(WIDTH, 19)
        self.layers = nn.ModuleList(
            Layer(randomise(MambaMixer(config, i)), norm, mlp) for i in range(3)
        )
        self.last = Weighted(last, torch.rand(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.last(x))
        return logits


class Weighted(nn.Module):
    def __init__(self, function: Callable[..., Tensor], *weights: Tensor) -> None:
        super().__init__()
        self.function, self.weights = function, nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module, norm: Norm, mlp: Any) -> None:
        super().__init__()
        self.mixer, self.norm = mixer, Weighted(norm, torch.rand(WIDTH) + 0.5)
        self.mlp_norm = Weighted(norm, torch.rand(WIDTH) + 0.5)
        self.mlp = Weighted(mlp, torch.randn(WIDTH, 12) / 2, torch.randn(12, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def tokens() -> Tensor:
    return torch.randint(19, (2, 9))


OPAQUE: dict[str, dict[str, Any]] = {
    "MLPs": {"mlp": opaque_mlp},
    "norms": {"norm": opaque_norm},
    "bare kernels": {"norm": bare_norm},
    "bare kernels on zeros": {"norm": functools.partial(bare_norm, make=torch.zeros_like)},
}
LINEAR, GRADIENTS = (LatimFlow, MambaLRP), (MambaAttribution, TransformerAttribution)
#: They need no gradient of what mixers and parts within tokens read.
without_gradients = named([m for m in METHODS if m not in (*LINEAR, *GRADIENTS)])


@pytest.mark.parametrize("kind", OPAQUE)
@without_gradients
def test_right_without_looking(method: Any, kind: str) -> None:
    ids, model = tokens(), Model(**OPAQUE[kind]).eval()
    expected = method(Model().eval()).attribute(ids, target=TARGET)
    assert relative_error(method(model).attribute(ids, target=TARGET), expected) <= 1e-5


@pytest.mark.parametrize("kind", OPAQUE)
@named([*LINEAR])
def test_refused_where_relevance_would_have_to_pass(method: Any, kind: str) -> None:
    with pytest.raises(NotLinearError, match=r"layers\.0\.(mlp|norm|mixer)"):
        method(Model(**OPAQUE[kind]).eval()).attribute(tokens(), target=TARGET)


@pytest.mark.parametrize("kind", ["MLPs", "norms"])
@named([*GRADIENTS])
def test_refused_where_a_gradient_would_have_to_pass(method: Any, kind: str) -> None:
    with pytest.raises(GradientModeError, match=r"no backward pass.*captum_ssm_tests.*LatimALTI"):
        method(Model(**OPAQUE[kind]).eval()).attribute(tokens(), target=TARGET)


@pytest.mark.parametrize("kind", ["bare kernels", "bare kernels on zeros"])
def test_refused_where_a_gradient_is_cut(kind: str) -> None:
    with pytest.raises(
        GradientModeError, match=r"No gradient passes through layer 'layers\.1\.mixer'"
    ):
        MambaAttribution(Model(**OPAQUE[kind]).eval()).attribute(tokens(), target=TARGET)


@pytest.mark.parametrize(("last", "where"), [(opaque_norm, "last"), (bare_norm, "head")])
def test_direct_paths_through_it_are_refused(last: Norm, where: str) -> None:
    with pytest.raises(NotLinearError, match=f"Module '{where}'"):
        LatimLogit(Model(last=last).eval()).attribute(tokens(), target=TARGET)


class Unpacked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = torch.empty_like(self.weight)
        weight.numpy()[...] = self.weight.detach().numpy()
        return x @ weight.T + self.bias


@each_method
def test_weights_that_kernels_unpack(method: Any) -> None:
    ids, model, plain = tokens(), Model().eval(), Model().eval()
    for layer in model.layers:
        mixer = layer.mixer
        layer.mlp = nn.Sequential(layer.mlp, Unpacked(WIDTH, WIDTH))
        mixer.x_proj.weight.requires_grad_(False)
    for layer, same in zip(plain.layers, model.layers, strict=True):
        layer.mlp = nn.Sequential(layer.mlp, nn.Linear(WIDTH, WIDTH))
        layer.mlp[1].load_state_dict(same.mlp[1].state_dict())
    expected = method(plain).attribute(ids, target=TARGET)
    assert relative_error(method(model).attribute(ids, target=TARGET), expected) <= 1e-5


# --- functions that work out of sight of the rules -----------------------------------------------


@torch.jit.script
def scripted_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def mapped_norm(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.vmap(torch.vmap(lambda y: rms_norm(y, weight)))(x)
    return out


@pytest.mark.parametrize("norm", [scripted_norm, mapped_norm], ids=["TorchScript", "vmap"])
@each_method
def test_out_of_sight(method: Any, norm: Norm) -> None:
    ids, model = tokens(), Model(norm=norm).eval()
    if method in (*LINEAR, TransformerAttribution):
        with pytest.raises(NotLinearError, match="do not sum to the model's output"):
            method(model).attribute(ids, target=TARGET)
        return
    expected = method(Model().eval()).attribute(ids, target=TARGET)
    assert relative_error(method(model).attribute(ids, target=TARGET), expected) <= 1e-5


def test_effects_by_a_rule_are_refused_there() -> None:
    with pytest.raises(NotLinearError, match="do not sum to the model's output"):
        EdgeEffects(Model(norm=mapped_norm).eval(), rule="half").attribute(tokens(), TARGET)


@pytest.mark.parametrize("bends", [False, True])
def test_a_mapped_head(bends: bool) -> None:
    model, ids = transformers_model("mamba"), tokens()
    width = model.config.hidden_size
    bent = nn.Tanh() if bends else nn.Identity()
    head = nn.Sequential(nn.Linear(width, 6, bias=False), bent, nn.Linear(6, 19, bias=False))
    explain = LatimLogit(lambda x: torch.vmap(head)(model.backbone(x).last_hidden_state), model)
    if bends:
        with pytest.raises(NotLinearError, match="do not sum"):
            explain.decompose(ids, TARGET)
    else:
        assert explain.decompose(ids, TARGET).delta.abs().max() <= 1e-5
