"""Whole networks as dense float64 matrices over tokens and features, layer by layer.

Nothing here calls the package.  Streams and attention weights are caught from the real model by
hooks.  Each layer is written as a function with frozen coefficients, whose Jacobian (L, E, L, E)
maps one stream to the next.  With ``half`` the factors of a gated product share its relevance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles.frozen_mixers import frozen, gated, straight

Recorded = dict[nn.Module, Any]
Branch = Callable[[Tensor], Tensor]


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


# --- parts of layers, of (1, L, E) ---------------------------------------------------------------


def normed(norm: Any, x: Tensor) -> Tensor:
    """A norm whose denominator is frozen."""
    x = x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    out = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt().detach() * double(norm.weight)
    return out + double(norm.bias) if isinstance(norm, nn.LayerNorm) else out


def mixer(module: Any, half: bool) -> Branch:
    wide = copy.deepcopy(module).double()
    return lambda x: frozen(wide, x, half=half).output


def attention(weights: Tensor, value: Tensor, project: Tensor, x: Tensor) -> Tensor:
    """Attention weights (H, L, L), value weights (G D, E) of groups of heads, and the output's."""
    heads = len(weights)
    v = (x @ value.T).unflatten(-1, (-1, project.shape[1] // heads))  # (1, L, G, D)
    v = v.repeat_interleave(heads // v.shape[2], 2)
    return torch.einsum("hij,bjhd->bihd", weights, v).flatten(2) @ project.T


def swiglu(mlp: Any, half: bool, x: Tensor) -> Tensor:
    gate, up, down = (double(p.weight) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    return gated(x @ up.T, straight(F.silu, x @ gate.T), half) @ down.T


def gelu(mlp: Any, x: Tensor) -> Tensor:
    h = F.linear(x, double(mlp.dense_h_to_4h.weight), double(mlp.dense_h_to_4h.bias))
    return straight(F.gelu, h) @ double(mlp.dense_4h_to_h.weight).T


# --- networks ------------------------------------------------------------------------------------


Layers = Callable[[Any, Recorded, bool], list[Tensor]]


def jacobian(function: Branch, x: Tensor) -> Tensor:
    """The matrix (L, E, L, E) of a function of (1, L, E) at a stream (L, E)."""
    return torch.autograd.functional.jacobian(lambda x: function(x[None])[0], x, vectorize=True)


def added(norm: nn.Module, branch: Branch, x: Tensor) -> Tensor:
    """The map of a stream to which a branch is added."""
    return jacobian(lambda x: x + branch(normed(norm, x)), x)


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
    return layers(model, seen, half), jacobian(partial(normed, final), seen[final]), seen


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
    return [added(x.norm, mixer(x.mixer, half), seen[x.norm]) for x in model.backbone.layers]


def decoder_layers(model: Any, seen: Recorded, half: bool) -> list[Tensor]:
    """Layers of llama and bamba: a mixer, then a gated MLP."""
    found = []
    for layer in model.model.layers:
        if hasattr(layer, "mamba"):
            branch = mixer(layer.mamba, half)
        else:
            own = layer.self_attn
            weights = double(own.v_proj.weight), double(own.o_proj.weight)
            branch = partial(attention, seen[own], *weights)
        found.append(added(layer.input_layernorm, branch, seen[layer.input_layernorm]))
        norm, mlp = second_norm(layer), getattr(layer, "mlp", None) or layer.feed_forward
        found.append(added(norm, partial(swiglu, mlp, half), seen[norm]))
    return found


def second_norm(layer: Any) -> Any:
    return getattr(layer, "pre_ff_layernorm", None) or layer.post_attention_layernorm


def parallel_layers(model: Any, seen: Recorded, half: bool) -> list[Tensor]:
    """Layers of GPT-NeoX: attention and MLP side by side."""
    found = []
    for layer in model.gpt_neox.layers:
        own, norm, other = layer.attention, layer.input_layernorm, layer.post_attention_layernorm
        x = seen[norm]
        qkv = double(own.query_key_value.weight).view(len(seen[own]), 3, -1, x.shape[-1])
        weights = qkv[:, 2].flatten(0, 1), double(own.dense.weight)
        branch = partial(attention, seen[own], *weights)
        one = added(norm, branch, x)
        found.append(one + jacobian(lambda x, n=other, m=layer.mlp: gelu(m, normed(n, x)), x))
    return found


def blocks(model: Any) -> Any:
    """The blocks of one of the models above, in their order."""
    for outer in ("backbone", "model", "gpt_neox"):
        if hasattr(model, outer):
            return getattr(model, outer).layers
    raise AssertionError(f"no blocks are known of {type(model).__name__}")
