"""Vision Mamba written again in float64 from a state dict.

Nothing here calls the package.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from oracles import Parts, alpha, chosen, mamba1_parts, scanned_backwards

Weights = dict[str, Tensor]


@torch.no_grad()
def randomise(module: nn.Module) -> Any:
    """Every parameter random: nothing is zero, one, or the same in both directions."""
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape).to(parameter)
        kind = name.rpartition(".")[2]
        if kind in ("A_log", "A_b_log"):
            parameter.copy_(0.6 * noise)
        elif "dt_proj" in name and kind == "bias":
            parameter.copy_(noise - 1)
        elif ("norm" in name and kind == "weight") or kind == "gamma":
            parameter.copy_(1 + 0.3 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(0.5 * noise)
        elif kind == "pos_embed" or "cls" in kind:
            parameter.copy_(noise)
        else:
            parameter.copy_(noise / math.sqrt(parameter[0].numel()))
    return module.eval()


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


# --- one mixer ------------------------------------------------------------------------------


def parts(w: Weights, hidden: Tensor, end: str = "", a_log: str = "A_log") -> Parts:
    """One direction at hidden (B, L, E), in the order in which it reads the tokens."""

    def projection(name: str) -> SimpleNamespace:
        return SimpleNamespace(weight=w[f"{name}.weight"], bias=w.get(f"{name}.bias"))

    own = {name: projection(name + end) for name in ("conv1d", "x_proj", "dt_proj")}
    both = {name: projection(name) for name in ("in_proj", "out_proj")}
    rest = {"A_log": w[a_log], "D": w[f"D{end}"], "activation": "silu"}
    return mamba1_parts(SimpleNamespace(**own, **both, **rest), hidden)


def mix(w: Weights, hidden: Tensor, kind: str, halve: bool) -> Tensor:
    """The mixer's output for hidden (L, E), all in float64."""
    hidden = hidden[None]
    y = parts(w, hidden).before_projection
    if kind == "v1":
        y = y + scanned_backwards(parts(w, hidden, "", "A_b_log")).before_projection
    if kind == "v2":
        y = y + parts(w, hidden.flip(1), "_b", "A_b_log").before_projection.flip(1)
        y = y / 2 if halve else y
    return (y[0] @ w["out_proj.weight"].T + w.get("out_proj.bias", 0)) * w.get("gamma", 1)


def double_weights(module: nn.Module) -> Weights:
    return {name: w.detach().double() for name, w in module.state_dict().items()}


# --- the whole model ------------------------------------------------------------------------


def forward(model: Any, images: Tensor, cls: str, pool: str, kind: str, halve: bool) -> Tensor:
    w = double_weights(model)
    return torch.stack([_one(w, model, image.double(), cls, pool, kind, halve) for image in images])


def _one(
    w: Weights, model: Any, image: Tensor, cls: str, pool: str, kind: str, halve: bool
) -> Tensor:
    kernel = w["patch_embed.proj.weight"]
    side, stride = kernel.shape[-1], model.patch_embed.proj.stride[0]
    tokens = []
    for top in range(0, image.shape[1] - side + 1, stride):
        for left in range(0, image.shape[2] - side + 1, stride):
            patch = image[:, top : top + side, left : left + side]
            tokens.append((kernel * patch).sum((1, 2, 3)) + w["patch_embed.proj.bias"])
    at = cls_places(cls, len(tokens))
    if cls == "double":
        tokens = [w["cls_token_head"][0, 0], *tokens, w["cls_token_tail"][0, 0]]
    elif cls != "none":
        tokens.insert(at[0], w["cls_token"][0, 0])
    x = torch.stack(tokens)
    if "pos_embed" in w:
        x = x + w["pos_embed"][0]
    for layer in range(len(model.layers)):
        start = f"layers.{layer}.mixer."
        mixer = {k.removeprefix(start): v for k, v in w.items() if k.startswith(start)}
        x = x + mix(mixer, norm(w, f"layers.{layer}.norm", x), kind, halve)
    x = norm(w, "norm_f", x)
    logits = x @ w["head.weight"].T + w["head.bias"]
    if at:
        return logits[at].mean(0)
    return {"none": logits[-1], "mean": logits.mean(0), "max": logits.amax(0), "all": logits}[pool]


def cls_places(cls: str, patches: int) -> list[int]:
    return {
        "middle": [patches // 2], "head": [0], "end": [patches], "double": [0, patches + 1],
        "none": [],
    }[cls]  # fmt: skip


def norm(w: Weights, name: str, x: Tensor) -> Tensor:
    if f"{name}.bias" in w:  # LayerNorm
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


# --- matrices -------------------------------------------------------------------------------


def matrices(
    module: nn.Module, hidden: Tensor, kind: str, halve: bool,
    components: str | Collection[str] = "unified",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """alpha of every channel from the forward and from the backward direction, (B, D, L, L)."""
    w, components = double_weights(module), chosen(components)
    ahead = alpha(parts(w, hidden), components)
    back = torch.zeros_like(ahead)
    if kind == "v1" and components & {"scan", "skip"}:  # it has one core, a sum
        back = alpha(scanned_backwards(parts(w, hidden, "", "A_b_log")), components)
    if kind == "v2":
        back = alpha(parts(w, hidden.flip(1), "_b", "A_b_log"), components).flip(-1, -2)
        if halve:
            ahead, back = ahead / 2, back / 2
    return ahead, back
