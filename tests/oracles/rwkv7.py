"""RWKV-7 token by token from its weights, by the names of published checkpoints.

Nothing here calls the package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
#: What is added to the variance of a head.
EPS = 64e-5


def forward(weights: Weights, ids: Tensor) -> Tensor:
    """The logits (L, V) of one text in float64, its tokens one after the other."""
    z = {name: x.detach().double().squeeze() for name, x in weights.items()}
    heads, size = weights["blocks.0.att.r_k"].shape
    depth = 1 + max(int(name.split(".")[1]) for name in z if name.startswith("blocks."))
    states = [torch.zeros(heads, size, size, dtype=torch.float64) for _ in range(depth)]
    width = heads * size
    read_before = [torch.zeros(2, width, dtype=torch.float64) for _ in range(depth)]
    logits = []
    for token in ids.tolist():
        x = norm(z["emb.weight"][token], z, "blocks.0.ln0")
        first = torch.zeros(width, dtype=torch.float64)
        for n in range(depth):
            here = norm(x, z, f"blocks.{n}.ln1")
            out, first = mixed(z, n, here, read_before[n][0], states[n], first)
            read_before[n][0], x = here, x + out
            here = norm(x, z, f"blocks.{n}.ln2")
            k = here + (read_before[n][1] - here) * z[f"blocks.{n}.ffn.x_k"]
            k = z[f"blocks.{n}.ffn.key.weight"] @ k
            x = x + z[f"blocks.{n}.ffn.value.weight"] @ k.clamp_min(0).pow(2)
            read_before[n][1] = here
        logits.append(z["head.weight"] @ norm(x, z, "ln_out"))
    return torch.stack(logits)


def mixed(
    z: Weights, n: int, x: Tensor, before: Tensor, state: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """What one token's mixing adds, and the first block's values; the state changes in place."""
    at = {name.removeprefix(f"blocks.{n}.att."): x for name, x in z.items()}
    heads, size, _ = state.shape
    r, w, k, v, a, g = (x + (before - x) * at[f"x_{name}"] for name in "rwkvag")
    rate = torch.sigmoid(at["a0"] + a @ at["a1"] @ at["a2"])
    log_decay = -torch.sigmoid(at["w0"] + torch.tanh(w @ at["w1"]) @ at["w2"]) / math.sqrt(math.e)
    value, key = at["value.weight"] @ v, at["key.weight"] @ k
    if n == 0:
        first = value
    else:
        share = torch.sigmoid(at["v0"] + v @ at["v1"] @ at["v2"])
        value = (1 - share) * value + share * first
    erase = (key * at["k_k"]).view(heads, size)
    erase = erase / erase.norm(dim=-1, keepdim=True)
    key = (key * (1 + (rate - 1) * at["k_a"])).view(heads, size)
    value, rate = value.view(heads, size), rate.view(heads, size)
    found = torch.einsum("hn,hnp->hp", erase, state)
    state *= log_decay.view(heads, size, 1).exp()
    state -= (rate * erase)[..., None] * found[:, None]
    state += key[..., None] * value[:, None]
    query = (at["receptance.weight"] @ r).view(heads, size)
    out = torch.einsum("hn,hnp->hp", query, state)
    out = F.layer_norm(out, (size,), eps=EPS).flatten() * at["ln_x.weight"] + at["ln_x.bias"]
    own = (query * key * at["r_k"].view(heads, size)).sum(-1, keepdim=True) * value
    gate = torch.sigmoid(g @ at["g1"]) @ at["g2"]
    return at["output.weight"] @ (gate * (out + own.flatten())), first


def norm(x: Tensor, z: Weights, name: str) -> Tensor:
    return F.layer_norm(x, x.shape, z[f"{name}.weight"], z[f"{name}.bias"])


@torch.no_grad()
def randomise(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter random, none of them zero or one."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape).to(parameter)
        if "ln" in name and name.endswith("weight"):
            parameter.copy_(1 + 0.3 * noise)
        elif parameter.dim() == 2:
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        else:
            parameter.copy_(0.5 * noise)
    return model.eval()
