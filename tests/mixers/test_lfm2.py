"""The gated short convolution of LFM2 and LFM3: the operator is the module."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import hybrid_checks as hybrid
from helpers.versions import VERSION_4
from oracles import diagonal_matrices, relative_error, times
from torch import Tensor
from zoo.mamba import padded_batch, randomise
from zoo.short_conv import FAMILIES, make_config, make_model

from captum_ssm.errors import CachedStateError, InputError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.lfm2 import short_conv

pytest.importorskip("transformers")

FLOAT32 = 1e-5  # for any draw; typical is 1e-7


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_reproduces_the_module(kernel: int, bias: bool, family: str) -> None:
    mixer = make_mixer(family, conv_L_cache=kernel, conv_bias=bias)
    for batch, tokens in ((1, 1), (3, 2), (2, 3), (2, max(1, kernel - 1)), (3, 13)):
        hidden = torch.randn(batch, tokens, 5)
        layer = hybrid.record_one(mixer, hidden)
        wanted = formula(mixer, hidden, {})
        assert relative_error(layer.output, wanted.output) <= FLOAT32
        hybrid.check(layer, FLOAT32)
        hybrid.check_formula_output(wanted, mixer.out_proj)
        hybrid.check_formula(layer, wanted, FLOAT32)


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


def test_typical_errors() -> None:
    errors, halves = [], []
    for _ in range(9):
        mixer, hidden = make_mixer(conv_bias=True), torch.randn(3, 40, 5)
        errors.append(hybrid.check(hybrid.record_one(mixer, hidden), FLOAT32))
        half = hybrid.record_one(mixer.to(torch.bfloat16), hidden.to(torch.bfloat16))
        halves.append(hybrid.check_half(half, 5e-2))
    hybrid.check_typical(errors, 5e-7)
    hybrid.check_typical(halves, 1.5e-2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bias", [False, True])
def test_whole_model(bias: bool, family: str) -> None:
    model = make_model(family, conv_bias=bias)
    ids, mask = padded_batch([70, 41, 1])
    layers = hybrid.record(model, ids, attention_mask=mask)
    assert [layer.architecture for layer in layers] == ["LFM3" if family == "lfm3" else "LFM2"] * 3
    for layer in layers:
        hybrid.check(layer, FLOAT32)
    hybrid.check_same_logits(model, ids, attention_mask=mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_methods(family: str) -> None:
    # the models of version 4 hand no mask of tokens on
    hybrid.check_methods(make_model(family), *padded_batch([12, 7]), invariant=not VERSION_4)


def test_methods_where_padding_leaks() -> None:
    hybrid.check_methods(
        make_model("lfm2", conv_bias=True), *padded_batch([12, 7]), invariant=False
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_attribution_by_hand(family: str) -> None:
    model = make_model(family, num_hidden_layers=2, layer_types=["conv", "conv"])
    hybrid.check_attribution_by_hand(model, mixer_class(family), formula, torch.randint(19, (2, 9)))


def test_caches_and_packed_sequences_are_refused() -> None:
    hidden, mixer = torch.randn(1, 4, 5), make_mixer()
    with pytest.raises(CachedStateError):
        short_conv(mixer, Call((hidden, object()), {}, hidden))
    for name in ("seq_idx", "cu_seq_lens_q"):
        with pytest.raises(InputError, match=name):
            short_conv(mixer, Call((hidden,), {name: torch.tensor([0, 2, 4])}, hidden))
