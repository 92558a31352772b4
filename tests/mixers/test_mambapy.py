"""mambapy's and deeptab's blocks: the operator is the module, in one direction or both."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.contract import FLOAT32, check, record, record_one
from oracles import (
    alpha,
    diagonal_matrices,
    linear,
    mamba1_parts,
    relative_error,
    scanned_backwards,
)
from torch import Tensor, nn
from zoo.mambapy import MODELS

from captum_ssm import LatimFlow
from captum_ssm.errors import UnsupportedMixerError
from captum_ssm.mixers.registry import adapter_for

pytestmark = pytest.mark.slow


def blocks(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if adapter_for(module) is not None)


def one_direction(
    module: Any, form: str, hidden: Tensor, act: Any = None, scan_flips: bool = False
) -> Tensor:
    """The matrices of the scan, the skip, the activation and the convolution, in float64.

    Args:
        module: the block.
        form: how the names of its parts end.
        hidden: what enters it.
        act: the activation. Default: None, SiLU.
        scan_flips: whether the scan, and it alone, runs from the last token to the first.
    """
    names = ("conv1d", "x_proj", "dt_proj", "A_log", "D", "in_proj", "out_proj")
    own = {name: getattr(module, name + form, getattr(module, name, None)) for name in names}
    if module.dt_layernorm is not None:
        for name, theirs in (("dt", "dt"), ("b", "B"), ("c", "C")):
            norm = getattr(module, f"{theirs}_layernorm")
            of_name = SimpleNamespace(weight=norm.weight, variance_epsilon=norm.eps)
            own[f"{name}_layernorm"] = of_name
    mixer = SimpleNamespace(**own, activation="silu" if act is None else "its own", act=act)
    parts = mamba1_parts(mixer, hidden)
    return alpha(scanned_backwards(parts) if scan_flips else parts, "exact-gate")


def gated(z: Tensor, matrices: Tensor) -> Tensor:
    return diagonal_matrices(z[..., None], (*z.shape, 1)) @ matrices


def against(layer: Any, wanted: Tensor) -> None:
    assert relative_error(layer.operator.per_channel().dense(None).double(), wanted) <= FLOAT32
    check(layer)


@pytest.mark.parametrize(("kind", "options"), [
    ("mamba", {"pscan": False, "bias": True}),
    ("mamba", {"inner_layernorms": True}),
    ("mamba", {"mup": True, "mup_base_width": 3.0}),
    ("vision", {"divide_output": False}),
    ("vision", {"bidirectional": False}),
    ("vision", {"pscan": False, "inner_layernorms": True}),
])  # fmt: skip
def test_mamba(kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one direction, or for images in both."""
    block = next(blocks(MODELS[kind](monkeypatch, **options)))
    hidden = torch.randn(2, 7, block.in_proj.in_features)
    z = linear(block.in_proj, hidden.double()).chunk(2, -1)[1]
    wanted = one_direction(block, "", hidden)
    if kind == "vision" and options.get("bidirectional", True):
        wanted = wanted + one_direction(block, "_b", hidden.flip(1)).flip(-1, -2)
        wanted = wanted / 2 if options.get("divide_output", True) else wanted
    against(record_one(block, hidden), gated(F.silu(z), wanted))


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
        wanted = scores.masked_fill(future, -torch.inf).softmax(-1)
        found = layers[1].operator.dense(None)[:, 2 * head].double()  # the first of two channels
        assert relative_error(found, wanted) <= FLOAT32


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("options", [
    {"BC_layer_norm": True, "bias": True},
    {"dilation": 2},
    {"activation": nn.GELU(), "use_pscan": True, "norm": "LayerNorm"},
])  # fmt: skip
def test_deeptab(options: dict[str, Any], both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["deeptab"](monkeypatch, bidirectional=both, **options)
    block = next(blocks(model))
    own = options.get("activation")
    act = F.silu if own is None else own
    hidden = torch.randn(2, 7, 8)
    z = linear(block.in_proj_fwd, hidden.double()).chunk(2, -1)[1]
    wanted = gated(act(z), one_direction(block, "_fwd", hidden, own))
    if both:
        back = gated(act(z), one_direction(block, "_bwd", hidden, own, scan_flips=True))
        wanted = torch.cat([wanted, back], 1) / 2
    against(record_one(block, hidden), wanted)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["deeptab"](monkeypatch, use_learnable_interaction=True)
    with pytest.raises(UnsupportedMixerError, match="use_learnable_interaction=True"):
        LatimFlow(model).attribute(torch.randn(1, 5, 8), (-1, 3))
