"""mambapy's and deeptab's blocks: the operator is the module, in one direction or both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.contract import FLOAT32, check, record, record_one
from oracles import conv_matrices, diagonal_matrices, linear, relative_error, scan_matrices
from torch import Tensor, nn
from zoo.mambapy import MODELS

from captum_ssm import LatimFlow
from captum_ssm.errors import CachedStateError, UnsupportedMixerError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.mambapy import mambapy_attention
from captum_ssm.mixers.registry import adapter_for

pytestmark = pytest.mark.slow


def blocks(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if adapter_for(module) is not None)


def one_direction(
    module: Any, form: str, x: Tensor, act: Callable[[Tensor], Tensor], scan_flips: bool = False
) -> Tensor:
    """The matrices of the scan, the skip, the activation and the convolution, in float64.

    Args:
        module: the block.
        form: what its parts are called.
        x: what enters the convolution (B, L, D).
        act: the activation.
        scan_flips: whether the scan, and it alone, runs from the last token to the first.
    """
    conv, x_proj, dt_proj, a_log, skip = (
        getattr(module, form.format(name)) for name in ("conv1d", "x_proj", "dt_proj", "A_log", "D")
    )
    shape, taps = (*x.shape, 1), conv.weight.detach().double()  # (D, 1, K)
    lags = [conv.dilation[0] * lag for lag in reversed(range(taps.shape[-1]))]
    matrices = conv_matrices(taps, lags, shape)
    u = torch.einsum("bdij,bjd->bid", matrices, x) + conv.bias.detach().double()
    ratio = act(u) / u
    v = act(u).flip(1) if scan_flips else act(u)
    state = a_log.shape[1]
    selected = linear(x_proj, v)
    t, b, c = selected.split([selected.shape[-1] - 2 * state, state, state], -1)
    if module.dt_layernorm is not None:
        t, b, c = (
            s
            / (s.square().mean(-1, keepdim=True) + norm.eps).sqrt()
            * norm.weight.detach().double()
            for s, norm in (
                (t, module.dt_layernorm),
                (b, module.B_layernorm),
                (c, module.C_layernorm),
            )
        )
    dt = F.softplus(linear(dt_proj, t))
    core = scan_matrices(dt, -a_log.detach().double().exp(), b, c)
    core = core + torch.diag_embed(skip.detach().double()[:, None].expand(-1, x.shape[1]))
    if scan_flips:
        core = core.flip(-1, -2)
    return core @ diagonal_matrices(ratio[..., None], shape) @ matrices


def gated(z: Tensor, matrices: Tensor) -> Tensor:
    return diagonal_matrices(z[..., None], (*z.shape, 1)) @ matrices


def against(layer: Any, alpha: Tensor) -> None:
    assert relative_error(layer.operator.per_channel().dense(None).double(), alpha) <= FLOAT32
    check(layer)


@pytest.mark.parametrize("options", [
    {"pscan": False, "bias": True},
    {"inner_layernorms": True},
    {"mup": True, "mup_base_width": 3.0},
])  # fmt: skip
def test_mamba(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["mamba"](monkeypatch, **options)
    block = next(blocks(model))
    hidden = torch.randn(2, 7, 6)
    x, z = linear(block.in_proj, hidden.double()).chunk(2, -1)
    alpha = gated(F.silu(z), one_direction(block, "{}", x, F.silu))
    against(record_one(block, hidden), alpha)


@pytest.mark.parametrize("options", [
    {"use_mem_eff_path": True, "n_groups": 2},
    {"learnable_init_states": True, "bias": True, "dt_limit": (0.2, 0.9)},
])  # fmt: skip
def test_mamba2(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices are those of the adapter of Mamba-2, which has tests of its own."""
    model = MODELS["mamba2"](monkeypatch, **options)
    for layer in record(model, torch.randint(16, (2, 11))):
        check(layer)


def test_jamba(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["jamba"](monkeypatch)
    ids = torch.randint(16, (2, 7))
    layers = record(model, ids)
    assert [layer.architecture for layer in layers] == ["Mamba", "Jamba"]
    for layer in layers:
        check(layer)
    module, hidden = layers[1].mixer.module, layers[1].call.hidden_states.double()
    q, k = (linear(p, hidden).view(2, 7, -1, 2) for p in (module.q_proj, module.k_proj))
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    for head in range(4):
        scores = q[:, :, head] @ k[:, :, head // 2].mT / 2**0.5
        alpha = scores.masked_fill(future, -torch.inf).softmax(-1)
        found = layers[1].operator.dense(None)[:, 2 * head].double()  # the first of two channels
        assert relative_error(found, alpha) <= FLOAT32


@pytest.mark.parametrize("options", [
    {"divide_output": False},
    {"bidirectional": False},
    {"pscan": False, "inner_layernorms": True},
])  # fmt: skip
def test_vision(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["vision"](monkeypatch, **options)
    block = next(blocks(model))
    hidden = torch.randn(2, 7, 8)
    x, z = linear(block.in_proj, hidden.double()).chunk(2, -1)
    alpha = one_direction(block, "{}", x, F.silu)
    if options.get("bidirectional", True):
        alpha = alpha + one_direction(block, "{}_b", x.flip(1), F.silu).flip(-1, -2)
        alpha = alpha / 2 if options.get("divide_output", True) else alpha
    against(record_one(block, hidden), gated(F.silu(z), alpha))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("options", [
    {"BC_layer_norm": True, "bias": True},
    {"dilation": 2},
    {"activation": nn.GELU(), "use_pscan": True, "norm": "LayerNorm"},
])  # fmt: skip
def test_deeptab(options: dict[str, Any], both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["deeptab"](monkeypatch, bidirectional=both, **options)
    block = next(blocks(model))
    act = options.get("activation", F.silu)
    hidden = torch.randn(2, 7, 8)
    x, z = linear(block.in_proj_fwd, hidden.double()).chunk(2, -1)
    alpha = gated(act(z), one_direction(block, "{}_fwd", x, act))
    if both:
        x_b = linear(block.in_proj_bwd, hidden.double()).chunk(2, -1)[0]
        back = gated(act(z), one_direction(block, "{}_bwd", x_b, act, scan_flips=True))
        alpha = torch.cat([alpha, back], 1) / 2
    against(record_one(block, hidden), alpha)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["deeptab"](monkeypatch, use_learnable_interaction=True)
    with pytest.raises(UnsupportedMixerError, match="use_learnable_interaction=True"):
        LatimFlow(model).attribute(torch.randn(1, 5, 8), (-1, 3))
    module, x = list(blocks(MODELS["jamba"](monkeypatch)))[1], torch.randn(1, 3, 8)
    with pytest.raises(CachedStateError, match="cache=tuple"):
        mambapy_attention(module, Call((x, (None, None)), {}, (x, None)))
