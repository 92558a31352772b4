"""Mixers read as they run: a kernel is a function whose arguments have roles.

A mixer's code runs once, under the rules for torch's functions.  Of a kernel's arguments one is the
content; others are keys, queries and steps.  With the rules ``"frozen"`` and ``"half"`` all but the
content are detached, and the kernel's own backward is linear.  With the other rules a kernel, and a
gate that multiplies its result, share relevance as in :mod:`.shares`.  The derivatives at the nodes
are the kernel's own.  Nothing runs twice for the first rules, and no adapter is asked.

A :class:`Reading` watches one call of a mixer.  It leaves the call to the mixer's adapter where
roles do not describe the code: a kernel without an entry, options that change the meaning of a
kernel's arguments, or a product of several factors other than a gate's.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..mixers.base import Call
from ..mixers.parts.common import heeded_mask, padding_mask
from ..mixers.registry import class_path, is_own
from ..operators import SelectiveScan
from ..operators.base import Role
from ..operators.kernels.arithmetic import autocast_dtype, unseen
from ..tracing.changes import Shared, lasting
from ..tracing.hooks import tensors_in
from ..tracing.repair.loops import Repair, replacing
from ..tracing.split import is_split
from .divided import Core, divided

if TYPE_CHECKING:
    from .mode import Linearising

#: Computes a kernel's result from the call that is read, the kernel and its arguments.
Entry = Callable[..., Any]
#: The role of each of a kernel's factors, and the dimension of its tokens.
Roles = Mapping[str, tuple[Role, int]]

#: Classes whose own code is read: module of transformers and class, or the path of the class.
_SCANS = """
mamba.MambaMixer falcon_mamba.FalconMambaMixer jamba.JambaMambaMixer zamba.ZambaMambaMixer
mamba_ssm.modules.mamba_simple.Mamba
"""
_IN_CHUNKS = """
mamba2.Mamba2Mixer bamba.BambaMixer falcon_h1.FalconH1Mixer nemotron_h.NemotronHMamba2Mixer
granitemoehybrid.GraniteMoeHybridMambaLayer zamba2.Zamba2MambaMixer mamba_ssm.modules.mamba2.Mamba2
qwen3_next.Qwen3NextGatedDeltaNet qwen3_5.Qwen3_5GatedDeltaNet qwen3_5_moe.Qwen3_5MoeGatedDeltaNet
olmo_hybrid.OlmoHybridGatedDeltaNet qwen4_exp.Qwen4ExpTextGatedDeltaNet
kimi_linear.KimiLinearDeltaAttention bailing_hybrid.BailingHybridDeltaAttention
glm5_next.Glm5NextTextLinearAttention
"""
_SOFTMAX = """
olmo_hybrid.OlmoHybridAttention kimi_linear.KimiLinearAttention
bailing_hybrid.BailingHybridAttention
zamba.ZambaAttention zamba2.Zamba2Attention lfm3.Lfm3Attention minimax.MiniMaxAttention
jamba.JambaAttention bamba.BambaAttention falcon_h1.FalconH1Attention
granitemoehybrid.GraniteMoeHybridAttention nemotron_h.NemotronHAttention
qwen3_next.Qwen3NextAttention qwen3_5.Qwen3_5Attention qwen3_5_moe.Qwen3_5MoeAttention
lfm2.Lfm2Attention lfm2_moe.Lfm2MoeAttention
bert.BertSelfAttention gpt_neox.GPTNeoXAttention gpt2.GPT2Attention llama.LlamaAttention
mistral.MistralAttention vit.ViTAttention deit.DeiTAttention siglip.SiglipAttention
siglip2.Siglip2Attention
"""


def _paths(names: str) -> frozenset[str]:
    parts = ((name, *name.partition(".")[::2]) for name in names.split())
    return frozenset(
        name if "." in kind else f"transformers.models.{family}.modeling_{name}"
        for name, family, kind in parts
    )


#: The paths of these classes.
READ = _paths(_SCANS + _IN_CHUNKS + _SOFTMAX)
#: Those whose gradients on a processor take longer than an operator's where rules divide.
_SLOW = _paths(_SCANS + _IN_CHUNKS)
#: Those that without a kernel loop over tokens.
_LOOPING = _paths(_SCANS)

#: Arguments that, unless they are none or an entry takes them, make of a kernel another function.
_OTHERWISE = frozenset(
    (
        *("initial_states", "initial_state", "seq_idx", "cu_seqlens", "cu_seq_lens_q"),
        *("return_last_state", "return_final_states", "return_varlen_states"),
        *("final_states_out", "output_final_state", "b_rms_weight", "c_rms_weight"),
        *("dt_rms_weight", "B_proj_bias", "C_proj_bias"),
    )
)

_now: ContextVar[Reading | None] = ContextVar("captum_ssm_reading", default=None)


class Reading:
    """One call of a mixer whose own code runs under the rules.

    Attributes:
        mode: the rules.
        given_up: whether an adapter has to explain the call.
        mask: True for real tokens (B, L), once the call has ended; None if none is padding.
        continues: see below.

    Args:
        mode: the rules.
        sequence: the first floating tensor that the mixer is given: graphs are searched up to it.
        continues: whether the run continues from a cache. Default: False.
    """

    def __init__(
        self, mode: Linearising, sequence: Tensor | None = None, continues: bool = False
    ) -> None:
        self.mode, self.continues = mode, continues
        self._entered = None if sequence is None else sequence.grad_fn
        self.given_up = False
        self.mask: Tensor | None = None
        self._mixes = False
        #: Where kernels are in the graph, and where their contents are.
        self._moved: dict[Any, Any] = {}
        #: The kernels that share relevance, by their place in the graph, with their results.
        self._cores: dict[Any, tuple[Core, Tensor]] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Read the code that runs inside the ``with``."""
        before, self.mode.reading = self.mode.reading, self
        token = _now.set(self)
        try:
            yield
        finally:
            _now.reset(token)
            self.mode.reading = before

    def give_up(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Leave the call to an adapter, and return a kernel's result."""
        self.given_up = True
        with torch.no_grad(), unseen():
            return kernel(*args, **kwargs)

    def moved(
        self, run: Callable[..., Tensor], roles: Roles, factors: Mapping[str, Tensor]
    ) -> Tensor:
        """Return a kernel's result for its factors.

        Args:
            run: calls the kernel with the factors, by their names.
            roles: of the factors.
            factors: the factors.
        """
        self._mixes |= len(roles) > 1
        if self.mode.divides and len(roles) > 1:
            return self._shared(run, roles, factors)
        contents = [name for name, (role, _) in roles.items() if role == "content"]
        with unseen():
            out = run(
                **{name: x if name in contents else x.detach() for name, x in factors.items()}
            )
        if out.grad_fn is not None:
            self._moved[out.grad_fn] = [factors[name].grad_fn for name in contents]
        return out

    def selecting(self, x: Tensor) -> Tensor:
        """Return the source of keys and steps; by some rules without a graph."""
        return x if self.mode.divides else x.detach()

    def _shared(
        self, run: Callable[..., Tensor], roles: Roles, factors: Mapping[str, Tensor]
    ) -> Tensor:
        core = Core(self, run, roles, dict(factors))
        out = divided(core)
        if out.grad_fn is not None:
            self._cores[out.grad_fn] = core, out
        return out

    def product(self, out: Tensor, live: list[Tensor], straight: list[Tensor]) -> Tensor | None:
        """Give up at a product of several factors that depend on the input, unless it is a gate's.

        Args:
            out: the product.
            live: the factors that share the relevance.
            straight: the live factors that no activation has bent.

        Returns:
            The product that a kernel and its gate share; None if its factors share it equally.
        """
        if not self.mode.divides:
            self.given_up |= (len(live), len(straight)) != (2, 1)
            return None
        behind = [self._behind(x) for x in live]
        found = [(x, *each) for x, each in zip(live, behind, strict=True) if each[0]]
        if not found:
            self.given_up |= (len(live), len(straight)) != (2, 1)
            return None
        (mapped, cores, of_others), *more = found
        gates = [x for x in live if x is not mapped]
        at_rest = self._at_rest(gates[0]) if len(gates) == 1 and not more else None
        alone = len(cores) == 1 and not of_others
        if at_rest is None or not alone or not mapped.shape == gates[0].shape == out.shape:
            self.given_up = True
            return None
        core, result = cores[0]
        return divided(core.gated(result, mapped, gates[0], at_rest), out)

    def _at_rest(self, gate: Tensor) -> float | None:
        """Return a gate's value where its input is 0; None if it is not known."""
        if self.mode.is_bent(gate):
            return 0.0
        known: float | None = self.mode.at_rest.get(gate)  # type: ignore[no-untyped-call]
        return known

    def _behind(self, x: Tensor) -> tuple[list[tuple[Core, Tensor]], bool]:
        """Return the kernels that ``x`` is computed from, and whether from anything else."""
        todo, seen, cores, of_others = [x.grad_fn], set[Any](), list[tuple[Core, Tensor]](), False
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._cores:
                cores.append(self._cores[node])
            elif node is self._entered or not node.next_functions:
                of_others = True
            else:
                todo += [following for following, _ in node.next_functions]
        return cores, of_others

    def explains(self, call: Call) -> bool:
        """Return True if the call's output has a graph that is linear, through one kernel at least.

        Args:
            call: the call, which has ended; its graph's records are dropped.
        """
        out, entering, moved = call.output_tensor, call.hidden_states, self._moved
        self._moved, self._cores = {}, {}
        if self.given_up or not self._mixes or not out.requires_grad:
            return False
        if len(out) != len(entering):  # a mask of more examples, say
            return False
        entered = {x.grad_fn for x in tensors_in((call.args, call.kwargs)) if x.grad_fn is not None}
        todo, seen = [out.grad_fn], set(entered)
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in moved:
                todo += moved[node]
                continue
            made_by = getattr(node, "_forward_cls", None)
            if made_by is not None and not made_by.__module__.startswith(_OURS):
                return False  # a kernel without an entry
            todo += [following for following, _ in node.next_functions]
        return True


#: Where the package's own functions are.
_OURS = f"{__name__.split('.', 1)[0]}."


def is_read(module: nn.Module, sequence: Tensor, divides: bool, continues: bool = False) -> bool:
    """Return True if a mixer's own code is read.

    Args:
        module: the mixer.
        sequence: its input.
        divides: whether factors other than content and gates get a share.
        continues: whether the run continues from a cache; adapters know none. Default: False.
    """
    path = class_path(type(module))
    if path not in READ or not is_own(type(module)) or any(map(is_split, module.modules())):
        return False
    if continues:
        return True
    if sequence.device.type == "cpu":  # where operators compute half precision in float32
        wide = sequence.dtype in (torch.float32, torch.float64) and not autocast_dtype(
            sequence.device
        )
        return wide and not (divides and path in _SLOW)
    return path not in _LOOPING or not _loops(module, sequence.device)


def _loops(module: nn.Module, device: torch.device) -> bool:
    """Return True if a mixer's scan is a loop over tokens, whose graph takes much time and memory.

    It is called once on each kind of device, with two tokens: kernels have a custom backward.
    """
    code = vars(sys.modules[type(module).__module__])
    kernel = next(
        code[name] for name in ("mamba_selective_scan", "selective_scan_fn") if name in code
    )
    key = inspect.unwrap(kernel), device.type
    if key not in _known_loops:
        with unseen(), torch.enable_grad():
            u, delta = (torch.zeros(1, 8, 2, device=device) for _ in range(2))
            rate, b, c = (torch.zeros(size, device=device) for size in ((8, 4), *2 * [(1, 4, 2)]))
            out = kernel(u.requires_grad_(), delta, rate, b, c)
        _known_loops[key] = not hasattr(out.grad_fn, "_forward_cls")
    return _known_loops[key]


_known_loops: dict[tuple[Any, str], bool] = {}


def mask_of(module: nn.Module, call: Call) -> Tensor | None:
    """Return the mask of a call, True for real tokens (B, L); None if none is padding.

    Of attention that continues from a cache it has the cached tokens in front.

    Args:
        module: the mixer, of a class that :func:`is_read`.
        call: its call.
    """
    place = _place_of_mask(type(module).forward)
    mask = None if place is None else call.argument("attention_mask", place)
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 2:
        original, mask = heeded_mask(module, call)
        return padding_mask(mask, call.hidden_states, type(module), original)
    visible = mask if mask.dtype == torch.bool else mask == 0  # of pairs
    keep, hidden = visible.any(-2).any(1), call.hidden_states
    keep = keep.expand(len(hidden), -1).to(hidden.device)
    return padding_mask(keep, keep[..., None], type(module), mask)


@functools.cache
def _place_of_mask(forward: Callable[..., Any]) -> int | None:
    names = list(inspect.signature(forward).parameters)
    return names.index("attention_mask") - 1 if "attention_mask" in names else None


# --- entries -------------------------------------------------------------------------------------


_CONTENT: Roles = {"x": ("content", -1)}
#: Of (B, D, L), and B and C of (B, N, L).
_SCAN: Roles = {"u": ("content", -1), "delta": ("step", -1), "B": ("key", -1), "C": ("query", -1)}
#: Of (B, L, H, P).
_CHUNKS: Roles = {"x": ("content", 1), "dt": ("step", 1), "B": ("key", 1), "C": ("query", 1)}
_DELTA: Roles = {
    "value": ("content", 1),
    "query": ("query", 1),
    "key": ("key", 1),
    "g": ("step", 1),
    "beta": ("step", 1),
}
#: Of (B, H, L, P).
_PAIRS: Roles = {"value": ("content", 2), "query": ("query", 2), "key": ("key", 2)}


def _conv(
    reading: Reading,
    kernel: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """causal_conv1d_fn: x (B, D, L)."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()

    def convolve(x: Tensor, bias: Tensor | None = bias) -> Tensor:
        return kernel(x, weight, bias, activation=None, **options)

    def moved(x: Tensor) -> Tensor:
        out: Tensor = _Convolved.apply(x, convolve)  # type: ignore[no-untyped-call]
        return out

    out = reading.moved(moved, _CONTENT, {"x": x})
    if bias is not None:
        out = reading.mode.ledger.included(out, bias[:, None])
    if activation not in ("silu", "swish", None):
        reading.given_up = True
    return out if activation is None else F.silu(out)


class _Convolved(torch.autograd.Function):
    """A causal convolution (B, D, L), which keeps nothing: its adjoint runs backward in time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, convolve: Callable[..., Tensor]) -> Tensor:
        ctx.convolve = convolve
        return convolve(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        found: Tensor = ctx.convolve(gradient.flip(-1).contiguous(), None)
        return found.flip(-1), None


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
    """mamba_ssm's selective_scan_fn and transformers' mamba_selective_scan."""
    rate, skip, bias = (None if x is None else x.detach() for x in (A, D, delta_bias))
    options |= {"delta_bias": bias, "delta_softplus": delta_softplus}
    on_processor = u.device.type == "cpu" and B.dim() == C.dim() == 3 and not A.is_complex()

    def run(u: Tensor, delta: Tensor, B: Tensor, C: Tensor) -> Tensor:
        if on_processor and not reading.mode.divides:
            return _by_operator(u, delta, rate, B, C, skip, bias, delta_softplus)
        return kernel(u, delta, rate, B, C, skip, z=None, **options)

    y = reading.moved(run, _SCAN, {"u": u, "delta": delta, "B": B, "C": C})
    y = y if z is None else y * F.silu(z)
    return (y, _unread(u, *A.shape)) if return_last_state else y


def _unread(like: Tensor, *size: int) -> Tensor:
    """Return zeros (B, ...) for a last state: a run that is explained reads its cache once."""
    with unseen():
        return like.new_zeros(len(like), *size)


def _with_state(
    roles: Roles, factors: dict[str, Tensor], name: str, state: Tensor | None
) -> tuple[Roles, dict[str, Tensor]]:
    """Add a first state to the factors of a kernel, as content."""
    if state is None:
        return roles, factors
    # a copy, as the cache is written to later
    return {**roles, name: ("content", 1)}, {**factors, name: state.clone()}


def _by_operator(
    u: Tensor,
    delta: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
) -> Tensor:
    """Compute a selective scan with a gradient for its content alone: half of a kernel's work."""
    assert A is not None
    wide = torch.promote_types(u.dtype, torch.float32)
    dt, values = delta.to(wide).mT, u.to(wide).mT
    dt = dt if bias is None else dt + bias
    scan = SelectiveScan(
        F.softplus(dt) if softplus else dt, A.to(wide), B.to(wide).mT, C.to(wide).mT
    )
    y = scan.apply(values[..., None])[..., 0]
    return (y if D is None else y + D * values).mT.to(u.dtype)


def _chunk_scan(
    reading: Reading,
    kernel: Callable[..., Tensor],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **options: Any,
) -> Any:
    """mamba_ssm's mamba_chunk_scan_combined and transformers' mamba2_chunk_scan."""
    A = A.detach()
    options |= {name: y.detach() for name, y in (("D", D), ("dt_bias", dt_bias)) if y is not None}

    def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, **state: Tensor) -> Tensor:
        return kernel(x, dt, A, B, C, chunk_size, **state, **options)

    factors = {"x": x, "dt": dt, "B": B, "C": C}
    y = reading.moved(run, *_with_state(_CHUNKS, factors, "initial_states", initial_states))
    y = y if z is None else y * F.silu(z)
    return (y, _unread(x, *x.shape[2:], B.shape[-1])) if return_final_states else y


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
    """causal_conv1d_update: x (B, D, L) behind the inputs that a cache holds."""
    if activation not in ("silu", "swish", None):
        reading.given_up = True
    x = torch.cat([conv_state, x], -1)[..., -(weight.shape[1] - 1 + x.shape[-1]) :]
    out = F.conv1d(x, weight[:, None], bias, groups=len(weight))
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
    """selective_state_update: one token x (B, D) or (B, H, P); its kernel has no gradients."""
    rate, skip, bias = (None if y is None else y.detach() for y in (A, D, dt_bias))

    def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor) -> Tensor:
        x, dt, B, C = (y[:, 0] for y in (x, dt, B, C))
        assert rate is not None
        step = dt if bias is None else dt + bias
        step = (F.softplus(step) if dt_softplus else step)[..., None]
        if B.dim() > 2:  # of groups of heads
            B, C = (y.repeat_interleave(x.shape[1] // y.shape[1], 1) for y in (B, C))
        moved = state * torch.exp(step * rate) + step * B[..., None, :] * x[..., None]
        y: Tensor = (moved * C[..., None, :]).sum(-1).to(x.dtype)
        return (y if skip is None else y + x * skip)[:, None]

    # with a dimension for the token
    factors = {"x": x[:, None], "dt": dt[:, None], "B": B[:, None], "C": C[:, None]}
    y = reading.moved(run, *_with_state(_CHUNKS, factors, "state", state))[:, 0]
    return y if z is None else y * F.silu(z)


def _mamba_inner(
    reading: Reading,
    kernel: Callable[..., Tensor],
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    x_weight: Tensor,
    dt_weight: Tensor,
    out_weight: Tensor,
    out_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = True,
    **options: Any,
) -> Tensor:
    """mamba_ssm's mamba_inner_fn: a whole mixer but for its first projection."""
    package = sys.modules.get("mamba_ssm.ops.selective_scan_interface")
    if package is None or B is not None or C is not None or A.is_complex():
        fixed = (conv_weight, conv_bias, x_weight, dt_weight, out_weight, out_bias, A, B, C, D)
        how = {"delta_bias": delta_bias, "delta_softplus": delta_softplus, **options}
        found: Tensor = reading.give_up(kernel, xz, *fixed, **how)
        return found
    x, z = xz.chunk(2, dim=1)
    x = _conv(reading, package.causal_conv1d_fn, x, conv_weight[:, 0], conv_bias, "silu")
    selected = reading.selecting(x)
    selected = F.linear(selected.transpose(1, 2), x_weight).transpose(1, 2)
    states = A.shape[1]
    t, b, c = torch.split(selected, [dt_weight.shape[1], states, states], 1)
    delta, b, c = dt_weight.to(t) @ t, b.contiguous(), c.contiguous()
    bias: dict[str, Any] = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
    scan = package.selective_scan_fn
    y = _selective_scan(reading, scan, x, delta, A, b, c, D=D, z=z, **bias)
    return F.linear(y.transpose(1, 2), out_weight, out_bias)


def _split_conv_scan(
    reading: Reading,
    kernel: Callable[..., Tensor],
    zxbcdt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    **options: Any,
) -> Tensor:
    """mamba_ssm's mamba_split_conv1d_scan_combined: Mamba-2 but for its first projection."""
    package = sys.modules["mamba_ssm.modules.mamba2"]
    heads = len(dt_bias)
    width = heads * (D.shape[1] if D.dim() == 2 else headdim or 1)
    both = (len(conv_weight) - width) // 2
    beside = (zxbcdt.shape[-1] - 2 * width - 2 * both - heads) // 2
    parts = [beside, beside, width, width + 2 * both, heads]
    z0, x0, z, mixed, dt = torch.split(zxbcdt, parts, -1)
    conv, scan = map(_itself, (package.causal_conv1d_fn, package.mamba_chunk_scan_combined))
    mixed = _conv(reading, conv, mixed.transpose(1, 2), conv_weight, conv_bias, activation)
    x, b, c = torch.split(mixed.transpose(1, 2), [width, both, both], -1)
    x = torch.unflatten(x, -1, (heads, -1))
    b, c = (torch.unflatten(reading.selecting(y), -1, (ngroups, -1)) for y in (b, c))
    how: dict[str, Any] = {"D": D, "dt_bias": dt_bias, "dt_softplus": True, "dt_limit": dt_limit}
    y = _chunk_scan(reading, scan, x, dt, A, b, c, chunk_size, **how).flatten(-2)
    if rmsnorm_weight is None:
        y = y * F.silu(z)
    else:
        norm = z, rmsnorm_eps, width // ngroups, norm_before_gate
        y = _gated_norm(y, rmsnorm_weight, *norm)
    if beside:
        y = torch.cat([F.silu(z0) * x0, y], -1)
    return y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)


def _gated_norm(
    x: Tensor, weight: Tensor, z: Tensor | None, eps: float, group_size: int | None, first: bool
) -> Tensor:
    """An RMSNorm of groups of channels, ``first`` or behind a gate SiLU(z), in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y, gate = x.to(wide), None if z is None else F.silu(z.to(wide))
    if gate is not None and not first:
        y = y * gate
    size = group_size or y.shape[-1]
    y = F.rms_norm(torch.unflatten(y, -1, (-1, size)), (size,), eps=eps).flatten(-2)
    y = y * weight.to(wide)
    if gate is not None and first:
        y = y * gate
    return y.to(x.dtype)


def _norm(
    reading: Reading,
    kernel: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> Tensor:
    """mamba_ssm's rmsnorm_fn."""
    if bias is not None:
        reading.given_up = True
    return _gated_norm(x, weight, z, eps, group_size, norm_before_gate)


def _delta_rule(
    reading: Reading,
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> Any:
    """The gated delta rule, transformers' and flash-linear-attention's."""
    if use_qk_l2norm_in_kernel:  # outside, where lengths are frozen
        query, key = map(_unit, (query, key))

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
    ) -> Tensor:
        if initial_state is not None and value.shape[1] == 1:  # its kernel has no gradients
            return _delta_step(query, key, value, g, beta, initial_state)
        how = {"initial_state": initial_state, "output_final_state": False, **options}
        out: Tensor = kernel(query, key, value, g=g, beta=beta, **how)[0]
        return out

    factors = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    y = reading.moved(run, *_with_state(_DELTA, factors, "initial_state", initial_state))
    size = value.shape[2], key.shape[3], value.shape[3]
    return y, (_unread(value, *size) if output_final_state else None)


def _delta_step(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor
) -> Tensor:
    """Compute the gated delta rule of one token (B, 1, H, P) from a state (B, H, N, P)."""
    heads = value.shape[2]
    wide = torch.promote_types(value.dtype, torch.float32)
    q, k = (x.to(wide)[:, 0].repeat_interleave(heads // x.shape[2], 1) for x in (query, key))
    v, decay, rate = value.to(wide)[:, 0], g.to(wide)[:, 0].exp(), beta.to(wide)[:, 0, :, None]
    state = initial_state.to(wide) * (decay[..., None, None] if g.dim() == 3 else decay[..., None])
    new = (v - torch.einsum("bhnp,bhn->bhp", state, k)) * rate
    state = state + k[..., None] * new[:, :, None]
    out: Tensor = torch.einsum("bhnp,bhn->bhp", state, q) / q.shape[-1] ** 0.5
    return out[:, None].to(value.dtype)


def _unit(x: Tensor) -> Tensor:
    """Scale vectors to length one; as in the packages, 1e-6 is added to the sum of squares."""
    return x * torch.rsqrt((x.detach() * x.detach()).sum(-1, keepdim=True) + 1e-6)


def attention(
    reading: Reading,
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """torch's scaled_dot_product_attention."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel(query, key, value, *args, **kwargs)

    return reading.moved(run, _PAIRS, {"query": query, "key": key, "value": value})


#: The entry of each kernel, by the name that modules give it.
ENTRIES: dict[str, Entry] = {
    "causal_conv1d_fn": _conv,
    "selective_scan_fn": _selective_scan,
    "mamba_selective_scan": _selective_scan,
    "mamba_inner_fn": _mamba_inner,
    "mamba_chunk_scan_combined": _chunk_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "causal_conv1d_update": _conv_step,
    "mamba_selective_state_update": _scan_step,
    "mamba2_selective_state_update": _scan_step,
    "mamba_split_conv1d_scan_combined": _split_conv_scan,
    "rmsnorm_fn": _norm,
    "chunk_gated_delta_rule": _delta_rule,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
}
#: Those of kernels that continue from a cache.
_STEPS = (_conv_step, _scan_step)


# --- where they are called -----------------------------------------------------------------------


def _entered(entry: Entry) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a replacement for a kernel, which sends calls that are read to an entry."""
    known = inspect.signature(entry).parameters.keys()

    def repaired(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(*args: Any, **kwargs: Any) -> Any:
            reading = _now.get()
            if reading is None:
                return kernel(*args, **kwargs)
            others = _OTHERWISE - known if reading.continues else _OTHERWISE
            otherwise = any(name in others and _is_given(kwargs[name]) for name in kwargs)
            stray = entry in _STEPS and not reading.continues
            if reading.given_up or otherwise or stray:
                return reading.give_up(kernel, *args, **kwargs)
            return entry(reading, kernel, *args, **kwargs)

        call._kernel = kernel  # type: ignore[attr-defined]
        return call

    return repaired


def _itself(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel without the function that asks whether its call is read."""
    found: Callable[..., Any] = getattr(kernel, "_kernel", kernel)
    return found


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _repairs() -> Iterable[Repair]:
    holders = {path.rpartition(".")[0] for path in READ}
    for holder in (*holders, "mamba_ssm.ops.triton.layernorm_gated"):
        for name, entry in ENTRIES.items():
            yield holder, name, _entered(entry)


_changes = Shared(lambda: replacing(_repairs()))


@contextmanager
def entries() -> Iterator[None]:
    """Let kernels ask whether their call is read, until the last user leaves."""
    with lasting(_changes.enter):
        yield
