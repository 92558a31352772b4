"""Mixers whose channels stand in another order: the matrices do too, and the output is the same."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from fuzz.fuzzing import LENGTHS, fuzz
from fuzz.mixer_checks import Made
from hypothesis import given
from hypothesis import strategies as st
from oracles import relative_error
from torch import Tensor
from zoo import mamba_ssm_cpu
from zoo.mamba import randomise

EXACT = 1e-10
FEW = st.integers(1, 5)


@dataclass
class Ordered:
    """A mixer, and which of its parameters hold channels.

    Attributes:
        made: the mixer.
        channels: D.
        places: the dimension that channels run along and where they begin, by parameter.  A name
            may have several beginnings.
    """

    made: Made
    channels: int
    places: dict[str, tuple[int, tuple[int, ...]]]

    def reordered(self, order: Tensor) -> Made:
        """The mixer with its channel ``order[c]`` in place c."""
        found = copy.copy(self.made)
        found.module = copy.deepcopy(self.made.module)
        parameters = dict(found.module.named_parameters())
        with torch.no_grad():
            for name, (dim, starts) in self.places.items():
                for start in starts:
                    held = parameters[name].narrow(dim, start, self.channels)
                    held.copy_(held.clone().index_select(dim, order))
        return found


def _mamba_places(module: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
    channels = len(module.D)
    places: dict[str, tuple[int, tuple[int, ...]]] = {
        "in_proj.weight": (0, (0, channels)),
        "in_proj.bias": (0, (0, channels)),
        "x_proj.weight": (1, (0,)),
        "out_proj.weight": (1, (0,)),
    }
    for name in ("conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias", "A_log", "D"):
        places[name] = (0, (0,))
    return {n: place for n, place in places.items() if n in dict(module.named_parameters())}


def mamba(draw: st.DrawFn, _: mamba_ssm_cpu.MambaSSM) -> Ordered:
    config = transformers.MambaConfig(
        hidden_size=draw(FEW),
        expand=draw(st.integers(1, 3)),
        state_size=draw(FEW),
        conv_kernel=draw(FEW),
        time_step_rank=draw(FEW),
        use_bias=draw(st.booleans()),
        use_conv_bias=draw(st.booleans()),
    )
    modeling = importlib.import_module("transformers.models.mamba.modeling_mamba")
    module = randomise(modeling.MambaMixer(config, layer_idx=0))
    return Ordered(Made(module, config.hidden_size), len(module.D), _mamba_places(module))


def mamba_ssm(draw: st.DrawFn, package: mamba_ssm_cpu.MambaSSM) -> Ordered:
    width = draw(FEW)
    module = package.make_mamba(
        width,
        d_state=draw(FEW),
        d_conv=draw(FEW),
        dt_rank=draw(FEW),
        bias=draw(st.booleans()),
        fused=draw(st.booleans()),
    )
    randomise(module)
    return Ordered(Made(module, width), len(module.D), _mamba_places(module))


def rwkv(draw: st.DrawFn, _: mamba_ssm_cpu.MambaSSM) -> Ordered:
    config = transformers.RwkvConfig(
        hidden_size=draw(FEW), attention_hidden_size=draw(FEW), num_hidden_layers=2
    )
    modeling = importlib.import_module("transformers.models.rwkv.modeling_rwkv")
    module = randomise(modeling.RwkvSelfAttention(config, 1))
    names = ("key.weight", "value.weight", "receptance.weight", "time_decay", "time_first")
    places = {name: (0, (0,)) for name in names} | {"output.weight": (1, (0,))}
    return Ordered(Made(module, config.hidden_size), config.attention_hidden_size, places)


def lfm2(draw: st.DrawFn, _: mamba_ssm_cpu.MambaSSM) -> Ordered:
    width, bias = draw(FEW), draw(st.booleans())
    config = transformers.Lfm2Config(
        hidden_size=width,
        conv_L_cache=draw(FEW),
        conv_bias=bias,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_hidden_layers=1,
        layer_types=["conv"],
    )
    modeling = importlib.import_module("transformers.models.lfm2.modeling_lfm2")
    module = randomise(modeling.Lfm2ShortConv(config, 0))
    places = {"in_proj.weight": (0, (0, width, 2 * width)), "conv.weight": (0, (0,))}
    if bias:
        places |= {"in_proj.bias": places["in_proj.weight"], "conv.bias": (0, (0,))}
    return Ordered(Made(module, width), width, places | {"out_proj.weight": (1, (0,))})


Make = Callable[[st.DrawFn, mamba_ssm_cpu.MambaSSM], Ordered]
MIXERS: dict[str, Make] = {make.__name__: make for make in (mamba, mamba_ssm, rwkv, lfm2)}


@pytest.fixture(scope="module")
def package() -> Iterator[mamba_ssm_cpu.MambaSSM]:
    """mamba_ssm, as if causal_conv1d were installed, for all cases."""
    with pytest.MonkeyPatch.context() as patch:
        yield mamba_ssm_cpu.install(patch, causal_conv1d=True)


@pytest.mark.parametrize("name", MIXERS)
@fuzz(quick=5, long=60)
@given(data=st.data(), tokens=LENGTHS, seed=st.integers(0, 2**31 - 1))
def test_channels_in_another_order(
    package: mamba_ssm_cpu.MambaSSM, name: str, data: st.DataObject, tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    ordered = MIXERS[name](data.draw, package)
    ordered.made.module.double().eval()
    order = torch.randperm(ordered.channels)
    hidden = torch.randn(2, tokens, ordered.made.width, dtype=torch.float64)
    (before,) = ordered.made.layers(hidden)
    (after,) = ordered.reordered(order).layers(hidden)
    # some modules compute in float32, their operators do not
    assert relative_error(after.linear.output(), before.linear.output()) <= EXACT
    matrices = before.operator.dense(None)[:, order]
    assert relative_error(after.operator.dense(None), matrices) <= EXACT
    assert relative_error(after.linear.bias, before.linear.bias[:, :, order]) <= EXACT
    assert relative_error(after.values, before.values[:, :, order]) <= EXACT
