"""Mixers read as they run: a kernel is a function whose arguments have roles.

By the rules ``"frozen"`` and ``"half"`` a mixer moves content by coefficients that are frozen.  Of a
kernel's arguments one is the content, and all others are detached: the kernel's value is the
model's own, and its own backward is that of a linear map.  All else that the mixer's code calls is
read by the rules for torch's functions, so that nothing runs twice and no adapter is asked.

A :class:`Reading` watches one call of a mixer.  It gives the call up, for the mixer's adapter to
explain, where the code does what roles do not tell: a kernel without an entry, options that change
what a kernel's arguments mean, or a product of several factors that no activation has bent.
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
from ..operators.kernels.arithmetic import unseen
from ..tracing.changes import Shared, lasting
from ..tracing.repair.loops import Repair, replacing
from ..tracing.split import is_split

if TYPE_CHECKING:
    from .mode import Linearising

#: Computes what a kernel computes, of the call that is read, the kernel and its arguments.
Entry = Callable[..., Any]

#: Classes whose own code is read: module of transformers and class, or the path of the class.
_CLASSES = """
mamba.MambaMixer falcon_mamba.FalconMambaMixer jamba.JambaMambaMixer
mamba2.Mamba2Mixer bamba.BambaMixer falcon_h1.FalconH1Mixer nemotron_h.NemotronHMamba2Mixer
granitemoehybrid.GraniteMoeHybridMambaLayer zamba2.Zamba2MambaMixer
mamba_ssm.modules.mamba_simple.Mamba mamba_ssm.modules.mamba2.Mamba2
qwen3_next.Qwen3NextGatedDeltaNet qwen3_5.Qwen3_5GatedDeltaNet qwen3_5_moe.Qwen3_5MoeGatedDeltaNet
jamba.JambaAttention bamba.BambaAttention falcon_h1.FalconH1Attention
granitemoehybrid.GraniteMoeHybridAttention nemotron_h.NemotronHAttention
qwen3_next.Qwen3NextAttention qwen3_5.Qwen3_5Attention qwen3_5_moe.Qwen3_5MoeAttention
olmo_hybrid.OlmoHybridAttention lfm2.Lfm2Attention lfm2_moe.Lfm2MoeAttention lfm3.Lfm3Attention
bert.BertSelfAttention gpt_neox.GPTNeoXAttention gpt2.GPT2Attention llama.LlamaAttention
mistral.MistralAttention vit.ViTAttention deit.DeiTAttention siglip.SiglipAttention
siglip2.Siglip2Attention
"""


def _path(name: str) -> str:
    family, _, kind = name.partition(".")
    return f"transformers.models.{family}.modeling_{name}" if "." not in kind else name


#: The paths of these classes.
READ = frozenset(map(_path, _CLASSES.split()))

#: Arguments of kernels that, unless they are none, make of it another function.
_OTHERWISE = frozenset(
    """
    initial_states initial_state final_states_out seq_idx cu_seqlens cu_seqlens_cpu cu_seq_lens_q
    return_last_state return_final_states return_varlen_states output_final_state state_v_first
    b_rms_weight c_rms_weight dt_rms_weight B_proj_bias C_proj_bias head_first
    """.split()
)

_now: ContextVar[Reading | None] = ContextVar("captum_ssm_reading", default=None)


class Reading:
    """One call of a mixer whose own code runs under the rules.

    Attributes:
        mode: the rules.
        given_up: whether an adapter has to explain the call.
    """

    def __init__(self, mode: Linearising) -> None:
        self.mode = mode
        self.given_up = False
        self._mixes = False
        #: Where kernels stand in the graph, and where their contents do.
        self._moved: dict[Any, Any] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Read what runs inside the ``with``."""
        before, self.mode.reading = self.mode.reading, self
        token = _now.set(self)
        try:
            yield
        finally:
            _now.reset(token)
            self.mode.reading = before

    def give_up(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Leave the call to an adapter, and return what a kernel returns."""
        self.given_up = True
        with torch.no_grad(), unseen():
            return kernel(*args, **kwargs)

    def moved(
        self, run: Callable[[Tensor], Tensor], content: Tensor, mixes: bool = True
    ) -> Tensor:
        """Return what a kernel makes of its content, all other arguments detached.

        Args:
            run: calls the kernel.
            content: its content.
            mixes: whether it is what the mixer is there for. Default: True.
        """
        self._mixes |= mixes
        with unseen():
            out = run(content)
        if out.grad_fn is not None and content.grad_fn is not None:
            self._moved[out.grad_fn] = content.grad_fn
        return out

    def shares(self, live: int, straight: int) -> None:
        """Give up at a product of factors that depend on the input, unless it is with a gate.

        Args:
            live: how many of them share the relevance.
            straight: how many no activation has bent.
        """
        self.given_up |= (live, straight) != (2, 1)

    def explains(self, call: Call) -> bool:
        """Whether the call's output has a graph that is linear, through one kernel at least.

        Args:
            call: the call, which has ended.
        """
        out = call.output_tensor
        if self.given_up or not self._mixes or not out.requires_grad:
            return False
        entered = {x.grad_fn for x in _tensors((call.args, call.kwargs)) if x.grad_fn is not None}
        todo, seen = [out.grad_fn], set(entered)
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._moved:
                todo.append(self._moved[node])
                continue
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return False  # a kernel without an entry
            todo += [following for following, _ in node.next_functions]
        return True


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def is_read(module: nn.Module) -> bool:
    """Whether a mixer's own code can be read.

    Args:
        module: the mixer.
    """
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}" in READ and not any(
        map(is_split, module.modules())
    )


def mask_of(module: nn.Module, call: Call) -> Tensor | None:
    """Return the mask of a call, True for real tokens (B, L); None if none is padding.

    Args:
        module: the mixer, of a class that :func:`is_read`.
        call: its call.
    """
    place = _place_of_mask(type(module))
    mask = None if place is None else call.argument("attention_mask", place)
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 2:
        original, mask = heeded_mask(module, call)
        return padding_mask(mask, call.hidden_states, type(module), original)
    visible = mask if mask.dtype == torch.bool else mask == 0  # of pairs
    return padding_mask(visible.any(-2).any(1), call.hidden_states, type(module), mask)


@functools.cache
def _place_of_mask(kind: type[nn.Module]) -> int | None:
    names = list(inspect.signature(kind.forward).parameters)
    return names.index("attention_mask") - 1 if "attention_mask" in names else None


# --- entries -------------------------------------------------------------------------------------


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
    how = {"activation": None, **options}
    out = reading.moved(lambda x: kernel(x, weight, bias, **how), x, mixes=False)
    if bias is not None:
        out = reading.mode.ledger.included(out, bias[:, None])
    return out if activation is None else _activated(reading, out, activation)


def _activated(reading: Reading, x: Tensor, activation: str) -> Tensor:
    if activation not in ("silu", "swish"):
        reading.given_up = True
    return F.silu(x)


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
    **options: Any,
) -> Tensor:
    """mamba_ssm's selective_scan_fn and transformers' mamba_selective_scan."""
    fixed = [None if x is None else x.detach() for x in (delta, A, B, C, D)]
    more = {"delta_bias": None if delta_bias is None else delta_bias.detach()}
    options |= {**more, "delta_softplus": delta_softplus}
    y = reading.moved(lambda u: kernel(u, *fixed, z=None, **options), u)
    return y if z is None else y * F.silu(z)


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
    **options: Any,
) -> Tensor:
    """mamba_ssm's mamba_chunk_scan_combined and transformers' mamba2_chunk_scan."""
    fixed = [y.detach() for y in (dt, A, B, C)]
    options |= {name: y.detach() for name, y in (("D", D), ("dt_bias", dt_bias)) if y is not None}
    y = reading.moved(lambda x: kernel(x, *fixed, chunk_size, **options), x)
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
        return reading.give_up(kernel, xz, *fixed, **how)
    x, z = xz.chunk(2, dim=1)
    x = _conv(reading, package.causal_conv1d_fn, x, conv_weight[:, 0], conv_bias, "silu")
    selected = F.linear(x.detach().transpose(1, 2), x_weight).transpose(1, 2)
    states = A.shape[1]
    t, b, c = torch.split(selected, [dt_weight.shape[1], states, states], 1)
    dt = dt_weight.to(t) @ t
    fixed = dt, A, b.contiguous(), c.contiguous()
    bias = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
    y = _selective_scan(reading, package.selective_scan_fn, x, *fixed, D=D, z=z, **bias)
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
    """mamba_ssm's mamba_split_conv1d_scan_combined: a whole Mamba-2 but for its first projection."""
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
    b, c = (torch.unflatten(y.detach(), -1, (ngroups, -1)) for y in (b, c))
    how = {"D": D, "dt_bias": dt_bias, "dt_softplus": True, "dt_limit": dt_limit}
    y = _chunk_scan(reading, scan, x, dt, A, b, c, chunk_size, **how).flatten(-2)
    if rmsnorm_weight is None:
        y = y * F.silu(z)
    else:
        norm = z, rmsnorm_eps, width // ngroups, norm_before_gate
        y = gated_norm(y, rmsnorm_weight, *norm)
    if beside:
        y = torch.cat([F.silu(z0) * x0, y], -1)
    return y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)


def gated_norm(
    x: Tensor,
    weight: Tensor,
    z: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
) -> Tensor:
    """An RMSNorm of groups of channels and a gate SiLU(z), in either order, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    gate = None if z is None else F.silu(z.to(wide))
    if gate is not None and not norm_before_gate:
        y = y * gate
    size = y.shape[-1] if group_size is None else group_size
    y = F.rms_norm(torch.unflatten(y, -1, (-1, size)), (size,), eps=eps).flatten(-2)
    y = y * weight.to(wide)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


def _delta_rule(
    reading: Reading,
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: Any,
) -> Any:
    """The gated delta rule, transformers' and flash-linear-attention's."""
    q, k, g, beta = (x.detach() for x in (query, key, g, beta))
    return reading.moved(lambda v: kernel(q, k, v, g=g, beta=beta, **options)[0], value), None


def attention(mode: Linearising, func: Any, args: Any, kwargs: Any) -> Any:
    """torch's scaled_dot_product_attention in a mixer that is read; elsewhere it is unknown."""
    reading = mode.reading
    if reading is None:
        with unseen():
            return mode.unknown(func(*args, **kwargs), func.__name__)
    bound = _ATTENTION.bind(*args, **kwargs).arguments
    query, key, value, *rest = bound.values()
    q, k = query.detach(), key.detach()
    names = list(bound)[3:]
    more = dict(zip(names, rest, strict=True))
    return reading.moved(lambda v: func(q, k, v, **more), value)


def _attention_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None: ...


_ATTENTION = inspect.signature(_attention_arguments)

#: The entry of each kernel, by the name that modules give it.
ENTRIES: dict[str, Entry] = {
    "causal_conv1d_fn": _conv,
    "selective_scan_fn": _selective_scan,
    "mamba_selective_scan": _selective_scan,
    "mamba_inner_fn": _mamba_inner,
    "mamba_chunk_scan_combined": _chunk_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "mamba_split_conv1d_scan_combined": _split_conv_scan,
    "chunk_gated_delta_rule": _delta_rule,
    "torch_chunk_gated_delta_rule": _delta_rule,
}


# --- where they are called -----------------------------------------------------------------------


def _entered(entry: Entry) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that lets calls which are read pass by an entry."""

    def repaired(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(*args: Any, **kwargs: Any) -> Any:
            reading = _now.get()
            if reading is None:
                return kernel(*args, **kwargs)
            otherwise = any(name in _OTHERWISE and _is_given(kwargs[name]) for name in kwargs)
            if reading.given_up or otherwise:
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
    for holder in {path.rpartition(".")[0] for path in READ}:
        for name, entry in ENTRIES.items():
            yield holder, name, _entered(entry)


_changes = Shared(lambda: replacing(_repairs()))


@contextmanager
def entries() -> Iterator[None]:
    """Let kernels ask whether their call is read, until the last user leaves."""
    with lasting(_changes.enter):
        yield
