"""Entries: functions that call kernels with the roles of the kernels' arguments.

An entry receives the reading, a kernel, and the arguments of a kernel call, and computes the result
by :meth:`.Reading.call`. Most kernels take vectors (B, L, ...) and share one entry, which derives
roles from argument names; the others have separate entries. All entries have the same first
arguments; an entry ``_compute_...`` calls torch functions in place of ``kernel``.

With frozen factors a kernel must be linear in its content. Its bias, activation and gate are
therefore left to torch functions, which have rules. Kernels that act on single tokens need no
roles: :mod:`captum_ssm.tracing.repair.fused` replaces them by torch functions.
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
from .reading import READ, STATES, Reading, Roles, current_reading
from .rules import Args, Kwargs

Kernel = Callable[..., Any]
#: Computes a kernel's result from the reading of a mixer call, the kernel and its arguments.
Entry = Callable[..., Any]


def _roles(dim: int, **names: str) -> Roles:
    """Return each argument's role and token dimension, by argument name.

    Args:
        dim: the dimension of the tokens.
        **names: for each role the names of its arguments, separated by spaces.
    """
    roles: Mapping[Any, str] = names
    return {name: (role, dim) for role, words in roles.items() for name in words.split()}


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

#: Names of arguments that entries do not support: they change the meaning of a kernel's result.
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


def _call_by_names(reading: Reading, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel whose arguments are vectors (B, L, ...), with roles by argument name."""
    return _call_with_roles(reading, kernel, args, kwargs, softmax=False)


def _call_softmax(reading: Reading, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel of softmax attention, as :func:`_call_by_names` does."""
    return _call_with_roles(reading, kernel, args, kwargs, softmax=True)


def _call_with_roles(
    reading: Reading, kernel: Kernel, args: Args, kwargs: Kwargs, *, softmax: bool
) -> Any:
    """Call a kernel on vectors (B, L, ...), whose roles follow from the names of its arguments."""
    vector_names = "q", "k", "p", "query", "key"
    original_call = functools.partial(kernel, *args, **kwargs)
    if not _add_by_name(kernel, args, kwargs):  # without a name there is no role
        return reading.give_up(original_call)
    z = kwargs.pop("z", None)  # the gate of mamba_ssm, which is applied below
    if reading.mode.divides and kwargs.get("use_qk_l2norm_in_kernel"):
        kwargs["use_qk_l2norm_in_kernel"] = False  # by torch, whose rule freezes lengths
        kwargs |= {name: unit_vectors(kwargs[name]) for name in vector_names if name in kwargs}
    if reading.mode.divides and kwargs.get("normalize"):  # by sums of rows, not frozen there
        return reading.give_up(original_call)
    roles = {name: role for name, role in _VECTORS.items() if isinstance(kwargs.get(name), Tensor)}
    factors = {name: kwargs.pop(name) for name in roles}
    for name in STATES & kwargs.keys():
        if isinstance(kwargs[name], Tensor):  # a copy, as the cache is written to later
            roles[name], factors[name] = ("content", 1), kwargs.pop(name).clone()
    if not factors or any(map(reading.mode.is_live, kwargs.values())):  # a live one has no role
        return reading.give_up(original_call)
    if reading.carried is not None and any(kwargs.get(name) is True for name in _LAST):
        run_with_state = functools.partial(kernel, **kwargs)  # the state is for the next chunk
        out, state = reading.call_with_state(run_with_state, roles, factors, softmax)
        return (out if z is None else out * F.silu(z)), state
    further_results: list[Any] = []

    def run(**factors: Tensor) -> Tensor:
        """Call the kernel; return its output, and store its other results."""
        out = kernel(**factors, **kwargs)
        if isinstance(out, tuple):
            out, *further_results[:] = out
        return cast(Tensor, out)

    out = reading.call(run, roles, factors, softmax)
    further_results = [_zeros_for_state(x) for x in further_results]
    out = out if z is None else out * F.silu(z)
    return (out, *further_results) if further_results else out


def _zeros_for_state(x: Any) -> Any:
    """Return zeros for a last state, not used without a cache; return ``x`` if it is no tensor."""
    if not isinstance(x, Tensor):
        return x
    with unseen():
        return torch.zeros_like(x)


@functools.cache
def _parameters(kernel: Kernel) -> tuple[str, ...]:
    """Return the names of a kernel's parameters, without ``*args`` and ``**kwargs``."""
    parameters = inspect.signature(kernel).parameters.values()
    return tuple(x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY))


def _add_by_name(kernel: Kernel, args: Args, kwargs: Kwargs) -> bool:
    """Add positional arguments to ``kwargs`` by name; return False if some have no name."""
    kwargs |= zip(_parameters(kernel), args, strict=False)
    return len(args) <= len(_parameters(kernel))


def _call_delta(reading: Reading, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Call a gated delta rule; for one token after a state, use a torch form with gradients."""
    original_call = functools.partial(kernel, *args, **kwargs)
    if not _add_by_name(kernel, args, kwargs):
        return reading.give_up(original_call)
    values = kwargs.get("v", kwargs.get("value"))
    if values is not None and values.shape[1] == 1 and kwargs.get("initial_state") is not None:
        kernel = _step_by_torch(kernel)
    return _call_by_names(reading, kernel, **kwargs)


@functools.cache
def _step_by_torch(kernel: Kernel) -> Kernel:
    """Return a torch form of the gated delta rule for one token (B, 1, H, P) after a state.

    S' = exp(g) S + beta k (v - k exp(g) S), y = scale q S', with states S (B, H, N, P). The kernels
    for one token have no gradients. The form keeps the signature of ``kernel``, by which
    :func:`_add_by_name` names arguments.
    """

    @functools.wraps(kernel)
    def step(
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        scale: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        names = "query", "key", "value"  # or only the first letter
        query, key, value = (kwargs.pop(x, kwargs.pop(x[0], None)) for x in names)
        unknown = [x for x in _parameters(kernel) if x not in _LAST and _is_set(kwargs.get(x))]
        if unknown:
            raise CachedStateError(
                f"{kernel.__name__} was called with {unknown[0]}=, which has no known gradients in "
                "a run that continues from a cache. Pass the whole sequence in one call, without "
                "a cache."
            )
        heads, dtype = value.shape[2], torch.promote_types(value.dtype, torch.float32)
        # without the token's dimension; several heads of values may share a key
        q, k = (x.to(dtype)[:, 0].repeat_interleave(heads // x.shape[2], 1) for x in (query, key))
        q, k = map(unit_vectors, (q, k)) if use_qk_l2norm_in_kernel else (q, k)
        v, decay, write_rate = (x.to(dtype)[:, 0] for x in (value, g.to(dtype).exp(), beta))
        decay = decay[..., None] if g.dim() > 3 else decay[..., None, None]  # by channel or head
        state = initial_state.to(dtype) * decay
        written = (v - torch.einsum("bhnp,bhn->bhp", state, k)) * write_rate[..., None]
        state = state + k[..., None] * written[:, :, None]
        q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
        return torch.einsum("bhnp,bhn->bhp", state, q)[:, None].to(value.dtype), state

    return step


def _call_rwkv7(reading: Reading, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Call chunk_rwkv7 with erasing keys and steps as two factors; its ``b`` is their product."""
    # reading.step is stored by _compute_rwkv7_keys()
    if not _add_by_name(kernel, args, kwargs) or reading.step is None:
        return reading.give_up(kernel, **kwargs)
    erase = -kwargs.pop("a")
    step = torch.unflatten(reading.step, -1, kwargs.pop("b").shape[-2:])
    return _call_by_names(reading, _of_erasing(kernel), erase=erase, erase_step=step, **kwargs)


@functools.cache
def _of_erasing(kernel: Kernel) -> Kernel:
    """Return chunk_rwkv7 as a function of erasing keys and steps, from which it gets a and b."""

    def call_on_factors(erase: Tensor, erase_step: Tensor, **kwargs: Any) -> Any:
        return kernel(a=-erase, b=erase * erase_step, **kwargs)

    return call_on_factors


def _compute_rwkv7_keys(
    reading: Reading, kernel: Kernel, k: Tensor, a: Tensor, ka: Tensor
) -> Tensor:
    """Compute fused_k_rwkv7: keys k + k (a - 1) ka (B, L, H N) by steps ``a``; store the steps."""
    keys, reading.step = _wide(k), a
    return (keys + keys * (a - 1) * ka).to(k.dtype)


def _compute_rwkv7_mixing(
    reading: Reading, kernel: Kernel, hidden: Tensor, delta: Tensor, *shares: Tensor
) -> list[Tensor]:
    """Compute fused_addcmul_rwkv7, hidden + delta share; its backward overwrites ``hidden``."""
    x, change = _wide(hidden), _wide(delta)
    return [(x + change * share).to(hidden.dtype) for share in shares]


def _compute_rwkv7_output(
    reading: Reading,
    kernel: Kernel,
    o: Tensor,
    r: Tensor,
    k: Tensor,
    r_k: Tensor,
    v: Tensor,
    g: Tensor,
) -> Tensor:
    """Compute RWKV-7's gate_output_correction, (o + own v) g, own = r . (r_k k), as one product."""
    own = (_wide(reading.for_keys(r)) * reading.for_keys(k) * r_k).sum(-1, keepdim=True)
    if not reading.mode.divides:
        return ((o + (own * v).flatten(-2)) * g).to(o.dtype)
    mixer: Any = reading.mixer
    with torch.no_grad(), unseen():
        out = kernel(*(x.detach() for x in (o, r, k, r_k, v, g)))  # a value without a graph
        at_rest = mixer.g_lora(r.new_zeros(1, 1, mixer.hidden_size))  # the gate's, for input 0
    return reading.divide_corrected(out, o, own, g, at_rest)


def _compute_l2_norm(reading: Reading, kernel: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Compute fla's l2_norm by torch functions."""
    return unit_vectors(_wide(x)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """Convert to float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _call_conv(
    reading: Reading,
    kernel: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """Call causal_conv1d_fn on x (B, D, L), with the activation as a torch function."""
    gated = reading.gated_core(x)  # None if x is no product of gate and content

    def convolve(x: Tensor, bias: Tensor | None = bias if gated is None else None) -> Tensor:
        """Call the kernel without activation, and in backward passes with None as bias."""
        return kernel(x, weight, bias, activation=None, **options)

    def convolve_saving_nothing(x: Tensor) -> Tensor:
        out: Tensor = _Convolved.apply(x, convolve)  # type: ignore[no-untyped-call]
        return out

    if gated is not None:
        return _convolve_between_gates(reading, convolve_saving_nothing, x, gated, weight, bias)
    out = reading.call(convolve_saving_nothing, _CONTENT, {"x": x})
    if bias is not None:  # ``out`` has it already
        out = reading.mode.ledger.included(out, bias[:, None])
    if activation not in ("silu", "swish", None):
        reading.given_up = True  # the result is then replaced by an adapter's
    return out if activation is None else F.silu(out)


class _Convolved(torch.autograd.Function):
    """A causal convolution (B, D, L) that saves nothing: backward convolves reversed gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, convolve: Callable[..., Tensor]) -> Tensor:
        ctx.convolve = convolve
        return convolve(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        at_input: Tensor = ctx.convolve(gradient.flip(-1).contiguous(), None)
        return at_input.flip(-1), None


def _convolve_between_gates(
    reading: Reading,
    convolve: Callable[[Tensor], Tensor],
    x: Tensor,
    gated: Core,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Call a convolution of gated content, so that content and both gates share relevance.

    The input ``x`` (B, D, K + L) has K tokens from a cache and then L of ``gated``, the product of
    gate and content. ``convolve`` leaves out the bias (D,); the weight is (D, taps).
    """
    roles, factors = dict(gated.roles), dict(gated.factors)
    length, taps = factors["other"].shape[-1], weight.shape[-1]
    earlier = x[..., :-length].clone()
    past = product = earlier.detach()  # product is read only if there is a bias
    # before the first chunk of a sequence the cache has only zeros
    if past.shape[-1] and (reading.carried is None or reading.carried.tokens):
        roles["initial_state"], factors["initial_state"] = ("content", -1), earlier
    if bias is not None:
        # a constant factor 1, as content, gets the contribution of the bias, and of products at
        # padded tokens, where biases are all that gate and content have
        one = reading.mode.cached(x.new_ones(len(x), 1, 1), reading.mode.where())
        roles["one"], factors["one"] = ("content", -1), one
        product = x[..., -length:].detach()

    def run(
        input: Tensor, other: Tensor, initial_state: Tensor = past, one: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the convolution of past and gated content, with the bias, and its last inputs."""
        content = input * other
        if one is not None and reading.mask is not None:
            content = torch.where(reading.mask[:, None, -length:], content, product * one)
        content = torch.cat([initial_state, content], -1) if initial_state.shape[-1] else content
        out = convolve(content)
        out = out if one is None or bias is None else out + bias[:, None] * one
        return out, content[..., -taps:]  # which the cache keeps for the next chunk

    if reading.carried is not None:
        return reading.call_with_state(run, roles, factors)[0]
    return reading.call(lambda **kwargs: run(**kwargs)[0], roles, factors)


def _call_fla_conv(
    reading: Reading,
    kernel: Kernel,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Call fla's causal_conv1d on x (B, L, D), with bias and activation as torch functions."""

    def convolve_without_bias(x: Tensor) -> Tensor:
        out: Tensor = kernel(x=x, weight=weight, bias=None, activation=None, **options)[0]
        return out

    out = reading.call(convolve_without_bias, _roles(1, content="x"), {"x": x})
    out = out if bias is None else out + bias
    # fla has no other activations; no last state
    return (F.silu(out) if activation in ("silu", "swish") else out), None


def _call_selective_scan(
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
        on_cpu = u.device.type == "cpu" and B.dim() == C.dim() == 3 and not A.is_complex()

    def scan(
        u: Tensor,
        delta: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = D,
        bias: Tensor | None = delta_bias,
        softplus: bool = delta_softplus,
    ) -> Tensor:
        """Call the kernel without its gate, or a faster form if only ``u`` gets a gradient."""
        if on_cpu and not reading.mode.divides:
            return _scan_by_operator(u, delta, A, B, C, D, bias, softplus)
        bias_options = {"delta_bias": bias, "delta_softplus": softplus}
        return kernel(u, delta, A, B, C, D, z=None, **options, **bias_options)

    def run(
        u: Tensor, delta: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scan a chunk of a sequence; return the result and the last state."""
        original_dtype, dtype = u.dtype, torch.promote_types(u.dtype, torch.float32)
        u, step, B, C = (x.to(dtype) for x in (u, delta, B, C))
        step = step if delta_bias is None else step + delta_bias[:, None]
        step = F.softplus(step) if delta_softplus else step
        scan_alone = functools.partial(scan, D=None, bias=None, softplus=False)
        out, state = _scan_from_state(initial_state, scan_alone, u, step, A, B, C)
        return (out if D is None else out + u * D[:, None]).to(original_dtype), state

    roles, factors = dict(_SCAN), {"u": u, "delta": delta, "B": B, "C": C}
    if reading.carried is None:
        out = reading.call(scan, roles, factors)
        state = _zeros_for_state(A.expand(len(u), *A.shape)) if return_last_state else None
    elif A.is_complex() or B.dim() != 3 or C.dim() != 3 or len(A) != u.shape[1]:
        # run() does not support these shapes; an adapter replaces the result and the state
        out, state = reading.give_up(kernel, u, delta, A, B, C), A
    else:
        state_before = reading.carried.state_of(reading.mixer, reading.scans)
        reading.scans += 1
        if state_before is not None:
            roles["initial_state"], factors["initial_state"] = ("content", 1), state_before
        out, state = reading.call_with_state(run, roles, factors)
    out = out if z is None else out * F.silu(z)
    return out if state is None else (out, state)


#: The step of the tokens that write a first state; a power of 2, by which division is exact.
_SHORT = 2.0**-10


def _scan_from_state(
    initial_state: Tensor | None,
    scan: Callable[..., Tensor],
    u: Tensor,
    step: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scan from a first state (B, D, N), or None for 0; return the result and the last state.

    The kernels accept no first state. N tokens before the others write it, one column each, with
    unit vectors as keys. N tokens after the others read the last state, with unit vectors as
    queries, and steps of 0, which do not change the state.
    """
    count = A.shape[1]
    identity = torch.eye(count, dtype=u.dtype, device=u.device).expand(len(u), count, count)
    no_input, no_step = u.new_zeros(*u.shape[:2], count), step.new_zeros(*u.shape[:2], count)
    written_keys, writing = identity[..., :0], 0  # no tokens that write
    if initial_state is not None:
        # the factor of each column's input: its step, and its decay exp(A step) by later columns
        remaining = (torch.arange(count, device=A.device).flip(0) * A.to(u) * _SHORT).exp() * _SHORT
        u = torch.cat([initial_state / remaining, u], -1)
        step = torch.cat([no_step + _SHORT, step], -1)
        written_keys, writing = identity, count
    B = torch.cat([written_keys, B, torch.zeros_like(identity)], -1)
    C = torch.cat([torch.zeros_like(written_keys), C, identity], -1)
    y = scan(u=torch.cat([u, no_input], -1), delta=torch.cat([step, no_step], -1), B=B, C=C)
    return y[..., writing:-count], y[..., -count:]


def _scan_by_operator(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
) -> Tensor:
    """Compute a selective scan of u (B, D, L), with a gradient only for ``u``, in half the time."""
    dtype = torch.promote_types(u.dtype, torch.float32)
    dt, values = delta.to(dtype).mT, u.to(dtype).mT
    dt = dt if bias is None else dt + bias
    dt = F.softplus(dt) if softplus else dt
    scan = SelectiveScan(dt, A.to(dtype), B.to(dtype).mT, C.to(dtype).mT)
    out = scan.apply(values[..., None])[..., 0]
    return (out if D is None else out + D * values).mT.to(u.dtype)


def _compute_conv_step(
    reading: Reading,
    kernel: Callable[..., Tensor],
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """Compute causal_conv1d_update on x (B, D, L), after the inputs in ``conv_state``, by torch.

    Unlike the kernel it does not write x into ``conv_state``: this is in a copy of the cache, which
    nothing reads after a call for one token (see :meth:`.Network.continued`).
    """
    if activation not in ("silu", "swish", None):
        reading.given_up = True  # the result is then replaced by an adapter's
    convolve = functools.partial(F.conv1d, weight=weight[:, None], groups=len(weight))
    gated = reading.gated_core(x)
    read_tokens = weight.shape[1] - 1 + x.shape[-1]  # as many earlier inputs as needed, then x
    x = torch.cat([conv_state, x], -1)[..., -read_tokens:]
    if gated is not None:
        return _convolve_between_gates(reading, convolve, x, gated, weight, bias)
    out = convolve(x, bias=bias)
    return out if activation is None else F.silu(out)


def _compute_scan_step(
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
    """Compute selective_state_update, whose kernel has no gradients, on x (B, D) or (B, H, P).

    S' = exp(dt A) S + dt B x, y = C S' + D x, with states S (B, D, N) or (B, H, P, N). As in
    :func:`_compute_conv_step`, the new state is not written into the cache.
    """

    def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, initial_state: Tensor) -> Tensor:
        """Return the result of one token, with a dimension of size 1 for it."""
        x, dt, B, C = (y[:, 0] for y in (x, dt, B, C))
        step = dt if dt_bias is None else dt + dt_bias
        step = (F.softplus(step) if dt_softplus else step)[..., None]
        if B.dim() > 2:  # of groups of heads
            B, C = (y.repeat_interleave(x.shape[1] // y.shape[1], 1) for y in (B, C))
        new_state = initial_state * torch.exp(step * A) + step * B[..., None, :] * x[..., None]
        y: Tensor = (new_state * C[..., None, :]).sum(-1).to(x.dtype)
        return (y if D is None else y + x * D)[:, None]

    # with a dimension for the token; a copy of the state, as the cache may be written to later
    factors = {name: y[:, None] for name, y in (("x", x), ("dt", dt), ("B", B), ("C", C))}
    roles = {**{name: _VECTORS[name] for name in factors}, "initial_state": ("content", 1)}
    y = reading.call(run, roles, {**factors, "initial_state": state.clone()})[:, 0]
    return y if z is None else y * F.silu(z)


def _compute_mamba(reading: Reading, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Compute mamba_ssm's mamba_inner_fn: a whole mixer without its first projection.

    x, z = xz; x = silu(conv(x)); dt, b, c = x_proj(x); out_proj(scan(x, dt, A, b, c) silu(z)).
    """
    call = _arguments_of(kernel, *args, **kwargs)
    # with the kernels that mamba_inner_fn calls; B or C is passed only if constant
    package = sys.modules.get("mamba_ssm.ops.selective_scan_interface")
    if package is None or call.B is not None or call.C is not None or call.A.is_complex():
        return reading.give_up(kernel, *args, **kwargs)
    x, z = call.xz.chunk(2, dim=1)
    weight, conv_bias = call.conv1d_weight[:, 0], call.conv1d_bias
    x = _call_conv(reading, package.causal_conv1d_fn, x, weight, conv_bias, activation="silu")
    projected = F.linear(reading.for_keys(x).transpose(1, 2), call.x_proj_weight).transpose(1, 2)
    states = call.A.shape[1]
    dt, b, c = torch.split(projected, [call.delta_proj_weight.shape[1], states, states], 1)
    delta, b, c = call.delta_proj_weight.to(dt) @ dt, b.contiguous(), c.contiguous()
    bias = {"delta_bias": call.delta_bias, "delta_softplus": call.delta_softplus}
    scan = functools.partial(_call_selective_scan, reading, package.selective_scan_fn)
    y = scan(x, delta, call.A, b, c, D=call.D, z=z, **bias)
    return F.linear(y.transpose(1, 2), call.out_proj_weight, call.out_proj_bias)


def _compute_mamba2(reading: Reading, kernel: Kernel, *args: Any, **kwargs: Any) -> Tensor:
    """Compute mamba_split_conv1d_scan_combined: a Mamba-2 mixer without its first projection.

    mlp_gate, mlp_value, z, x b c (convolved), dt = zxbcdt; y = norm(scan(x, dt, A, b, c), gate z);
    out_proj([silu(mlp_gate) mlp_value, y]).
    """
    call, package = _arguments_of(kernel, *args, **kwargs), sys.modules["mamba_ssm.modules.mamba2"]
    heads, weight, zxbcdt = len(call.dt_bias), call.conv1d_weight, call.zxbcdt
    width = heads * (call.D.shape[1] if call.D.dim() == 2 else call.headdim or 1)
    key_width = (len(weight) - width) // 2
    mlp_width = (zxbcdt.shape[-1] - 2 * width - 2 * key_width - heads) // 2  # of a parallel MLP
    widths = [mlp_width, mlp_width, width, width + 2 * key_width, heads]
    mlp_gate, mlp_value, z, xbc, dt = torch.split(zxbcdt, widths, -1)
    # without wrappers, by which kernels would call their entries inside this entry
    conv, scan = map(_original, (package.causal_conv1d_fn, package.mamba_chunk_scan_combined))
    xbc = _call_conv(reading, conv, xbc.transpose(1, 2), weight, call.conv1d_bias, call.activation)
    x, b, c = torch.split(xbc.transpose(1, 2), [width, key_width, key_width], -1)
    x = torch.unflatten(x, -1, (heads, -1))
    b, c = (torch.unflatten(reading.for_keys(y), -1, (call.ngroups, -1)) for y in (b, c))
    options = {"D": call.D, "dt_bias": call.dt_bias, "dt_softplus": True, "dt_limit": call.dt_limit}
    y = _call_by_names(reading, scan, x, dt, call.A, b, c, call.chunk_size, **options).flatten(-2)
    if call.rmsnorm_weight is None:
        y = y * F.silu(z)
    else:
        norm_options = call.rmsnorm_eps, width // call.ngroups, call.norm_before_gate
        y = gated_norm(y, call.rmsnorm_weight, None, z, *norm_options)
    if mlp_width:
        y = torch.cat([F.silu(mlp_gate) * mlp_value, y], -1)
    return y if call.outproj_weight is None else F.linear(y, call.outproj_weight, call.outproj_bias)


def _arguments_of(kernel: Kernel, *args: Any, **kwargs: Any) -> SimpleNamespace:
    """Return a call's arguments by name, with the kernel's defaults."""
    call = inspect.signature(kernel).bind(*args, **kwargs)
    call.apply_defaults()
    return SimpleNamespace(**call.arguments)


def call_attention(
    reading: Reading,
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Call scaled_dot_product_attention (B, H, L, N) with roles; save shared heads of keys once."""
    # enable_gqa, the fifth argument after the values: torch itself repeats shared heads
    in_groups = kwargs.get("enable_gqa") or args[4:5] == (True,)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Repeat keys that queries of a group share, but save for autograd the unrepeated ones."""
        # unrepeated keys and values, by address and shape of the repeated tensor
        heads, unrepeated = query.shape[-3], dict[tuple[int, torch.Size], Tensor]()

        def repeated_if_shared(x: Tensor) -> Tensor:
            if in_groups or x.shape[-3] == heads:
                return x
            repeated = _repeat_heads(x, heads)
            unrepeated[repeated.untyped_storage()._cdata, repeated.shape] = x.detach()
            return repeated

        def pack(x: Tensor) -> tuple[Tensor, bool]:
            """Return the tensor to save, and True if its heads must be repeated when it is read."""
            few_heads = unrepeated.get((x.untyped_storage()._cdata, x.shape))
            return (x.detach(), False) if few_heads is None else (few_heads, True)

        def unpack(packed: tuple[Tensor, bool]) -> Tensor:
            return _repeat_heads(packed[0], heads) if packed[1] else packed[0]

        key, value = repeated_if_shared(key), repeated_if_shared(value)
        saving = torch.autograd.graph.saved_tensors_hooks
        with saving(pack, unpack) if unrepeated else nullcontext():
            return kernel(query, key, value, *args, **kwargs)

    factors = {"query": query, "key": key, "value": value}
    return reading.call(run, _PAIRS, factors, softmax=True)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of keys or values (..., H, L, N) for the queries of a group."""
    return x.repeat_interleave(heads // x.shape[-3], -3)


def _keep_heads(reading: Reading, kernel: Callable[..., Tensor], x: Tensor, times: int) -> Tensor:
    """Return keys or values with one head for a group; :func:`call_attention` repeats these heads.

    They are kept for the backward pass, and repeated heads would take ``times`` their memory.
    """
    return x if reading.mode.is_live(x) else kernel(x, times)


def _keep_query(reading: Reading, kernel: Callable[..., Tensor], x: Any, times: int) -> Any:
    """Return a query of one token, or its mask, unchanged, in place of transformers' pack_gqa.

    That function makes a group's heads tokens of one head, but means of queries are over tokens.
    """
    return x


def _call_if_frozen(reading: Reading, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel if only content and gates get relevance; else use the mixer's adapter."""
    call = reading.give_up if reading.mode.divides else functools.partial(_call_by_names, reading)
    return call(kernel, *args, **kwargs)


def _call_mlstm(reading: Reading, kernel: Kernel, backend: Any, **kwargs: Any) -> Any:
    """Call the kernels of mLSTM, by a backend's method, for rules that freeze their factors."""
    if "siging" in str(backend.config.chunkwise_kernel):  # a sigmoid as input gate
        return reading.give_up(kernel, backend, **kwargs)
    # keys are a second factor, though frozen, because it marks a kernel that mixes tokens
    value, key = ("v", "k") if "v" in kwargs else ("value", "key")
    factors, last_states = {name: kwargs.pop(name) for name in (value, key)}, list[Any]()
    kwargs = {name: detached(x) for name, x in kwargs.items()}

    def run(**factors: Tensor) -> Tensor:
        """Call the kernel; return its output, and store its last states."""
        out, *last_states[:] = kernel(backend, **factors, **kwargs)
        return cast(Tensor, out)

    return reading.call(run, _roles(2, content=value, key=key), factors), *detached(last_states)


#: Names of flash-linear-attention's kernels; each kernel has several of the forms below.
_OF_FLA = """
retention gla simple_gla linear_attn delta_rule comba rwkv6
"""
_OF_GATED_DELTA = "gated_delta_rule kda"
_FOR_CONTENT = "based gsa hgrn lightnet mesa_net"
_FORMS = ("chunk", "fused_recurrent", "fused_chunk", "parallel")

#: The entry of each kernel, by the name that modules give it.
ENTRIES: dict[str, Entry] = {
    "causal_conv1d_fn": _call_conv,
    "causal_conv1d": _call_fla_conv,
    "selective_scan_fn": _call_selective_scan,
    "mamba_selective_scan": _call_selective_scan,
    "causal_conv1d_update": _compute_conv_step,
    "mamba_selective_state_update": _compute_scan_step,
    "mamba2_selective_state_update": _compute_scan_step,
    "mamba_inner_fn": _compute_mamba,
    "mamba_chunk_scan_combined": _call_by_names,
    "mamba2_chunk_scan": _call_by_names,
    "mamba_split_conv1d_scan_combined": _compute_mamba2,
    "torch_chunk_gated_delta_rule": _call_delta,
    "torch_recurrent_gated_delta_rule": _call_delta,
    "chunk_kimi_delta_attention": _call_delta,
    "recurrent_kimi_delta_attention": _call_delta,
    "chunk_rwkv7": _call_rwkv7,
    "fused_k_rwkv7": _compute_rwkv7_keys,
    "fused_addcmul_rwkv7": _compute_rwkv7_mixing,
    "gate_output_correction": _compute_rwkv7_output,
    "l2_norm": _compute_l2_norm,
    "flash_attn_func": _call_softmax,
    **{f"{form}_forgetting_attn": _call_softmax for form in _FORMS},
    **{f"{form}_{name}": _call_by_names for name in _OF_FLA.split() for form in _FORMS},
    **{f"{form}_{name}": _call_delta for name in _OF_GATED_DELTA.split() for form in _FORMS},
    **{f"{form}_{name}": _call_if_frozen for name in _FOR_CONTENT.split() for form in _FORMS},
}
#: Entries of kernels that continue from a cache, and state arguments that other entries accept.
_STEPS = (_compute_conv_step, _compute_scan_step)
_WITH_CACHE = {
    _call_by_names: STATES | _LAST,
    _call_softmax: _LAST,
    _call_delta: STATES | _LAST,
    _call_rwkv7: STATES | _LAST,
    _call_selective_scan: _LAST,
}


def _decorator(entry: Entry) -> Callable[[Kernel], Kernel]:
    """Return a decorator of kernels: they call ``entry`` in mixers explained by their own code.

    In other code they only call the kernel. The mixer is left to its adapter if the call has an
    argument that the entry does not support, or is one for a single token without a cache.
    """
    unsupported = _UNSUPPORTED - _WITH_CACHE.get(entry, frozenset())

    def wrap(kernel: Kernel) -> Kernel:
        @functools.wraps(kernel)
        def call(*args: Any, **kwargs: Any) -> Any:
            reading = current_reading.get()
            if reading is None:
                return kernel(*args, **kwargs)
            # states are supported only in a run that continues from a cache
            refused_names = unsupported if reading.continues else _UNSUPPORTED
            has_unsupported = any(_is_set(kwargs[name]) for name in refused_names & kwargs.keys())
            is_step_without_cache = entry in _STEPS and not reading.continues
            if reading.given_up or has_unsupported or is_step_without_cache:
                return reading.give_up(kernel, *args, **kwargs)
            with unseen():  # weights are constants, and get no relevance
                args = reading.mode.without_weights(args)
                kwargs = reading.mode.without_weights(kwargs)
            return entry(reading, kernel, *args, **kwargs)

        # read by _original()
        call._kernel = kernel  # type: ignore[attr-defined]
        return call

    return wrap


def _original(kernel: Kernel) -> Kernel:
    """Return the original kernel inside a wrapper made by :func:`_decorator`."""
    return cast(Kernel, getattr(kernel, "_kernel", kernel))


def _is_set(value: Any) -> bool:
    """Return True unless an optional argument is None or False."""
    return value is not None and value is not False


#: The modules that call kernels.
_HOLDERS = {path.rpartition(".")[0] for path in READ} | {"fla.modules.causal_conv1d.ops"}


def _repairs() -> Iterable[Repair]:
    """Yield (module, attribute, decorator) for each kernel of the imported modules."""
    for holder in _HOLDERS & sys.modules.keys():
        for name in ENTRIES.keys() & vars(sys.modules[holder]).keys():
            yield holder, name, _decorator(ENTRIES[name])
    # not of models' own modules, where other functions than torch's attention follow
    for name, entry in (("repeat_kv", _keep_heads), ("pack_gqa", _keep_query)):
        yield "transformers.integrations.sdpa_attention", name, _decorator(entry)
    mlstm = _decorator(_call_mlstm)
    yield "mlstm_kernels.torch.backend_module", "mLSTMBackend.forward", mlstm
    yield "transformers.models.xlstm.modeling_xlstm", "xLSTMBackend.forward", mlstm


_changes = Shared(lambda: replacing(_repairs()))


@contextmanager
def entries() -> Iterator[None]:
    """Wrap all kernels that have entries, until the last nested context exits."""
    with lasting(_changes.enter):
        yield
