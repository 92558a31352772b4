"""Whole networks as dense float64 matrices over tokens and features, layer by layer.

Written from the formulas; nothing here calls the package.  Streams and attention weights are caught
from the real model by hooks; a matrix (L, E, L, E) maps one stream to the next.  With ``half`` the
relevance of a gated product is shared between its factors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracles
from oracles import mamba2_formula

Recorded = dict[nn.Module, Any]


@contextmanager
def recording(model: nn.Module, entering: list[nn.Module], leaving: list[nn.Module]) -> Any:
    """What enters and what leaves some modules, in float64, of one example."""
    seen: Recorded = {}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen[module] = (*args, *kwargs.values())[0][0].detach().double()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        seen[module] = output[1][0].detach().double()

    handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in entering]
    handles += [m.register_forward_hook(leave) for m in leaving]
    yield seen
    for handle in handles:
        handle.remove()


def double(weight: Tensor) -> Tensor:
    return weight.detach().double()


# --- matrices ------------------------------------------------------------------------------------


def identity(tokens: int, width: int) -> Tensor:
    eye = torch.eye(tokens * width, dtype=torch.float64)
    return eye.view(tokens, width, tokens, width)


def of_each_token(matrices: Tensor) -> Tensor:
    """A matrix (L, F, E) for each token, as (L, F, L, E)."""
    tokens = len(matrices)
    eye = torch.eye(tokens, dtype=torch.float64)
    return torch.einsum("ij,ipe->ipje", eye, matrices)


def after(second: Tensor, first: Tensor) -> Tensor:
    return torch.einsum("ipkq,kqje->ipje", second, first)


def rms_norm(norm: Any, x: Tensor) -> Tensor:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    scale = (x.square().mean(-1) + eps).rsqrt()  # (L,)
    return of_each_token(scale[:, None, None] * torch.diag(double(norm.weight)))


def layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    width = x.shape[-1]
    centring = torch.eye(width).double() - 1 / width
    scale = (x.var(-1, correction=0) + norm.eps).rsqrt()
    return of_each_token(scale[:, None, None] * (double(norm.weight)[:, None] * centring))


def normed(norm: Any, x: Tensor) -> Tensor:
    """What a norm computes."""
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, x.shape[-1:], double(norm.weight), double(norm.bias), norm.eps)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * double(norm.weight)


def mixer(module: Any, x: Tensor, form: Any, half: bool) -> Tensor:
    """A Mamba-1 mixer, or with a form a Mamba-2 mixer, of inputs x (L, E)."""
    weight = double(module.in_proj.weight)
    if form is None:
        parts = oracles.mamba1_parts(module, x[None])
        width = parts.values.shape[-1]
        stream, gate = weight[:width], weight[width : 2 * width]
    else:
        parts = mamba2_formula.mamba2_parts(module, x[None], form)
        width = parts.values.shape[-1]
        gate, stream = weight[:width], weight[width : 2 * width]
    out = double(module.out_proj.weight)
    mixed = torch.einsum("pd,dij,de->ipje", out, oracles.alpha(parts, "exact")[0], stream)
    if not half:
        return mixed
    bias = 0 if module.in_proj.bias is None else double(module.in_proj.bias)
    z = (F.linear(x, weight) + bias)[:, width:] if form is None else F.linear(x, gate)
    beside_gate = torch.sigmoid(z) * parts.before_projection[0] / parts.gate[0]
    gated = of_each_token(torch.einsum("pd,id,de->ipe", out, beside_gate, gate))
    return (mixed + gated) / 2


def attention(module: Any, weights: Tensor, value: Tensor, project: Tensor) -> Tensor:
    """Attention weights (H, L, L), value weights (G D, E) of groups of heads, and the output's."""
    heads = len(weights)
    width = project.shape[1] // heads
    groups = value.view(-1, width, value.shape[-1])
    of_head = groups.repeat_interleave(heads // len(groups), 0)  # (H, D, E)
    return torch.einsum("phd,hij,hde->ipje", project.view(-1, heads, width), weights, of_head)


def swiglu(mlp: Any, x: Tensor, half: bool) -> Tensor:
    gate, up, down = (double(p.weight) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    g, u = x @ gate.T, x @ up.T
    through_up = torch.einsum("pd,id,de->ipe", down, F.silu(g), up)
    if not half:
        return of_each_token(through_up)
    through_gate = torch.einsum("pd,id,de->ipe", down, torch.sigmoid(g) * u, gate)
    return of_each_token((through_up + through_gate) / 2)


def gelu(mlp: Any, x: Tensor) -> Tensor:
    h = F.linear(x, double(mlp.dense_h_to_4h.weight), double(mlp.dense_h_to_4h.bias))
    ratio = F.gelu(h) / h
    up, down = double(mlp.dense_h_to_4h.weight), double(mlp.dense_4h_to_h.weight)
    return of_each_token(torch.einsum("pd,id,de->ipe", down, ratio, up))


# --- networks ------------------------------------------------------------------------------------


Layers = Callable[[Any, Recorded, bool], list[Tensor]]


def matrices(
    model: Any, layers: Layers, norms: list[nn.Module], attentions: list[nn.Module],
    final: nn.Module, ids: Tensor, half: bool,
) -> tuple[list[Tensor], Tensor, Recorded]:  # fmt: skip
    """The maps from each stream to the next of one example, that to the last norm's output, and
    the streams that enter the norms."""
    plain = F.softmax
    with (
        torch.no_grad(),
        recording(model, [*norms, final], attentions) as seen,
        pytest.MonkeyPatch.context() as patch,
    ):  # transformers asks for float32
        patch.setattr(F, "softmax", lambda x, dim, dtype=None: plain(x, dim))
        model(ids[None])
    x = seen[final]
    head = rms_norm(final, x) if not isinstance(final, nn.LayerNorm) else layer_norm(final, x)
    return layers(model, seen, half), head, seen


def before(row: Tensor, maps: list[Tensor]) -> Tensor:
    """A row (L, E) over what the last of some maps returns, as one over what the first is given."""
    for matrix in reversed(maps):
        row = torch.einsum("ip,ipje->je", row, matrix)
    return row


def of_logit(model: Any, head: Tensor, target: tuple[int, int]) -> Tensor:
    """The row (L, E) of an output over the stream that enters the last norm."""
    position, token = target
    unembedding = double(model.get_output_embeddings().weight)[token]
    return torch.einsum("p,pje->je", unembedding, head[position])


def relevance(
    model: Any, layers: Layers, norms: list[nn.Module], attentions: list[nn.Module],
    final: nn.Module, ids: Tensor, target: tuple[int, int], half: bool,
) -> Tensor:  # fmt: skip
    """Relevance of each feature of each token of one example, (L, E)."""
    maps, head, _ = matrices(model, layers, norms, attentions, final, ids, half)
    row = before(of_logit(model, head, target), maps)
    return row * double(model.get_input_embeddings()(ids))


def mamba_layers(model: Any, seen: Recorded, half: bool) -> list[Tensor]:
    found = []
    for block in model.backbone.layers:
        x = seen[block.norm]
        form = None
        if type(block.mixer).__name__ == "Mamba2Mixer":
            form = mamba2_formula.form_of(block.mixer, model.config)
        branch = mixer(block.mixer, normed(block.norm, x), form, half)
        found.append(identity(*x.shape) + after(branch, rms_norm(block.norm, x)))
    return found


def decoder_layers(model: Any, seen: Recorded, half: bool) -> list[Tensor]:
    """Layers of llama and bamba: a mixer, then a gated MLP."""
    found = []
    for layer in model.model.layers:
        x = seen[layer.input_layernorm]
        if hasattr(layer, "mamba"):
            form = mamba2_formula.form_of(layer.mamba, model.config)
            branch = mixer(layer.mamba, normed(layer.input_layernorm, x), form, half)
        else:
            own = layer.self_attn
            weights = double(own.v_proj.weight), double(own.o_proj.weight)
            branch = attention(own, seen[own], *weights)
        found.append(identity(*x.shape) + after(branch, rms_norm(layer.input_layernorm, x)))
        norm = second_norm(layer)
        mlp = layer.mlp if hasattr(layer, "mlp") else layer.feed_forward
        branch = swiglu(mlp, normed(norm, seen[norm]), half)
        found.append(identity(*x.shape) + after(branch, rms_norm(norm, seen[norm])))
    return found


def second_norm(layer: Any) -> Any:
    return getattr(layer, "pre_ff_layernorm", None) or layer.post_attention_layernorm


def parallel_layers(model: Any, seen: Recorded, half: bool) -> list[Tensor]:
    """Layers of GPT-NeoX: attention and MLP side by side."""
    found = []
    for layer in model.gpt_neox.layers:
        own, x = layer.attention, seen[layer.input_layernorm]
        heads = len(seen[own])
        qkv = double(own.query_key_value.weight).view(heads, 3, -1, x.shape[-1])
        value, project = qkv[:, 2].flatten(0, 1), double(own.dense.weight)
        one = after(attention(own, seen[own], value, project), layer_norm(layer.input_layernorm, x))
        norm = layer.post_attention_layernorm
        other = after(gelu(layer.mlp, normed(norm, x)), layer_norm(norm, x))
        found.append(identity(*x.shape) + one + other)
    return found


def blocks(model: Any) -> Any:
    """The blocks of one of the models above, in their order."""
    for outer in ("backbone", "model", "gpt_neox"):
        if hasattr(model, outer):
            return getattr(model, outer).layers
    raise AssertionError(f"no blocks are known of {type(model).__name__}")
