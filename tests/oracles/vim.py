"""Vision Mamba written again in float64 from a state dict, with loops over tokens.

Nothing here calls the package.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from oracles import COMPONENTS, PRESETS, conv_matrices, diagonal_matrices, scan_matrices

Weights = dict[str, Tensor]


def released_shapes(width: int, depth: int = 24) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the released checkpoints, of patches of 16 in images of 224."""
    inner, rank, state = 2 * width, width // 16, 16
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 197, width),
        "patch_embed.proj.weight": (width, 3, 16, 16),
        "patch_embed.proj.bias": (width,),
        "head.weight": (1000, width),
        "head.bias": (1000,),
        "norm_f.weight": (width,),
    }
    for layer in range(depth):
        shapes[f"layers.{layer}.norm.weight"] = (width,)
        mixer = f"layers.{layer}.mixer"
        shapes[f"{mixer}.in_proj.weight"] = (2 * inner, width)
        shapes[f"{mixer}.out_proj.weight"] = (width, inner)
        shapes[f"{mixer}.A_log"] = shapes[f"{mixer}.A_b_log"] = (inner, state)
        for end in ("", "_b"):
            shapes[f"{mixer}.D{end}"] = (inner,)
            shapes[f"{mixer}.conv1d{end}.weight"] = (inner, 1, 4)
            shapes[f"{mixer}.conv1d{end}.bias"] = (inner,)
            shapes[f"{mixer}.x_proj{end}.weight"] = (rank + 2 * state, inner)
            shapes[f"{mixer}.dt_proj{end}.weight"] = (inner, rank)
            shapes[f"{mixer}.dt_proj{end}.bias"] = (inner,)
    return shapes


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


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


# --- one mixer ------------------------------------------------------------------------------


def select(w: Weights, end: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u before SiLU and dt (L, D), B and C (L, N), for x (L, D) read from the first token on."""
    taps = w[f"conv1d{end}.weight"][:, 0]
    bias = w.get(f"conv1d{end}.bias", torch.zeros(len(taps)).double())
    u = torch.stack(
        [
            bias + sum(taps[:, -1 - k] * x[t - k] for k in range(taps.shape[1]) if t >= k)
            for t in range(len(x))
        ]
    )
    rank = w[f"dt_proj{end}.weight"].shape[1]
    state = w["A_log"].shape[1]
    selected = silu(u) @ w[f"x_proj{end}.weight"].T
    t, b, c = selected[:, :rank], selected[:, rank : rank + state], selected[:, rank + state :]
    dt = softplus(t @ w[f"dt_proj{end}.weight"].T + w[f"dt_proj{end}.bias"])
    return u, dt, b, c


def scan(u: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, skip: Tensor) -> Tensor:
    a = -a_log.exp()
    h, out = torch.zeros_like(a), []
    for t in range(len(u)):
        h = torch.exp(dt[t, :, None] * a) * h + dt[t, :, None] * b[t] * u[t, :, None]
        out.append(h @ c[t] + skip * u[t])
    return torch.stack(out)


def mix(w: Weights, hidden: Tensor, kind: str, halve: bool) -> Tensor:
    """The mixer's output for hidden (L, E), all in float64."""
    xz = hidden @ w["in_proj.weight"].T + w.get("in_proj.bias", 0)
    x, z = xz[:, : xz.shape[1] // 2], xz[:, xz.shape[1] // 2 :]
    u, *rest = select(w, "", x)
    parts = (silu(u), *rest)
    y = scan(*parts, w["A_log"], w["D"]) * silu(z)
    if kind == "v1":
        back = scan(*(p.flip(0) for p in parts), w["A_b_log"], w["D"])
        y = y + (back * silu(z.flip(0))).flip(0)
    if kind == "v2":
        u, *rest = select(w, "_b", x.flip(0))
        back = scan(silu(u), *rest, w["A_b_log"], w["D_b"]) * silu(z.flip(0))
        y = y + back.flip(0)
        y = y / 2 if halve else y
    return (y @ w["out_proj.weight"].T + w.get("out_proj.bias", 0)) * w.get("gamma", 1)


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
        "middle": [patches // 2],
        "head": [0],
        "end": [patches],
        "double": [0, patches + 1],
        "none": [],
    }[cls]


def norm(w: Weights, name: str, x: Tensor) -> Tensor:
    if f"{name}.bias" in w:  # LayerNorm
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


# --- matrices -------------------------------------------------------------------------------


def matrices(
    module: nn.Module,
    hidden: Tensor,
    kind: str,
    halve: bool,
    components: str | Collection[str] = "unified",
) -> tuple[Tensor, Tensor]:
    """alpha of every channel from the forward and from the backward direction, (B, D, L, L)."""
    if isinstance(components, str):
        preset, *removed = components.split("-")
        components = PRESETS[preset] - set(removed)
    assert set(components) <= COMPONENTS
    w = double_weights(module)
    both = [_matrices(w, h.double(), kind, halve, set(components)) for h in hidden]
    return torch.cat([f for f, _ in both]), torch.cat([b for _, b in both])


def _matrices(
    w: Weights, hidden: Tensor, kind: str, halve: bool, components: set[str]
) -> tuple[Tensor, Tensor]:
    xz = hidden @ w["in_proj.weight"].T + w.get("in_proj.bias", 0)
    x, z = xz[:, : xz.shape[1] // 2], xz[:, xz.shape[1] // 2 :]
    tokens, channels = x.shape
    shape = (1, tokens, channels, 1)
    eye = torch.eye(tokens).double().expand(1, channels, tokens, tokens)

    def one_way(end: str, x: Tensor, a_log: str, flip_scan: bool = False) -> Tensor:
        """(scan + D) . activation . conv for values in the given order."""
        u, dt, b, c = select(w, end, x)
        core = torch.zeros_like(eye)
        if "scan" in components:
            parts = [p.flip(0)[None] if flip_scan else p[None] for p in (dt, b, c)]
            found = scan_matrices(parts[0], -w[a_log].exp(), parts[1], parts[2])
            core = core + (found.flip(-1, -2) if flip_scan else found)
        if "skip" in components:
            core = core + w[f"D{end}"][:, None, None] * eye
        if not components & {"scan", "skip"}:
            core = eye * 0 if flip_scan else eye  # v1 has one core, a sum
        if "activation" in components:
            core = core @ diagonal_matrices(torch.sigmoid(u)[None, :, :, None], shape)
        if "conv" in components:
            taps = w[f"conv1d{end}.weight"]
            lags = [taps.shape[-1] - 1 - k for k in range(taps.shape[-1])]
            core = core @ conv_matrices(taps, lags, (1, tokens, channels, 1))
        return core

    gate = diagonal_matrices(silu(z)[None, :, :, None], shape) if "gate" in components else eye
    ahead = gate @ one_way("", x, "A_log")
    back = torch.zeros_like(ahead)
    if kind == "v1":
        back = gate @ one_way("", x, "A_b_log", flip_scan=True)
    if kind == "v2":
        back = gate @ one_way("_b", x.flip(0), "A_b_log").flip(-1, -2)
        if halve:
            ahead, back = ahead / 2, back / 2
    return ahead, back
