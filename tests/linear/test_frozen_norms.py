"""Gradients with the statistics of norms held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients, NoiseTunnel
from torch import Tensor, nn
from torch.nn import functional as F

import captum_ssm
from captum_ssm import frozen_norms
from captum_ssm.errors import InputError, OptionError
from tests.zoo import architectures


class _Written(nn.Module):
    """A norm as models write it out."""

    def __init__(self, root: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.root = root

    def forward(self, x: Tensor) -> Tensor:
        return x * self.root(x)


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True) + 1e-5


NORMS: dict[str, Callable[[], nn.Module]] = {
    "rms": lambda: nn.RMSNorm(6, eps=1e-5),
    "layer": lambda: nn.LayerNorm(6),
    "group": lambda: nn.GroupNorm(2, 6),
    "rsqrt": lambda: _Written(lambda x: torch.rsqrt(_mean_square(x))),
    "power": lambda: _Written(lambda x: _mean_square(x) ** -0.5),
    "square root": lambda: _Written(lambda x: 1 / torch.sqrt(_mean_square(x))),
    "length": lambda: _Written(lambda x: 1 / x.norm(dim=-1, keepdim=True)),
}


def _held(norm: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """A norm (N, 6) as the affine map that it is with the statistics of x."""
    groups = x.unflatten(-1, (2 if isinstance(norm, nn.GroupNorm) else 1, -1))
    if isinstance(norm, _Written):
        scale = norm.root(x)
        return lambda y: y * scale
    centered = not isinstance(norm, nn.RMSNorm)
    middle = groups - groups.mean(-1, keepdim=True) if centered else groups
    scale = 1 / (middle.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    weight, bias = norm.weight, getattr(norm, "bias", None)

    def affine(y: Tensor) -> Tensor:
        y = y.unflatten(-1, (len(groups[0]), -1))
        y = ((y - y.mean(-1, keepdim=True) if centered else y) * scale).flatten(-2)
        return y * weight + (0 if bias is None else bias)

    return affine


def _net(kind: str) -> tuple[nn.Sequential, Tensor]:
    norm = NORMS[kind]()
    for p in norm.parameters():
        nn.init.normal_(p)
    net = nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 1)).double().eval()
    return net.requires_grad_(False), torch.randn(3, 4, dtype=torch.float64)


@pytest.mark.parametrize("kind", NORMS)
def test_gradients_are_those_of_affine_norms(kind: str) -> None:
    net, x = _net(kind)
    hidden = net[0](x)
    affine = _held(net[1], hidden)
    torch.testing.assert_close(affine(hidden), net[1](hidden))

    def held(y: Tensor) -> Tensor:
        return net[3](net[2](affine(net[0](y))))  # type: ignore[no-any-return]

    x.requires_grad_()
    wanted, plain = InputXGradient(held).attribute(x), InputXGradient(net).attribute(x)
    with frozen_norms():
        torch.testing.assert_close(net(x), held(x), rtol=1e-12, atol=1e-12)
        found = InputXGradient(net).attribute(x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert (plain - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("batch", [None, 3, 6])
def test_integrated_gradients_keep_the_norms_of_the_explained_input(
    kind: str, batch: int | None
) -> None:
    net, x = _net(kind)
    affine = _held(net[1], net[0](x))
    options: dict[str, Any] = {"n_steps": 4, "internal_batch_size": batch}
    with frozen_norms(net, keep=x):
        found = IntegratedGradients(net).attribute(x, **options)
    wanted = torch.cat(
        [
            IntegratedGradients(lambda y, i=i: _one(net, affine, y, i)).attribute(
                x[i : i + 1], n_steps=4
            )
            for i in range(3)
        ]
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def _one(net: nn.Sequential, affine: Callable[[Tensor], Tensor], y: Tensor, i: int) -> Tensor:
    """One example's output at several points y (N, 4), by its own statistics."""
    out = []
    for point in net[0](y):
        rows = point.expand(3, -1)
        out.append(net[3](net[2](affine(rows)[i])))
    return torch.stack(out)


def test_noise_repeats_each_example() -> None:
    net, x = _net("layer")
    affine, noisy = _held(net[1], net[0](x)), list[Tensor]()
    net.register_forward_pre_hook(lambda _, args: noisy.append(args[0].detach().clone()))
    with frozen_norms(net, keep=x, interleaved=True):
        found = NoiseTunnel(InputXGradient(net)).attribute(x, nt_samples=3, stdevs=0.1)
    alone = []
    for i, y in enumerate(next(y for y in noisy if len(y) == 9).requires_grad_()):
        (g,) = torch.autograd.grad(_one(net, affine, y[None], i // 3).sum(), y)
        alone.append(g * y)
    wanted = torch.stack(alone).unflatten(0, (3, 3)).mean(1)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


class _Flat(nn.Module):
    """A norm of tokens that stand one behind the other, whatever their example."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return (flat * torch.rsqrt(_mean_square(flat))).view_as(x) * 6**-0.5


@pytest.mark.parametrize("interleaved", [False, True])
def test_flattened_tokens_have_the_norms_of_their_example(interleaved: bool) -> None:
    x = torch.randn(2, 3, 4)
    own = torch.rsqrt(_mean_square(x)) * 6**-0.5

    def larger(y: Tensor) -> Tensor:
        return y.repeat_interleave(3, 0) if interleaved else y.repeat(3, 1, 1)

    points = torch.randn(6, 3, 4)
    with frozen_norms(net := _Flat(), keep=x, interleaved=interleaved):
        torch.testing.assert_close(net(points), points * larger(own))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "gpt2", "jamba"])
def test_gradients_of_models_are_slopes_with_the_norms_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "gpt2":
        import transformers

        config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        model = getattr(architectures, name)(monkeypatch).model
    model = model.double().eval()
    width = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    x = torch.randn(2, 5, width, dtype=torch.float64, requires_grad=True)

    def score(y: Tensor) -> Tensor:
        out: Tensor = model(inputs_embeds=y, use_cache=False).logits
        return F.log_softmax(out[:, -1], -1)[:, 3]

    with frozen_norms():
        (found,) = torch.autograd.grad(score(x).sum(), x)
    # models of transformers norm in float32, which differences of float64 do not see through
    step = 1e-3 * torch.randn_like(x)
    with frozen_norms(model, keep={"inputs_embeds": x, "use_cache": False}), torch.no_grad():
        slope = (score(x + step) - score(x - step)) / 2
    torch.testing.assert_close((found * step).sum((1, 2)), slope.double(), rtol=1e-2, atol=1e-6)
    (plain,) = torch.autograd.grad(score(x).sum(), x)
    assert (plain - found).abs().max() > 1e-2 * found.abs().max()
    if name != "gpt2":
        root = torch.rsqrt
        monkeypatch.setattr(torch, "rsqrt", lambda y: root(y).detach())
        (wanted,) = torch.autograd.grad(score(x).sum(), x)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_wrong_use_is_refused() -> None:
    net, x = _net("rms")
    with pytest.raises(OptionError, match="only keep"), frozen_norms(keep=x):
        pass
    with pytest.raises(InputError, match="found no norm"), frozen_norms():
        nn.Linear(4, 1).double()(x)
    with pytest.raises(InputError, match="shape"), frozen_norms(net, keep=x):
        net(x[:2])
    twice = nn.Sequential(net[:3], nn.RMSNorm(6).double())
    with pytest.raises(InputError, match="1 norms in place of 2"), frozen_norms(twice, keep=x):
        twice[1] = nn.Identity()
        twice(x)
    assert captum_ssm.frozen_norms is frozen_norms
    assert not net._forward_hooks and not net._forward_pre_hooks
