"""Entries: functions that call kernels with the roles of the kernels' arguments.

An entry receives the reading, a kernel, and the arguments of a kernel call, and computes the result
by :meth:`.Reading.moved`. Most kernels take vectors (B, L, ...) and share one entry, which derives
roles from argument names; the others have separate entries. Kernels that act on single tokens need
no roles: :mod:`captum_ssm.tracing.repair.fused` replaces them by torch functions.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CachedStateError
from ..mixers.parts.common import unit_vectors
from ..operators import SelectiveScan
from ..operators.kernels.arithmetic import unseen
from ..tracing.changes import Shared, lasting
from ..tracing.hooks import detached
from ..tracing.repair.fused import gated_norm
from ..tracing.repair.loops import Repair, replacing
from .divided import Core
from .reading import READ, STATES, Reading, Roles, now

#: Computes a kernel's result from the reading of a mixer call, the kernel and its arguments.
Entry = Callable[..., Any]


def _roles(dim: int, **names: str) -> Roles:
    """Return role and token dimension by argument name; content comes first.

    Args:
        dim: the dimension of the tokens.
        **names: for each role the argument names, separated by spaces.
    """
    roles: Mapping[Any, str] = names
    return {name: (role, dim) for role, of_it in roles.items() for name in of_it.split()}


_CONTENT = _roles(-1, content="x")
#: Roles for content and steps of shape (B, D, L), and B and C of shape (B, N, L).
_SCAN = _roles(-1, content="u", step="delta", key="B", query="C")
#: Roles for shapes (B, L, ...), by names in transformers, flash-linear-attention and mamba_ssm.
_VECTORS = _roles(
    1,
    content="v value x hidden_states",
    query="q query r C",
    key="k key p B erase",
    step="g gk w dt beta s erase_step",
)
#: Roles for shape (B, H, L, P).
_PAIRS = _roles(-2, content="value", query="query", key="key")

#: Arguments that change the meaning of a kernel's result, which entries do not support.
_UNSUPPORTED = frozenset(
    (
        *("initial_states", "initial_state", "seq_idx", "cu_seqlens", "cu_seq_lens_q"),
        *("return_last_state", "return_final_states", "return_varlen_states"),
        *("final_states_out", "output_final_state", "b_rms_weight", "c_rms_weight"),
        *("dt_rms_weight", "B_proj_bias", "C_proj_bias", "residual", "cache", "reverse"),
        "c_initial",
    )
)
#: Arguments that ask for last states. They and ``STATES`` are accepted if a cache was passed.
_LAST = frozenset(("return_last_state", "return_final_states", "output_final_state"))


def _vectors(reading: Reading, kernel: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Call a kernel whose arguments are vectors (B, L, ...), with roles by argument name."""
    return _by_name(reading, kernel, args, given, softmax=False)


def _softmax_vectors(reading: Reading, kernel: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Call a kernel of softmax attention, as :func:`_vectors` does."""
    return _by_name(reading, kernel, args, given, softmax=True)


def _by_name(
    reading: Reading,
    kernel: Callable[..., Any],
    args: tuple[Any, ...],
    given: dict[str, Any],
    *,
    softmax: bool,
) -> Any:
    names = "q", "k", "p", "query", "key"
    called = functools.partial(kernel, *args, **given)
    if not _bind(kernel, args, given):
        return reading.give_up(called)
    z = given.pop("z", None)
    if reading.mode.divides and given.get("use_qk_l2norm_in_kernel"):
        given["use_qk_l2norm_in_kernel"] = False  # outside, where lengths are frozen
        given |= {name: unit_vectors(given[name]) for name in names if name in given}
    if reading.mode.divides and given.get("normalize"):  # by sums of rows, which are constants
        return reading.give_up(called)
    roles = {name: role for name, role in _VECTORS.items() if isinstance(given.get(name), Tensor)}
    factors = {name: given.pop(name) for name in roles}
    for name in STATES & given.keys():
        if isinstance(given[name], Tensor):  # a copy, as the cache is written to later
            roles[name], factors[name] = ("content", 1), given.pop(name).clone()
    if not factors or any(map(reading.mode.is_live, given.values())):
        return reading.give_up(called)
    if reading.carried is not None and any(given.get(name) is True for name in _LAST):
        y, state = reading.moved_with_state(
            functools.partial(kernel, **given), roles, factors, softmax
        )
        return (y if z is None else y * F.silu(z)), state
    rest: list[Any] = []

    def run(**factors: Tensor) -> Tensor:
        out = kernel(**factors, **given)
        if isinstance(out, tuple):
            out, *rest[:] = out
        found: Tensor = out
        return found

    y = reading.moved(run, roles, factors, softmax)
    rest = [_unread(x) for x in rest]
    y = y if z is None else y * F.silu(z)
    return (y, *rest) if rest else y


def _unread(x: Any) -> Any:
    """Replace a returned last state by zeros, since an explained run does not use this state."""
    if not isinstance(x, Tensor):
        return x
    with unseen():
        return torch.zeros_like(x)


@functools.cache
def _names(kernel: Callable[..., Any]) -> tuple[str, ...]:
    found = inspect.signature(kernel).parameters.values()
    return tuple(x.name for x in found if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY))


def _bind(kernel: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Add positional arguments to ``given`` by name; return False if they have no names."""
    given |= zip(_names(kernel), args, strict=False)
    return len(args) <= len(_names(kernel))


def _delta(reading: Reading, kernel: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Call a gated delta rule; replace the kernel for one token, which has no gradients."""
    called = functools.partial(kernel, *args, **given)
    if not _bind(kernel, args, given):
        return reading.give_up(called)
    values = given.get("v", given.get("value"))
    if values is not None and values.shape[1] == 1 and given.get("initial_state") is not None:
        kernel = _by_token(kernel)
    return _vectors(reading, kernel, **given)


@functools.cache
def _by_token(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a torch form of the gated delta rule for one token (B, 1, H, P) after a state.

    It replaces kernels for one token, which have no gradients. It keeps the kernel's signature, by
    which :func:`_bind` names arguments.
    """

    @functools.wraps(kernel)
    def step(
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        scale: float | None = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor]:
        query, key, value = (given.pop(x, given.pop(x[0], None)) for x in ("query", "key", "value"))
        unknown = [x for x in _names(kernel) if x not in _LAST and _is_given(given.get(x))]
        if unknown:
            raise CachedStateError(
                f"{kernel.__name__} was called with {unknown[0]}=, which has no known gradients in "
                "a run that continues from a cache. Pass the whole sequence in one call, without "
                "a cache."
            )
        heads, wide = value.shape[2], torch.promote_types(value.dtype, torch.float32)
        q, k = (x.to(wide)[:, 0].repeat_interleave(heads // x.shape[2], 1) for x in (query, key))
        q, k = map(unit_vectors, (q, k)) if use_qk_l2norm_in_kernel else (q, k)
        v, decay, rate = (x.to(wide)[:, 0] for x in (value, g.to(wide).exp(), beta))
        decay = decay[..., None] if g.dim() > 3 else decay[..., None, None]
        state = initial_state.to(wide) * decay
        new = (v - torch.einsum("bhnp,bhn->bhp", state, k)) * rate[..., None]
        state = state + k[..., None] * new[:, :, None]
        q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
        return torch.einsum("bhnp,bhn->bhp", state, q)[:, None].to(value.dtype), state

    return step


def _rwkv7(reading: Reading, kernel: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Call chunk_rwkv7 with erasing keys and steps as factors, in place of their products."""
    if not _bind(kernel, args, given) or reading.step is None:
        return reading.give_up(kernel, **given)
    erase = -given.pop("a")
    step = torch.unflatten(reading.step, -1, given.pop("b").shape[-2:])
    return _vectors(reading, _by_erasing(kernel), erase=erase, erase_step=step, **given)


@functools.cache
def _by_erasing(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(erase: Tensor, erase_step: Tensor, **given: Any) -> Any:
        return kernel(a=-erase, b=erase * erase_step, **given)

    return call


def _updated_keys(
    reading: Reading, kernel: Callable[..., Tensor], k: Tensor, a: Tensor, ka: Tensor
) -> Tensor:
    """Compute fused_k_rwkv7, keys (B, L, H N) updated by steps ``a``, by torch functions."""
    wide, reading.step = _wide(k), a
    return (wide + wide * (a - 1) * ka).to(k.dtype)


def _mixed(
    reading: Reading, kernel: Callable[..., Any], hidden: Tensor, delta: Tensor, *shares: Tensor
) -> list[Tensor]:
    """Compute fused_addcmul_rwkv7, whose backward pass overwrites ``hidden``."""
    x, change = _wide(hidden), _wide(delta)
    return [(x + change * share).to(hidden.dtype) for share in shares]


def _corrected(
    reading: Reading,
    kernel: Callable[..., Tensor],
    o: Tensor,
    r: Tensor,
    k: Tensor,
    r_k: Tensor,
    v: Tensor,
    g: Tensor,
) -> Tensor:
    """Compute RWKV-7's gate_output_correction, (o + (r . (r_k k)) v) g, as one product."""
    own = (_wide(reading.selecting(r)) * reading.selecting(k) * r_k).sum(-1, keepdim=True)
    if not reading.mode.divides:
        return ((o + (own * v).flatten(-2)) * g).to(o.dtype)
    mixer: Any = reading.mixer
    with torch.no_grad(), unseen():
        out = kernel(*(x.detach() for x in (o, r, k, r_k, v, g)))
        at_rest = mixer.g_lora(r.new_zeros(1, 1, mixer.hidden_size))
    return reading.corrected(out, o, own, g, at_rest)


def _normalized(reading: Reading, kernel: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Compute fla's l2_norm by torch functions."""
    return unit_vectors(_wide(x)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _conv(
    reading: Reading,
    kernel: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """Call causal_conv1d_fn on x (B, D, L), with bias and activation as torch functions."""
    written = reading.written(x)

    def convolve(x: Tensor, bias: Tensor | None = bias if written is None else None) -> Tensor:
        return kernel(x, weight, bias, activation=None, **options)

    def moved(x: Tensor) -> Tensor:
        out: Tensor = _Convolved.apply(x, convolve)  # type: ignore[no-untyped-call]
        return out

    if written is not None:
        return _between_gates(reading, moved, x, written, weight, bias)
    out = reading.moved(moved, _CONTENT, {"x": x})
    if bias is not None:
        out = reading.mode.ledger.included(out, bias[:, None])
    if activation not in ("silu", "swish", None):
        reading.given_up = True
    return out if activation is None else F.silu(out)


class _Convolved(torch.autograd.Function):
    """A causal convolution (B, D, L); backward convolves reversed gradients, with nothing saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, convolve: Callable[..., Tensor]) -> Tensor:
        ctx.convolve = convolve
        return convolve(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        found: Tensor = ctx.convolve(gradient.flip(-1).contiguous(), None)
        return found.flip(-1), None


def _between_gates(
    reading: Reading,
    convolve: Callable[[Tensor], Tensor],
    x: Tensor,
    written: Core,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Call a convolution of gated content, so that content and both gates share relevance.

    Args:
        reading: the reading.
        convolve: the convolution without its bias.
        x: the convolution's input (B, D, K + L), where the first K tokens are from a cache.
        written: the product of gate and content, the last L tokens of ``x``.
        weight, bias: weight (D, taps) and bias (D,) of the convolution.
    """
    roles, factors = dict(written.roles), dict(written.factors)
    tokens, taps = factors["other"].shape[-1], weight.shape[-1]
    earlier = x[..., :-tokens].clone()
    before = product = earlier.detach()
    if before.shape[-1] and (reading.carried is None or reading.carried.tokens):
        roles["initial_state"], factors["initial_state"] = ("content", -1), earlier
    if bias is not None:  # a factor of constants: of the bias, and of padded tokens with biases
        one = reading.mode.cached(x.new_ones(len(x), 1, 1), reading.mode.where())
        roles["one"], factors["one"] = ("content", -1), one
        product = x[..., -tokens:].detach()

    def run(
        input: Tensor, other: Tensor, initial_state: Tensor = before, one: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        new = input * other
        if one is not None and reading.mask is not None:
            new = torch.where(reading.mask[:, None, -tokens:], new, product * one)
        new = torch.cat([initial_state, new], -1) if initial_state.shape[-1] else new
        out = convolve(new)
        return (out if one is None or bias is None else out + bias[:, None] * one), new[..., -taps:]

    if reading.carried is not None:
        return reading.moved_with_state(run, roles, factors)[0]
    return reading.moved(lambda **given: run(**given)[0], roles, factors)


def _conv_of_fla(
    reading: Reading,
    kernel: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Call fla's causal_conv1d on x (B, L, D), with bias and activation as torch functions."""

    def convolve(x: Tensor) -> Tensor:
        out: Tensor = kernel(x=x, weight=weight, bias=None, activation=None, **options)[0]
        return out

    out = reading.moved(convolve, _roles(1, content="x"), {"x": x})
    out = out if bias is None else out + bias
    return (F.silu(out) if activation in ("silu", "swish") else out), None


def _selective_scan(
    reading: Reading,
    kernel: Callable[..., Tensor],
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> Any:
    """Call mamba_ssm's selective_scan_fn or transformers' mamba_selective_scan on u (B, D, L)."""
    with unseen():
        on_processor = u.device.type == "cpu" and B.dim() == C.dim() == 3 and not A.is_complex()

    def scan(
        u: Tensor,
        delta: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = D,
        bias: Tensor | None = delta_bias,
        softplus: bool = delta_softplus,
    ) -> Tensor:
        if on_processor and not reading.mode.divides:
            return _by_operator(u, delta, A, B, C, D, bias, softplus)
        how = {"delta_bias": bias, "delta_softplus": softplus}
        return kernel(u, delta, A, B, C, D, z=None, **options, **how)

    def run(
        u: Tensor, delta: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        dtype, wide = u.dtype, torch.promote_types(u.dtype, torch.float32)
        u, step, B, C = (x.to(wide) for x in (u, delta, B, C))
        step = step if delta_bias is None else step + delta_bias[:, None]
        step = F.softplus(step) if delta_softplus else step
        alone = functools.partial(scan, D=None, bias=None, softplus=False)
        out, state = _scanned_from(initial_state, alone, u, step, A, B, C)
        return (out if D is None else out + u * D[:, None]).to(dtype), state

    roles, factors = dict(_SCAN), {"u": u, "delta": delta, "B": B, "C": C}
    if reading.carried is None:
        y = reading.moved(scan, roles, factors)
        state = _unread(A.expand(len(u), *A.shape)) if return_last_state else None
    elif A.is_complex() or B.dim() != 3 or C.dim() != 3 or len(A) != u.shape[1]:
        y, state = reading.give_up(kernel, u, delta, A, B, C), A
    else:
        first = reading.carried.state_of(reading.mixer, reading.scans)
        reading.scans += 1
        if first is not None:
            roles["initial_state"], factors["initial_state"] = ("content", 1), first
        y, state = reading.moved_with_state(run, roles, factors)
    y = y if z is None else y * F.silu(z)
    return y if state is None else (y, state)


#: The step of the tokens that write a first state; a power of 2, by which division is exact.
_SHORT = 2.0**-10


def _scanned_from(
    initial_state: Tensor | None,
    scan: Callable[..., Tensor],
    u: Tensor,
    step: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
) -> tuple[Tensor, Tensor]:
    """Call a selective scan from a first state (B, D, N); return the result and the last state.

    The kernels accept no first state. N tokens before the others write it, one column each, and N
    tokens after the others read the last state.
    """
    states = A.shape[1]
    unit = torch.eye(states, dtype=u.dtype, device=u.device).expand(len(u), states, states)
    none, still = u.new_zeros(*u.shape[:2], states), step.new_zeros(*u.shape[:2], states)
    before, first = unit[..., :0], 0
    if initial_state is not None:
        # what is left of each column when all are written
        left = (torch.arange(states, device=A.device).flip(0) * A.to(u) * _SHORT).exp() * _SHORT
        u = torch.cat([initial_state / left, u], -1)
        step = torch.cat([still + _SHORT, step], -1)
        before, first = unit, states
    B = torch.cat([before, B, torch.zeros_like(unit)], -1)
    C = torch.cat([torch.zeros_like(before), C, unit], -1)
    y = scan(torch.cat([u, none], -1), torch.cat([step, still], -1), B, C)
    return y[..., first:-states], y[..., -states:]


def _by_operator(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
) -> Tensor:
    """Compute a selective scan with a gradient only for ``u``, which halves the kernel's time."""
    wide = torch.promote_types(u.dtype, torch.float32)
    dt, values = delta.to(wide).mT, u.to(wide).mT
    dt = dt if bias is None else dt + bias
    scan = SelectiveScan(
        F.softplus(dt) if softplus else dt, A.to(wide), B.to(wide).mT, C.to(wide).mT
    )
    y = scan.apply(values[..., None])[..., 0]
    return (y if D is None else y + D * values).mT.to(u.dtype)


def _conv_step(
    reading: Reading,
    kernel: Callable[..., Tensor],
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """Compute causal_conv1d_update on x (B, D, L), preceded by the inputs in ``conv_state``."""
    if activation not in ("silu", "swish", None):
        reading.given_up = True
    convolve = functools.partial(F.conv1d, weight=weight[:, None], groups=len(weight))
    written = reading.written(x)
    x = torch.cat([conv_state, x], -1)[..., -(weight.shape[1] - 1 + x.shape[-1]) :]
    if written is not None:
        return _between_gates(reading, convolve, x, written, weight, bias)
    out = convolve(x, bias=bias)
    return out if activation is None else F.silu(out)


def _scan_step(
    reading: Reading,
    kernel: Callable[..., Tensor],
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **options: Any,
) -> Tensor:
    """Compute selective_state_update, whose kernel has no gradients, on x (B, D) or (B, H, P)."""

    def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, initial_state: Tensor) -> Tensor:
        x, dt, B, C = (y[:, 0] for y in (x, dt, B, C))
        step = dt if dt_bias is None else dt + dt_bias
        step = (F.softplus(step) if dt_softplus else step)[..., None]
        if B.dim() > 2:  # of groups of heads
            B, C = (y.repeat_interleave(x.shape[1] // y.shape[1], 1) for y in (B, C))
        moved = initial_state * torch.exp(step * A) + step * B[..., None, :] * x[..., None]
        y: Tensor = (moved * C[..., None, :]).sum(-1).to(x.dtype)
        return (y if D is None else y + x * D)[:, None]

    # with a dimension for the token; a copy of the state, as the cache is written to later
    factors = {name: y[:, None] for name, y in (("x", x), ("dt", dt), ("B", B), ("C", C))}
    roles = {**{name: _VECTORS[name] for name in factors}, "initial_state": ("content", 1)}
    y = reading.moved(run, roles, {**factors, "initial_state": state.clone()})[:, 0]
    return y if z is None else y * F.silu(z)


def _mamba_inner(reading: Reading, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute mamba_ssm's mamba_inner_fn: a whole mixer without its first projection."""
    of = _bound(kernel, *args, **kwargs)
    package = sys.modules.get("mamba_ssm.ops.selective_scan_interface")
    if package is None or of.B is not None or of.C is not None or of.A.is_complex():
        return reading.give_up(kernel, *args, **kwargs)
    x, z = of.xz.chunk(2, dim=1)
    conv = of.conv1d_weight[:, 0], of.conv1d_bias, "silu"
    x = _conv(reading, package.causal_conv1d_fn, x, *conv)
    selected = F.linear(reading.selecting(x).transpose(1, 2), of.x_proj_weight).transpose(1, 2)
    states = of.A.shape[1]
    t, b, c = torch.split(selected, [of.delta_proj_weight.shape[1], states, states], 1)
    given = x, of.delta_proj_weight.to(t) @ t, of.A, b.contiguous(), c.contiguous(), of.D, z
    bias = of.delta_bias, of.delta_softplus
    y = _selective_scan(reading, package.selective_scan_fn, *given, *bias)
    return F.linear(y.transpose(1, 2), of.out_proj_weight, of.out_proj_bias)


def _split_conv_scan(
    reading: Reading, kernel: Callable[..., Any], *args: Any, **kwargs: Any
) -> Tensor:
    """Compute mamba_split_conv1d_scan_combined: a Mamba-2 mixer without its first projection."""
    of, package = _bound(kernel, *args, **kwargs), sys.modules["mamba_ssm.modules.mamba2"]
    heads, weight, zxbcdt = len(of.dt_bias), of.conv1d_weight, of.zxbcdt
    width = heads * (of.D.shape[1] if of.D.dim() == 2 else of.headdim or 1)
    both = (len(weight) - width) // 2
    beside = (zxbcdt.shape[-1] - 2 * width - 2 * both - heads) // 2
    parts = [beside, beside, width, width + 2 * both, heads]
    z0, x0, z, mixed, dt = torch.split(zxbcdt, parts, -1)
    conv, scan = map(_itself, (package.causal_conv1d_fn, package.mamba_chunk_scan_combined))
    mixed = _conv(reading, conv, mixed.transpose(1, 2), weight, of.conv1d_bias, of.activation)
    x, b, c = torch.split(mixed.transpose(1, 2), [width, both, both], -1)
    x = torch.unflatten(x, -1, (heads, -1))
    b, c = (torch.unflatten(reading.selecting(y), -1, (of.ngroups, -1)) for y in (b, c))
    how = {"D": of.D, "dt_bias": of.dt_bias, "dt_softplus": True, "dt_limit": of.dt_limit}
    y = _vectors(reading, scan, x, dt, of.A, b, c, of.chunk_size, **how).flatten(-2)
    if of.rmsnorm_weight is None:
        y = y * F.silu(z)
    else:
        norm = of.rmsnorm_eps, width // of.ngroups, of.norm_before_gate
        y = gated_norm(y, of.rmsnorm_weight, None, z, *norm)
    if beside:
        y = torch.cat([F.silu(z0) * x0, y], -1)
    return y if of.outproj_weight is None else F.linear(y, of.outproj_weight, of.outproj_bias)


def _bound(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> SimpleNamespace:
    """Return a call's arguments by name, with the kernel's defaults."""
    call = inspect.signature(kernel).bind(*args, **kwargs)
    call.apply_defaults()
    return SimpleNamespace(**call.arguments)


def attention(
    reading: Reading,
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Call torch's scaled_dot_product_attention with the roles of its arguments."""
    in_groups = kwargs.get("enable_gqa") or args[4:5] == (True,)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, few = query.shape[-3], dict[tuple[int, torch.Size], Tensor]()

        def whole(x: Tensor) -> Tensor:
            if in_groups or x.shape[-3] == heads:
                return x
            repeated = _for_queries(x, heads)
            few[repeated.untyped_storage()._cdata, repeated.shape] = x.detach()
            return repeated

        def pack(x: Tensor) -> tuple[Tensor, bool]:
            """Return what autograd keeps of a tensor, and whether it is heads to be repeated."""
            found = few.get((x.untyped_storage()._cdata, x.shape))
            return (x.detach(), False) if found is None else (found, True)

        def unpack(kept: tuple[Tensor, bool]) -> Tensor:
            return _for_queries(kept[0], heads) if kept[1] else kept[0]

        key, value = whole(key), whole(value)
        in_few = torch.autograd.graph.saved_tensors_hooks(pack, unpack) if few else nullcontext()
        with in_few:
            return kernel(query, key, value, *args, **kwargs)

    factors = {"query": query, "key": key, "value": value}
    return reading.moved(run, _PAIRS, factors, softmax=True)


def _for_queries(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of keys or values (..., H, L, N) for the queries of a group."""
    return x.repeat_interleave(heads // x.shape[-3], -3)


def _unrepeated(reading: Reading, kernel: Callable[..., Tensor], x: Tensor, times: int) -> Tensor:
    """Return keys or values with one head for a group; :func:`attention` repeats these heads.

    They are kept for the backward pass, and repeated heads would take ``times`` their memory.
    """
    return x if reading.mode.is_live(x) else kernel(x, times)


def _unpacked(reading: Reading, kernel: Callable[..., Tensor], x: Any, times: int) -> Any:
    """Return a single query of all heads, or its mask, where transformers packs groups as tokens.

    Means of queries are over tokens.
    """
    return x


def _of_content(reading: Reading, kernel: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Call a kernel if only content and gates get relevance; else use the mixer's adapter."""
    entry = reading.give_up if reading.mode.divides else functools.partial(_vectors, reading)
    return entry(kernel, *args, **given)


def _mlstm(reading: Reading, kernel: Callable[..., Any], backend: Any, **given: Any) -> Any:
    """Call the kernels of mLSTM, by a backend's method, for rules that freeze their factors."""
    if "siging" in str(backend.config.chunkwise_kernel):
        return reading.give_up(kernel, backend, **given)
    values, keys = ("v", "k") if "v" in given else ("value", "key")
    factors, states = {name: given.pop(name) for name in (values, keys)}, list[Any]()
    given = {name: detached(x) for name, x in given.items()}

    def run(**factors: Tensor) -> Tensor:
        out, *states[:] = kernel(backend, **factors, **given)
        return cast(Tensor, out)

    return reading.moved(run, _roles(2, content=values, key=keys), factors), *detached(states)


#: Names of flash-linear-attention's kernels; each kernel has several of the forms below.
_OF_FLA = """
retention gla simple_gla linear_attn delta_rule comba rwkv6
"""
_OF_GATED_DELTA = "gated_delta_rule kda"
_FOR_CONTENT = "based gsa hgrn lightnet mesa_net"
_FORMS = ("chunk", "fused_recurrent", "fused_chunk", "parallel")

#: The entry of each kernel, by the name that modules give it.
ENTRIES: dict[str, Entry] = {
    "causal_conv1d_fn": _conv,
    "causal_conv1d": _conv_of_fla,
    "selective_scan_fn": _selective_scan,
    "mamba_selective_scan": _selective_scan,
    "causal_conv1d_update": _conv_step,
    "mamba_selective_state_update": _scan_step,
    "mamba2_selective_state_update": _scan_step,
    "mamba_inner_fn": _mamba_inner,
    "mamba_chunk_scan_combined": _vectors,
    "mamba2_chunk_scan": _vectors,
    "mamba_split_conv1d_scan_combined": _split_conv_scan,
    "torch_chunk_gated_delta_rule": _delta,
    "torch_recurrent_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "recurrent_kimi_delta_attention": _delta,
    "chunk_rwkv7": _rwkv7,
    "fused_k_rwkv7": _updated_keys,
    "fused_addcmul_rwkv7": _mixed,
    "gate_output_correction": _corrected,
    "l2_norm": _normalized,
    "flash_attn_func": _softmax_vectors,
    **{f"{form}_forgetting_attn": _softmax_vectors for form in _FORMS},
    **{f"{form}_{name}": _vectors for name in _OF_FLA.split() for form in _FORMS},
    **{f"{form}_{name}": _delta for name in _OF_GATED_DELTA.split() for form in _FORMS},
    **{f"{form}_{name}": _of_content for name in _FOR_CONTENT.split() for form in _FORMS},
}
#: Entries of kernels that continue from a cache, and state arguments that other entries accept.
_STEPS = (_conv_step, _scan_step)
_WITH_CACHE = {
    _vectors: STATES | _LAST,
    _softmax_vectors: _LAST,
    _delta: STATES | _LAST,
    _rwkv7: STATES | _LAST,
    _selective_scan: _LAST,
}


def _entered(entry: Entry) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper of kernels that calls ``entry`` in mixers explained by their own code.

    In other code the wrapper only calls the kernel. It leaves the mixer to its adapter if the call
    has an argument that the entry does not support, or is one for a single token without a cache.
    """
    unsupported = _UNSUPPORTED - _WITH_CACHE.get(entry, frozenset())

    def repaired(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(*args: Any, **kwargs: Any) -> Any:
            reading = now.get()
            if reading is None:
                return kernel(*args, **kwargs)
            refused = unsupported if reading.continues else _UNSUPPORTED
            unknown = any(_is_given(kwargs[name]) for name in refused & kwargs.keys())
            step_alone = entry in _STEPS and not reading.continues
            if reading.given_up or unknown or step_alone:
                return reading.give_up(kernel, *args, **kwargs)
            with unseen():  # weights are constants, and get no relevance
                args = reading.mode.without_weights(args)
                kwargs = reading.mode.without_weights(kwargs)
            return entry(reading, kernel, *args, **kwargs)

        # the kernel itself, for _itself()
        call._kernel = kernel  # type: ignore[attr-defined]
        return call

    return repaired


def _itself(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the original kernel inside a wrapper made by :func:`_entered`."""
    found: Callable[..., Any] = getattr(kernel, "_kernel", kernel)
    return found


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


#: The modules that call kernels.
_HOLDERS = {path.rpartition(".")[0] for path in READ} | {"fla.modules.causal_conv1d.ops"}


def _repairs() -> Iterable[Repair]:
    for holder in _HOLDERS & sys.modules.keys():
        for name in ENTRIES.keys() & vars(sys.modules[holder]).keys():
            yield holder, name, _entered(ENTRIES[name])
    # not of models' own modules, where other functions than torch's attention follow
    for name, entry in (("repeat_kv", _unrepeated), ("pack_gqa", _unpacked)):
        yield "transformers.integrations.sdpa_attention", name, _entered(entry)
    yield "mlstm_kernels.torch.backend_module", "mLSTMBackend.forward", _entered(_mlstm)
    yield "transformers.models.xlstm.modeling_xlstm", "xLSTMBackend.forward", _entered(_mlstm)


_changes = Shared(lambda: replacing(_repairs()))


@contextmanager
def entries() -> Iterator[None]:
    """Wrap all kernels that have entries, until the last nested context exits."""
    with lasting(_changes.enter):
        yield
