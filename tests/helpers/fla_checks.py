"""Checks of every adapter of flash-linear-attention, and the matrices that it should give.

The matrices are written in float64 from the layers' parameters, entry by entry; nothing in them
comes from the package.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from oracles import Formula, conv_matrices, times
from oracles.delta_formula import in_float64
from torch import Tensor
from torch.overrides import TorchFunctionMode

from captum_ssm.errors import InputError
from helpers import contract

#: Norms of few features that do not blow rounding errors up.
EPS = 0.05
#: Padding between tokens.
GAP = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0]])


def side_mask(lengths: Sequence[int], tokens: int) -> Tensor:
    """1 for tokens and 0 for padding on the left."""
    mask = torch.zeros(len(lengths), tokens, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, tokens - length :] = 1
    return mask


# --- the matrices ---------------------------------------------------------------------------


def convolved(conv: Any, x: Tensor) -> Tensor:
    """A ShortConvolution of (B, L, C), its activation included."""
    if conv is None:
        return x
    _, _, out = oracles.convolved(conv, x)
    return F.silu(out) if conv.activation else out


def conv_parts(
    conv: Any, values: Tensor, repeat: int = 1, keep: Tensor | None = None
) -> dict[str, Any]:
    """A convolution of values (B, L, H, P) whose heads are repeated, with its SiLU."""
    _, tokens, heads, per_head = values.shape
    weight = conv.weight.detach().double().view(heads // repeat, per_head, -1)
    weight = weight.repeat_interleave(repeat, 0)
    lags = list(range(weight.shape[-1]))[::-1]
    matrices = conv_matrices(weight, lags, (1, tokens, heads, per_head))
    bias = torch.zeros(heads, per_head, dtype=torch.float64)
    if conv.bias is not None:
        bias = conv.bias.detach().double().view(heads // repeat, per_head)
        bias = bias.repeat_interleave(repeat, 0)
    values = values if keep is None else values * keep[..., None, None]
    ratio = torch.sigmoid(times(matrices, values) + bias)
    return {"conv": matrices, "conv_bias": bias, "ratio": ratio}


def rms_factors(weight: Tensor | None, eps: float, *, whole: bool) -> Callable[[Tensor], Tensor]:
    def norm(o: Tensor) -> Tensor:
        x = o.flatten(2) if whole else o
        factor = 1 / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        factor = factor.expand_as(x) if weight is None else factor * weight.detach().double()
        return factor.reshape(o.shape)

    return norm


def layer_norm(norm: Any, values: Tensor) -> dict[str, Any]:
    """A norm of heads that subtracts their means."""
    shape, weight, bias = values.shape[2:], norm.weight, norm.bias
    weight = torch.ones(shape) if weight is None else weight.detach().view(shape)
    bias = torch.zeros(shape) if bias is None else bias.detach().view(shape)

    def factors(o: Tensor) -> Tensor:
        centered = o - o.mean(-1, keepdim=True)
        return weight.double() / (centered.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()

    return {"norm": factors, "norm_bias": bias.double()}


# --- the core, by the layer's own kernel ---------------------------------------------------------


class _Entering(TorchFunctionMode):
    """Notes what enters a projection."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weight = weight

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and args[1] is self._weight:
            self.seen = args[0]
        return func(*args, **(kwargs or {}))


def by_kernel(layer: Any, hidden: Tensor, keep: Tensor, **kwargs: Any) -> Formula:
    """The formula whose core is the kernel's output for unit values, with all else as it was.

    Norm and gate are one factor: the output projection's input relative to the kernel's output,
    and 0 where both are 0, as nothing is read there.
    """
    module, calls = sys.modules[type(layer).__module__], list[Any]()

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            out = function(*args, **options)
            if "attn" in name or {"v", "x"} & options.keys():
                calls.append((function, args, options, out))
            return out

        return called

    entering, kind = _Entering(layer.o_proj.weight), type(layer).__name__
    with pytest.MonkeyPatch.context() as patch:
        in_float64(patch)
        for name, function in list(vars(module).items()):
            if name.startswith(("chunk_", "fused_", "parallel_", "flash_attn_func")):
                patch.setattr(module, name, noting(name, function))
        with entering:
            layer(hidden, **kwargs)
        ((function, args, options, out),) = calls
        place = next((name for name in ("v", "x") if name in options), "")
        v = options[place] if place else args[2]
        columns = []
        for t in range(v.shape[1]):
            unit = torch.zeros_like(v)
            unit[:, t] = 1
            given = args if place else (*args[:2], unit, *args[3:])
            columns.append(_first(function(*given, **options | ({place: unit} if place else {}))))
    v, steps = v if v.dim() == 4 else v[..., None], v.shape[1] // hidden.shape[1]
    each = v.shape[1] // _first(out).shape[1]  # of several steps of a token the last one returns
    o, *columns = (x[:, steps // each - 1 :: steps // each] for x in (_first(out), *columns))
    y = entering.seen.reshape(o.shape)
    core = torch.stack([x[..., 0] for x in columns], -1).transpose(1, 2)  # (B, H, L, L * steps)
    core = torch.cat([core[..., step::steps] for step in range(steps)], 1)
    o, y = (torch.cat([x] * steps, 2) for x in (o, y))
    v, heads = v.unflatten(1, (-1, steps)).flatten(2, 3), o.shape[2]
    v = v.repeat_interleave(heads // v.shape[2], 2)
    if kind == "HGRNAttention":  # the kernel is given what is written, which the core scales
        written = 1 - options["g"].exp()
        core, v = core * written.transpose(1, 2)[:, :, None], v / written[..., None]
    if kind.startswith("RWKV"):
        norm = layer_norm(layer.g_norm, v)
        normed = norm["norm"](o) * (o - o.mean(-1, keepdim=True)) + norm["norm_bias"]
        own = torch.zeros_like(o[..., 0])
        if kind == "RWKV7Attention":  # what a token adds of its own past the norm
            own = (options["r"] * options["k"] * layer.r_k).sum(-1)
        gate = (y / (normed + own[..., None] * v)).nan_to_num()
        return Formula(v, core, keep, gate=gate, past=own, **norm)
    name = "v" if hasattr(layer, "v_proj") else "i"
    values = getattr(layer, f"{name}_proj")(hidden).unflatten(-1, (-1, o.shape[-1]))
    repeat = heads // values.shape[2]
    values, conv = values.repeat_interleave(repeat, 2), getattr(layer, f"{name}_conv1d", None)
    parts = {} if conv is None else conv_parts(conv, values, repeat)
    made = Formula(values, core, keep, **parts)
    u = times(made.conv, values * made.keep[..., None, None]) + made.conv_bias
    made.ratio = torch.where(u == 0, 0, v / u)
    made.activated = kind == "GatedSlotAttention"
    made.norm = lambda _: (y / (F.silu(o) if made.activated else o)).nan_to_num()
    return made


def _first(out: Any) -> Tensor:
    """The output of heads of a kernel; HGRN's has channels alone."""
    out = out[0] if isinstance(out, tuple) else out
    return out if out.dim() == 4 else out[..., None]


# --- the contract --------------------------------------------------------------------------------


Make = Callable[[Any, Tensor, Tensor], Formula]


def holds(
    layer: Any, width: int, formula: Make | None = None, *, compacted: bool,
    refuses: Mapping[str, str] | None = None, **kwargs: Any,
) -> None:  # fmt: skip
    """The contract of adapters, its matrices for ablations, and padding between tokens.

    Without a ``formula`` the layer's own kernel gives the matrices. A ``compacted`` layer drops
    padded tokens: each sequence is written alone.
    """
    ablations = ["s6", "unified", "exact", "exact-conv", "exact-norm-gate"]
    ablations += [] if formula is None else ["exact-activation", "exact-norm", "exact-gate"]

    @torch.no_grad()
    def matrices(layer: Any, hidden: Tensor, given: Mapping[str, Any]) -> dict[str, Tensor]:
        mask = given.get("attention_mask")
        mask = torch.ones(hidden.shape[:2]).long() if mask is None else mask
        found: dict[str, list[Tensor]] = {name: [] for name in ablations}
        for row in range(len(hidden)):
            at = mask[row].bool() if compacted else torch.ones_like(mask[row]).bool()
            own, real = hidden[row : row + 1, at], mask[row : row + 1, at]
            if formula is not None:
                wanted = formula(layer, own, real)
            else:
                masked = {} if compacted else {"attention_mask": real}
                told = {name: x(own) if callable(x) else x for name, x in kwargs.items()}
                wanted = by_kernel(layer, own, real, **masked, **told)
            for name, rows in found.items():
                # rotations and some kernels have the accuracy of float32
                alpha = wanted.alpha(name)[0].to(torch.float64 if formula else torch.float32)
                whole = alpha.new_zeros(len(alpha), len(at), len(at))
                whole[:, at[:, None] & at] = alpha.flatten(1)
                rows.append(whole)
        return {name: torch.stack(rows) for name, rows in found.items()}

    contract.holds(layer, width, matrices, refuses, **kwargs)
    if "attention_mask" in inspect.signature(layer.forward).parameters and not refuses:
        hidden = torch.randn(1, 8, width)
        told = {name: x(hidden) if callable(x) else x for name, x in kwargs.items()}
        recorded = contract.record_one(layer, hidden, attention_mask=GAP, **told)
        try:
            contract.check(recorded)
        except InputError as error:  # over a gap a convolution has other taps
            assert compacted and "between tokens" in str(error)
            assert any(name.endswith("conv1d") for name, _ in layer.named_modules())
