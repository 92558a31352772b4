"""Checks shared by the tests of mixers.

Each test file brings its models and, for every mixer class, a :class:`Formula`: the mixer at one
input, written again in float64 as plainly as possible.  Nothing in a formula calls the package.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from oracles import conv_matrices, relative_error, times
from torch import Tensor, nn

from captum_ssm import ImplicitAttentionRollout, MambaAttribution, trace
from captum_ssm.tracing import Layer

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


def check_typical(errors: Sequence[float], typical: float) -> None:
    assert statistics.median(errors) <= typical, [f"{e:.1e}" for e in errors]


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


def check_formula_output(formula: Formula, project: nn.Linear, tolerance: float = 1e-12) -> None:
    """alpha v + bias, projected, is the formula's own output."""
    y = times(formula.alpha, formula.values)
    y = y if formula.bias is None else y + formula.bias
    weight = project.weight.detach().double()
    out = y.flatten(2) @ weight.T
    out = out if project.bias is None else out + project.bias.detach().double()
    assert relative_error(out, formula.output) <= tolerance


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


def check_methods(
    model: Any, ids: Tensor, mask: Tensor | None = None, *, invariant: bool = True
) -> None:
    """Both kinds of attribution run on the whole model; left padding changes nothing."""
    arguments = () if mask is None else (mask,)
    target = [(-1, 3)] * len(ids)
    for method, options in ((MambaAttribution(model), {"target": target}),
                            (ImplicitAttentionRollout(model), {"query": "last"})):  # fmt: skip
        relevance = method.attribute(
            ids, additional_forward_args=arguments or None, verify=1e-4, **options
        )
        assert relevance.shape == ids.shape
        assert torch.isfinite(relevance).all() and bool(relevance.any(-1).all())
        if mask is None or not invariant:
            continue
        assert not relevance[mask == 0].any()
        for row in range(len(ids)):
            own = mask[row].bool()
            alone = {k: v[:1] if k == "target" else v for k, v in options.items()}
            single = method.attribute(ids[row : row + 1, own], **alone)
            assert relative_error(relevance[row, own], single[0]) <= 1e-4


def attribution_by_hand(
    model: Any,
    kinds: type | tuple[type, ...],
    make: MakeFormula,
    ids: Tensor,
    token: int,
    clamp: Callable[[Tensor], Tensor],
) -> Tensor:
    """Mamba-Attribution of the last position, by dense matrices in float64.

    The row of the last token times the product of I + clamp(g mean-over-channels alpha), with
    the gradients of a plain backward pass.
    """
    model = copy.deepcopy(model).double().eval()
    seen: list[tuple[Any, Tensor, dict[str, Any], Tensor]] = []

    def keep(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        out = output if isinstance(output, Tensor) else output[0]
        seen.append((module, hidden.detach(), kwargs, out))

    handles = [
        m.register_forward_hook(keep, with_kwargs=True)
        for m in model.modules()
        if isinstance(m, kinds)
    ]
    logits = model(ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(logits[:, -1, token].sum(), [out for *_, out in seen])
    row = torch.zeros(ids.shape, dtype=torch.float64)
    row[:, -1] = 1
    for (module, hidden, kwargs, _), gradient in reversed(list(zip(seen, gradients, strict=True))):
        matrix = make(module, hidden, kwargs).alpha.mean(1)
        weighted = clamp(gradient.mean(-1)[:, :, None] * matrix)
        row = row + torch.einsum("bi,bij->bj", row, weighted)
    return row


def check_attribution_by_hand(
    model: Any, kinds: type | tuple[type, ...], make: MakeFormula, ids: Tensor
) -> None:
    """The package agrees, told to use the mixers of these classes only."""
    double = copy.deepcopy(model).double()
    mixers = [m for m in double.modules() if isinstance(m, kinds)]
    assert len(mixers) > 1
    method = MambaAttribution(double, layers=mixers)
    for clamp, function in (("relu", torch.relu), ("abs", torch.abs)):
        wanted = attribution_by_hand(model, kinds, make, ids, 3, function)
        found = method.attribute(ids, target=[(-1, 3)] * len(ids), clamp=clamp)
        # modules in float64 round parts of their recurrences to float32
        assert relative_error(found, wanted) <= 2e-5
        if clamp == "abs":  # the last token, at 1 and more, hides the others
            assert wanted[:, :-1].max() > 1e-6, "nothing is explained"
            assert relative_error(found[:, :-1], wanted[:, :-1]) <= 1e-4


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
