"""Theorem 1 of the hidden-attention paper, held against real layers and toy S4D, GSS and Hyena.

The toy layers compute by recurrences and sums over lags; their adapters by long convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import contract
from helpers.hybrid_checks import Formula, record_one
from helpers.versions import continuing, recurrent_gemma_block
from oracles import diagonal_matrices
from oracles.mixing import TOKENS, Observed, observe
from torch import Tensor, nn
from zoo.mamba import randomise, transformers_model

from captum_ssm import register_mixer
from captum_ssm.mixers import Call, LinearMixer
from captum_ssm.operators import Chain, Diagonal, LongConv, Mixing, Operator, Shape, Sum

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

WIDTH, STATE = 5, 3


# --- toy layers ----------------------------------------------------------------------------


class S4D(nn.Module):
    """h[t] = exp(dt A) h[t-1] + B u[t], y[t] = 2 Re(C h[t]) + D u[t], states in conjugate pairs."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.log_rate, self.frequency, self.c_real, self.c_imag = (
            nn.Parameter(torch.randn(width, STATE)) for _ in range(4)
        )
        self.skip = nn.Parameter(torch.randn(width))
        self.out = nn.Linear(width, width)

    def steps(self) -> tuple[Tensor, Tensor]:
        """The decay and C B of one step, complex (D, N)."""
        decay = torch.exp(torch.complex(-self.log_rate.exp(), self.frequency))
        return decay, torch.complex(self.c_real, self.c_imag)

    def mix(self, u: Tensor) -> Tensor:
        decay, c = self.steps()
        state = torch.zeros(u.shape[0], *decay.shape, dtype=decay.dtype)
        out = []
        for t in range(u.shape[1]):
            state = decay * state + u[:, t, :, None]
            out.append(2 * (c * state).sum(-1).real + self.skip * u[:, t])
        return torch.stack(out, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.mix(hidden))


class GSS(nn.Module):
    """A gated state space: y = gelu(W h) S4D(gelu(V h))."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.inner = S4D(width)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.inner.mix(F.gelu(self.value(hidden)))
        return self.out(F.gelu(self.gate(hidden)) * mixed)


# --- their adapters ------------------------------------------------------------------------


def state_space(module: S4D, shape: Shape) -> Operator:
    decay, c = module.steps()
    powers = decay[..., None] ** torch.arange(shape.tokens)  # (D, N, L)
    kernel = 2 * (c[..., None] * powers).sum(1).real
    return Sum(LongConv(kernel[:, None], shape), skip_of(module.skip, shape))


def skip_of(skip: Tensor, shape: Shape) -> Operator:
    return Diagonal(skip.view(1, 1, -1, 1), shape, "skip")


def s4d(module: Any, call: Call) -> LinearMixer:
    values = call.hidden_states[..., None]
    operator = state_space(module, Shape(*values.shape))
    return LinearMixer(values, operator, lambda y: module.out(y.flatten(2)))


def gss(module: Any, call: Call) -> LinearMixer:
    values = F.gelu(module.value(call.hidden_states))[..., None]
    shape = Shape(*values.shape)
    gate = Diagonal(F.gelu(module.gate(call.hidden_states))[..., None], shape, "gate")
    operator = Chain(gate, state_space(module.inner, shape))
    return LinearMixer(values, operator, lambda y: module.out(y.flatten(2)))


# --- what the layers are, by the impulse responses of the layers themselves -------------------


def s4d_formula(module: Any, hidden: Tensor) -> Formula:
    return Formula(hidden[..., None], _responses(module, hidden), module(hidden))


def gss_formula(module: Any, hidden: Tensor) -> Formula:
    values = F.gelu(module.value(hidden))
    gate = diagonal_matrices(F.gelu(module.gate(hidden))[..., None], (*values.shape, 1))
    return Formula(values[..., None], gate @ _responses(module.inner, values), module(hidden))


def _responses(module: S4D, values: Tensor) -> Tensor:
    """(B, D, L, L): what a one at each token brings about."""
    batch, tokens, channels = values.shape
    ones = torch.eye(tokens).to(values)[..., None].expand(-1, -1, channels)
    return module.mix(ones).permute(2, 1, 0).expand(batch, -1, -1, -1)


@dataclass(frozen=True)
class Toy:
    make: Callable[[], nn.Module]
    linearize: Any
    formula: Callable[[Any, Tensor], Formula]


TOYS: dict[str, Toy] = {
    "S4D": Toy(S4D, s4d, s4d_formula),
    "GSS": Toy(GSS, gss, gss_formula),
}


def make_toy(name: str) -> Any:
    """A random toy layer, its adapter registered."""
    module = randomise(TOYS[name].make())
    register_mixer(type(module), TOYS[name].linearize)
    return module


# --- the theorem ---------------------------------------------------------------------------


def mamba() -> Any:
    return transformers_model("mamba").backbone.layers[0].mixer


def mamba2() -> Any:
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    small = {"hidden_size": WIDTH, "num_heads": 2, "head_dim": 5, "expand": 2, "n_groups": 1}
    config = transformers.Mamba2Config(**small, state_size=STATE, chunk_size=4)
    return randomise(Mamba2Mixer(config, 0))


def rwkv() -> Any:
    from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

    config = transformers.RwkvConfig(hidden_size=WIDTH, attention_hidden_size=WIDTH)
    return randomise(RwkvSelfAttention(config, 0))


def griffin() -> Any:
    small = {"hidden_size": WIDTH, "lru_width": 4, "num_attention_heads": 2}
    return randomise(recurrent_gemma_block(transformers.RecurrentGemmaConfig(**small)))


def lfm2() -> Any:
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    config = transformers.Lfm2Config(hidden_size=WIDTH, num_attention_heads=1, num_hidden_layers=1)
    return randomise(Lfm2ShortConv(config, 0))


def attention() -> Any:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    config = transformers.GPT2Config(n_embd=6, n_head=3, n_layer=1, attn_implementation="sdpa")
    return randomise(GPT2Attention(config, layer_idx=0))


@dataclass(frozen=True)
class Layer:
    """A layer, what the theorem says of it, and how many tokens back its gates read."""

    make: Callable[[], Any]
    mixing: str
    reach: int = 0
    width: int = WIDTH


LAYERS: dict[str, Layer] = {
    "S4D": Layer(lambda: make_toy("S4D"), "fixed"),
    "GSS": Layer(lambda: make_toy("GSS"), "gated"),
    "LFM2": Layer(lfm2, "gated"),
    "Mamba": Layer(mamba, "controlled"),
    "Mamba-2": Layer(mamba2, "controlled"),
    "RWKV-4": Layer(rwkv, "controlled"),
    "Griffin": Layer(griffin, "controlled"),
    "attention": Layer(attention, "controlled", width=6),
}


def operator_at(module: Any, hidden: Tensor) -> Operator:
    """A layer's operator for an input; Griffin's wants to know the positions."""
    if type(module).__name__ != "RecurrentGemmaRecurrentBlock":
        return record_one(module, hidden).operator
    positions = torch.arange(hidden.shape[1])[None]
    arguments = {"use_cache": False} | continuing(0)
    return record_one(module, hidden, positions, None, **arguments).operator


def look(layer: Layer, module: Any) -> Observed:
    return observe(
        lambda hidden: operator_at(module, hidden).per_channel().dense(None),
        lambda: torch.randn(2, TOKENS, layer.width, dtype=torch.float64),
        layer.reach,
    )


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_theorem_1(layer: Layer) -> None:
    """The word is what the matrices of the real layer show at several inputs."""
    module = layer.make().double()
    operator = operator_at(module, torch.randn(2, TOKENS, layer.width, dtype=torch.float64))
    assert operator.mixing is Mixing(layer.mixing)
    assert operator.mixes_tokens and operator.data_dependent == (layer.mixing != "fixed")
    assert look(layer, module).word == layer.mixing


@pytest.mark.parametrize(
    ("components", "mixing"),
    [
        ({"scan", "gate", "conv", "activation", "skip"}, "controlled"),
        ({"gate", "conv", "activation", "skip"}, "gated"),
        ({"conv", "skip"}, "fixed"),
        ({"gate", "activation"}, "none"),
    ],
)
def test_mamba_without_its_scan_mixes_no_more_than_its_convolution(
    components: set[str], mixing: str
) -> None:
    mixer = record_one(mamba(), torch.randn(2, TOKENS, WIDTH)).linear.restrict(components)
    assert mixer.operator.mixing is Mixing(mixing)


def test_padding_is_no_data() -> None:
    """Which tokens are padding does not make a convolution data-dependent."""
    hidden, mask = torch.randn(2, TOKENS, WIDTH), torch.ones(2, TOKENS)
    mask[0, :3] = 0
    layer = record_one(lfm2(), hidden, attention_mask=mask)
    assert layer.linear.mask is not None
    without_gates = layer.linear.restrict({"conv"}).operator
    assert without_gates.mixing is Mixing.FIXED and layer.operator.mixing is Mixing.GATED


@pytest.mark.parametrize("name", TOYS)
def test_contract(name: str) -> None:
    def matrices(module: Any, hidden: Tensor, _: Any) -> Tensor:
        return TOYS[name].formula(module, hidden).alpha.detach()

    contract.holds(make_toy(name), WIDTH, matrices, {"bfloat16": "got BFloat16"})
