"""Where elements come from, held to what changes where a token is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import attention_models
import oracles
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from versions import named

from captum_ssm.operators.kernels.arithmetic import unseen
from captum_ssm.tracing.hooks import swap_first, without_caches
from captum_ssm.tracing.places import Mixed, Origin, Places, token_places

B, L, E = 2, 5, 4


def draw(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, L, E)), dtype=torch.float64)


def followed(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, Origin | None]:
    """What a function returns and where that comes from; its inputs are sources 0, 1, ..."""
    places = Places(lambda: "here")
    inputs = tuple(x.clone() for x in inputs)
    with torch.no_grad(), places:
        for source, x in enumerate(inputs):
            places.begin(x, source)
        out = function(*inputs)
    return out, places.origin(out)


def depends(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Which elements change with which tokens of each input: (shape of the output, B * L)."""
    found = []
    with torch.no_grad():
        before = function(*(x.clone() for x in inputs))
        for i, x in enumerate(inputs):
            changes = []
            for token in range(x.shape[0] * x.shape[1]):
                change = torch.zeros(before.shape, dtype=torch.bool)
                for size in (10, -10):  # so that it comes to be, and not to be, a maximum
                    others = [y.clone() for y in inputs]
                    others[i].flatten(0, 1)[token] += size * (1 + draw(*x.shape[2:]).abs())
                    change |= (function(*others) - before).abs() > 1e-12
                changes.append(change)
            found.append(torch.stack(changes, -1))
    return found


def claimed(origin: Origin, source: int) -> Tensor:
    batch, tokens = origin.sizes[source]
    out = torch.zeros(*origin.shape, batch * tokens, dtype=torch.bool)
    for entry in origin.sources.get(source, []):
        places = entry.places.expand(origin.shape).long()
        out |= places[..., None] == torch.arange(batch * tokens)
    return out


def is_right(origin: Origin, truth: list[Tensor]) -> bool:
    """Whether what is claimed is what is true, taken together where tokens are not told apart."""
    entries = [e for found in origin.sources.values() for e in found]
    for source, wanted in enumerate(truth):
        found = claimed(origin, source)
        if (wanted & ~found).any():
            return False
        for dim in range(len(origin.shape)):
            if all(e.places.size(dim) == 1 for e in entries):
                found, wanted = found.any(dim, keepdim=True), wanted.any(dim, keepdim=True)
        if not torch.equal(found, wanted):
            return False
    return True


def check(function: Callable[..., Tensor], *inputs: Tensor) -> Origin:
    inputs = inputs or (draw(),)
    origin = followed(function, *inputs)[1]
    assert origin is not None
    assert origin.mixed is None, origin.mixed
    assert is_right(origin, depends(function, inputs))
    return origin


WEIGHT = draw(E, E)
ORDER = torch.tensor([3, 0, 4, 1, 2])
MASK = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]]).bool()
PICKS = torch.tensor([[3, 0], [1, 1]])

MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x.clone(),
    "view": lambda x: x.view(B * L, E),
    "view and back": lambda x: x.view(B, L, 2, E // 2).transpose(1, 2).reshape(B, L, E),
    "heads": lambda x: x.view(B, L, 2, E // 2).transpose(1, 2),
    "heads merged with tokens": lambda x: x.view(B, L, 2, E // 2).permute(2, 1, 0, 3).flatten(0, 2),
    "reshape over features": lambda x: x.reshape(B, L * E),
    "reshape through features": lambda x: x.mT.reshape(B, L, E),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(1, -1),
    "mT": lambda x: x.mT,
    "movedim": lambda x: x.movedim(1, 0),
    "flip": lambda x: x.flip(1),
    "flip over features": lambda x: x.flip(-1),
    "flip of examples": lambda x: torch.flip(x, dims=(0, 1)),
    "roll": lambda x: x.roll(2, 1),
    "roll flat": lambda x: torch.roll(x, 3),
    "rot90": lambda x: torch.rot90(x, 1, (1, 2)),
    "slice": lambda x: x[:, 1:],
    "steps": lambda x: x[:, ::2],
    "select": lambda x: x[:, 3],
    "select by name": lambda x: x.select(1, 2),
    "last": lambda x: x[..., -1, :],
    "new dimensions": lambda x: x[None, :, None],
    "features": lambda x: x[..., 1:3],
    "narrow": lambda x: x.narrow(1, 1, 3),
    "chunk": lambda x: x.chunk(3, dim=1)[1],
    "chunk of features": lambda x: x.chunk(2, -1)[1],
    "split": lambda x: x.split([2, 3], dim=1)[1],
    "tensor_split": lambda x: torch.tensor_split(x, 2, dim=1)[0],
    "unbind": lambda x: x.unbind(1)[2],
    "iterate": lambda x: list(x.transpose(0, 1))[3],
    "unpack": lambda x: torch.stack([h for h in x]),
    "expand": lambda x: x[:, :1].expand(B, L, E),
    "expand in front": lambda x: x.expand(3, B, L, E),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x[:, :1], x)[0],
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "unsqueeze": lambda x: x.unsqueeze(2),
    "unflatten": lambda x: x.transpose(0, 1).flatten(1).unflatten(1, (B, E)),
    "index": lambda x: x[:, ORDER],
    "index of list": lambda x: x[:, [2, 0, 2]],
    "index both": lambda x: x[torch.tensor([[0], [1]]), PICKS],
    "index flat": lambda x: x.flatten(0, 1)[torch.tensor([7, 2, 2])],
    "index scalar": lambda x: x[:, torch.tensor(3)],
    "index with ellipsis": lambda x: x[:, ORDER, ...],
    "index of features": lambda x: x[..., torch.tensor([2, 0])],
    "index apart": lambda x: x[PICKS[:, 0] % B, :, PICKS[:, 1]],
    "mask": lambda x: x[MASK],
    "masked_select": lambda x: x.masked_select(MASK[..., None]),
    "index_select": lambda x: x.index_select(1, ORDER),
    "index_select features": lambda x: x.index_select(-1, torch.tensor([1, 1])),
    "gather": lambda x: x.gather(1, PICKS[..., None].expand(B, 2, E)),
    "gather anywhere": lambda x: x.gather(1, torch.arange(B * 3 * E).view(B, 3, E) % L),
    "gather features": lambda x: x.gather(2, PICKS[:, :, None].expand(B, 2, 3)),
    "take_along_dim": lambda x: x.take_along_dim(PICKS[..., None], 1),
    "repeat": lambda x: x.repeat(1, 2, 3),
    "repeat in front": lambda x: x.repeat(2, 1, 1, 1),
    "tile": lambda x: x.tile(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "repeat_interleave features": lambda x: torch.repeat_interleave(x, 3, dim=-1),
    "repeat_interleave of some": lambda x: x[0].repeat_interleave(torch.arange(L), dim=0),
    "diagonal": lambda x: x[:, :4].diagonal(dim1=1, dim2=2),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "pad": lambda x: F.pad(x, (0, 0, 2, 1)),
    "pad features": lambda x: F.pad(x, (1, 0)),
    "cut": lambda x: F.pad(x, (0, 0, -1, 1)),
    "shift": lambda x: nn.ZeroPad2d((0, 0, 1, -1))(x),
    "reflect": lambda x: F.pad(x.mT, (2, 1), mode="reflect"),
    "tril": lambda x: x.tril(),
    "diag_embed": lambda x: x.diag_embed(),
    "copy": copy.deepcopy,
    "cat": lambda x: torch.cat([x[:, 2:], x[:, :2]], dim=1),
    "cat twice": lambda x: torch.cat([x, x], 1),
    "cat features": lambda x: torch.cat((x, x.flip(1)), -1),
    "virtual tokens": lambda x: torch.cat([torch.ones(B, 2, E).double(), x], 1),
    "features beside": lambda x: torch.cat([x, torch.ones(B, L, 2).double()], -1),
    "empty beside": lambda x: torch.cat([torch.zeros(0).double(), x], 1),
    "stack": lambda x: torch.stack([x, x.flip(1)], 2),
    "stack alike": lambda x: torch.stack((x, x, x), dim=0),
    "hstack": lambda x: torch.hstack([x, x.flip(1)]),
    "where": lambda x: torch.where(MASK[..., None], x, x.flip(1)),
    "where number": lambda x: x.where(MASK[..., None], 0.0),
    "masked_fill": lambda x: x.masked_fill(~MASK[..., None], -1.0),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([1, 3]), 0.0),
    "index_copy": lambda x: x.index_copy(1, torch.tensor([4, 0]), x[:, :2]),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, PICKS[:, :1, None].expand(B, 1, E), x[:, :1]),
    "scatter number": lambda x: x.scatter(1, PICKS[..., None].expand(B, 2, E), 1.5),
    "masked_scatter": lambda x: x.masked_scatter(MASK[..., None].expand(B, L, E), x.flip(1)),
    "slice_scatter": lambda x: x.slice_scatter(x[:, :2], 1, 3, 5),
    "select_scatter": lambda x: x.select_scatter(x[:, 0], 1, 2),
    "float": lambda x: x.float().double(),
    "to": lambda x: x.to("cpu", torch.float64),
    "type_as": lambda x: x.type_as(WEIGHT),
    "detour": lambda x: x.contiguous().detach().requires_grad_(False),
    "data": lambda x: x.data,
    "as_strided": lambda x: x.as_strided((B, L - 1, E), (L * E, E, 1)),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "aten": lambda x: torch.ops.aten.transpose.int(x, 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_moves(name: str) -> None:
    origin = check(MOVES[name])
    # what only moves is the source itself at every place that is not empty
    assert all(e.skip == 1 for e in origin.sources[0]), name


TOKENWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, WEIGHT, draw(E)),
    "silu": F.silu,
    "in place": lambda x: F.silu(2 * x, inplace=True),
    "norm": lambda x: F.layer_norm(x, (E,)),
    "rms_norm": lambda x: F.rms_norm(x, (E,), draw(E)),
    "norm by hand": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * draw(E),
    "norm of flipped": lambda x: F.layer_norm(x.mT.flip(-1).mT, (E,)),
    "group_norm": lambda x: F.group_norm(x.flatten(0, 1), 2),
    "batch_norm": lambda x: F.batch_norm(x.mT, draw(E), draw(E).exp()),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x @ WEIGHT, dim=2),
    "sum alone": lambda x: x[:, :1].sum(1),
    "sum": lambda x: x.sum(-1),
    "sum keeps": lambda x: x.sum(2, keepdim=True),
    "sum over heads": lambda x: x.view(B, L, 2, 2).transpose(1, 2).sum(1),
    "max": lambda x: x.max(dim=-1).values,
    "maximum": lambda x: x.max(x.new_full((), -9.0)),
    "amax": lambda x: x.amax((-1,)),
    "var_mean": lambda x: torch.var_mean(x, -1)[0],
    "std": lambda x: x.std(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(2)[0],
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "norm along": lambda x: x.norm(dim=-1),
    "glu": lambda x: F.glu(x),
    "fft": lambda x: torch.fft.rfft(x, dim=-1).real,
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.view(B, L, 2, 2)) * torch.polar(draw(2), draw(2))
    ).flatten(2),
    "matmul": lambda x: x @ WEIGHT,
    "matmul left": lambda x: WEIGHT @ x.mT,
    "rmatmul": lambda x: torch.ones(3, E).double() @ x.mT,
    "bmm": lambda x: torch.bmm(x, WEIGHT.expand(B, E, E)),
    "mm": lambda x: x.flatten(0, 1).mm(WEIGHT),
    "mv": lambda x: x.flatten(0, 1).mv(WEIGHT[0]),
    "addmm": lambda x: torch.addmm(draw(E), x[0], WEIGHT),
    "addmm onto": lambda x: torch.addmm(x[0].flip(0), x[0], WEIGHT),
    "baddbmm": lambda x: torch.baddbmm(draw(1, 1, E), x, WEIGHT.expand(B, E, E)),
    "einsum": lambda x: torch.einsum("ble,fe->blf", x, WEIGHT),
    "einsum spread": lambda x: torch.einsum("...e, fe -> f...", x, WEIGHT),
    "einsum implied": lambda x: torch.einsum("bte,ef", [x, WEIGHT]),
    "einsum gate": lambda x: torch.einsum("ble,ble->bl", x, x.flip(1)),
    "outer": lambda x: torch.outer(x[0, :, 0], draw(3)),
    "conv of size 1": lambda x: F.conv1d(x.mT, WEIGHT[..., None], stride=2),
    "conv of each channel": lambda x: F.conv1d(x.mT, WEIGHT[:, :1, None], groups=E),
    "conv over features": lambda x: F.conv2d(x[:, None], draw(3, 1, 1, 2), padding=(0, 1)),
    "conv with tokens as channels": lambda x: F.conv1d(x, draw(L, 1, 3), groups=L),
    "attention to itself": lambda x: F.scaled_dot_product_attention(
        x[:, 2:3], x[:, :1] * draw(2, 1), x[:, 1:2] * draw(2, 1)
    ),
    "pool over features": lambda x: F.avg_pool1d(x, 2),
    "two places": lambda x: x * 0.3 + nn.ZeroPad2d((0, 0, 1, -1))(x) * 0.7,
    "mlp of two": lambda x: F.linear(F.gelu(F.linear(x + x.flip(1), WEIGHT)), WEIGHT),
    "scores": lambda x: x[:, :3] @ x[:, :2].mT,
    "residual": lambda x: x + F.silu(F.layer_norm(x, (E,)) @ WEIGHT),
    "bidirectional": lambda x: x + torch.tanh(x.flip(1)).flip(1),
    "first beside all": lambda x: x[:, :1] * x,
    "stacked and summed": lambda x: torch.stack([x, x.tanh()], 1).sum(1),
    "summed with nothing": lambda x: torch.cat([x[:, :1], torch.ones(B, 3, E).double()], 1).sum(1),
    "written in pieces": lambda x: _pieces(x),
    "experts": lambda x: _experts(x),
    "grouped": lambda x: _grouped(x),
}  # fmt: skip


def _pieces(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :2] = x[:, 3:].tanh()
    out[:, 2:] = x[:, :3]
    return out


def _experts(x: Tensor) -> Tensor:
    flat = x.reshape(-1, E)
    out = torch.zeros_like(flat)
    for rows in (torch.tensor([0, 3, 4, 9]), torch.tensor([3, 1, 2]), torch.arange(5, 10)):
        out.index_add_(0, rows, flat[rows].tanh() @ WEIGHT)
    return out.view(x.shape)


def _grouped(x: Tensor) -> Tensor:
    """Two experts for each token: sorted, multiplied, and put back."""
    chosen = torch.tensor([0, 1, 2, 0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 0, 1, 0, 2, 1, 0, 1])
    order = torch.argsort(chosen)
    rows = x.reshape(-1, E).repeat_interleave(2, 0)[order]
    ends = torch.bincount(chosen).cumsum(0)
    weights = draw(3, E, E)
    parts = [p @ w for p, w in zip(rows.tensor_split(ends[:-1]), weights, strict=True)]
    back = torch.cat(parts)[torch.argsort(order)]
    return back.view(B * L, 2, E).sum(1).view(B, L, E)


@pytest.mark.parametrize("name", TOKENWISE)
def test_token_by_token(name: str) -> None:
    function = TOKENWISE[name]
    state = torch.get_rng_state()

    def same_weights(x: Tensor) -> Tensor:
        torch.set_rng_state(state)
        return function(x)

    check(same_weights)


# --- tensors that are changed in place, and others that share their memory -----------------------


def _alias_of_written(x: Tensor) -> Tensor:
    view = x[:, 1:3]
    x[:, 0] = x[:, 4]
    x[:, 2] = x[:, 3].tanh()
    return view


def _written_through_a_view(x: Tensor) -> Tensor:
    view = x.view(B * L, E)[3:6]
    view.mul_(view.flip(0))
    return x


def _written_through_two(x: Tensor) -> Tensor:
    heads = x.view(B, L, 2, 2).transpose(1, 2)
    heads[:, 0].add_(x[:, 2:3, 2:])
    x.mT[:, 0].zero_()
    return x


def _nothing_made_something(x: Tensor) -> Tensor:
    out = torch.zeros(B, L, E, dtype=x.dtype)
    rows = out.unbind(1)
    rows[3].copy_(x[:, 0])
    torch.mul(x[:, 1], 2, out=out[:, 1])
    return torch.cat([out, rows[3][:, None]], 1)


def _detached_alias(x: Tensor) -> Tensor:
    alias = x.detach()
    alias += alias.flip(1)
    return x


def _out(x: Tensor) -> Tensor:
    out = x.new_empty(B, L, E)
    torch.add(x, x.roll(1, 1), out=out)
    return out


def _of_data(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.data = x[:, :3]
    return y


def _in_other_shapes(x: Tensor) -> Tensor:
    y, z = x.flip(1), x * 2
    y.unsqueeze_(0).transpose_(1, 2).squeeze_().swapdims_(0, 1)
    return y + z


def _set(write: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        out = x.clone()
        write(out, x.flip(1))
        return out

    return function


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "alias of written": _alias_of_written,
    "written through a view": _written_through_a_view,
    "written through two": _written_through_two,
    "nothing made something": _nothing_made_something,
    "detached alias": _detached_alias,
    "out": _out,
    "data": _of_data,
    "add": _set(lambda out, y: out.add_(y)),
    "iadd of part": _set(lambda out, y: out[:, :2].__iadd__(y[:, :2])),
    "copy": _set(lambda out, y: out.copy_(y[:, :1])),
    "zero": _set(lambda out, y: out[:, 2].zero_()),
    "fill": _set(lambda out, y: out[:, 1].fill_(3.0)),
    "normal": _set(lambda out, y: (torch.manual_seed(0), out[:, 1:3].normal_())),
    "set": _set(lambda out, y: out.__setitem__(slice(0, 1), 0.0)),
    "set all": _set(lambda out, y: out.__setitem__(..., y)),
    "set token": _set(lambda out, y: out.__setitem__((slice(None), 1), y[:, 4])),
    "set mask": _set(lambda out, y: out.__setitem__(MASK, y[MASK])),
    "set features": _set(lambda out, y: out.__setitem__((..., slice(2)), y[..., :2])),
    "set by list": _set(lambda out, y: out.__setitem__((slice(None), [0, 3]), y[:, 1:3])),
    "set to one": _set(lambda out, y: out.__setitem__((slice(None), slice(2)), y[:, :1])),
    "set feature": _set(lambda out, y: out.__setitem__((slice(None), 0, 2), y[:, 0, 0])),
    "index_put": _set(lambda out, y: out.index_put_((PICKS[:, 0] % B, PICKS[:, 1]), y[:, 3])),
    "index_put onto": _set(
        lambda out, y: out.index_put_((PICKS % B, PICKS), y[:, 3:], accumulate=True)
    ),
    "index_add": _set(lambda out, y: out.index_add_(1, torch.tensor([2, 2, 0]), y[:, :3])),
    "index_copy": _set(lambda out, y: out.index_copy_(1, torch.tensor([2, 0]), y[:, :2])),
    "index_fill": _set(lambda out, y: out.index_fill_(1, torch.tensor([2, 0]), 0.5)),
    "scatter_add": _set(
        lambda out, y: out.scatter_add_(1, PICKS[..., None].expand(B, 2, E), y[:, 2:])
    ),
    "scatter": _set(lambda out, y: out.scatter_(1, PICKS[:1, :, None].expand(1, 2, E), y[:, 2:])),
    "scatter of number": _set(lambda out, y: out.scatter_(1, PICKS[..., None], 2.0)),
    "masked_fill": _set(lambda out, y: out.masked_fill_(MASK[..., None], 0.0)),
    "masked_scatter": _set(lambda out, y: out.masked_scatter_(MASK[..., None], y)),
    "relu": _set(lambda out, y: F.leaky_relu(out[:, :2].mul_(y[:, :2]), 0.1, inplace=True)),
    "in other shapes": _in_other_shapes,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str) -> None:
    check(IN_PLACE[name])


def test_a_view_of_other_bytes_is_not_followed_through_writes() -> None:
    def function(x: Tensor) -> Tensor:
        halves = x.view(torch.float32)
        x[:, 0] = x[:, 1]
        return halves

    assert followed(function, draw())[1].mixed.function == "view"


def test_freed_memory_is_forgotten() -> None:
    places = Places(lambda: "here")
    x = draw()
    with places:
        places.begin(x)
        for _ in range(200):
            x.clone().mul_(2)[:, 0] = 1.0
        assert len(places._memories) <= 65
        assert len(places._records) < 8


# --- what mixes tokens ----------------------------------------------------------------------------


def _recurrence(x: Tensor) -> Tensor:
    state, out = torch.zeros(B, E).double(), []
    for t in range(L):
        state = torch.tanh(state @ WEIGHT + x[:, t])
        out.append(state)
    return torch.stack(out, 1)


def _scores(x: Tensor) -> Tensor:
    return F.softmax(x @ x.mT, -1)


def _write_to(x: Tensor, mixed: Tensor) -> Tensor:
    out = x.clone()
    out[:, :2] = mixed[:, :2]
    return out


def _write_view(x: Tensor, mixed: Tensor) -> Tensor:
    out = x.clone()
    out.view(B * L, E)[:3].copy_(mixed.flatten(0, 1)[:3])
    return out


MIXING: dict[str, tuple[Callable[[Tensor], Tensor], str, bool, bool]] = {
    # function, torch's name of what mixes, whether it pools, whether it joins
    "mean": (lambda x: x.mean(1), "mean", True, False),
    "mean of some": (lambda x: x[:, 1:].mean(1, keepdim=True), "mean", True, False),
    "masked mean": (lambda x: (x * MASK[..., None]).sum(1) / 3, "sum", True, False),
    "sum": (lambda x: x.sum(dim=(1, 2)), "sum", True, False),
    "amax": (lambda x: torch.amax(x, 1), "amax", True, False),
    "max": (lambda x: x.max(1)[0], "max", True, False),
    "mean of map": (lambda x: x[:, :4].view(B, 2, 2, E).mean((1, 2)), "mean", True, False),
    "adaptive pool": (lambda x: F.adaptive_avg_pool1d(x.mT, 1), "adaptive_avg_pool1d", True, False),
    "max pool": (lambda x: F.max_pool1d(x.mT, L), "max_pool1d", True, False),
    "pool in windows": (lambda x: F.avg_pool1d(x.mT, 2), "avg_pool1d", False, False),
    "mean of pairs": (lambda x: x[:, :4].view(B, 2, 2, E).mean(2), "mean", False, False),
    "mean of examples": (lambda x: x.mean(0), "mean", False, False),
    "mean of all": (lambda x: x.mean(), "mean", False, False),
    "pooled head": (lambda x: F.linear(x.mean(1).tanh(), WEIGHT)[..., :2], "mean", True, False),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x),
                  "scaled_dot_product_attention", False, False),
    "attention by hand": (lambda x: _scores(x) @ x, "softmax", False, False),
    "attention pool": (lambda x: (x[..., :1].softmax(1) * x).sum(1), "softmax", False, False),
    "joined attention": (lambda x: x + _scores(x) @ x, "softmax", False, True),
    "joined and on": (lambda x: F.layer_norm(_scores(x) @ x + x, (E,)), "softmax", False, True),
    "joined in place": (lambda x: x.clone().add_(_scores(x) @ x), "softmax", False, True),
    "joined mean": (lambda x: x - x.mean(1, keepdim=True), "mean", True, True),
    "sum of pooled": (lambda x: x.mean(1) + x.amax(1), "mean", True, False),
    "gated by pooled": (lambda x: x * x.mean(1, keepdim=True).sigmoid(), "mean", True, False),
    "two mixed": (lambda x: _scores(x) @ x + x.cumsum(1), "softmax", False, False),
    "written": (lambda x: _write_to(x, x.cumsum(1)), "cumsum", False, True),
    "written to a view": (lambda x: _write_view(x, x.cumsum(1)), "cumsum", False, True),
    "conv": (lambda x: F.conv1d(x.mT, draw(E, E, 3), padding=1), "conv1d", False, False),
    "strided conv": (lambda x: F.conv1d(x[:, :4].mT, draw(3, E, 2), stride=2), "conv1d", False, False),
    "tokens as channels": (lambda x: F.conv1d(x, draw(3, L, 1)), "conv1d", False, False),
    "recurrence": (_recurrence, "add", False, False),
    "gru": (lambda x: nn.GRU(E, 3, batch_first=True).double()(x)[0], "gru", False, False),
    "cumsum": (lambda x: x.cumsum(1), "cumsum", False, False),
    "softmax": (lambda x: F.softmax(x, dim=1), "softmax", False, False),
    "sort": (lambda x: x.sort(1).values, "sort", False, False),
    "topk": (lambda x: x.topk(2, dim=1).values, "topk", False, False),
    "fft": (lambda x: torch.fft.fft(x, dim=1).real, "fft", False, False),
    "norm over tokens": (lambda x: F.layer_norm(x, (L, E)), "layer_norm", False, False),
    "group norm": (lambda x: F.group_norm(x.mT, 2), "group_norm", False, False),
    "instance norm": (lambda x: F.instance_norm(x.mT), "instance_norm", False, False),
    "batch norm": (lambda x: F.batch_norm(x.mT, None, None, training=True), "batch_norm", False, False),
    "normalize": (lambda x: F.normalize(x, dim=1), "normalize", False, False),
    "matmul": (lambda x: torch.ones(3, L).double() @ x, "matmul", False, False),
    "linear": (lambda x: F.linear(x.mT, draw(3, L)), "linear", False, False),
    "einsum": (lambda x: torch.einsum("ble,ml->bme", x, draw(L, L)), "einsum", False, False),
    "windows": (lambda x: (x.unfold(1, 2, 1) * draw(2)).sum(-1), "sum", False, False),
    "glu": (lambda x: F.glu(x[:, :4], 1), "glu", False, False),
    "five places": (lambda x: sum(x.roll(i, 1) for i in range(5)), "add", False, False),
    "index_add": (lambda x: torch.zeros(B, 1, E).double().index_add_(1, ORDER * 0, x), "index_add", False, False),
    "unknown": (lambda x: torch.cdist(x, x), "cdist", False, False),
    "unknown in place": (lambda x: torch.ops.aten.renorm_(x.clone(), 2, 2, 1.0), "renorm", False, False),
    "interpolate": (lambda x: F.interpolate(x.mT, 7, mode="linear"), "interpolate", False, False),
    "moved": (lambda x: x.cumsum(1).flip(1)[:, :2].float().double(), "cumsum", False, False),
    "beside": (lambda x: torch.cat([x.mean(1, keepdim=True), x], 1), "mean", True, False),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_mixing(name: str) -> None:
    function, by, pooled, joined = MIXING[name]
    x = draw()
    state = torch.get_rng_state()

    def same_weights(x: Tensor) -> Tensor:
        torch.set_rng_state(state)
        return function(x)

    origin = followed(same_weights, x)[1]
    assert origin is not None and not origin.sources
    found = origin.mixed
    assert (found.function, found.pooled, found.joined) == (by, pooled, joined)
    assert found.module == "here"
    truth = depends(same_weights, (x,))[0]
    assert (truth.sum(-1) > 1).any(), "tokens do meet"


# --- sources, skips, ids --------------------------------------------------------------------------


def test_what_is_added_up_is_the_tensor() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        stream = torch.cat([x + y.flip(1), x[:, 1:3] - y[:, 2:4]], 1)
        stream = stream + stream + F.pad(x, (0, 0, 0, 2))
        stream[:, 1] = -y[:, 0]
        return torch.stack([stream, stream.roll(1, 1)]).add(0.0).transpose(0, 1).reshape(B, -1, E)

    x, y = draw(), draw()
    out, origin = followed(function, x, y)
    check(function, x, y)
    total = torch.zeros_like(out)
    for source, tokens in enumerate((x, y)):
        rows = torch.cat([tokens.flatten(0, 1), torch.zeros(1, E)])  # the last one for no token
        for entry in origin.sources[source]:
            assert entry.skip
            total += entry.skip * rows[token_places(origin.shape, entry.places).long()]
    assert torch.allclose(total, out, atol=1e-12)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x, y: x + y, [1.0, 1.0]),
        (lambda x, y: x + x + y, [2.0, 1.0]),
        (lambda x, y: x - y, [1.0, -1.0]),
        (lambda x, y: 1 - x, [-1.0]),
        (lambda x, y: torch.rsub(x, y), [-1.0, 1.0]),
        (lambda x, y: torch.add(x, y, alpha=2), [1.0, 0.0]),
        (lambda x, y: torch.sub(x, other=x, alpha=1), [0.0]),
        (lambda x, y: 2 * x + y, [0.0, 1.0]),
        (lambda x, y: x * y, [0.0, 0.0]),
        (lambda x, y: x + F.layer_norm(x, (E,)) @ WEIGHT, [1.0]),
        (lambda x, y: (x + y).tanh() + x, [1.0, 0.0]),
        (lambda x, y: F.dropout(x, 0.5), [0.0]),
        (lambda x, y: F.dropout(x, 0.0) + F.dropout(y, 0.5, False), [1.0, 1.0]),
        (lambda x, y: torch.cat([x, x.tanh()], -1)[..., :E], [1.0]),
        (lambda x, y: x.clone().add_(y), [1.0, 1.0]),
        (lambda x, y: x.clone().mul_(1), [0.0]),
        (lambda x, y: x[:, :1] + y, [1.0, 1.0]),
    ],
)
def test_skips(function: Callable[[Tensor, Tensor], Tensor], wanted: list[float]) -> None:
    origin = followed(function, draw(), draw())[1]
    for source, skip in enumerate(wanted):
        assert sum(e.skip for e in origin.sources[source]) == skip, source
    assert len(origin.sources) == len(wanted)


def test_what_mixers_return_is_a_source_of_its_own() -> None:
    places = Places(lambda: "here")
    x = draw()
    with places:
        places.begin(x)
        with unseen():
            mixed = x.cumsum(1)
        assert places.origin(mixed) is None
        places.declare(mixed, 1)
        stream = x + mixed
        with unseen():
            second = stream.cumsum(1)
        places.declare(second.flip(1), 2)  # which nobody keeps
        places.declare(second, 2, order=torch.arange(B * L).view(B, L).flip(1))
        stream = (stream + second).transpose(1, 2)
        head = stream.mT.flip(1)
    origin = places.origin(head)
    assert [origin.is_identity(source) for source in range(3)] == [False, False, True]
    backwards = torch.arange(L).flip(0).expand(B, L)
    assert torch.equal(origin.permutation(0), backwards)
    assert torch.equal(origin.permutation(2), backwards.flip(1))
    assert origin.permutation(7) is None and origin.tokens(7) == []
    assert places.origin(stream).tokens(0) is None, "they lie along the last dimension"
    # sources in one order share their places
    assert len(origin.groups) == 2


def test_a_source_in_windows() -> None:
    """What a mixer of windows returned: their tokens lie where the map's order puts them."""
    order = torch.arange(B * 4).view(B, 2, 2).flip(1).reshape(B * 2, 2)
    places = Places(lambda: "here")
    x = draw(B * 2, 2, E)
    with places:
        places.declare(x, 3, order, size=(B, 4))
        y = x.view(B, 2, 2, E).flip(1).flatten(1, 2)
    assert places.origin(y).is_identity(3)
    assert not places.origin(x).is_identity(3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, 1:],  # of one example the places of the first tokens are those of all
        lambda x: x[:, :-1],
        lambda x: x[:, [0, 1, 2, 3, 3]],
        lambda x: x.flip(0),
        lambda x: torch.cat([x, x[:, :1]], 1),
        lambda x: x + x.flip(1),
        lambda x: x.transpose(0, 1).reshape(B, L, E),
        lambda x: torch.where(MASK[..., None], x, 0),
    ],
)
def test_no_permutation(function: Callable[[Tensor], Tensor]) -> None:
    origin = followed(function, draw())[1]
    assert origin.permutation(0) is None and not origin.is_identity(0)
    whole = followed(torch.clone, draw())[1]
    assert whole.is_identity(0)


def test_the_first_tokens_of_one_example_are_not_all() -> None:
    assert not followed(lambda x: x[:, :3], draw(1, L, E))[1].is_identity(0)


def test_features_of_different_tokens() -> None:
    origin = followed(lambda x: torch.cat([x, x.flip(1)], -1), draw())[1]
    assert origin.tokens(0) is None
    with_constants = followed(lambda x: torch.cat([x, torch.ones(B, L, 2)], -1), draw())[1]
    assert with_constants.is_identity(0)


def test_ids() -> None:
    ids, table = torch.randint(9, (B, L)), draw(9, E)
    embedding = nn.Embedding(9, E).double()
    lookups: list[Callable[[Tensor], Tensor]] = [
        embedding,
        lambda i: F.embedding(i.flip(1), table).flip(1),
        lambda i: torch.embedding(table, i.clone().to(torch.int32)),
        lambda i: table[i],
        lambda i: table.index_select(0, i.flatten()).view(B, L, E),
        lambda i: embedding(torch.stack([i, i.flip(1)])[0].contiguous()),
        lambda i: embedding(i.masked_fill(i < 0, 0)),
    ]
    for lookup in lookups:
        origin = followed(lookup, ids)[1]
        assert origin.is_identity(0) and origin.sources[0][0].skip == 1
    joined = followed(lambda i: embedding(torch.cat([i[:, :1] * 0 + 3, i], 1)), ids)[1]
    assert joined.tokens(0)[0][0].tolist() == [-1, 0, 1, 2, 3, 4]
    untracked: list[Callable[[Tensor], Tensor]] = [
        lambda i: i + 1,
        lambda i: i != 3,
        lambda i: i.bool(),
        lambda i: (i != 3).long().cumsum(1),
        lambda i: F.one_hot(i, 9),
        lambda i: torch.zeros_like(i),
        lambda i: embedding((i != 3).cumsum(1)),
    ]
    for function in untracked:
        assert followed(function, ids)[1] is None
    mixed: list[Callable[[Tensor], Tensor]] = [
        lambda i: torch.zeros(B, 9).scatter_(1, i, 1.0),
        lambda i: table.gather(0, i[:, :E]),
        lambda i: F.embedding_bag(i, table, mode="sum"),
        lambda i: i.float().mean(1),
    ]
    for function in mixed:
        assert followed(function, ids)[1].mixed is not None


@pytest.mark.parametrize(
    "function",
    [
        torch.zeros_like,
        lambda x: x.new_ones(B, L, E),
        lambda x: torch.randn_like(x),
        lambda x: x.clone().zero_(),
        lambda x: x.clone().copy_(draw()),
        lambda x: x.argsort(1),
        lambda x: x > 0,
        lambda x: x.long(),
        lambda x: draw().view_as(x).type_as(x).expand_as(x),
        lambda x: x[:0],
        lambda x: x.shape and draw(),
    ],
)
def test_what_comes_from_no_token(function: Callable[[Tensor], Tensor]) -> None:
    assert followed(function, draw())[1] is None


def test_parts_that_come_from_no_token_are_no_source() -> None:
    origin = followed(lambda x: torch.cat([torch.ones(B, 2, E).double(), x], 1)[:, :2], draw())[1]
    assert origin.sources == {} and origin.mixed is None


# --- out of sight ---------------------------------------------------------------------------------


class OutOfSight(torch.autograd.Function):
    """As packages write it around kernels of their own, of which torch is not told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        with unseen():
            torch.cumsum(x, 1, out=out)
        return out


def test_memory_filled_out_of_sight() -> None:
    origin = followed(lambda x: OutOfSight.apply(x).tanh(), draw())[1]
    assert origin.mixed == Mixed("empty", "here") and origin.sources == {}
    assert followed(lambda x: x + OutOfSight.apply(x), draw())[1].mixed.joined
    # but not where torch itself fills it
    filled = check(lambda x: x.new_empty(B, L, E).copy_(x))
    assert filled.is_identity(0)
    assert followed(lambda x: torch.empty_like(x).uniform_(), draw())[1] is None
    assert check(lambda x: x * torch.empty_like(x).fill_(0.5)).mixed is None


def test_a_module_that_is_known_to_work_token_by_token() -> None:
    places = Places(lambda: "here")
    x, y = draw(), draw(B, 1, E)
    with places:
        places.begin(x)
        places.declare(y, 1)
        out = OutOfSight.apply(x)
        places.through(out, x, y)
    origin = places.origin(out)
    assert origin.is_identity(0) and origin.sources[0][0].skip == 0 and origin.mixed is None
    assert origin.tokens(1)[0].tolist() == [[0] * L, [1] * L]


def test_custom_operators() -> None:
    def doubled(out: Tensor, x: Tensor) -> None:
        out.copy_(2 * x)

    with torch.library._scoped_library("places_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.define("double_(Tensor(a!) out, Tensor x) -> ()")
        library.impl("twice", lambda x: 2 * x, "CPU")
        library.impl("double_", doubled, "CPU")

        def written(x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            torch.ops.places_test.double_(out, x)
            return out

        for function, name in (
            (torch.ops.places_test.twice, "places_test::twice"),
            (torch.ops.places_test.twice.default, "places_test::twice"),
            (written, "places_test::double"),
        ):
            assert followed(function, draw())[1].mixed.function == name


# --- cost -----------------------------------------------------------------------------------------


class LargestNumbers(TorchDispatchMode):
    """The size of the largest memory that holds whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.size = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and not x.is_floating_point():
                self.size = max(self.size, x.untyped_storage().nbytes() // x.element_size())
                self.calls += 1
        return out


def test_no_work_over_features() -> None:
    tokens, width = 512, 64
    up, down = torch.randn(3 * width, width), torch.randn(width, width)

    def block(x: Tensor) -> Tensor:
        y = F.linear(F.layer_norm(x, (width,)), up)
        gate, value, out = y.chunk(3, dim=-1)
        heads = value.view(1, tokens, 4, -1).transpose(1, 2) * 0.5
        heads = heads + F.rms_norm(heads, heads.shape[-1:])
        value = heads.transpose(1, 2).reshape(1, tokens, width)
        hidden = x + F.linear(F.silu(gate) * value, down) + out.contiguous()
        hidden = torch.cat([hidden.flip(1)[:, 1:], hidden[:, :1]], 1)
        hidden[:, 3] = hidden[:, 4]
        hidden.add_(x.to(torch.float32))
        rows = torch.randperm(tokens)
        routed = torch.zeros(tokens, width).index_add_(0, rows, hidden.flatten(0, 1)[rows])
        return routed.view_as(x).softmax(-1)

    places, largest = Places(lambda: "here"), LargestNumbers()
    with torch.no_grad(), largest, places:
        x = torch.randn(1, tokens, width)
        places.begin(x)
        out = block(x)
    assert places.origin(out).sources
    assert largest.calls > 10
    assert largest.size <= tokens


# --- random compositions --------------------------------------------------------------------------


def _experts_of(x: Tensor, a: int, b: int) -> Tensor:
    flat = x.reshape(-1, E)
    out = torch.zeros_like(flat)
    chosen = torch.arange(len(flat)) * (a + 1) % 3
    for expert in range(3):
        rows = torch.where((chosen == expert) | (chosen == b % 3))[0]
        out.index_add_(0, rows, torch.sin(flat[rows] @ (WEIGHT + expert)))
    return out.view_as(x)


def _index_write(x: Tensor, a: int, b: int) -> Tensor:
    out = x.clone()
    out[:, a % x.shape[1]] = torch.sin(x[:, b % x.shape[1]])
    return out


def _write_back(x: Tensor, a: int, b: int) -> Tensor:
    out = x.clone()
    out.transpose(0, 1)[a % x.shape[1] :].mul_(x[:, b % x.shape[1]])
    return out


#: On the tensor that is there, one kept from before, another source, and two numbers.
STEPS: dict[str, Callable[[Tensor, Tensor, Tensor, int, int], Tensor]] = {
    "flip": lambda x, kept, y, a, b: x.flip(1),
    "roll": lambda x, kept, y, a, b: x.roll(a, 1),
    "slice": lambda x, kept, y, a, b: x[:, a % x.shape[1] :: 1 + b % 2],
    "virtual": lambda x, kept, y, a, b: torch.cat([torch.ones(B, 1 + a % 2, E), x], 1),
    "beside": lambda x, kept, y, a, b: torch.cat([kept, x[:, :1]], 1),
    "sum": lambda x, kept, y, a, b: x + kept if x.shape == kept.shape else x + kept[:, :1],
    "other": lambda x, kept, y, a, b: torch.cat([x, y[:, a % 2 :]], 1)[:, b % 2 :],
    "product": lambda x, kept, y, a, b: x * kept if x.shape == kept.shape else x * y[:, :1],
    "norm": lambda x, kept, y, a, b: F.layer_norm(x, (E,)),
    "linear": lambda x, kept, y, a, b: F.linear(x, WEIGHT),
    "mlp": lambda x, kept, y, a, b: x + torch.sin(x @ WEIGHT) @ WEIGHT.T,
    "heads": lambda x, kept, y, a, b: x.unflatten(-1, (2, -1)).transpose(1, 2).sin().transpose(
        1, 2
    ).flatten(2),
    "index": lambda x, kept, y, a, b: x[:, [a % x.shape[1], b % x.shape[1], 0]],
    "repeat": lambda x, kept, y, a, b: x.repeat_interleave(1 + a % 2, dim=1)[:, :6],
    "shift": lambda x, kept, y, a, b: F.pad(x, (0, 0, 1, -1)),
    "where": lambda x, kept, y, a, b: torch.where(
        (torch.arange(x.shape[1]) % 2 == a % 2)[:, None], x, x.roll(b, 1)
    ),
    "experts": lambda x, kept, y, a, b: x + _experts_of(x, a, b),
    "index write": lambda x, kept, y, a, b: _index_write(x, a, b),
    "write back": lambda x, kept, y, a, b: _write_back(x, a, b),
    "through features": lambda x, kept, y, a, b: x.mT.flatten(1).unflatten(1, (E, -1)).mT.sin(),
    "mean": lambda x, kept, y, a, b: x.mean(1, keepdim=True),
    "attention": lambda x, kept, y, a, b: x + F.scaled_dot_product_attention(x, x, x),
}  # fmt: skip

PROGRAM = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 5), st.integers(0, 5)),
    min_size=1,
    max_size=9,
)


def _run(program: list[tuple[str, int, int]], x: Tensor, y: Tensor) -> Tensor:
    kept = x
    for name, a, b in program:
        x, kept = STEPS[name](x, kept, y, a, b), x
    return x


@given(PROGRAM)
@settings(max_examples=150)
def test_random_compositions(program: list[tuple[str, int, int]]) -> None:
    x, y = draw(B, 3, E), draw(B, 3, E)
    for end in range(1, len(program) + 1):
        part = program[:end]
        origin = followed(lambda x, y: _run(part, x, y), x, y)[1]  # noqa: B023
        if origin is None or origin.mixed is not None:
            break
    truth = depends(lambda x, y: _run(part, x, y), (x, y))
    if origin is None:
        assert not any(wanted.any() for wanted in truth)
    elif origin.mixed is not None:
        assert any((wanted.sum(-1) > 1).any() for wanted in truth)
    else:
        assert is_right(origin, truth)


# --- real models, mixers aside --------------------------------------------------------------------


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


class Streams:
    """A model whose mixers return what they are told to; what entered them is noted.

    Args:
        model: the model.
        start: what returns source 0, for a model that is not given it. Default: None.
        dtype: what it computes in. Default: torch.float64.
    """

    def __init__(
        self,
        model: nn.Module,
        start: nn.Module | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.model = model.to(dtype).eval()
        self.rounding = 100 * torch.finfo(dtype).eps
        named_so = [m for m in model.modules() if type(m).__name__.endswith(MIXERS)]
        self.mixers = [m for m in named_so if not set(named_so) & set([*m.modules()][1:])]
        self.start = start
        self.given: dict[int, Tensor] = {}
        self.origins: list[Origin | None] = []

    def __call__(self, inputs: Tensor, places: Places | None = None) -> list[Tensor]:
        """What entered each mixer, and the model's output; where they come from is noted."""
        seen: list[Tensor] = []
        contexts: list[Any] = []
        self.origins = []

        def note(x: Tensor) -> None:
            self.origins.append(None if places is None else places.origin(x))
            with unseen():
                seen.append(x.clone())

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            note(next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)))
            contexts.append(unseen())
            contexts[-1].__enter__()

        def returned(source: int, output: Any) -> Any:
            self.given.setdefault(source, swap_first(output, _copy)[1])
            new = self.given[source].clone()
            if places is not None:
                places.declare(new, source)
            return swap_first(output, lambda _: new)[0]

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            contexts.pop().__exit__(None, None, None)
            return returned(len(seen), output)

        with ExitStack() as stack, torch.no_grad():
            without_caches(self.model, stack)
            for module in self.mixers:
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(after).remove)
            if self.start is not None:
                start = self.start.register_forward_hook(lambda m, a, out: returned(0, out))
                stack.callback(start.remove)
            if places is not None:
                stack.enter_context(places)
                places.begin(inputs)
            out = self.model(inputs)
            note(out if isinstance(out, Tensor) else getattr(out, "logits", out[0]))
        return seen

    def changes(self, inputs: Tensor) -> list[list[Tensor]]:
        """Of each tensor, which elements change with which tokens of each source."""
        before = self(inputs)
        found: list[list[Tensor]] = [[] for _ in before]
        if self.start is None:
            self.given[0] = inputs
        for source in range(len(before)):
            x = self.given[source]
            changes: list[list[Tensor]] = [[] for _ in before]
            for token in x.flatten(0, 1):
                kept = token.clone()
                if x.is_floating_point():
                    token += torch.randn_like(token)
                else:
                    token.copy_((token + 1) % 13)
                for change, old, new in zip(changes, before, self(inputs), strict=True):
                    change.append((new - old).abs() > self.rounding)
                token.copy_(kept)
            for all_of, change in zip(found, changes, strict=True):
                all_of.append(torch.stack(change, -1))
        return found


#: How the names of classes end that mix tokens.
MIXERS = ("Mixer", "Attention", "MambaLayer", "DeltaNet")


def _moe(family: str, experts: str) -> Streams:
    config, model = named(f"{family}Config"), named(f"{family}ForCausalLM")
    sizes = {"num_local_experts" if family == "Mixtral" else "num_experts": 4}
    options: dict[str, Any] = {
        "vocab_size": 13,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "intermediate_size": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "experts_implementation": experts,
    }
    dtype = torch.float32 if experts == "grouped_mm" else torch.float64
    return Streams(oracles.randomise(model(config(**options | sizes))), dtype=dtype)


def _of_family(family: str) -> Streams:
    return Streams(attention_models.attention_model(family))


def _vit() -> Streams:
    model = attention_models.attention_model("vit")
    return Streams(model, model.vit.embeddings.patch_embeddings)


def _rwkv() -> Streams:
    config = named("RwkvConfig")(vocab_size=13, hidden_size=7, num_hidden_layers=2)
    return Streams(oracles.randomise(named("RwkvForCausalLM")(config)))


MODELS: dict[str, Callable[[], Streams]] = {
    "mamba": lambda: Streams(oracles.transformers_model("mamba")),
    "mixtral": lambda: _moe("Mixtral", "eager"),
    "mixtral batched": lambda: _moe("Mixtral", "batched_mm"),
    "mixtral grouped": lambda: _moe("Mixtral", "grouped_mm"),
    "qwen3_moe": lambda: _moe("Qwen3Moe", "eager"),
    "vit": _vit,
} | {
    family: lambda family=family: _of_family(family)
    for family in ("llama", "gpt2", "bert", "jamba", "zamba2", "qwen3_5_moe", "gpt_neox")
}


@pytest.mark.parametrize("name", [*MODELS, "rwkv"])
def test_real_models(name: str) -> None:
    streams = MODELS[name]() if name in MODELS else _rwkv()
    inputs = torch.randn(2, 3, 12, 12).double() if name == "vit" else torch.randint(13, (2, 4))
    streams(inputs, Places(lambda: "model"))
    origins, truth = streams.origins, streams.changes(inputs)
    assert len(origins) == len(streams.given) >= 3
    for origin, wanted in zip(origins, truth, strict=True):
        assert origin.mixed is None
        assert is_right(origin, wanted)
    if name == "rwkv":  # its feed-forward reads the token before, too
        assert [len(entries) for entries in origins[1].sources.values()] == [2, 2]
    elif name == "vit":  # a token for the class is put in front
        assert origins[0].tokens(0)[0][0].tolist() == [-1, *range(9)]
        assert origins[1].is_identity(1)
    else:
        assert all(o.is_identity(source) for o in origins[:-1] for source in o.sources)
