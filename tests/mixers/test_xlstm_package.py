"""The layers of the package xlstm: the operators are the modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.contract import check, record, record_one
from oracles import relative_error
from torch import Tensor
from zoo import xlstm_cpu

from captum_ssm import ImplicitAttention, StateMemory, trace
from captum_ssm.errors import UnsupportedMixerError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.xlstm import mlstm
from captum_ssm.operators import FeedbackRecurrence, ScalarDecayHeads
from captum_ssm.testing.adapters import check_adapter

pytestmark = pytest.mark.slow

REFUSED = dict.fromkeys(contract.PADDING, "takes no attention_mask")
#: The cells round to bfloat16 by themselves, or do not run with its weights in float32.
REFUSED |= {"bfloat16": "off by|same dtype"}
MODELS: dict[str, Callable[[], Any]] = {
    "large, fused": lambda: xlstm_cpu.large(weight_mode="fused", use_bias=True),
    "transformers": xlstm_cpu.of_transformers,
    "blocks with biases": lambda: xlstm_cpu.blocks(bias=True),
    "sLSTM alone": lambda: xlstm_cpu.blocks((0, 1, 2)),
    "no convolution, no weight of the norm": lambda: xlstm_cpu.blocks(
        conv1d_kernel_size=0, group_norm_weight=False
    ),
    "LSTM": lambda: xlstm_cpu.blocks(function="lstm"),
}


def mixers(model: Any) -> list[Any]:
    names = ("mLSTMLayer", "sLSTMLayer")
    return [module for module in model.modules() if type(module).__name__ in names]


@pytest.mark.parametrize("at", [0, 1])
def test_large_gates_do_not_overflow(at: int) -> None:
    """exp of the input gate alone would be infinite."""
    module = mixers(xlstm_cpu.blocks())[at]
    given = module.mlstm_cell.igate.weight if at == 0 else module.fgate.weight
    with torch.no_grad():
        given.mul_(1000)
    layer = record_one(module, torch.randn(2, 20, 16))
    assert torch.isfinite(layer.output).all()
    check(layer, 1e-3)


# --- the recurrence of sLSTM ---------------------------------------------------------------------


def normed(module: Any, y: Tensor, heads: int) -> Tensor:
    """A LayerNorm of each head, whose weight counts from one."""
    y = y.unflatten(-1, (heads, -1))
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, correction=0) + module.eps).sqrt()
    return y.flatten(-2) * (1 + module.weight.detach())


def test_what_a_token_of_slstm_does_is_what_moving_its_content_does() -> None:
    """With all else frozen, outputs follow z alone, through the outputs before, too."""
    module = mixers(xlstm_cpu.blocks().double())[1]
    layer = record_one(module, torch.randn(1, 6, 16, dtype=torch.float64))
    core = next(x for x in layer.operator.leaves() if isinstance(x, FeedbackRecurrence))
    moved = torch.zeros_like(layer.values)
    moved[0, 1, 0, 2] = 1.0
    found = core.apply(moved)[0]
    state = heard = torch.zeros_like(moved[0, 0])
    kernel = module.slstm_cell._recurrent_kernel_.detach().view(2, 4, 8, 8)[:, 2]
    for t in range(6):
        state = core.decay[0, t] * state + core.write[0, t] * (moved[0, t] + heard)
        assert torch.allclose(found[t], core.gate[0, t] * state, atol=1e-14)
        heard = torch.einsum("hpq,hq->hp", kernel, core.gate[0, t] * state)
    assert found[1, 0, 2] != 0 and found[2, 0].ne(0).all() and not found[:, 1].any()
    # of what is kept and what is written, a state relative to its normaliser is the mean
    weight = core.decay[:, 1:] + core.write[:, 1:] / (core.write / (1 - core.decay))[:, 1:]
    assert torch.allclose(weight, torch.ones_like(weight))


def test_matrices_of_slstm() -> None:
    """Each channel's own share, behind a norm whose mean takes a part of it away."""
    model = xlstm_cpu.blocks((0, 1, 2)).double()
    ids = torch.randint(19, (1, 6))
    found = ImplicitAttention(model).matrices(ids, components="exact")
    for matrices, layer in zip(found, record(model, ids), strict=True):
        module, values = layer.mixer.module, layer.values
        core = next(x for x in layer.operator.leaves() if isinstance(x, FeedbackRecurrence))
        y = core.apply(values)  # held to the loop above
        slope = normed(module.group_norm, y.flatten(2), 2)
        assert relative_error(slope, layer.output) <= 1e-11
        deviation = (y.var(-1, keepdim=True, correction=0) + module.group_norm.eps).sqrt()
        weight = (1 + module.group_norm.weight.detach()).view(2, 8) / deviation
        whole: Any = torch.autograd.functional.jacobian(core.apply, values)
        wanted = torch.zeros(6, 6, dtype=torch.float64)
        for h in range(2):
            for p in range(8):
                wanted += weight[0, :, h, p, None] * whole[0, :, h, p, 0, :, h, p] * (1 - 1 / 8)
        assert relative_error(matrices[0], wanted / 16) <= 1e-10


# --- refusals ------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    hidden = torch.randn(1, 4, 16)
    model = xlstm_cpu.large(chunkwise_kernel="parallel--native_siging_autograd", mode="inference")
    with pytest.raises(UnsupportedMixerError, match="siging"):  # a sigmoid as input gate
        mlstm(mixers(model)[0], Call((hidden,), {}, hidden))
    with (
        pytest.raises(UnsupportedMixerError, match="mLSTMCell"),
        trace(mixers(xlstm_cpu.blocks())[0].mlstm_cell),
    ):
        pass


def test_every_layer_has_a_state() -> None:
    """What the last token reads of it is what the recurrence returns there."""
    model, ids = xlstm_cpu.blocks().double(), torch.randint(19, (2, 9))
    memories, layers = StateMemory(model).of(ids), record(model, ids)
    assert len(memories) == len(layers) == 3
    for memory, layer in zip(memories, layers, strict=True):
        state = memory.state(-1)  # (B, H, N, P)
        assert memory.heads == range(2)
        assert memory.read(-1).sum(1).sub(1).abs().max() <= 1e-12
        assert memory.erased(0, 8).shape == memory.held_without(0, 8).shape == ids.shape
        values = layer.values[:, :, :2]
        leaves = layer.operator.leaves()
        if type(layer.mixer.module).__name__ == "sLSTMLayer":
            core = next(x for x in leaves if isinstance(x, FeedbackRecurrence))
            found = core.gate[:, -1] * state[..., 0]
        else:
            core = next(x for x in leaves if isinstance(x, ScalarDecayHeads))
            found = (core.query[:, -1, :, :, None] * state).sum(-2)
        assert relative_error(found, core.apply(values)[:, -1]) <= 1e-11


@pytest.mark.parametrize("name", MODELS)
def test_contract(name: str) -> None:
    model = MODELS[name]()
    clauses = (*contract.CORE, "sums")
    check_adapter(lambda: model, torch.randint(19, (2, 9)), None, REFUSED, clauses)
    layers = record(model, torch.randint(19, (2, 40)))
    assert [layer.mixer.module for layer in layers] == mixers(model)
    for layer in layers:
        check(layer)
