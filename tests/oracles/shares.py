"""What a mixer does, divided among its factors: autograd at nodes, with loops over tokens.

Every function takes a module of a library and what enters it, (B, L, E), and returns the factors of
its outer part with their graphs, and that part as a function of them.  On the way to the factors
SiLU is its frozen ratio, norms are frozen, and softplus, sigmoid and exp follow their derivatives.
Nothing here calls the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import token_loops

#: By rule and role: what factors are compared with, and their share.
DIVIDED = {
    "frozen": {"content": ("zero", 1.0)},
    "half": {"content": ("zero", 1.0), "gate": ("zero", 1.0)},
    "centered": {
        "content": ("zero", 1.0), "gate": ("zero", 1.0), "sigmoid gate": ("one half", 1.0),
        "key": ("mean", 0.5), "query": ("mean", 0.5), "step": ("own", 0.5),
        "softmax key": ("mean", 0.5), "softmax query": ("mean", 0.5),
    },
    "balanced": {
        "content": ("own", 1.0),
        **{role: ("own", 0.5) for role in ("gate", "sigmoid gate", "key", "query", "step")},
        "softmax key": ("mean", 0.5), "softmax query": ("mean", 0.5),
    },
}  # fmt: skip

#: Factors by name, each with its role.
Factors = dict[str, tuple[Tensor, str]]
Outer = Callable[..., Tensor]


@dataclass
class Shares:
    """What a rule finds at one input.

    Attributes:
        inputs: relevance (B, L, E).
        references: what belongs to references (B,).
        output: what is divided (B,).
    """

    inputs: Tensor
    references: Tensor
    output: Tensor


def divided(
    factors: Factors, outer: Outer, entering: Tensor, seed: Tensor, rule: str,
    mask: Tensor | None = None,
) -> Shares:  # fmt: skip
    """The relevance of what enters by a rule.

    ``outer`` makes the mixer's output (B, L, E) of the factors, whose graphs begin at ``entering``.
    The number explained is the sum of that output times ``seed``.
    """
    shares = DIVIDED[rule]
    values = {name: x.detach() for name, (x, _) in factors.items()}
    starts = {
        name: _start(values[name], shares[role][0], mask) if role in shares else values[name]
        for name, (_, role) in factors.items()
    }
    gradients = {name: torch.zeros_like(x) for name, x in values.items()}
    for node in (0.5 - 12**-0.5, 0.5 + 12**-0.5):
        here = {
            name: (starts[name] + node * (x - starts[name])).requires_grad_()
            for name, x in values.items()
        }
        at_node = torch.autograd.grad((outer(**here) * seed).sum(), list(here.values()))
        for (name, (_, role)), gradient in zip(factors.items(), at_node, strict=True):
            if role in shares:
                gradients[name] += gradient * shares[role][1] / 2
    output = (outer(**values) * seed).flatten(1).sum(1)
    bias = outer(**{name: torch.zeros_like(x) for name, x in values.items()})
    added = output - (bias * seed).flatten(1).sum(1)
    batch = len(entering)  # of windows, those of an example stand in a row
    parts = [(values[name] * x).reshape(batch, -1).sum(1) for name, x in gradients.items()]
    divided = torch.stack([(factors[name][0] * x).sum() for name, x in gradients.items()]).sum()
    (gradient,) = torch.autograd.grad(divided, entering)
    references = (added - torch.stack(parts).sum(0)).detach()
    return Shares(gradient * entering.detach(), references, output.detach())


def _start(x: Tensor, reference: str, mask: Tensor | None) -> Tensor:
    """Nothing, one half, the factor itself, or the mean over the real tokens up to each."""
    if reference == "own":
        return x
    out = torch.zeros_like(x)
    if reference in ("zero", "one half"):
        return out if reference == "zero" else out + 0.5
    for example in range(len(x)):
        for t in range(x.shape[1]):
            real = [j for j in range(t + 1) if mask is None or mask[example, j]]
            if real:
                out[example, t] = x[example, real].mean(0)
    return out


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.detach())


def _conv(conv: Any, x: Tensor) -> Tensor:
    """A causal convolution of channels, (B, L, D)."""
    padded = F.pad(x, (0, 0, conv.weight.shape[-1] - 1, 0))
    taps = conv.weight[:, 0]
    out = sum(padded[:, k : k + x.shape[1]] * taps[:, k] for k in range(taps.shape[1]))
    return out if conv.bias is None else out + conv.bias


def _unit(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps).detach()


def _rms_norm(x: Tensor, real: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """The norm of ``real``, frozen, of each group of channels by itself."""
    mean_squares = real.detach().square().unflatten(-1, (groups, -1)).mean(-1)
    each = torch.rsqrt(mean_squares + eps).repeat_interleave(x.shape[-1] // groups, -1)
    return x * each * weight


def mamba(module: Any, entering: Tensor, mask: Tensor | None = None) -> tuple[Factors, Outer]:
    """transformers' MambaMixer."""
    keep = 1 if mask is None else mask[..., None].to(entering)
    x, z = module.in_proj(entering * keep).chunk(2, -1)
    v = silu(_conv(module.conv1d, x)) * keep
    rank, states = module.dt_proj.weight.shape[1], module.A_log.shape[1]
    t, key, query = torch.split(module.x_proj(v), [rank, states, states], -1)
    step = F.softplus(module.dt_proj(t))
    rates = -torch.exp(module.A_log)

    def returned(v: Tensor, z: Tensor, key: Tensor, query: Tensor, step: Tensor) -> Tensor:
        state, out = torch.zeros(*v.shape[::2], states, dtype=v.dtype), []
        for i in range(v.shape[1]):
            state = torch.exp(step[:, i, :, None] * rates) * state
            state = state + (step * v)[:, i, :, None] * key[:, i, None]
            out.append((state * query[:, i, None]).sum(-1) + module.D * v[:, i])
        return module.out_proj(z * torch.stack(out, 1))

    factors = {"v": v, "z": silu(z), "key": key, "query": query, "step": step}
    return _with_roles(factors), returned


def mamba2(module: Any, entering: Tensor, mask: Tensor | None = None) -> tuple[Factors, Outer]:
    """transformers' Mamba2Mixer."""
    keep = 1 if mask is None else mask[..., None].to(entering)
    width, heads = module.intermediate_size, module.num_heads
    states = module.n_groups * module.ssm_state_size
    z, mixed, dt = torch.split(
        module.in_proj(entering * keep), [width, width + 2 * states, heads], -1
    )
    mixed = silu(_conv(module.conv1d, mixed)) * keep
    v, key, query = torch.split(mixed, [width, states, states], -1)
    step = F.softplus(dt + module.dt_bias)
    rates = -torch.exp(module.A_log)

    def scan(v: Tensor, z: Tensor, key: Tensor, query: Tensor, step: Tensor) -> Tensor:
        v = v.unflatten(-1, (heads, -1))
        key, query = (x.unflatten(-1, (module.n_groups, -1)) for x in (key, query))
        operator = SimpleNamespace(
            query=query, key=key, log_decay=step * rates, scale=step, shape=SimpleNamespace()
        )
        operator.shape.heads = heads
        mixing = token_loops.scalar_decay(operator, v) + module.D[:, None] * v
        return z * mixing.flatten(2)

    factors = {"v": v, "z": silu(z), "key": key, "query": query, "step": step}
    real = scan(**factors).detach()

    def returned(**factors: Tensor) -> Tensor:
        norm = module.norm
        scanned, eps = scan(**factors), norm.variance_epsilon
        return module.out_proj(_rms_norm(scanned, real, norm.weight, eps, module.n_groups))

    return _with_roles(factors), returned


def gated_delta_net(
    module: Any, entering: Tensor, mask: Tensor | None = None
) -> tuple[Factors, Outer]:
    """transformers' Qwen3NextGatedDeltaNet."""
    keep = 1 if mask is None else mask[..., None].to(entering)
    entering = entering * keep
    split = module.fix_query_key_value_ordering
    query, key, v, z, b, a = split(module.in_proj_qkvz(entering), module.in_proj_ba(entering))
    mixed = torch.cat([query.flatten(2), key.flatten(2), v.flatten(2)], -1)
    mixed = silu(_conv(module.conv1d, mixed))
    shared = module.num_k_heads, module.num_v_heads // module.num_k_heads
    query, key, v = torch.split(mixed, [module.key_dim, module.key_dim, module.value_dim], -1)
    query, key = (_unit(x.unflatten(-1, (shared[0], -1)), 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(shared[1], 2) for x in (query, key))
    factors = {
        "v": v.unflatten(-1, (module.num_v_heads, -1)), "z": silu(z), "key": key,
        "query": query * module.head_k_dim**-0.5, "write": torch.sigmoid(b),
        "step": -module.A_log.exp() * F.softplus(a + module.dt_bias),
    }  # fmt: skip

    def rule(v: Tensor, key: Tensor, query: Tensor, write: Tensor, step: Tensor) -> Tensor:
        operator = SimpleNamespace(query=query, key=key, beta=write, log_decay=step)
        return token_loops.delta_rule(operator, v)

    real = rule(**{name: x.detach() for name, x in factors.items() if name != "z"})

    def returned(z: Tensor, **others: Tensor) -> Tensor:
        norm = module.norm
        normed = _rms_norm(rule(**others), real, norm.weight, norm.variance_epsilon)
        return module.out_proj((z * normed).flatten(2))

    return _with_roles(factors), returned


def rg_lru(module: Any, entering: Tensor) -> tuple[Factors, Outer]:
    """transformers' RecurrentGemmaRecurrentBlock, for a sequence from its beginning.

    The convolution passes relevance on by itself: behind it every channel is content times what
    lets it in.  sqrt is its frozen ratio, and the two factors of what lets in share it.
    """
    own = module.rg_lru
    x = _conv(module.conv_1d, module.linear_x(entering))

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        heads = x.unflatten(-1, weight.shape[:2])
        return torch.sigmoid(torch.einsum("blhi,hij->blhj", heads, weight) + bias).flatten(2)

    let_in = gate(own.input_gate_weight, own.input_gate_bias)
    logs = -8 * gate(own.recurrent_gate_weight, own.recurrent_gate_bias)
    logs = logs * F.softplus(own.recurrent_param)
    square = 1 - torch.exp(2 * logs)
    scale = square * square.detach().rsqrt()
    first = (torch.arange(x.shape[1]) == 0)[None, :, None]
    decay, scale = torch.exp(logs).masked_fill(first, 0), scale.masked_fill(first, 1)
    product = (let_in * scale).detach()
    halves = (let_in * scale.detach() + let_in.detach() * scale) / 2
    gating = module.linear_y(entering)
    ratio = (module.act_fn(gating) / gating).detach()
    factors = {
        "v": x, "z": gating * ratio, "key": product + halves - halves.detach(), "step": decay,
    }  # fmt: skip

    def returned(v: Tensor, z: Tensor, key: Tensor, step: Tensor) -> Tensor:
        state, out = torch.zeros_like(v[:, 0]), []
        for i in range(v.shape[1]):
            state = step[:, i] * state + (key * v)[:, i]
            out.append(state)
        return module.linear_out(z * torch.stack(out, 1))

    return _with_roles(factors), returned


def rwkv4(module: Any, entering: Tensor, *, tangents: bool) -> tuple[Factors, Outer]:
    """transformers' RwkvSelfAttention; its sigmoid follows its derivative, or is a coefficient."""
    before = F.pad(entering, (0, 0, 1, -1))

    def mixed(share: Tensor) -> Tensor:
        return entering * share + before * (1 - share)

    factors = {
        "v": module.value(mixed(module.time_mix_value)),
        "z": torch.sigmoid(module.receptance(mixed(module.time_mix_receptance))),
        "key": module.key(mixed(module.time_mix_key)),
    }
    rate, own = torch.exp(module.time_decay), module.time_first

    def returned(v: Tensor, z: Tensor, key: Tensor) -> Tensor:
        out = []
        for i in range(v.shape[1]):
            past = (torch.arange(i) - (i - 1))[:, None] * rate + key[:, :i]
            weights = torch.cat([past, own + key[:, i : i + 1]], 1).exp()
            out.append((weights * v[:, : i + 1]).sum(1) / weights.sum(1))
        return module.output(z * torch.stack(out, 1))

    return _with_sigmoid_gate(factors, tangents), returned


def gla(module: Any, entering: Tensor, *, tangents: bool) -> tuple[Factors, Outer]:
    """fla's GatedLinearAttention, without convolutions and a feature map.

    Where the gate is a sigmoid, that follows its derivative, or is a coefficient.
    """
    heads = module.num_heads
    query, key, v, z = (
        project(entering).unflatten(-1, (heads, -1))
        for project in (module.q_proj, module.k_proj, module.v_proj, module.g_proj)
    )
    step = F.logsigmoid(module.gk_proj(entering)) / module.gate_logit_normalizer
    factors = {
        "v": v, "z": silu(z) if module.fuse_norm_and_gate else torch.sigmoid(z), "key": key,
        "query": query * module.head_k_dim**-0.5, "step": step.unflatten(-1, (heads, -1)),
    }  # fmt: skip

    def attention(v: Tensor, key: Tensor, query: Tensor, step: Tensor) -> Tensor:
        operator = SimpleNamespace(query=query, key=key, log_decay=step, bonus=None)
        return token_loops.vector_decay(operator, v)

    real = attention(**{name: x.detach() for name, x in factors.items() if name != "z"})

    def returned(z: Tensor, **others: Tensor) -> Tensor:
        norm = module.g_norm_swish_gate if module.fuse_norm_and_gate else module.g_norm
        normed = _rms_norm(attention(**others), real, norm.weight, norm.eps)
        return module.o_proj((z * normed).flatten(2))

    if module.fuse_norm_and_gate:
        return _with_roles(factors), returned
    return _with_sigmoid_gate(factors, tangents), returned


def softmax_attention(module: Any, entering: Tensor) -> tuple[Factors, Outer]:
    """transformers' ViTAttention, in which every token reads all."""
    heads = module.num_attention_heads
    query, key, v = (
        project(entering).unflatten(-1, (heads, -1))
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )

    def returned(v: Tensor, query: Tensor, key: Tensor) -> Tensor:
        scores = torch.einsum("bihn,bjhn->bhij", query, key) * query.shape[-1] ** -0.5
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        return module.o_proj(torch.einsum("bhij,bjhp->bihp", weights, v).flatten(2))

    factors = {"v": (v, "content")}
    return factors | {"query": (query, "softmax query"), "key": (key, "softmax key")}, returned


def _with_roles(factors: dict[str, Tensor]) -> Factors:
    roles = {"v": "content", "z": "gate", "write": "step"}
    return {name: (x, roles.get(name, name)) for name, x in factors.items()}


def _with_sigmoid_gate(factors: dict[str, Tensor], tangents: bool) -> Factors:
    gate = (factors["z"], "sigmoid gate") if tangents else (factors["z"].detach(), "none")
    return {**_with_roles(factors), "z": gate}
