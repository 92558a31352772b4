"""What every adapter of flash-linear-attention is held to, and the matrices it should give.

The matrices are written in float64 from the layers' parameters, entry by entry; nothing in them
comes from the package.
"""

from __future__ import annotations

import copy
import inspect
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import oracles
import torch
import torch.nn.functional as F
from oracles import relative_error
from torch import Tensor

from captum_ssm import ImplicitAttentionRollout, MambaAttribution, trace
from captum_ssm.attr.call.components import parse_components
from captum_ssm.tracing import Layer

# float32 against float32 or float64, for any draw of the parameters; see typical_error
FLOAT32 = 1e-5
#: Norms of few features that do not blow rounding errors up.
EPS = 0.05
LENGTHS = [1, 2, 3, 5, 70]
ABLATIONS = ["s6", "unified", "exact", "exact-conv", "exact-activation", "exact-norm", "exact-gate"]


def record(model: Any, *args: Any, **kwargs: Any) -> list[Layer]:
    """The layers of a run, whose operators are made where a test asks for them."""
    with torch.no_grad(), trace(model, operators=False) as t:
        model(*args, **kwargs)
    return t.layers


def record_one(layer: Any, hidden: Tensor, **kwargs: Any) -> Layer:
    (recorded,) = record(layer, hidden, **kwargs)
    return recorded


def side_mask(lengths: Sequence[int], tokens: int, side: str = "left") -> Tensor:
    mask = torch.zeros(len(lengths), tokens, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, tokens - length :] = 1
    return mask if side == "left" else mask.flip(1)


# --- reproduction ---------------------------------------------------------------------------


def reproduces(make: Callable[[], Any], width: int, **kwargs: Any) -> None:
    """All lengths, single and in batches, with and without padding on either side."""
    layer = make()
    for tokens in LENGTHS:
        for batch in (1, 3):
            recorded = record_one(layer, torch.randn(batch, tokens, width), **kwargs)
            assert recorded.output.shape == (batch, tokens, width)
            assert recorded.reconstruction_error() <= FLOAT32, (tokens, batch)
            assert recorded.linear.mask is None
    knows_padding = "attention_mask" in inspect.signature(layer.forward).parameters
    for side in ("left", "right")[: 2 if knows_padding else 0]:
        mask = side_mask([9, 4, 1], 9, side)
        recorded = record_one(layer, torch.randn(3, 9, width), attention_mask=mask, **kwargs)
        assert recorded.reconstruction_error() <= FLOAT32, side
        assert recorded.linear.mask is not None
        assert torch.equal(recorded.linear.mask, mask.bool())


def typical_error(make: Callable[[], Any], width: int, limit: float, **kwargs: Any) -> None:
    errors = []
    for _ in range(9):
        hidden = torch.randn(2, 16, width)
        errors.append(record_one(make(), hidden, **kwargs).reconstruction_error())
    assert statistics.median(errors) <= limit


def half_precision(make: Callable[[], Any], width: int, **kwargs: Any) -> None:
    """The operator of a bfloat16 layer is computed in float32; its layer rounds."""
    errors = []
    for _ in range(5):
        layer = make().to(torch.bfloat16)
        recorded = record_one(layer, torch.randn(2, 9, width).bfloat16(), **kwargs)
        linear = recorded.linear
        assert recorded.output.dtype == torch.bfloat16
        assert linear.values.dtype == linear.operator.dtype == torch.float32
        assert linear.output().dtype == torch.float32
        errors.append(recorded.reconstruction_error())
    assert statistics.median(errors) <= 2e-2


# --- the matrices ---------------------------------------------------------------------------


@dataclass
class Formula:
    """A layer at one input, in float64; ``core`` holds one matrix per head."""

    values: Tensor  # (B, L, H, P)
    conv: Tensor  # (1, C, L, L)
    conv_bias: Tensor  # (H, P)
    ratio: Tensor  # (B, L, H, P), ones without an activation
    core: Tensor  # (B, H, L, L)
    norm: Callable[[Tensor], Tensor]  # the core's output to its factors, both (B, L, H, P)
    gate: Tensor  # (B, L, H, P), ones without a gate
    keep: Tensor  # (B, L) of 0 and 1; silences values around the convolution
    norm_bias: Tensor | None = None  # (H, P); a norm with a bias also subtracts the head's mean
    skip: Tensor | None = None  # (H,), of what passes the core by
    activated: bool = False  # whether SiLU stands between the core and the norm

    def core_output(self) -> Tensor:
        u = oracles.times(self.conv, self.values * self.keep[..., None, None]) + self.conv_bias
        x = u * self.ratio * self.keep[..., None, None]
        out = torch.einsum("bhij,bjhp->bihp", self.core, x)
        return out if self.skip is None else out + self.skip[:, None] * x

    def before_projection(self) -> Tensor:
        o = self.core_output()
        if self.activated:
            o = F.silu(o)
        factor = self.norm(o)
        if self.norm_bias is None:
            return self.gate * factor * o
        centered = o - o.mean(-1, keepdim=True)
        return self.gate * (factor * centered + self.norm_bias)

    def alpha(self, components: str | Collection[str]) -> Tensor:
        """(B, C, L, L); of centering, each channel's own share."""
        chosen = parse_components(components)
        shape = self.values.shape
        tokens = shape[1]
        eye = torch.eye(tokens, dtype=torch.float64)
        keep = oracles.diagonal_matrices(self.keep[:, :, None, None], shape)
        out = keep
        if "conv" in chosen:
            out = self.conv @ out
        if "activation" in chosen:
            out = oracles.diagonal_matrices(self.ratio, shape) @ out
        out = keep @ out
        core = self.core if "scan" in chosen else eye
        if self.skip is not None and "skip" in chosen:
            core = core + self.skip[:, None, None] * eye
        core = core.repeat_interleave(shape[3], 1) if core.dim() == 4 else core
        out = core @ out
        o = self.core_output()
        if self.activated:
            if "activation" in chosen:
                out = oracles.diagonal_matrices(torch.sigmoid(o), shape) @ out
            o = F.silu(o)
        if "norm" in chosen:
            factor = self.norm(o)
            if self.norm_bias is not None:
                factor = factor * (1 - 1 / shape[3])
            out = oracles.diagonal_matrices(factor, shape) @ out
        if "gate" in chosen:
            out = oracles.diagonal_matrices(self.gate, shape) @ out
        return out


def conv_parts(conv: Any, heads: int, per_head: int, tokens: int, repeat: int = 1) -> Any:
    """Matrices and bias of a ShortConvolution whose heads are repeated; identity without one."""
    if conv is None:
        return torch.eye(tokens, dtype=torch.float64)[None, None], torch.zeros(heads, per_head)
    weight = conv.weight.detach().double().view(heads // repeat, per_head, -1)
    weight = weight.repeat_interleave(repeat, 0)
    width = weight.shape[-1]
    lags = [width - 1 - k for k in range(width)]
    bias = torch.zeros(heads, per_head, dtype=torch.float64)
    if conv.bias is not None:
        bias = conv.bias.detach().double().view(heads // repeat, per_head)
        bias = bias.repeat_interleave(repeat, 0)
    return oracles.conv_matrices(weight, lags, (1, tokens, heads, per_head)), bias


def convolved(conv: Any, x: Tensor) -> Tensor:
    """A ShortConvolution of (B, L, C), token by token, its activation included."""
    if conv is None:
        return x
    weight = conv.weight.detach().double()[:, 0]  # (C, K), the last tap for the token itself
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for k in range(min(weight.shape[1], t + 1)):
            out[:, t] += weight[:, -1 - k] * x[:, t - k]
    out = out if conv.bias is None else out + conv.bias.detach().double()
    return F.silu(out) if conv.activation else out


def rms_factors(weight: Tensor | None, eps: float, *, whole: bool) -> Callable[[Tensor], Tensor]:
    def norm(o: Tensor) -> Tensor:
        x = o.flatten(2) if whole else o
        factor = 1 / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        factor = factor.expand_as(x) if weight is None else factor * weight.detach().double()
        return factor.reshape(o.shape)

    return norm


def decayed_scores(q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """sum over n of q[i, n] exp(sum of log_decay[j+1..i, n]) k[j, n], (B, H, L, L)."""
    batch, tokens, heads, _ = q.shape
    out = torch.zeros(batch, heads, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i + 1):
            decay = log_decay[:, j + 1 : i + 1].sum(1).exp()
            out[:, :, i, j] = (q[:, i] * decay * k[:, j]).sum(-1)
    return out


Make = Callable[[Any, Tensor, Tensor], Formula]


def matrices_agree(
    layer: Any,
    width: int,
    formula: Make,
    *,
    compacted: bool,
    tolerance: float = 1e-10,
    before_projection: Callable[[Tensor], Tensor] = lambda y: y,
    **kwargs: Any,
) -> None:
    """The operator against the formula in float64, for every ablation, with and without padding.

    Args:
        layer: a layer of fla; one that knows no padding is given none.
        width: of its input.
        formula: makes the formula from a float64 layer, its input and its mask.
        compacted: whether the layer drops padded tokens; then each sequence is written alone.
        tolerance: of the comparison.
        before_projection: what happens to the operator's output before it is projected. Default:
            nothing.
        **kwargs: passed to the layer.
    """
    layer = copy.deepcopy(layer).double()
    hidden = torch.randn(3, 8, width, dtype=torch.float64)
    knows_padding = "attention_mask" in inspect.signature(layer.forward).parameters
    for side in ("none", "left", "right")[: 3 if knows_padding else 1]:
        mask = torch.ones(3, 8, dtype=torch.long)
        mask = mask if side == "none" else side_mask([8, 5, 2], 8, side)
        given = {"attention_mask": mask} if knows_padding else {}
        recorded = record_one(layer, hidden, **given, **kwargs)
        linear = recorded.linear
        before = linear.operator.affine(linear.values)
        assert before.dtype == torch.float64
        projected = before_projection(before).flatten(2)
        project = layer.o_proj if hasattr(layer, "o_proj") else layer.out_proj
        assert relative_error(linear.output(), project(projected)) <= 1e-12
        for row in range(3):
            at = mask[row].bool() if compacted else torch.ones(8, dtype=torch.bool)
            wanted = formula(layer, hidden[row : row + 1, at], mask[row : row + 1, at])
            found = before[row : row + 1, at]
            assert relative_error(found, wanted.before_projection()) <= tolerance, side
            for components in ABLATIONS:
                operator = linear.restrict(parse_components(components)).operator.per_channel()
                matrices = operator.dense(None)[row]
                alone = matrices[:, at][:, :, at]
                exact = wanted.alpha(components)[0]
                assert relative_error(alone, exact) <= tolerance, (side, components)
                assert not matrices[:, :, mask[row] == 0].any()
                if compacted:
                    assert not matrices[:, ~at].any()
                mean = operator.dense("mean")[row][at][:, at]
                assert relative_error(mean, exact.mean(0)) <= tolerance


# --- whole models ---------------------------------------------------------------------------


def whole_model(model: Any, tolerance: float = FLOAT32) -> None:
    """Every layer, logits that tracing leaves alone, and padding that changes nothing."""
    ids = torch.randint(19, (3, 11))
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
    with torch.no_grad(), trace(model) as t:
        traced = model(ids).logits
    assert torch.equal(plain, traced)
    assert len(t.layers) == 2
    for layer in t.layers:
        assert layer.reconstruction_error() <= tolerance

    mask = side_mask([11, 6, 2], 11)
    for layer in record(model, ids, attention_mask=mask):
        assert layer.reconstruction_error() <= tolerance
    for method in (MambaAttribution(model), ImplicitAttentionRollout(model)):
        together = method.attribute(ids, (-1, 3), mask, components="exact")
        assert together.shape == ids.shape
        assert not together[mask == 0].any()
        for row, length in enumerate([11, 6, 2]):
            alone = method.attribute(ids[row : row + 1, 11 - length :], (-1, 3), components="exact")
            assert relative_error(together[row : row + 1, 11 - length :], alone) <= 1e-5
            assert alone.abs().max() > 0


def attribution_agrees(model: Any, formula: Callable[[Any, Tensor, Any], Formula]) -> None:
    """MambaAttribution against I + (g . mean of alpha)+ multiplied out in float64."""
    ids = torch.randint(19, (2, 9))
    found = MambaAttribution(model).attribute(ids, (-1, 3))

    double = copy.deepcopy(model).double()
    inputs: list[tuple[Any, Tensor, dict[str, Any]]] = []
    outputs: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        inputs.append((module, (args[0] if args else kwargs["hidden_states"]).detach(), kwargs))
        outputs.append(output[0])

    mixers = [layer.attn for layer in double.model.layers]
    handles = [m.register_forward_hook(keep, with_kwargs=True) for m in mixers]
    with torch.enable_grad():
        logits = double(ids, use_cache=False).logits
        gradients = torch.autograd.grad(logits[:, -1, 3].sum(), outputs)
    for handle in handles:
        handle.remove()

    eye = torch.eye(9, dtype=torch.float64)
    product = eye.expand(2, 9, 9)
    for (module, hidden, kwargs), gradient in zip(inputs, gradients, strict=True):
        with torch.no_grad():
            alpha = formula(module, hidden, kwargs).alpha("unified").mean(1)
        product = (eye + (gradient.mean(-1)[..., None] * alpha).clamp_min(0)) @ product
    assert relative_error(found, product[:, -1]) <= 1e-5
