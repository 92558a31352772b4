"""Matrices per state of flash-linear-attention's layers with a decay per key channel."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error
from zoo import fla_cpu

from captum_ssm import ImplicitAttention
from captum_ssm.errors import OptionError

pytestmark = pytest.mark.slow

CHANNELS = [7, 0, -1]


@pytest.mark.parametrize("kind", ["GatedLinearAttention", "HGRN2Attention", "RWKV6Attention"])
def test_states_but_no_steps(fla: fla_cpu.FLA, kind: str) -> None:
    heads = {"expand_ratio": 6} if kind == "HGRN2Attention" else {"num_heads": 2}
    layer = fla.layer(kind, hidden_size=24, **heads).double()
    layer.layer_idx = 0  # HGRN2's first layer has no lower bound
    attention, hidden = ImplicitAttention(layer), torch.randn(2, 7, 24, dtype=torch.float64)
    for components in ("s6", "unified"):
        (matrices,) = attention.matrices(hidden, reduce=None, components=components)
        (states,) = attention.states(hidden, CHANNELS, components=components)
        assert relative_error(states.sum(2), matrices[:, CHANNELS]) <= 1e-11
    assert not torch.allclose(states[:, :, 0], states[:, :, 1])
    with pytest.raises(OptionError, match="VectorDecayHeads has none"):
        attention.factors(hidden, CHANNELS)
