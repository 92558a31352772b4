"""RWKV-4's time mixing: the operator is the module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import hybrid_checks as hybrid
from oracles import diagonal_matrices, relative_error, times
from torch import Tensor
from zoo.mamba import randomise

from captum_ssm import ImplicitAttentionRollout
from captum_ssm.errors import CachedStateError
from captum_ssm.mixers.base import Call
from captum_ssm.mixers.rwkv import rwkv4

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

FLOAT32 = 1e-5  # for any draw; typical is 3e-7


def config(**options: Any) -> Any:
    small = {
        "vocab_size": 19,
        "hidden_size": 7,
        "attention_hidden_size": 10,
        "num_hidden_layers": 4,
        "rescale_every": 2,
    }
    return transformers.RwkvConfig(**small | options)


def spread(model: Any) -> Any:
    """Decays from fast to slow, and mixtures with the previous token from 0 to 1."""
    randomise(model)
    for name, parameter in model.named_parameters():
        if name.endswith("time_decay"):
            parameter.data = -1 + 2 * torch.randn(parameter.shape)
        if "time_mix" in name:
            parameter.data = torch.rand(parameter.shape)
    return model


def make_model(**options: Any) -> Any:
    return spread(transformers.RwkvForCausalLM(config(**options)))


def mixer_class() -> Any:
    from transformers.models.rwkv import modeling_rwkv

    return modeling_rwkv.RwkvSelfAttention


def make_mixer(**options: Any) -> Any:
    return spread(mixer_class()(config(**options), 1))


def formula(module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> hybrid.Formula:
    hidden = hidden.detach().double()
    batch, tokens, _ = hidden.shape
    before = torch.zeros_like(hidden)
    before[:, 1:] = hidden[:, :-1]
    key, value, receptance = (
        hybrid.apply_linear(getattr(module, name), hidden * mix + before * (1 - mix))
        for name in ("key", "value", "receptance")
        for mix in [getattr(module, f"time_mix_{name}").detach().double()]
    )
    w = -torch.exp(module.time_decay.detach().double())
    u = module.time_first.detach().double()
    scores = torch.full((batch, len(w), tokens, tokens), -torch.inf, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i):
            scores[:, :, i, j] = (i - 1 - j) * w + key[:, j]
        scores[:, :, i, i] = u + key[:, i]
    gate = 1 / (1 + torch.exp(-receptance))
    alpha = diagonal_matrices(gate[..., None], (*gate.shape, 1)) @ torch.softmax(scores, -1)
    y = times(alpha, value[..., None])
    return hybrid.Formula(value[..., None], alpha, hybrid.apply_linear(module.output, y.flatten(2)))


def test_large_keys_do_not_overflow() -> None:
    mixer = make_mixer()
    with torch.no_grad():
        mixer.key.weight.mul_(300)  # exponents of some hundreds, themselves rounded to 1e-5
    hybrid.check(hybrid.record_one(mixer, torch.randn(2, 20, 7)), 2e-4)


def test_logits_and_rescaled_weights_are_left_alone() -> None:
    model = make_model()
    ids = torch.randint(19, (2, 12))
    with torch.no_grad():
        model(ids, use_cache=False)  # from here on the output projections are rescaled
    hybrid.check_same_logits(model, ids)


def test_the_first_run_rescales_once() -> None:
    """A traced first run leaves the model as an untraced one does."""
    plain = make_model()
    traced = copy.deepcopy(plain)
    ids = torch.randint(19, (2, 12))
    with torch.no_grad():
        plain(ids, use_cache=False)
    hybrid.record(traced, ids)
    for (name, a), b in zip(plain.named_parameters(), traced.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_rollout_does_not_depend_on_rescaling() -> None:
    model = make_model()
    other = copy.deepcopy(model)
    other.config.rescale_every = other.rwkv.config.rescale_every = 0
    ids = torch.randint(19, (2, 12))
    found = ImplicitAttentionRollout(model).attribute(ids, query="last")
    assert relative_error(found, ImplicitAttentionRollout(other).attribute(ids, query="last")) <= (
        1e-5
    )


@pytest.mark.parametrize("by_position", [False, True])
def test_a_state_is_refused(by_position: bool) -> None:
    hidden = torch.randn(1, 4, 7)
    args, kwargs = ((hidden, [hidden]), {}) if by_position else ((hidden,), {"state": [hidden]})
    with pytest.raises(CachedStateError):
        rwkv4(make_mixer(), Call(args, kwargs, hidden))


def test_contract() -> None:
    hybrid.holds(make_mixer(), 7, formula)


@pytest.mark.parametrize("rescale_every", [0, 1])
def test_rescaled_models_in_training(rescale_every: int) -> None:
    model = make_model(rescale_every=rescale_every).train()
    for layer in hybrid.record(model, torch.randint(19, (2, 30))):
        hybrid.check(layer, FLOAT32)
