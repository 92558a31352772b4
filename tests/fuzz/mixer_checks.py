"""What every mixer is held to at random inputs: its operator is the module, and keeps its promises.

The module runs on the inputs as they are; alone, cut short and padded it must give the same
matrices, values and constants, so that nothing leaks from one example, or one token, to another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fuzz.fuzzing import FEW, MANY
from hypothesis import strategies as st
from oracles import relative_error
from torch import Tensor, nn

from captum_ssm import trace
from captum_ssm.mixers import LinearMixer
from captum_ssm.tracing import Layer

HALF = torch.bfloat16
#: Of results that went different ways, by the dtype of the operator.
LIMIT = {torch.float64: 1e-10, torch.float32: 1e-5}
#: What rounding the steps of the layers before to bfloat16 may come to.
HALF_LIMIT = 0.15
#: How much further off than the module itself a result may be, where little is left of large terms.
OWN = 32


@dataclass
class Made:
    """A module with random parameters, and how it is called.

    Attributes:
        module: a mixer, or a model with mixers.
        width: features of its input.
        call: keyword arguments beside the input, of the input and the mask (B, L) or None.
        sides: on which padding changes nothing.
        causal: whether no token reads a later one.
        mixes_channels: whether a norm subtracts the mean of a head's channels.
        double: whether the module keeps to float64.
        upcast: whether the module in bfloat16 can be compared with itself in float32; no model can,
            whose earlier layers round, nor a module whose buffers are rounded.
        half: whether the module runs in bfloat16.
        longest: most tokens that it takes.
    """

    module: Any
    width: int
    call: Callable[[Tensor, Tensor | None], dict[str, Any]] = lambda hidden, mask: {}
    sides: tuple[str, ...] = ()
    causal: bool = True
    mixes_channels: bool = False
    double: bool = True
    upcast: bool = True
    half: bool = True
    longest: int = 300

    def layers(self, hidden: Tensor, mask: Tensor | None = None) -> list[Layer]:
        """Its layers after a run."""
        with torch.no_grad(), trace(self.module) as t:
            self.module(hidden, **self.call(hidden, mask))
        assert t.layers
        return t.layers

    def to(self, dtype: torch.dtype) -> Made:
        """The same module in another dtype."""
        found = copy.copy(self)
        found.module = copy.deepcopy(self.module).to(dtype)
        return found


@dataclass(frozen=True)
class Inputs:
    """Sizes and kinds of an input, and all that is chosen at random in a check."""

    batch: int
    tokens: int
    dtype: torch.dtype
    #: Of the input and the parameters.
    seed: int
    #: Fractions of the tokens: how many examples of a padded batch keep, where a sequence is cut.
    kept: tuple[float, float]
    cut: float
    side: str


def inputs() -> st.SearchStrategy[Inputs]:
    """Inputs of 1 to 300 tokens."""
    fraction = st.floats(0, 1)
    return st.builds(
        Inputs,
        batch=st.integers(1, 3),
        tokens=st.one_of(FEW, FEW, FEW, FEW, FEW, MANY),
        dtype=st.sampled_from([torch.float64, torch.float64, torch.float32, torch.float32, HALF]),
        seed=st.integers(0, 2**31 - 1),
        kept=st.tuples(fraction, fraction),
        cut=fraction,
        side=st.sampled_from(["left", "right"]),
    )


def check_any(
    options: dict[str, Any],
    make: Callable[[dict[str, Any]], Made],
    data: st.DataObject,
    drawn: Inputs,
) -> None:
    """Check a mixer of options that are drawn."""
    chosen = data.draw(st.fixed_dictionaries(options), label="options")
    torch.manual_seed(drawn.seed)
    check(make(chosen), drawn)


def check(made: Made, drawn: Inputs) -> None:
    """All that holds of any mixer, at one input."""
    dtype = torch.float32 if drawn.dtype == HALF and not made.half else drawn.dtype
    made = made.to(dtype)
    made.module.eval()
    tokens = min(drawn.tokens, made.longest)
    hidden = torch.randn(drawn.batch, tokens, made.width, dtype=dtype)
    layers = made.layers(hidden)
    for at, layer in enumerate(layers):
        assert layer.linear.mask is None
        reproduces(made, hidden, None, layer, at)
        is_linear(layer.linear)
        is_its_matrices(made, layer.linear)
    several(made, hidden, layers)
    if made.causal:
        cut_short(made, hidden, layers, 1 + int(drawn.cut * (tokens - 1)))
    if drawn.side in made.sides:
        padded(made, hidden, drawn)


# --- one input ---------------------------------------------------------------------------------


def reproduces(made: Made, hidden: Tensor, mask: Tensor | None, layer: Layer, at: int) -> None:
    """project(operator v + bias) is what the module returns; of half precision, in float32."""
    found, wanted = layer.linear.output(), layer.output
    assert found.dtype == layer.linear.operator.dtype == working(wanted.dtype)
    if wanted.dtype == HALF:
        if not made.upcast:
            assert relative_error(found, wanted) <= HALF_LIMIT
            return
        made, hidden = made.to(torch.float32), hidden.float()
        wanted = made.layers(hidden, mask)[at].output
    single = wanted.dtype == torch.float32 or not made.double
    limit = LIMIT[torch.float32 if single else torch.float64]
    error = relative_error(found, wanted)
    if error > limit and single:  # few features may blow rounding errors up, the module's own too
        limit = OWN * own_error(made, hidden, mask, at)
    assert error <= limit, f"{layer.architecture}: {error:.1e} > {limit:.1e}"


def own_error(made: Made, hidden: Tensor, mask: Tensor | None, at: int) -> float:
    """How far the module itself is off for computing in float32."""
    outputs = (
        made.to(dtype).layers(hidden.to(dtype), mask)[at].output
        for dtype in (torch.float32, torch.float64)
    )
    return relative_error(*outputs)


def is_linear(linear: LinearMixer) -> None:
    """Linearity, and <A v, u> = <v, A' u>."""
    operator = linear.operator
    u, v, w = (torch.randn_like(linear.values) for _ in range(3))
    mapped, other = operator.apply(v), operator.apply(w)
    both = operator.apply(2 * v - 0.5 * w)
    limit = LIMIT[operator.dtype]
    size = 1e-30 + mapped.abs().max() + other.abs().max()
    assert (both - (2 * mapped - 0.5 * other)).abs().max() <= limit * size
    # all terms of the sum, which may cancel
    size = (u * mapped).abs().sum() + 1e-30
    assert ((u * mapped).sum() - (operator.transpose(u) * v).sum()).abs() <= limit * size * 10


def is_its_matrices(made: Made, linear: LinearMixer) -> None:
    """Matrices times values plus bias are what enters the projection."""
    operator = linear.operator
    alpha = operator.per_channel().dense(None)  # (B, C, L, L)
    limit = LIMIT[operator.dtype]
    size = 1e-30 + alpha.abs().max()
    assert (operator.per_channel().dense() - alpha.mean(1)).abs().max() <= limit * size
    if made.causal:
        assert not alpha.triu(1).any(), "a token reads a later one"
    token, channel = (int(torch.randint(n, ())) for n in (alpha.shape[-1], alpha.shape[1]))
    unit = linear.values.new_zeros(operator.shape)
    unit.view(*alpha.shape[:1], alpha.shape[-1], -1)[:, token, channel] = 1
    column = operator.apply(unit).flatten(2)
    assert (column[..., channel] - alpha[:, channel, :, token]).abs().max() <= limit * size
    if made.mixes_channels:
        return
    others = column.clone()
    others[..., channel] = 0
    assert not others.any(), "a channel reads another"
    values = linear.values.flatten(2)
    y = torch.einsum("bcij,bjc->bic", alpha, values) + linear.bias.flatten(2)
    terms = torch.einsum("bcij,bjc->bic", alpha.abs(), values.abs()) + linear.bias.flatten(2).abs()
    wanted = operator.affine(linear.values).flatten(2)
    assert (y - wanted).abs().max() <= limit * (1e-30 + terms.max())


# --- the same tokens in other company ----------------------------------------------------------


def several(made: Made, hidden: Tensor, layers: list[Layer]) -> None:
    """An example alone gives what it gives among others."""
    row = len(hidden) - 1
    for own, layer in zip(made.layers(hidden[row:]), layers, strict=True):
        same(made, own, layer, slice(row, row + 1), slice(None))


def cut_short(made: Made, hidden: Tensor, layers: list[Layer], tokens: int) -> None:
    """What comes later changes nothing."""
    for own, layer in zip(made.layers(hidden[:, :tokens]), layers, strict=True):
        same(made, own, layer, slice(None), slice(tokens))


def padded(made: Made, hidden: Tensor, drawn: Inputs) -> None:
    """Examples of a padded batch give what they give alone, and padding gets nothing."""
    tokens = hidden.shape[1]
    kept = [tokens, *(1 + int(share * (tokens - 1)) for share in drawn.kept)]
    hidden = torch.randn(3, tokens, made.width, dtype=hidden.dtype)
    mask = torch.zeros(3, tokens, dtype=torch.long)
    for row, count in enumerate(kept):
        mask[row, tokens - count if drawn.side == "left" else 0 :][:count] = 1
    layers = made.layers(hidden, mask)
    for at, layer in enumerate(layers):
        reproduces(made, hidden, mask, layer, at)
        found = layer.linear.mask
        assert bool(mask.all()) if found is None else torch.equal(found, mask.bool())
        alpha = layer.linear.operator.per_channel().dense(None)
        hidden_columns = (mask == 0)[:, None, None].expand_as(alpha)
        assert not alpha[hidden_columns].any(), "padding is read"
    row = int(torch.randint(3, ()))
    start = tokens - kept[row] if drawn.side == "left" else 0
    own = slice(start, start + kept[row])
    for alone, layer in zip(made.layers(hidden[row : row + 1, own]), layers, strict=True):
        same(made, alone, layer, slice(row, row + 1), own)


def same(made: Made, own: Layer, among: Layer, rows: slice, tokens: slice) -> None:
    """A layer's results on some examples and tokens are those of its run on these alone."""
    half = own.output.dtype == HALF
    limit = LIMIT[own.linear.operator.dtype]
    if not made.double:
        limit = LIMIT[torch.float32]
    if half and not made.upcast:
        limit = 2 * HALF_LIMIT  # what enters it was rounded in both runs
    mine, all_ = (x.linear.operator.per_channel().dense(None) for x in (own, among))
    pairs = {
        "matrices": (mine, all_[rows][:, :, tokens, tokens]),
        "values": (own.linear.values, among.linear.values[rows, tokens]),
        "bias": (own.linear.bias, among.linear.bias[rows, tokens]),
    }
    if not half:  # of which only the module is
        pairs["output"] = own.output, among.output[rows, tokens]
    for name, (found, wanted) in pairs.items():
        assert found.shape == wanted.shape
        # against what the layer deals in: of a few tokens all may be tiny
        full = {"matrices": all_, "output": among.output}.get(name, among.linear.values)
        error = (found.double() - wanted.double()).abs().max() / (1e-30 + full.double().abs().max())
        assert error <= limit, f"{own.architecture}, {name}: {error:.1e}"


def working(dtype: torch.dtype) -> torch.dtype:
    """What an adapter computes in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def randomised(module: nn.Module, spread: dict[str, Callable[[Tensor], Tensor]]) -> nn.Module:
    """Parameters whose names end in a key are made anew, by a function of noise of their shape."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            for end, function in spread.items():
                if name.endswith(end):
                    parameter.copy_(function(torch.randn_like(parameter)))
    return module
