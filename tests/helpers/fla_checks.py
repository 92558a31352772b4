"""What every adapter of flash-linear-attention is held to, and the matrices it should give.

The matrices are written in float64 from the layers' parameters, entry by entry; nothing in them
comes from the package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import oracles
import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm.attr.call.components import parse_components
from captum_ssm.errors import InputError
from helpers import contract
from helpers.hybrid_checks import record as record
from helpers.hybrid_checks import record_one

# float32 against float32 or float64, for any draw of the parameters; see typical_error
FLOAT32 = 1e-5
#: Norms of few features that do not blow rounding errors up.
EPS = 0.05
ABLATIONS = ["s6", "unified", "exact", "exact-conv", "exact-activation", "exact-norm", "exact-gate"]


def side_mask(lengths: Sequence[int], tokens: int, side: str = "left") -> Tensor:
    mask = torch.zeros(len(lengths), tokens, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, tokens - length :] = 1
    return mask if side == "left" else mask.flip(1)


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


def holds(
    layer: Any, width: int, formula: Make, *, compacted: bool, exact: bool = True, **kwargs: Any
) -> None:
    """The contract of adapters, its matrices for every ablation, and padding between tokens.

    Args:
        layer: a layer of fla.
        width: of its input.
        formula: makes the formula from a float64 layer, its input and its mask.
        compacted: whether the layer drops padded tokens; then each sequence is written alone.
        exact: whether the formula has the accuracy of float64. Default: True.
        **kwargs: passed to the layer.
    """

    def matrices(layer: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        mask = kwargs.get("attention_mask")
        mask = torch.ones(hidden.shape[:2]).long() if mask is None else mask
        found: dict[str, list[Tensor]] = {name: [] for name in ABLATIONS}
        for row in range(len(hidden)):
            at = mask[row].bool() if compacted else torch.ones_like(mask[row]).bool()
            wanted = formula(layer, hidden[row : row + 1, at], mask[row : row + 1, at])
            for name, rows in found.items():
                alpha = wanted.alpha(name)[0].to(torch.float64 if exact else torch.float32)
                whole = alpha.new_zeros(len(alpha), len(at), len(at))
                whole[:, at[:, None] & at] = alpha.flatten(1)
                rows.append(whole)
        return {name: torch.stack(rows) for name, rows in found.items()}

    contract.holds(layer, width, matrices, **kwargs)
    if "attention_mask" in inspect.signature(layer.forward).parameters:
        gap = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0]])
        recorded = record_one(layer, torch.randn(1, 8, width), attention_mask=gap, **kwargs)
        try:
            assert recorded.reconstruction_error() <= FLOAT32
        except InputError as error:  # over a gap a convolution has other taps
            assert compacted and "between tokens" in str(error)
            assert any(name.endswith("conv1d") for name, _ in layer.named_modules())
