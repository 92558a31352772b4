"""Small networks put together from real mixers in float64, as people wrap them.

Every class says in ``forward`` what it computes; :mod:`oracles.wrapped` goes through the same
classes and writes down what that means for each method.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from zoo.mamba import randomise

#: Features of the stream, entries of the vocabulary, most tokens with a position of their own.
WIDTH, VOCABULARY, LONGEST = 8, 11, 16
#: Added to mean squares: norms of few features must not blow rounding errors up.
EPS = 0.02

#: By name: the class of the mixer, the configuration, and its options.
_SMALL = {"num_hidden_layers": 1, "vocab_size": 19}
_MIXERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mamba": (
        "mamba.MambaMixer",
        "MambaConfig",
        {"hidden_size": WIDTH, "state_size": 3, "time_step_rank": 2, "conv_kernel": 3, "expand": 1},
    ),
    "mamba2": ("mamba2.Mamba2Mixer", "Mamba2Config", {
        "hidden_size": WIDTH, "expand": 1, "num_heads": 4, "head_dim": 2, "n_groups": 2,
        "state_size": 3, "conv_kernel": 3, "chunk_size": 4, "layer_norm_epsilon": EPS,
    }),
    "rwkv": ("rwkv.RwkvSelfAttention", "RwkvConfig", {"hidden_size": WIDTH}),
    "griffin": ("recurrent_gemma.RecurrentGemmaRecurrentBlock", "RecurrentGemmaConfig", {
        "hidden_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "lru_width": WIDTH, "conv1d_width": 3,
    }),
    "lfm2": ("lfm2.Lfm2ShortConv", "Lfm2Config", {
        "hidden_size": WIDTH, "num_attention_heads": 1, "num_key_value_heads": 1,
        "layer_types": ["conv"], "conv_bias": True,
    }),
    "llama": ("llama.LlamaAttention", "LlamaConfig", {
        "hidden_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 1,
        "attention_bias": True,
    }),
    "gpt2": ("gpt2.GPT2Attention", "GPT2Config", {"n_embd": WIDTH, "n_head": 2}),
}  # fmt: skip
KINDS = tuple(_MIXERS)


_CLASSES = {path.split(".")[1] for path, _, _ in _MIXERS.values()}


def is_mixer(module: nn.Module) -> bool:
    """Whether a module is one of the mixers."""
    return type(module).__name__ in _CLASSES


def mixer(kind: str) -> nn.Module:
    """A mixer with random parameters."""
    path, settings, options = _MIXERS[kind]
    model, name = path.split(".")
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    config = getattr(transformers, settings)(**_SMALL | options)
    config._attn_implementation = "sdpa"
    made: nn.Module = randomise(getattr(modeling, name)(config, 0))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("recurrent_param"):
                parameter.copy_(torch.randn_like(parameter) - 2)
            if "time_mix" in name:
                parameter.copy_(torch.rand_like(parameter))
    return made.double()


def mixed(module: Any, x: Tensor) -> Tensor:
    """What a mixer returns for (B, L, E), called as its own model calls it."""
    kind, positions = type(module).__name__, torch.arange(x.shape[1])[None]
    if kind == "RecurrentGemmaRecurrentBlock":
        found = module(x, position_ids=positions, attention_mask=None, use_cache=False)
    elif kind == "LlamaAttention":
        found = module(x, position_embeddings=_rotation(positions, module.head_dim))
    else:
        found = module(x)
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def _rotation(positions: Tensor, per_head: int) -> tuple[Tensor, Tensor]:
    frequency = 10_000 ** (-torch.arange(0, per_head, 2).double() / per_head)
    angle = (positions[..., None] * frequency).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


@contextmanager
def never_rounded() -> Iterator[None]:
    """The mixers' own code keeps to float64 where it would round to float32."""
    original, double = Tensor.to, torch.float64

    # torch looks methods up by name where modes are on
    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dtype == double and torch.float32 in (*args, *kwargs.values()):
            args = tuple(double if a is torch.float32 else a for a in args)
            kwargs = {k: double if a is torch.float32 else a for k, a in kwargs.items()}
        return original(x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", to)
        patch.setattr(Tensor, "type", lambda x, dtype: to(x, dtype))
        patch.setattr(Tensor, "float", lambda x: to(x, torch.float32))
        yield


# --- parts within tokens -------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Written out, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


NORMS = (nn.LayerNorm, nn.RMSNorm, RMSNorm)


def norm(kind: str) -> nn.Module:
    """One of "layer", "rms", "torch" and "none"."""
    return {
        "layer": lambda: nn.LayerNorm(WIDTH, eps=EPS),
        "rms": RMSNorm,
        "torch": lambda: nn.RMSNorm(WIDTH, eps=EPS),
        "none": nn.Identity,
    }[kind]()


class MLP(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 6) if gated else None
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            out: Tensor = self.down(F.gelu(self.up(x)))
        else:
            out = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


# --- blocks --------------------------------------------------------------------------------------


class Held(nn.Module):
    """A mixer in a module of its own, of which the residual connection is outside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return mixed(self.inner, x)


class Residual(nn.Module):
    """x + scale mixer(norm(x)), and an MLP behind it or beside it.

    The scale is 1, one half, or a parameter for each feature; in its place may stand a norm or a
    projection.
    """

    def __init__(self, kind: str, norms: str, held: bool, scale: str, mlp: str, place: str) -> None:
        super().__init__()
        self.norm, self.mixer = norm(norms), mixer(kind)
        self.scale: Any = 0.5 if scale == "half" else None
        if scale == "features":
            self.scale = nn.Parameter(torch.randn(WIDTH))
        self.behind: nn.Module | None = None
        if scale == "projection":
            self.behind = nn.Linear(WIDTH, WIDTH)
        elif scale not in ("one", "half", "features"):
            self.behind = norm(scale)
        if held:
            self.mixer = Held(self.mixer)
        self.mlp = None if mlp == "none" else MLP(mlp == "gated")
        self.mlp_norm = None if mlp == "none" or place == "beside" else norm(norms)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out = self.mixer(h) if isinstance(self.mixer, Held) else mixed(self.mixer, h)
        out = out if self.scale is None else self.scale * out
        out = out if self.behind is None else self.behind(out)
        if self.mlp is None:
            return x + out
        if self.mlp_norm is None:
            return x + (out + self.mlp(h))
        x = x + out
        behind: Tensor = x + self.mlp(self.mlp_norm(x))
        return behind


class Bare(nn.Module):
    """mixer(norm(x)), without a residual connection, or times a gate of what it reads."""

    def __init__(self, kind: str, norms: str, gated: bool) -> None:
        super().__init__()
        self.norm, self.mixer = norm(norms), mixer(kind)
        self.gate = nn.Linear(WIDTH, WIDTH) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out = mixed(self.mixer, h)
        return out if self.gate is None else out * F.silu(self.gate(h))


class Pair(nn.Module):
    """Two mixers one after the other in one block."""

    def __init__(self, kinds: tuple[str, str], norms: str) -> None:
        super().__init__()
        self.norm, self.other_norm = norm(norms), norm(norms)
        self.first, self.second = map(mixer, kinds)

    def forward(self, x: Tensor) -> Tensor:
        x = x + mixed(self.first, self.norm(x))
        return x + mixed(self.second, self.other_norm(x))


class Directions(nn.Module):
    """Both directions, or two mixers that read the same."""

    def __init__(self, kinds: tuple[str, str], backwards: bool, same: bool) -> None:
        super().__init__()
        self.one = mixer(kinds[0])
        self.other = self.one if same else mixer(kinds[1])
        self.backwards = backwards

    def forward(self, h: Tensor) -> Tensor:
        if self.backwards:
            return mixed(self.one, h) + mixed(self.other, h.flip(1)).flip(1)
        return mixed(self.one, h) + mixed(self.other, h)


class Beside(nn.Module):
    """x + f(norm(x)) + b(norm(x)), b backwards or not; summed in a module of their own or here."""

    def __init__(
        self, kinds: tuple[str, str], norms: str, backwards: bool, same: bool, held: bool
    ) -> None:
        super().__init__()
        self.norm, self.held = norm(norms), held
        pair = Directions(kinds, backwards, same)
        if held:
            self.pair = pair
        else:
            self.one, self.other, self.backwards = pair.one, pair.other, backwards

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.held:
            summed: Tensor = x + self.pair(h)
            return summed
        x = x + mixed(self.one, h)
        if self.backwards:
            return x + mixed(self.other, h.flip(1)).flip(1)
        return x + mixed(self.other, h)


class Doubled(nn.Module):
    """Two branches of one mixer, each with a residual connection of its own, summed."""

    def __init__(self, kinds: tuple[str, str], norms: str) -> None:
        super().__init__()
        self.norm, self.other_norm = norm(norms), norm(norms)
        self.one, self.other = map(mixer, kinds)

    def forward(self, x: Tensor) -> Tensor:
        one = x + mixed(self.one, self.norm(x))
        return one + (x + mixed(self.other, self.other_norm(x)))


class Parts(nn.Module):
    """A norm and a mixer that the network itself calls, as in x + mixer(norm(x))."""

    def __init__(self, kind: str, norms: str) -> None:
        super().__init__()
        self.norm, self.mixer = norm(norms), mixer(kind)


class Local(nn.Module):
    """x + mlp(norm(x))."""

    def __init__(self, norms: str, gated: bool) -> None:
        super().__init__()
        self.norm, self.mlp = norm(norms), MLP(gated)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Backwards(nn.Module):
    """A block that reads the tokens from the other end."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x.flip(1)).flip(1)
        return out


class Turned(nn.Module):
    """All that follows reads the tokens from the other end."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1)


class Twice(nn.Module):
    """A block that is run twice, its parts being shared."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(self.block(x))
        return out


class Branches(nn.Module):
    """Two stacks of blocks that read the same, summed."""

    def __init__(self, one: list[nn.Module], other: list[nn.Module]) -> None:
        super().__init__()
        self.one, self.other = nn.Sequential(*one), nn.Sequential(*other)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(x) + self.other(x)
        return out


# --- networks ------------------------------------------------------------------------------------


class Network(nn.Module):
    """Embeddings, blocks, a norm, tokens that are read, a head.

    ``reads`` names tokens (``"all"``, ``"last"`` or their ``"mean"``) or gives a position;
    ``virtual`` counts the tokens that the network puts in front.
    """

    def __init__(
        self, blocks: list[nn.Module], norms: str, reads: str | int, positions: bool, virtual: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LONGEST, WIDTH)) if positions else None
        self.virtual = nn.Parameter(torch.randn(virtual, WIDTH)) if virtual else None
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head, self.reads = norm(norms), nn.Linear(WIDTH, VOCABULARY), reads

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs if inputs.is_floating_point() else self.embed(inputs)
        if self.virtual is not None:
            x = torch.cat([self.virtual.expand(len(x), -1, -1), x], 1)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            apart = isinstance(block, Parts)
            x = x + mixed(block.mixer, block.norm(x)) if apart else block(x)
        out: Tensor = self.head(self.read(self.norm(x)))
        return out

    def read(self, x: Tensor) -> Tensor:
        if self.reads == "all":
            return x
        if self.reads == "mean":
            return x.mean(1)
        return x[:, -1 if self.reads == "last" else int(self.reads)]


class Adapted(nn.Linear):
    """A projection with a low-rank adapter, which can be switched off."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__(inner.in_features, inner.out_features, inner.bias is not None)
        self.weight, self.bias = inner.weight, inner.bias
        scale = 1 / math.sqrt(inner.in_features)
        self.down = nn.Parameter(scale * torch.randn(2, inner.in_features, dtype=torch.float64))
        self.up = nn.Parameter(0.5 * torch.randn(inner.out_features, 2, dtype=torch.float64))
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + x @ self.down.T @ self.up.T if self.on else out

    def settled(self, on: bool) -> nn.Linear:
        """A plain projection that computes the same."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None).double()
        plain.weight.data = self.weight.data + (self.up @ self.down).data * on
        if self.bias is not None:
            plain.bias.data = self.bias.data
        return plain


#: Projections of mixers that take adapters.
ADAPTED = ("in_proj", "out_proj", "x_proj", "value", "output", "linear_x", "q_proj", "o_proj")


def adapt(model: nn.Module) -> None:
    """Put adapters around projections of all mixers."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ADAPTED and type(child) is nn.Linear:
                setattr(module, name, Adapted(child))


@contextmanager
def switched(model: nn.Module, on: bool) -> Iterator[None]:
    """Adapters are on, or off, for the time of a ``with``; else they are on."""
    adapters = [module for module in model.modules() if isinstance(module, Adapted)]
    for adapter in adapters:
        adapter.on = on
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.on = True


def settle(model: nn.Module, on: bool) -> None:
    """Leave of adapters what they compute."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Adapted):
                setattr(module, name, child.settled(on))
