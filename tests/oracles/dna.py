"""Caduceus and HyenaDNA written again in float64 from a state dict, with loops over tokens.

Nothing here calls the package.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracles import vim

Weights = dict[str, Tensor]

#: The other strand's token of each, of 16.
OTHER = [0, 1, 2, 3, 4, 5, 6, 10, 9, 8, 7, 11, 12, 13, 14, 15]


def under(weights: Weights, prefix: str) -> Weights:
    """The weights whose names begin with ``prefix``, without it."""
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def filtered(weight: Tensor, x: Tensor) -> Tensor:
    """A short causal convolution of weight (C, 1, K), whose last tap reads the token itself."""
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for k in range(min(t + 1, weight.shape[-1])):
            out[t] += weight[:, 0, -1 - k] * x[t - k]
    return out


# --- Caduceus ---------------------------------------------------------------------------------


def bi_mamba(w: Weights, hidden: Tensor) -> Tensor:
    """For hidden (L, E)."""
    ahead = vim.mix(under(w, "mamba_fwd."), hidden, "none", False)
    return ahead + vim.mix(under(w, "mamba_rev."), hidden.flip(0), "none", False).flip(0)


def caduceus(w: Weights, ids: Tensor, depth: int, rcps: bool, fused: bool) -> Tensor:
    """Logits of tokens (L, V), or of a classifier that reads the mean."""
    stem = "caduceus.backbone."
    if not rcps:
        table = w[f"{stem}embeddings.word_embeddings.weight"]
        x = table[ids]
        for i in range(depth):
            layer = under(w, f"{stem}layers.{i}.")
            x = x + bi_mamba(under(layer, "mixer."), rms_norm(x, layer["norm.weight"]))
        x = rms_norm(x, w[f"{stem}norm_f.weight"])
        return x.mean(0) @ w["score.weight"].T if "score.weight" in w else x @ table.T
    table = w[f"{stem}embeddings.word_embeddings.embedding.weight"]
    # the sequence, and its reverse complement as it is read
    reverse = torch.tensor([OTHER[i] for i in ids.tolist()[::-1]])
    a, b = table[ids], table[reverse]
    name = "norm.weight" if fused else "norm.submodule.weight"
    for i in range(depth):
        layer = under(w, f"{stem}layers.{i}.")
        if fused:  # what was read as the reverse complement is read as the sequence, and back
            a, b = b.flip(0, 1), a.flip(0, 1)
        mixer = under(layer, "mixer.submodule.")
        a = a + bi_mamba(mixer, rms_norm(a, layer[name]))
        b = b + bi_mamba(mixer, rms_norm(b, layer[name]))
    last = w[f"{stem}{'norm_f.weight' if fused else 'norm_f.submodule.weight'}"]
    a, b = rms_norm(a, last), rms_norm(b, last)
    if "score.weight" in w:
        return (a.mean(0) + b.mean(0)) @ w["score.weight"].T / 2
    return a @ table.T + b.flip(0) @ table[OTHER].T


# --- HyenaDNA ---------------------------------------------------------------------------------


def filters(w: Weights, tokens: int) -> Tensor:
    """The long filters (tokens, D), of weights under ``filter_fn``."""
    z, t = w["pos_emb.z"][0, :tokens], w["pos_emb.t"][0, :tokens]
    last = max(int(k.split(".")[1]) for k in w if k.startswith("implicit_filter."))
    x = z
    for i in range(0, last, 2):
        x = x @ w[f"implicit_filter.{i}.weight"].T + w[f"implicit_filter.{i}.bias"]
        x = torch.sin(w["implicit_filter.1.freq"][0] * x)
    x = x @ w[f"implicit_filter.{last}.weight"].T
    return x * (torch.exp(-t * w["modulation.deltas"][0].abs()) + 0.05)


def hyena_parts(w: Weights, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The projected stream before the short convolution and behind it, (L, (order + 1) E)."""
    projected = hidden @ w["in_proj.weight"].T + w["in_proj.bias"]
    short = filtered(w["short_filter.weight"], projected)
    return projected, short + w["short_filter.bias"]


def hyena(w: Weights, hidden: Tensor) -> Tensor:
    """The mixer's output for hidden (L, E)."""
    width, tokens = hidden.shape[1], len(hidden)
    _, short = hyena_parts(w, hidden)
    first, *gates, v = short.split(width, 1)
    long = filters(under(w, "filter_fn."), tokens).split(width, 1)
    biases = w["filter_fn.bias"].split(width)
    for gate, h, bias in zip(gates[::-1], long, biases, strict=True):
        v = gate * v
        found = torch.stack([sum(h[k] * v[t - k] for k in range(t + 1)) for t in range(tokens)])
        v = found + bias * v
    return (first * v) @ w["out_proj.weight"].T + w["out_proj.bias"]


def layer_norm(x: Tensor, w: Weights) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / scale * w["weight"] + w["bias"]


def hyenadna(w: Weights, ids: Tensor, depth: int) -> Tensor:
    """Logits of tokens (L, V), or of a classifier that reads the last."""
    x = w["hyena.backbone.embeddings.word_embeddings.weight"][ids]
    for i in range(depth):
        layer = under(w, f"hyena.backbone.layers.{i}.")
        x = x + hyena(under(layer, "mixer."), layer_norm(x, under(layer, "norm1.")))
        u = layer_norm(x, under(layer, "norm2.")) @ layer["mlp.fc1.weight"].T
        u = u + layer["mlp.fc1.bias"]
        u = u / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        x = x + u @ layer["mlp.fc2.weight"].T + layer["mlp.fc2.bias"]
    x = layer_norm(x, under(w, "hyena.backbone.ln_f."))
    return x[-1] @ w["score.weight"].T if "score.weight" in w else x @ w["lm_head.weight"].T


# --- StripedHyena 2 ---------------------------------------------------------------------------


def cascade(w: Weights, u: Tensor) -> Tensor:
    """The gated convolution of a projected stream u (L, 3 E)."""
    tokens, short = len(u), filtered(w["short_filter_weight"], u)
    x2, x1, v = short[:, 0::3], short[:, 1::3], short[:, 2::3]
    width = v.shape[1]
    if "h" in w:
        filters = w["h"][:, 0]
        filters = filters if filters.shape[1] >= 128 else filters.flip(1)
        h = [filters[channel // (width // len(filters))] for channel in range(width)]
    else:
        time = torch.arange(tokens)
        h = [
            (w["residues"][c, :, None] * torch.exp(w["log_poles"][c] * time)).sum(0)
            for c in range(width)
        ]
    skip = w.get("D", torch.zeros(width).double())
    out = torch.zeros_like(v)
    for t in range(tokens):
        for c in range(width):
            read = range(min(t + 1, len(h[c])))
            mixed = sum(h[c][k] * x1[t - k, c] * v[t - k, c] for k in read)
            out[t, c] = x2[t, c] * (mixed + skip[c] * x1[t, c] * v[t, c])
    return out


def striped_attention(w: Weights, hidden: Tensor, heads: int, scaling: float = 1.0) -> Tensor:
    """For hidden (L, E)."""
    tokens, width = hidden.shape
    size = width // heads
    qkv = hidden @ w["Wqkv.weight"].T
    found = []
    for head in range(heads):
        q, k, v = qkv[:, 3 * size * head : 3 * size * (head + 1)].split(size, 1)
        turned = []
        for x in (q, k):
            rows = []
            for t in range(tokens):
                angle = t / scaling * w["rotary_emb.inv_freq"]
                pairs = torch.complex(x[t, : size // 2], x[t, size // 2 :]) * torch.exp(1j * angle)
                rows.append(torch.cat([pairs.real, pairs.imag]))
            turned.append(torch.stack(rows))
        scores = turned[0] @ turned[1].T / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
        found.append(scores.softmax(-1) @ v)
    return torch.cat(found, 1) @ w["out_proj.weight"].T + w["out_proj.bias"]


def scale_norm(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    return scale * x / (x.square().mean(-1, keepdim=True).sqrt() + eps)


def striped_hyena(w: Weights, ids: Tensor, heads: int) -> Tensor:
    """Logits of tokens (L, V)."""
    table = w["embedding_layer.weight"]
    x, i = table[ids], 0
    while f"blocks.{i}.pre_norm.scale" in w:
        block = under(w, f"blocks.{i}.")
        normed = scale_norm(x, block["pre_norm.scale"])
        if "projections.weight" in block:
            y = cascade(under(block, "filter."), normed @ block["projections.weight"].T)
            x = x + y @ block["out_filter_dense.weight"].T + block["out_filter_dense.bias"]
        else:
            x = x + striped_attention(under(block, "inner_mha_cls."), normed, heads)
        normed = scale_norm(x, block["post_norm.scale"])
        gate = normed @ block["mlp.l1.weight"].T
        if i == 0:
            gate = gate / 2 * (1 + torch.erf(gate / math.sqrt(2)))
        x = x + (gate * (normed @ block["mlp.l2.weight"].T)) @ block["mlp.l3.weight"].T
        i += 1
    return scale_norm(x, w["norm.scale"]) @ table.T
