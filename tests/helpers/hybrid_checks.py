"""Checks shared by the tests of mixers.

Each test file brings its models and, for every mixer class, a :class:`Formula`: the mixer at one
input, written again in float64 as plainly as possible.  Nothing in a formula calls the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from oracles import conv_matrices, relative_error
from torch import Tensor, nn

from captum_ssm import trace
from captum_ssm.tracing import Layer
from helpers import contract

Make = Callable[[], Any]


@dataclass
class Formula:
    """A mixer at one input; C = H * P channels, channel h * P + p."""

    values: Tensor  # (B, L, H, P)
    alpha: Tensor  # (B, C, L, L), of what is a matrix per channel
    output: Tensor  # (B, L, E)
    bias: Tensor | None = None  # (B, L, H, P)


#: Module, its input in float64 and the recorded keyword arguments in, formula out.
MakeFormula = Callable[[Any, Tensor, dict[str, Any]], Formula]


def record(model: Any, *args: Any, **kwargs: Any) -> list[Layer]:
    """The layers of a run, whose operators are made where a test asks for them."""
    with torch.no_grad(), trace(model, operators=False) as t:
        model(*args, **kwargs)
    return t.layers


def record_one(mixer: Any, *args: Any, **kwargs: Any) -> Layer:
    (layer,) = record(mixer, *args, **kwargs)
    return layer


def check(layer: Layer, tolerance: float = 1e-5) -> float:
    """The operator is the module, within what float32 allows by default; returns the error."""
    linear = layer.linear
    rebuilt = linear.project(linear.operator.affine(linear.values))
    error = relative_error(rebuilt, layer.output)
    assert error <= tolerance, f"{layer.name or layer.architecture}: {error:.1e}"
    assert layer.reconstruction_error() <= tolerance
    return error


def holds(
    mixer: Any,
    width: int,
    formula: MakeFormula,
    refuses: Mapping[str, str] | None = None,
    **options: Any,
) -> None:
    """The contract of adapters with the formula's matrices; arguments as ``contract.holds`` has."""

    def matrices(module: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        return formula(module, hidden, dict(kwargs)).alpha

    contract.holds(mixer, width, matrices, refuses, **options)


def check_formula(layer: Layer, formula: Formula, tolerance: float) -> None:
    """Values, matrices, bias and output against the formula, alpha v + bias inside."""
    linear = layer.linear
    assert relative_error(linear.values, formula.values) <= tolerance
    matrices = linear.operator.per_channel().dense(None)
    assert relative_error(matrices, formula.alpha) <= tolerance
    mean = linear.operator.per_channel().dense()
    # channels of either sign may leave little of a mean
    limit = tolerance * float(formula.alpha.abs().max())
    assert (mean - formula.alpha.mean(1)).abs().max() <= limit
    assert relative_error(linear.output(), formula.output) <= tolerance
    bias = torch.zeros_like(formula.values) if formula.bias is None else formula.bias
    assert relative_error(linear.bias + 1, bias + 1) <= tolerance
    assert not matrices.triu(1).any(), "not causal"
    assert not any(t.requires_grad for t in linear.operator.tensors().values())


def check_half(layer: Layer, tolerance: float) -> float:
    """A bfloat16 module is linearised in float32."""
    assert layer.output.dtype == torch.bfloat16
    linear = layer.linear
    assert linear.values.dtype == linear.operator.dtype == linear.output().dtype == torch.float32
    return check(layer, tolerance)


def check_same_logits(model: Any, *args: Any, **kwargs: Any) -> None:
    """Tracing changes neither what the model computes nor its parameters."""
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with torch.no_grad():
        plain = model(*args, use_cache=False, **kwargs).logits
        with trace(model) as t:
            traced = model(*args, **kwargs).logits
        assert [layer.reconstruction_error() for layer in t.layers]
        again = model(*args, use_cache=False, **kwargs).logits
    assert torch.equal(plain, traced)
    assert torch.equal(plain, again)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


# --- pieces of formulas --------------------------------------------------------------------


def apply_linear(projection: Any, x: Tensor) -> Tensor:
    out = x @ projection.weight.detach().double().T
    return out if projection.bias is None else out + projection.bias.detach().double()


def causal_taps(conv: nn.Conv1d, tokens: int) -> Tensor:
    """Matrices (1, C, L, L) of a depthwise convolution whose last tap reads token t."""
    taps = conv.weight.detach().double()[:, 0]
    lags = range(taps.shape[1] - 1, -1, -1)
    return conv_matrices(taps[:, None], list(lags), (1, tokens, len(taps), 1))


def keep_of(mask: Tensor | None, hidden: Tensor) -> Tensor:
    """1 for tokens and 0 for padding, (B, L)."""
    return torch.ones(hidden.shape[:2]).double() if mask is None else mask.double()


def per_value_channel(matrices: Tensor, per_head: int) -> Tensor:
    """(B, H, L, L) to (B, H * P, L, L)."""
    return matrices.repeat_interleave(per_head, 1)
