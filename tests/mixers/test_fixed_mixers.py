"""Theorem 1 of the hidden-attention paper, held against real layers and toy S4D, GSS and Hyena.

The toy layers compute by recurrences and sums over lags; their adapters by long convolutions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.hybrid_checks import Formula, causal_taps, check, check_formula, record_one
from helpers.versions import continuing, recurrent_gemma_block
from oracles import conv_matrices, diagonal_matrices, relative_error, times
from oracles.mixing import TOKENS, Observed, observe
from torch import Tensor, nn
from zoo.mamba import randomise, transformers_model

from captum_ssm import ImplicitAttention, register_mixer
from captum_ssm.mixers import Call, LinearMixer
from captum_ssm.operators import Chain, Diagonal, LongConv, Mixing, Operator, Shape, ShortConv, Sum

transformers = pytest.importorskip("transformers")

FLOAT32 = 1e-5  # for any draw
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


class Hyena(nn.Module):
    """z = v, then z = x_n (h_n * z) for each step, on projections after a short convolution.

    The filters h_n are a small network of the position, under an exponential window.
    """

    def __init__(self, steps: int = 1, width: int = WIDTH) -> None:
        super().__init__()
        self.steps = steps
        self.project = nn.Linear(width, (steps + 1) * width)
        wide = (steps + 1) * width
        self.conv1d = nn.Conv1d(wide, wide, 3, groups=wide, padding=2)
        self.position, self.filter = nn.Linear(1, 7), nn.Linear(7, steps * width)
        self.skip = nn.Parameter(torch.randn(steps, width))
        self.out = nn.Linear(width, width)

    def streams(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """x_n for every step, then v, each (B, L, D)."""
        mixed = self.conv1d(self.project(hidden).mT)[..., : hidden.shape[1]].mT
        return mixed.chunk(self.steps + 1, -1)

    def filters(self, tokens: int) -> Tensor:
        """(steps, L, D)"""
        t = torch.arange(tokens).to(self.skip)[:, None]
        h = self.filter(torch.sin(self.position(t))) * torch.exp(-0.2 * t)
        return h.unflatten(-1, (self.steps, -1)).movedim(1, 0)

    def forward(self, hidden: Tensor) -> Tensor:
        *gates, z = self.streams(hidden)
        for gate, h, skip in zip(gates, self.filters(hidden.shape[1]), self.skip, strict=True):
            lagged = [
                F.pad(z, (0, 0, lag, 0))[:, : z.shape[1]] * weight for lag, weight in enumerate(h)
            ]
            z = gate * (torch.stack(lagged).sum(0) + skip * z)
        return self.out(z)


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


def hyena(module: Any, call: Call) -> LinearMixer:
    *gates, v = module.streams(call.hidden_states)
    shape = Shape(*v.shape, 1)
    parts: list[Operator] = []
    for gate, h, skip in zip(gates, module.filters(shape.tokens), module.skip, strict=True):
        mixed = Sum(LongConv(h.T[:, None], shape), skip_of(skip, shape))
        parts = [Diagonal(gate[..., None], shape, "gate"), mixed, *parts]
    return LinearMixer(v[..., None], Chain(*parts), lambda y: module.out(y.flatten(2)))


def hyena_with_its_short_convolution(module: Any, call: Call) -> LinearMixer:
    """The same layer with the values taken before the short convolution."""
    after = hyena(module, call)
    shape = after.operator.shape
    values = module.project(call.hidden_states)[..., -shape.heads :, None]
    weight, bias = (p[-shape.heads :] for p in (module.conv1d.weight, module.conv1d.bias))
    conv = ShortConv(weight.flip(-1), shape, bias.view(1, 1, -1, 1))
    return LinearMixer(values, Chain(after.operator, conv), after.project)


# --- what the layers are, by the impulse responses of the layers themselves -------------------


def s4d_formula(module: Any, hidden: Tensor) -> Formula:
    return Formula(hidden[..., None], _responses(module, hidden), module(hidden))


def gss_formula(module: Any, hidden: Tensor) -> Formula:
    values = F.gelu(module.value(hidden))
    gate = diagonal_matrices(F.gelu(module.gate(hidden))[..., None], (*values.shape, 1))
    return Formula(values[..., None], gate @ _responses(module.inner, values), module(hidden))


def hyena_formula(module: Any, hidden: Tensor) -> Formula:
    *gates, v = module.streams(hidden)
    shape = (*v.shape, 1)
    alpha = diagonal_matrices(torch.ones(1, 1, 1, 1), shape)
    for gate, h, skip in zip(gates, module.filters(shape[1]), module.skip, strict=True):
        mixed = conv_matrices(h.T[:, None], range(shape[1]), shape)
        mixed = mixed + diagonal_matrices(skip.view(1, 1, -1, 1), shape)
        alpha = diagonal_matrices(gate[..., None], shape) @ mixed @ alpha
    return Formula(v[..., None], alpha, module(hidden))


def hyena_formula_with_its_short_convolution(module: Any, hidden: Tensor) -> Formula:
    after = hyena_formula(module, hidden)
    channels = after.alpha.shape[1]
    v = module.project(hidden)[..., -channels:, None]
    conv = causal_taps(module.conv1d, hidden.shape[1])[:, -channels:]
    bias = module.conv1d.bias[-channels:].view(1, 1, -1, 1).expand_as(v)
    return Formula(v, after.alpha @ conv, after.output, times(after.alpha, bias))


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
    "Hyena": Toy(Hyena, hyena, hyena_formula),
    "Hyena of two steps": Toy(lambda: Hyena(2), hyena, hyena_formula),
    "Hyena with its short convolution": Toy(
        Hyena, hyena_with_its_short_convolution, hyena_formula_with_its_short_convolution
    ),
}


def make_toy(name: str) -> Any:
    """A random toy layer, its adapter registered."""
    module = randomise(TOYS[name].make())
    register_mixer(type(module), TOYS[name].linearize)
    return module


@pytest.mark.parametrize("tokens", [1, 2, 23])
@pytest.mark.parametrize("name", TOYS)
def test_the_operator_is_the_layer(name: str, tokens: int) -> None:
    module = make_toy(name)
    check(record_one(module, torch.randn(2, tokens, WIDTH)), FLOAT32)
    hidden = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        wanted = TOYS[name].formula(module.double(), hidden)
    check_formula(record_one(module, hidden), wanted, 1e-12)


@pytest.mark.parametrize("name", TOYS)
def test_typical_error(name: str) -> None:
    """Half of all draws agree with the layer to 5e-7."""
    errors = [check(record_one(make_toy(name), torch.randn(2, 40, WIDTH)), FLOAT32)
              for _ in range(9)]  # fmt: skip
    assert statistics.median(errors) <= 5e-7


def test_methods_read_fixed_mixers() -> None:
    model = nn.Sequential(*(make_toy(name) for name in ("S4D", "GSS", "Hyena"))).double()
    hidden = torch.randn(2, 11, WIDTH, dtype=torch.float64)
    wanted, entering = [], hidden
    with torch.no_grad():
        for layer, name in zip(model, ("S4D", "GSS", "Hyena"), strict=True):
            wanted.append(TOYS[name].formula(layer, entering).alpha.mean(1))
            entering = layer(entering)
    found = ImplicitAttention(model).matrices(hidden, components="exact")
    for matrix, by_hand in zip(found, wanted, strict=True):
        assert relative_error(matrix, by_hand) <= 1e-12


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
    "Hyena": Layer(lambda: make_toy("Hyena"), "gated", reach=2),
    "LFM2": Layer(lfm2, "gated"),
    "Hyena of two steps": Layer(lambda: make_toy("Hyena of two steps"), "controlled", reach=2),
    "Hyena with its short convolution": Layer(
        lambda: make_toy("Hyena with its short convolution"), "gated", reach=2
    ),
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


def test_rwkv_4_is_a_rescaling_by_the_past() -> None:
    """Its rows are fixed exponentials between diagonals, of which one holds all earlier keys."""
    seen = look(LAYERS["RWKV-4"], rwkv().double())
    assert seen.rescaled and not seen.local


def test_the_fixed_kernel_of_gss_shows_through_its_gates() -> None:
    module = make_toy("GSS").double()
    hidden = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        gate = F.gelu(module.gate(hidden)).mT[..., None]
        kernel = operator_at(module, hidden).dense(None) / gate
        wanted = _responses(module.inner, hidden)
    assert relative_error(kernel, wanted) <= 1e-9
    for lag in range(TOKENS):
        diagonal = kernel.diagonal(-lag, -2, -1)
        assert relative_error(diagonal, diagonal[..., :1].expand_as(diagonal)) <= 1e-6


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
