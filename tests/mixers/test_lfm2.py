"""The gated short convolution of LFM2 and LFM3: the operator is the module."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import hybrid_checks as hybrid
from oracles import diagonal_matrices, times
from torch import Tensor
from zoo.mamba import randomise
from zoo.short_conv import FAMILIES, make_config

from captum_ssm.errors import CachedStateError, InputError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.lfm2 import short_conv

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")


def mixer_class(family: str = "lfm2") -> Any:
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    words = "".join(word.capitalize() for word in family.split("_"))
    return getattr(modeling, f"{words}ShortConv")


def make_mixer(family: str = "lfm2", width: int = 5, **options: Any) -> Any:
    own = make_config(family, hidden_size=width, num_attention_heads=1, **options)
    return randomise(mixer_class(family)(own, 0))


def formula(module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> hybrid.Formula:
    hidden = hidden.detach().double()
    mask = kwargs.get("attention_mask")
    pairs = mask is not None and mask.dim() == 4  # which version 4 hands on, and passes over
    keep = hybrid.keep_of(None if pairs else mask, hidden)
    write, read, x = hybrid.apply_linear(module.in_proj, hidden * keep[..., None]).chunk(3, -1)
    conv = hybrid.causal_taps(module.conv, hidden.shape[1])
    shape = (*x.shape, 1)
    outer = diagonal_matrices(read[..., None], shape) @ conv
    inner = diagonal_matrices(write[..., None], shape)
    alpha = outer @ diagonal_matrices(keep[..., None, None], shape) @ inner
    # a constant: what padding leaks, and the bias of the convolution
    offset = times(outer @ inner, (x * (1 - keep[..., None]))[..., None])
    if module.conv.bias is not None:
        offset = offset + (read * module.conv.bias.detach().double())[..., None]
    y = times(alpha, x[..., None]) + offset
    return hybrid.Formula(
        x[..., None], alpha, hybrid.apply_linear(module.out_proj, y.flatten(2)), offset
    )


@pytest.mark.parametrize("where", ["left", "right", "middle"])
def test_padding(where: str) -> None:
    """With biases the model leaks padding through the convolution; it counts as bias."""
    mixer = make_mixer(conv_bias=True).double()
    hidden = torch.randn(2, 9, 5, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, {"left": slice(0, 4), "right": slice(6, 9), "middle": slice(3, 5)}[where]] = 0
    layer = hybrid.record_one(mixer, hidden, attention_mask=mask)
    hybrid.check(layer, 1e-12)
    hybrid.check_formula(layer, formula(mixer, hidden, {"attention_mask": mask}), 1e-12)
    assert not layer.operator.dense(None)[1][:, :, mask[1] == 0].any()


def test_the_convolution_is_the_mixing() -> None:
    layer = hybrid.record_one(make_mixer(), torch.randn(2, 6, 5))
    left = layer.linear.restrict({"gate"}).operator.dense(None)
    assert not (left - torch.diag_embed(left.diagonal(dim1=-2, dim2=-1))).any()
    assert {leaf.component for leaf in layer.operator.leaves()} == {"conv", "gate"}


def test_caches_and_packed_sequences_are_refused() -> None:
    hidden, mixer = torch.randn(1, 4, 5), make_mixer()
    with pytest.raises(CachedStateError):
        short_conv(mixer, Call((hidden, object()), {}, hidden))
    for name in ("seq_idx", "cu_seq_lens_q"):
        with pytest.raises(InputError, match=name):
            short_conv(mixer, Call((hidden,), {name: torch.tensor([0, 2, 4])}, hidden))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kernel", "bias"), [(1, False), (2, True), (3, False), (5, True)])
def test_contract(kernel: int, bias: bool, family: str) -> None:
    mixer = make_mixer(family, conv_L_cache=kernel, conv_bias=bias)
    hybrid.holds(mixer, 5, formula, {"left padding": "bias differ"} if bias else {})
