"""The layers of the package xlstm: the operators are the modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import contract
from helpers import hybrid_checks as hybrid
from oracles import relative_error
from torch import Tensor
from zoo import xlstm_cpu

from captum_ssm import (
    ImplicitAttention,
    StateMemory,
    supported_architectures,
    trace,
)
from captum_ssm.errors import CachedStateError, UnsupportedMixerError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.slstm import xlstm_slstm
from captum_ssm.mixers.xlstm import mlstm
from captum_ssm.operators import FeedbackRecurrence, ScalarDecayHeads
from captum_ssm.testing.adapters import check_adapter

pytestmark = pytest.mark.slow

EXACT = 1e-11
REFUSED = dict.fromkeys(contract.PADDING, "takes no attention_mask")
#: The cells round to bfloat16 by themselves, or do not run with its weights in float32.
REFUSED |= {"bfloat16": "off by|same dtype"}
FLOAT32 = 1e-5  # for any draw
MODELS: dict[str, Callable[[], Any]] = {
    "large": xlstm_cpu.large,
    "large, fused": lambda: xlstm_cpu.large(weight_mode="fused", use_bias=True),
    "transformers": xlstm_cpu.of_transformers,
    "blocks": xlstm_cpu.blocks,
    "blocks with biases": lambda: xlstm_cpu.blocks(bias=True),
    "sLSTM alone": lambda: xlstm_cpu.blocks((0, 1, 2)),
    "sLSTM without a convolution": lambda: xlstm_cpu.blocks(conv1d_kernel_size=0),
    "LSTM": lambda: xlstm_cpu.blocks(function="lstm"),
    "no weight of the norm": lambda: xlstm_cpu.blocks(group_norm_weight=False),
}


def mixers(model: Any) -> list[Any]:
    names = ("mLSTMLayer", "sLSTMLayer")
    return [module for module in model.modules() if type(module).__name__ in names]


def test_names_are_real() -> None:
    """Every class of the table is one of the package, and every mixer of it is in the table."""
    xlstm_cpu.package()
    models = [MODELS[name]() for name in ("large", "blocks")]
    real = {f"{type(m).__module__}.{type(m).__qualname__}" for x in models for m in mixers(x)}
    table = {a.class_path for a in supported_architectures() if a.package == "xlstm"}
    assert real == table and len(table) == 3


@pytest.mark.parametrize("at", [0, 1])
def test_large_gates_do_not_overflow(at: int) -> None:
    """exp of the input gate alone would be infinite."""
    module = mixers(xlstm_cpu.blocks())[at]
    given = module.mlstm_cell.igate.weight if at == 0 else module.fgate.weight
    with torch.no_grad():
        given.mul_(1000)
    layer = hybrid.record_one(module, torch.randn(2, 20, 16))
    assert torch.isfinite(layer.output).all()
    hybrid.check(layer, 1e-3)


# --- token loops -------------------------------------------------------------------------------


def headwise(module: Any, x: Tensor) -> Tensor:
    """The package's projection of blocks of channels."""
    weight = module.weight.detach()
    parts = [x.chunk(len(weight), -1)[h] @ w.T for h, w in enumerate(weight)]
    out = torch.cat(parts, -1)
    return out if module.bias is None else out + module.bias.detach()


def convolved(module: Any, x: Tensor) -> Tensor:
    taps, bias = module.conv.weight.detach()[:, 0], module.conv.bias.detach()
    out = torch.zeros_like(x) + bias
    for t in range(x.shape[1]):
        for back in range(min(t + 1, taps.shape[1])):
            out[:, t] += taps[:, -1 - back] * x[:, t - back]
    return out * torch.sigmoid(out)


def normed(module: Any, y: Tensor, heads: int) -> Tensor:
    """A LayerNorm of each head, whose weight counts from one."""
    y = y.unflatten(-1, (heads, -1))
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, correction=0) + module.eps).sqrt()
    return y.flatten(-2) * (1 + module.weight.detach())


def slstm_by_hand(module: Any, x: Tensor) -> Tensor:
    """As in equations 8 to 16 of the xLSTM paper, unstabilised."""
    heads, cell = module.config.num_heads, module.slstm_cell
    u = convolved(module.conv1d, x)
    entering = [headwise(module.fgate, u), headwise(module.igate, u)]
    entering += [headwise(module.zgate, x), headwise(module.ogate, x)]
    bias = cell._bias_.detach().view(4, -1)  # by gate, channels of all heads
    width = x.shape[-1] // heads
    kernel = cell._recurrent_kernel_.detach().view(heads, 4, width, width)
    y, c, n = (torch.zeros_like(x[:, 0]) for _ in range(3))
    out = []
    for t in range(x.shape[1]):
        heard = torch.einsum("hgpq,bhq->gbhp", kernel, y.unflatten(-1, (heads, -1))).flatten(-2)
        i, f, z, o = (e[:, t] + r + b for e, r, b in zip(entering, heard, bias, strict=True))
        c = torch.sigmoid(f) * c + torch.exp(i) * torch.tanh(z)
        n = torch.sigmoid(f) * n + torch.exp(i)
        y = torch.sigmoid(o) * c / n
        out.append(y)
    return normed(module.group_norm, torch.stack(out, 1), heads)


def mlstm_by_hand(module: Any, x: Tensor) -> Tensor:
    """As in equations 19 to 27 of the paper, unstabilised but for the bound of the normaliser."""
    heads, cell = module.config.num_heads, module.mlstm_cell
    inner, z = (x @ module.proj_up.weight.detach().T).chunk(2, -1)
    u = convolved(module.conv1d, inner)
    q, k, v = (
        headwise(map_, e)
        for map_, e in ((module.q_proj, u), (module.k_proj, u), (module.v_proj, inner))
    )
    gates = torch.cat([q, k, v], -1)
    i, f = (hybrid.apply_linear(gate, gates) for gate in (cell.igate, cell.fgate))
    q, k, v = (e.unflatten(-1, (heads, -1)) for e in (q, k, v))
    width = q.shape[-1]
    state, total = 0.0, 0.0
    scale = torch.zeros_like(i[:, 0])  # m: what the package counts the bound relative to
    out = []
    for t in range(x.shape[1]):
        forget, write = torch.sigmoid(f[:, t]), torch.exp(i[:, t])
        key = k[:, t] / width**0.5
        state = forget[..., None, None] * state + write[..., None, None] * (
            key[..., :, None] * v[:, t, :, None, :]
        )
        total = forget[..., None] * total + write[..., None] * key
        kept = torch.log(forget) + scale
        scale = i[:, t] if t == 0 else torch.maximum(kept, i[:, t])
        found = (q[:, t, :, :, None] * state).sum(-2)
        bound = (q[:, t] * total).sum(-1).abs() * torch.exp(-scale)
        bound = torch.maximum(bound, torch.exp(-scale)) + 1e-6
        out.append(found * torch.exp(-scale)[..., None] / bound[..., None])
    y = normed(cell.outnorm, torch.stack(out, 1).flatten(-2), heads)
    y = (y + module.learnable_skip.detach() * u) * z * torch.sigmoid(z)
    return y @ module.proj_down.weight.detach().T


@pytest.mark.parametrize(("at", "by_hand"), [(0, mlstm_by_hand), (1, slstm_by_hand)])
def test_against_token_loops(at: int, by_hand: Any) -> None:
    module = mixers(xlstm_cpu.blocks().double())[at]
    hidden = torch.randn(2, 11, 16, dtype=torch.float64)
    layer = hybrid.record_one(module, hidden)
    wanted = by_hand(module, hidden)
    assert relative_error(layer.output, wanted) <= EXACT
    assert relative_error(layer.linear.output(), wanted) <= EXACT


def test_what_a_token_of_slstm_does_is_what_moving_its_content_does() -> None:
    """With all else frozen, outputs follow z alone, through the outputs before, too."""
    module = mixers(xlstm_cpu.blocks().double())[1]
    linear = hybrid.record_one(module, torch.randn(1, 6, 16, dtype=torch.float64)).linear
    core = next(x for x in linear.operator.leaves() if isinstance(x, FeedbackRecurrence))
    moved = torch.zeros_like(linear.values)
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
    for matrices, layer in zip(found, hybrid.record(model, ids), strict=True):
        module, linear = layer.mixer.module, layer.linear
        core = next(x for x in linear.operator.leaves() if isinstance(x, FeedbackRecurrence))
        output = slstm_by_hand(module, layer.call.hidden_states)
        y = core.apply(linear.values)  # held to the loop above
        slope = normed(module.group_norm, y.flatten(2), 2)
        assert relative_error(slope, output) <= EXACT
        deviation = (y.var(-1, keepdim=True, correction=0) + module.group_norm.eps).sqrt()
        weight = (1 + module.group_norm.weight.detach()).view(2, 8) / deviation
        whole: Any = torch.autograd.functional.jacobian(core.apply, linear.values)
        wanted = torch.zeros(6, 6, dtype=torch.float64)
        for h in range(2):
            for p in range(8):
                wanted += weight[0, :, h, p, None] * whole[0, :, h, p, 0, :, h, p] * (1 - 1 / 8)
        assert relative_error(matrices[0], wanted / 16) <= 1e-10


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv_state", "slstm_state"])
def test_states_are_refused(name: str) -> None:
    hidden = torch.randn(1, 4, 16)
    module = mixers(xlstm_cpu.blocks())[1]
    with pytest.raises(CachedStateError, match=name):
        xlstm_slstm(module, Call((hidden,), {name: hidden}, hidden))
    with pytest.raises(CachedStateError, match="state"):
        large = mixers(xlstm_cpu.large())[0]
        mlstm(large, Call((hidden, (hidden,)), {}, hidden))


def test_a_sigmoid_as_input_gate_is_refused() -> None:
    model = xlstm_cpu.large(chunkwise_kernel="parallel--native_siging_autograd", mode="inference")
    module = mixers(model)[0]
    hidden = torch.randn(1, 4, 16)
    with pytest.raises(UnsupportedMixerError, match="siging"):
        mlstm(module, Call((hidden,), {}, hidden))


def test_cells_by_themselves_are_refused() -> None:
    cell = mixers(xlstm_cpu.blocks())[0].mlstm_cell
    with pytest.raises(UnsupportedMixerError, match="mLSTMCell"), trace(cell):
        pass


def test_every_layer_has_a_state() -> None:
    """What the last token reads of it is what the recurrence returns there."""
    model, ids = xlstm_cpu.blocks().double(), torch.randint(19, (2, 9))
    memories, layers = StateMemory(model).of(ids), hybrid.record(model, ids)
    assert len(memories) == len(layers) == 3
    for memory, layer in zip(memories, layers, strict=True):
        linear, state = layer.linear, memory.state(-1)  # (B, H, N, P)
        assert memory.heads == range(2)
        assert memory.read(-1).sum(1).sub(1).abs().max() <= 1e-12
        assert memory.erased(0, 8).shape == memory.held_without(0, 8).shape == ids.shape
        values = linear.values[:, :, :2]
        leaves = linear.operator.leaves()
        if type(layer.mixer.module).__name__ == "sLSTMLayer":
            core = next(x for x in leaves if isinstance(x, FeedbackRecurrence))
            found = core.gate[:, -1] * state[..., 0]
        else:
            core = next(x for x in leaves if isinstance(x, ScalarDecayHeads))
            found = (core.query[:, -1, :, :, None] * state).sum(-2)
        assert relative_error(found, core.apply(values)[:, -1]) <= EXACT


@pytest.mark.parametrize("name", MODELS)
def test_contract(name: str) -> None:
    model = MODELS[name]()
    clauses = (*contract.CORE, "sums")
    check_adapter(lambda: model, torch.randint(19, (2, 9)), None, REFUSED, clauses)
    layers = hybrid.record(model, torch.randint(19, (2, 40)))
    assert [layer.mixer.module for layer in layers] == mixers(model)
    for layer in layers:
        hybrid.check(layer, FLOAT32)
