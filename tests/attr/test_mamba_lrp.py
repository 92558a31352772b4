"""MambaLRP: conservation, and what it says of models without biases."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from oracles import vim as vim_oracle
from torch import Tensor, nn
from zoo import networks
from zoo.small import mamba_lm, token_ids

from captum_ssm import LatimFlow, MambaLRP
from captum_ssm.models import VisionMamba

pytestmark = pytest.mark.slow

METHODS = pytest.mark.parametrize("method", [LatimFlow, MambaLRP])


def without_biases(model: nn.Module) -> nn.Module:
    """The model with its biases at zero, but for that of the step sizes, which is a coefficient."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def test_the_network_without_biases_is_the_model_with_biases_at_zero():
    model, ids = mamba_lm(use_bias=True), token_ids()
    found = MambaLRP(model).decompose(ids, (-1, 3), zero_bias=True)
    bare = without_biases(model)
    wanted = MambaLRP(bare).decompose(ids, (-1, 3))
    assert oracles.relative_error(found.output, bare(ids).logits[:, -1, 3]) <= 1e-5
    assert oracles.relative_error(found.inputs, wanted.inputs) <= 1e-5
    assert wanted.bias.abs().max() <= 1e-6 * wanted.inputs.abs().sum()


def test_masks_survive_where_biases_do_not(monkeypatch):
    case = networks.make("gpt_neox", monkeypatch)
    ids, target = case.inputs, (3, 2)
    found = MambaLRP(case.model).attribute(ids, target, zero_bias=True)
    assert not found[:, 4:].any() and found[:, :4].all()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    padded = MambaLRP(case.model).attribute(ids, target, mask, zero_bias=True)
    assert not padded[0, :2].any() and padded[0, 2:4].all()


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x).detach()


@pytest.mark.parametrize("cls", ["middle", "none"])
def test_of_vision_mamba_it_is_gradient_times_input_of_the_rules(cls: Any) -> None:
    """As in the published modules each direction's gated product is halved by itself."""
    options = {"depth": 2, "embed_dim": 6, "num_classes": 5, "d_state": 3, "cls_token": cls}
    model = vim_oracle.randomise(VisionMamba((12, 20), 4, **options)).double()

    def direction(mixer: Any, end: str, x: Tensor, z: Tensor) -> Tensor:
        def part(name: str) -> Any:
            return getattr(mixer, f"{name}{end}")

        u = silu(part("conv1d")(x.mT)[..., : x.shape[1]].mT)
        a = -(mixer.A_b_log if end else mixer.A_log).exp()
        sizes = [part("dt_proj").in_features, a.shape[1], a.shape[1]]
        t, b, c = part("x_proj")(u).detach().split(sizes, -1)
        dt = nn.functional.softplus(part("dt_proj")(t)).detach()
        state, out = torch.zeros(len(x), *a.shape).double(), []
        for i in range(x.shape[1]):
            step = dt[:, i, :, None]
            state = (step * a).exp() * state + step * b[:, i, None] * u[:, i, :, None]
            out.append((state * c[:, i, None]).sum(-1) + part("D") * u[:, i])
        y = torch.stack(out, 1) * silu(z)
        return y / 2 + (y / 2).detach()

    def mixed(mixer: Any, h: Tensor) -> Tensor:
        x, z = mixer.in_proj(h).chunk(2, -1)
        back = direction(mixer, "_b", x.flip(1), z.flip(1)).flip(1)
        return mixer.out_proj((direction(mixer, "", x, z) + back) / 2)

    def normed(norm: Any, x: Tensor) -> Tensor:
        return norm.weight * x * (x.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt().detach()

    pictures = torch.randn(2, 3, 12, 20).double().requires_grad_()
    tokens = model.patch_embed(pictures).flatten(2).mT
    places = vim_oracle.cls_places(cls, tokens.shape[1])
    for place in places:
        token = model.cls_token.expand(2, 1, -1)
        tokens = torch.cat([tokens[:, :place], token, tokens[:, place:]], 1)
    stream = tokens + model.pos_embed
    for block in model.layers:
        stream = stream + mixed(block.mixer, normed(block.norm, stream))
    logits = model.head(normed(model.norm_f, stream)[:, places[0] if places else -1])
    assert oracles.relative_error(logits, model(pictures)) <= 1e-12
    (gradient,) = torch.autograd.grad(logits[:, 2].sum(), pictures)
    found = MambaLRP(model).decompose(pictures.detach(), 2)
    assert oracles.relative_error(found.inputs, pictures * gradient) <= 1e-11
