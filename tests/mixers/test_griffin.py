"""Griffin's recurrent block: the operator is the module."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import hybrid_checks as hybrid
from helpers.versions import continuing, recurrent_gemma_block, renamed
from oracles import diagonal_matrices, times
from torch import Tensor
from zoo.mamba import randomise

from captum_ssm.errors import CachedStateError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.griffin import recurrent_gemma

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

FLOAT32 = 1e-5  # for any draw; typical is 2e-7


def config(**options: Any) -> Any:
    small = {
        "vocab_size": 19,
        "hidden_size": 12,
        "intermediate_size": 18,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "lru_width": 9,
        "attention_window_size": 5,
        "block_types": ["recurrent", "recurrent", "attention"],
    }
    return transformers.RecurrentGemmaConfig(**renamed("recurrent_gemma", small | options))


def spread_decays(model: Any) -> Any:
    """Decays from nearly 0 to nearly 1."""
    randomise(model)
    for name, parameter in model.named_parameters():
        if name.endswith("recurrent_param"):
            parameter.data = -2 + 2 * torch.randn(parameter.shape)
    return model


def make_model(**options: Any) -> Any:
    return spread_decays(transformers.RecurrentGemmaForCausalLM(config(**options)))


def make_block(**options: Any) -> Any:
    return spread_decays(recurrent_gemma_block(config(**options)))


def run_block(block: Any, hidden: Tensor, positions: Tensor | None = None) -> Any:
    if positions is None:
        positions = torch.arange(hidden.shape[1])[None]
    return hybrid.record_one(block, hidden, positions, None, use_cache=False, **continuing(0))


def formula(module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> hybrid.Formula:
    hidden = hidden.detach().double()
    batch, tokens, _ = hidden.shape
    positions = kwargs.get("position_ids")
    positions = torch.arange(tokens)[None] if positions is None else positions
    reset = (positions == 0).expand(batch, tokens)
    values = hybrid.apply_linear(module.linear_x, hidden)
    channels = values.shape[-1]
    conv = hybrid.causal_taps(module.conv_1d, tokens)
    bias = module.conv_1d.bias.detach().double()
    u = torch.einsum("xcij,bjc->bic", conv, values) + bias
    lru = module.rg_lru
    heads = lru.num_attention_heads
    gates = []
    for name in ("input_gate", "recurrent_gate"):
        weight = getattr(lru, f"{name}_weight").detach().double()
        shift = getattr(lru, f"{name}_bias").detach().double()
        parts = [part @ weight[h] + shift[h] for h, part in enumerate(u.chunk(heads, -1))]
        gates.append(1 / (1 + torch.exp(-torch.cat(parts, -1))))
    log_decay = -8 * gates[1] * F.softplus(lru.recurrent_param.detach().double())
    written = torch.where(reset[..., None], 1.0, (1 - torch.exp(2 * log_decay)).sqrt()) * gates[0]
    core = torch.zeros(batch, channels, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i + 1):
            kept = ~reset[:, j + 1 : i + 1].any(1)
            decay = torch.exp(log_decay[:, j + 1 : i + 1].sum(1))
            core[:, :, i, j] = kept[:, None] * decay * written[:, j]
    z = hybrid.apply_linear(module.linear_y, hidden)
    gate = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    shape = (batch, tokens, channels, 1)
    outer = diagonal_matrices(gate[..., None], shape) @ core
    alpha = outer @ conv
    values = values[..., None]
    offset = times(outer, bias[:, None].expand(shape))
    y = times(alpha, values) + offset
    return hybrid.Formula(
        values, alpha, hybrid.apply_linear(module.linear_out, y.flatten(2)), offset
    )


def test_resets_separate_packed_sequences() -> None:
    block = make_block().double()
    hidden = torch.randn(2, 10, 12, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]])
    layer = run_block(block, hidden, positions)
    hybrid.check_formula(layer, formula(block, hidden, {"position_ids": positions}), 1e-12)
    hybrid.check(layer, 1e-6)
    core = layer.linear.restrict({"scan"}).operator.dense()
    assert not core[0, 4:, :4].any() and not core[0, 7:, :7].any() and not core[1, 2:, :2].any()
    assert core[0, 3, 0] != 0


def test_positions_that_begin_later() -> None:
    block = make_block()
    hidden = torch.randn(2, 6, 12)
    hybrid.check(run_block(block, hidden, torch.arange(3, 9)[None]), FLOAT32)


def test_initialised_decays() -> None:
    """Near a decay of one, where the model's sqrt(1 - a^2) cancels."""
    model = transformers.RecurrentGemmaForCausalLM(config()).eval()
    for layer in hybrid.record(model, torch.randint(3, 19, (2, 40))):
        hybrid.check(layer, 1e-5)


def test_an_earlier_generation_leaves_no_trace() -> None:
    """The block itself carries the state of cached runs; a traced run starts afresh."""
    model = make_model()
    ids = torch.randint(3, 19, (2, 9))
    with torch.no_grad():
        fresh = model(ids, use_cache=False).logits
        model(ids[:, :5], use_cache=True)
    for layer in hybrid.record(model, ids):
        hybrid.check(layer, FLOAT32)
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, fresh)


def test_batches_of_other_sizes() -> None:
    """In version 4 a block goes on from the last call's state, also without a cache."""
    model = make_model()
    ids, later = torch.randint(3, 19, (4, 9)), torch.arange(3, 12)[None]
    with torch.no_grad():
        model(ids[:1])
    states = {m: m.recurrent_states for m in model.modules() if hasattr(m, "recurrent_states")}
    for batch in (3, 2):
        for layer in hybrid.record(model, ids[:batch]):
            hybrid.check(layer, FLOAT32)
    for layer in hybrid.record(model, ids[:2], position_ids=later):  # no reset at the beginning
        hybrid.check(layer, FLOAT32)
    assert all(module.recurrent_states is state for module, state in states.items())
    with torch.no_grad():
        model(ids, use_cache=False)


def test_a_cache_is_refused() -> None:
    hidden = torch.randn(1, 4, 12)
    kwargs = {"past_key_values": object(), "position_ids": torch.arange(4)[None]}
    with pytest.raises(CachedStateError):
        recurrent_gemma(make_block(), Call((hidden,), kwargs, hidden))


@pytest.mark.parametrize(("kernel", "heads"), [(4, 5), (1, 1), (2, 2), (7, 10)])
def test_contract(kernel: int, heads: int) -> None:
    block = make_block(conv1d_width=kernel, num_attention_heads=heads, head_dim=2, lru_width=10)
    # nearer to a decay of one, 1 - a^2 is rounded to nothing by bfloat16 itself
    block.rg_lru.recurrent_param.data.clamp_(min=-3)
    own = {"attention_mask": None, "use_cache": False, **continuing(0)}
    hybrid.holds(block, 12, formula, masked=False, position_ids=positions, **own)


def positions(hidden: Tensor) -> Tensor:
    return torch.arange(hidden.shape[1])[None]
