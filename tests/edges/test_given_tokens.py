"""Positions of edges count the given tokens, wherever a layer reads them, or are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from oracles.messages import run_without
from torch import Tensor, nn
from transformers import DynamicCache
from zoo.wrapped import Residual, mixer

from captum_ssm import Edges, knock_out
from captum_ssm.errors import InputError, QueryError, TrainingModeError

pytestmark = pytest.mark.slow


def block(kind: str = "mamba") -> Any:
    return Residual(kind, "rms", False, "one", "none", "behind")


class Between(nn.Module):
    """Blocks with functions of the stream before each of them."""

    def __init__(self, *before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.before = before
        self.blocks = nn.ModuleList(block() for _ in before)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        for change, one in zip(self.before, self.blocks, strict=True):
            x = one(change(x))
        return x


def made(*before: Callable[[Tensor], Tensor]) -> Any:
    return Between(*before).double().eval()


def same(x: Tensor) -> Tensor:
    return x


def tokens(batch: int = 2, length: int = 6) -> Tensor:
    return torch.randint(11, (batch, length))


def cut(model: Any, ids: Tensor, *edges: Edges) -> Tensor:
    with torch.no_grad(), knock_out(model, *edges):
        out: Tensor = model(ids)
    return out


def zeroed(shape: tuple[int, int], *pairs: tuple[int, int]) -> Tensor:
    out = torch.zeros(shape[0], shape[1], shape[1], dtype=torch.bool)
    for target, source in pairs:
        out[:, target, source] = True
    return out


def assert_cut(
    model: Any, ids: Tensor, layer: int, edge: tuple[int, int], at: tuple[int, int], length: int = 0
) -> None:
    entries = zeroed((len(ids), length or ids.shape[1]), at)
    expected, _ = run_without(model, ids, {layer: entries})
    found = cut(model, ids, Edges(layer, sources=edge[1], targets=edge[0]))
    assert oracles.relative_error(found, expected) <= 1e-6
    assert oracles.relative_error(found, model(ids).detach()) > 1e-5, "nothing is cut"


# --- what nobody can look into -------------------------------------------------------------------


def through_numpy(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    array = x.detach().numpy()
    out.numpy()[...] = array / np.sqrt((array**2).mean(-1, keepdims=True) + 0.02)
    return out


def test_kernels_between_layers_are_no_obstacle() -> None:
    ids = tokens()
    assert_cut(made(same, through_numpy), ids, 1, (4, 1), (4, 1))
    with torch.library._scoped_library("captum_ssm_edges", "DEF") as library:
        library.define("turned(Tensor x) -> Tensor")
        library.impl("turned", lambda x: 2 * x.flip(1), "CPU")
        # token 4 lies at 5 - 4, and is read after token 5
        assert_cut(made(same, torch.ops.captum_ssm_edges.turned), ids, 1, (1, 4), (4, 1))


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "the first token": lambda x: x + x[:, :1],
    "the last token": lambda x: x + x[:, -1:],
    "one token": lambda x: torch.cat([x[:, :3], x[:, 3:4] + x[:, 2:3], x[:, 4:]], 1),
    "the token before": lambda x: x + torch.nn.functional.pad(x, (0, 0, 1, -1)),
    "half as many": lambda x: (x[:, ::2] + x[:, 1::2]) / 2,
    "all examples": lambda x: x + x.mean(0),
    "another example": lambda x: x.roll(1, 0),
}


@pytest.mark.parametrize("length", [4, 12, 40])
@pytest.mark.parametrize("name", MIXING)
def test_a_layer_behind_what_mixes_tokens_is_refused(name: str, length: int) -> None:
    model, ids = made(same, MIXING[name]), tokens(2, length)
    with pytest.raises(InputError, match=r"'blocks\.1\.mixer'.*not found there"):
        cut(model, ids, Edges(1, 1, -1))
    assert_cut(model, ids, 0, (3, 1), (3, 1))  # the one before it is not
    cut(model, ids, Edges(1))  # nor is all of it


def test_a_layer_that_reads_none_of_the_tokens_is_refused() -> None:
    with pytest.raises(InputError, match=r"'blocks\.1\.mixer'.*not found there"):
        cut(made(same, torch.zeros_like), tokens(), Edges(1, 1, -1))


# --- where tokens lie ----------------------------------------------------------------------------


def in_front(x: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(x[:, :2]), x], 1)


def test_every_layer_by_itself() -> None:
    ids = tokens()
    swapped = made(same, lambda x: x[:, [0, 2, 1, 3, 4, 5]])
    assert_cut(swapped, ids, 1, (4, 1), (4, 2))
    longer = made(same, in_front, lambda x: x[:, 1:])
    assert_cut(longer, ids, 0, (4, 1), (4, 1))
    for layer, shift, length in ((1, 2, 8), (2, 1, 7)):
        found = cut(longer, ids, Edges(layer, sources=1, targets=4))
        expected = _by_hand(longer, ids, layer, 4 + shift, 1 + shift, length)
        assert oracles.relative_error(found, expected) <= 1e-6

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.one = nn.Embedding(11, 8), mixer("mamba")

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            out: Tensor = x + self.one(x) + self.one(x.flip(1)).flip(1)
            return out

    class Ended(Between):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(torch.cat([ids, ids[:, :1], 0 * ids[:, :1] + 7], 1))

    ended = Ended(same).double().eval()
    # the first token again, and one that was not given
    for sources, entries in ((5, [(6, 5)]), ([0, -1], [(6, 5), (6, 6), (6, 0), (0, 0), (0, 5)])):
        expected, _ = run_without(ended, ids, {0: zeroed((2, 8), *entries)})
        found = cut(ended, ids, Edges(0, sources=sources, targets=0))
        assert oracles.relative_error(found, expected) <= 1e-6

    both = Both().double().eval()
    found = cut(both, ids, Edges(0, sources=[1, 3], targets=[1, 3]))
    # in its second call the mixer reads them the other way round
    x, alone = both.table(ids).detach(), nn.Sequential(both.one)
    one, _ = run_without(alone, x, {0: zeroed((2, 6), *itertools.product([1, 3], [1, 3]))})
    turned = zeroed((2, 6), *itertools.product([4, 2], [4, 2]))
    other, _ = run_without(alone, x.flip(1), {0: turned})
    assert oracles.relative_error(found, x + one + other.flip(1)) <= 1e-6


def _by_hand(model: Any, ids: Tensor, layer: int, target: int, source: int, n: int) -> Tensor:
    """The layer alone, given what it reads, and the rest of the model behind it."""
    with torch.no_grad():
        x: Tensor = model.table(ids)
        for k, (change, one) in enumerate(zip(model.before, model.blocks, strict=True)):
            x = change(x)
            if k == layer:
                x, _ = run_without(one, x, {0: zeroed((len(ids), n), (target, source))})
            else:
                x = one(x)
    return x


class Turned(nn.Module):
    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.inner, self.change = inner, change or (lambda x: x.flip(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.change(self.inner(self.change(x)))
        return out


def test_of_images_those_of_the_first_mixer() -> None:
    class Patches(nn.Module):
        def __init__(self, *blocks: nn.Module) -> None:
            super().__init__()
            self.patch, self.blocks = nn.Conv2d(3, 8, 4, 4), nn.Sequential(*blocks)

        def forward(self, images: Tensor) -> Tensor:
            x = self.patch(images).flatten(2).transpose(1, 2)
            out: Tensor = self.blocks(x)
            return out

    images = torch.randn(2, 3, 8, 12).double()
    turned = Patches(Turned(block()), block()).double().eval()
    assert_cut(turned, images, 0, (4, 1), (4, 1), 6)
    assert_cut(turned, images, 1, (1, 4), (4, 1), 6)
    mixed = Patches(Turned(block(), MIXING["the first token"]), block()).double().eval()
    assert_cut(mixed, images, 0, (4, 1), (4, 1), 6)


# --- when the model is asked ---------------------------------------------------------------------


def test_a_changed_model_is_asked_anew() -> None:
    class Either(Between):
        backwards = False

        def forward(self, ids: Tensor, backwards: bool = False) -> Tensor:
            x: Tensor = self.table(ids)
            out: Tensor = self.blocks[0](x.flip(1) if self.backwards or backwards else x)
            return out

    model, ids = Either(same).double().eval(), tokens()
    assert_cut(model, ids, 0, (4, 1), (4, 1))
    model.backwards = True
    assert_cut(model, ids, 0, (1, 4), (4, 1))
    with torch.no_grad(), knock_out(model, Edges(0, sources=4, targets=1)):
        backwards = model(ids)
        model.backwards = False
        with pytest.raises(QueryError, match="before its source"):
            model(ids)
        assert torch.equal(model(ids, True), backwards)
        with pytest.raises(QueryError, match="before its source"):
            model(ids, False)

    class Packed(Between):
        """Moves its padding, the token 0, to the end."""

        def forward(self, ids: Tensor) -> Tensor:
            order = (ids == 0).long().argsort(dim=1, stable=True)
            x = self.table(ids).gather(1, order[..., None].expand(-1, -1, 8))
            out: Tensor = self.blocks[0](x)
            return out

    packed = Packed(same).double().eval()
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    padded = torch.tensor([[0, 4, 5, 6, 7]])
    with torch.no_grad(), knock_out(packed, Edges(0, sources=1, targets=3)):
        found = packed(ids), packed(padded)
    for x, one, at in zip((ids, padded), found, ((3, 1), (2, 0)), strict=True):
        expected, _ = run_without(packed, x, {0: zeroed((1, 5), at)})
        assert oracles.relative_error(one, expected) <= 1e-6


def test_being_asked_leaves_nothing_behind() -> None:
    model, ids = made(same, same), tokens()
    state, before = torch.get_rng_state(), model(ids)
    with torch.inference_mode():
        found = cut(model, ids, Edges(1, 1, 4))
    assert torch.equal(found, cut(model, ids, Edges(1, 1, 4)))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(ids), before)

    class Dropping(Between):
        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = super().forward(ids) + torch.rand(1)
            return out

    with torch.no_grad(), knock_out(noisy := Dropping(same).double(), Edges(0, 1, 4)):
        torch.manual_seed(3)
        noisy(ids)
        drawn = torch.rand(1)
    torch.manual_seed(3)
    noisy(ids)
    assert torch.equal(torch.rand(1), drawn)
    model.append = nn.Dropout(0.5)
    with pytest.raises(TrainingModeError, match="append"):
        cut(model.train(), ids, Edges(1, 1, 4))


def test_what_models_write_to() -> None:
    class InPlace(nn.Module):
        in_place = False

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8)
            self.mixers = nn.ModuleList([mixer("mamba"), mixer("mamba")])

        def forward(self, ids: Tensor) -> Tensor:
            x: Tensor = self.table(ids)
            for one in self.mixers:
                x = one(x).add_(x) if self.in_place else one(x) + x
            return x

    written, ids = InPlace().double().eval(), tokens()
    expected, _ = run_without(written, ids, {1: zeroed((2, 6), (4, 1))})
    written.in_place = True
    assert oracles.relative_error(cut(written, ids, Edges(1, 1, 4)), expected) <= 1e-6

    class Cached(Between):
        def __init__(self) -> None:
            super().__init__(same)
            self.attention = mixer("llama")

        def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
            x: Tensor = self.blocks[0](self.table(ids))
            turn = torch.ones(1, ids.shape[1], self.attention.head_dim).to(x)
            options = {"position_embeddings": (turn, 0 * turn), "past_key_values": cache}
            out: Tensor = x + self.attention(x, attention_mask=None, **options)[0]
            return out

    model, cache = Cached().double().eval(), DynamicCache()
    with torch.no_grad(), knock_out(model, Edges("blocks.0.mixer", 1, 4)):
        found = model(ids, cache)
    assert cache.get_seq_length() == ids.shape[1]
    assert oracles.relative_error(found, cut(model, ids, Edges("blocks.0.mixer", 1, 4))) <= 1e-12
