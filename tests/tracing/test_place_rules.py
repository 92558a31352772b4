"""What each of torch's functions does to places, held to what changes where a token does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import function_arguments, function_calls
from helpers.function_arguments import Constants
from helpers.origins import (
    MASK,
    ORDER,
    PICKS,
    WEIGHT,
    B,
    E,
    L,
    check,
    claimed,
    depends,
    draw,
    followed,
)
from torch import Tensor, nn

from captum_ssm.tracing.places import Places, rules
from captum_ssm.tracing.places.rules.groups import tensors

pytestmark = pytest.mark.slow

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
    "scatter": lambda x: torch.zeros(B, L, E).double().scatter(
        1, PICKS[:, :1, None].expand(B, 1, E), x[:, :1]
    ),
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
    "strided conv": (lambda x: F.conv1d(x.mT, draw(3, E, 2), stride=2), "conv1d", False, False),
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
    "batch norm": (lambda x: F.batch_norm(x.mT, None, None, training=True),
                   "batch_norm", False, False),
    "normalize": (lambda x: F.normalize(x, dim=1), "normalize", False, False),
    "matmul": (lambda x: torch.ones(3, L).double() @ x, "matmul", False, False),
    "linear": (lambda x: F.linear(x.mT, draw(3, L)), "linear", False, False),
    "einsum": (lambda x: torch.einsum("ble,ml->bme", x, draw(L, L)), "einsum", False, False),
    "windows": (lambda x: (x.unfold(1, 2, 1) * draw(2)).sum(-1), "sum", False, False),
    "glu": (lambda x: F.glu(x[:, :4], 1), "glu", False, False),
    "five places": (lambda x: sum(x.roll(i, 1) for i in range(5)), "add", False, False),
    "index_add": (lambda x: x[:, :1].clone().index_add_(1, ORDER * 0, x),
                  "index_add", False, False),
    "unknown": (lambda x: torch.cdist(x, x), "cdist", False, False),
    "unknown in place": (lambda x: torch.ops.aten.renorm_(x.clone(), 2, 2, 1.0),
                         "renorm", False, False),
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


# --- every function, however it is called ---------------------------------------------------------

#: Their results are whole numbers, or drawn at random, before they are numbers again.
NO_ORIGIN = {"argsort", "one_hot", "bernoulli"}
#: Said to mix tokens though they need not.
ALARMING = {
    "block_diag",
    "cdist",
    "chain_matmul",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "embedding_bag",
    "interpolate",
    "masked_fill",
    "multi_dot",
    "tensordot",
    "unfold",
}


@pytest.mark.parametrize("name", function_calls.names())
def test_every_function(name: str) -> None:
    """No result depends on a token that is not claimed, nor are tokens mixed that are apart."""
    constants, state = Constants(), torch.get_rng_state()
    x = function_arguments.draw(positive=name in ("log", "log2", "log10", "sqrt", "rsqrt"))
    for call in function_calls.calls(name):

        def results(x: Tensor, call: Any = call) -> list[Tensor]:
            torch.set_rng_state(state)
            found = tensors((call(x.clone(), constants),))
            return [r for r in found if r.is_floating_point() or r.is_complex()]

        places, explained = Places(lambda: "here"), x.clone()
        with torch.no_grad(), places:
            places.begin(explained)
            found = results(explained)
        for i, result in enumerate(found):
            origin = places.origin(result)
            (truth,) = depends(lambda x: results(x)[i], (x,))  # noqa: B023
            if origin is None:
                assert name in NO_ORIGIN or not truth.any()
            elif origin.mixed is not None:
                assert name in ALARMING or (truth.sum(-1) > 1).any()
            else:
                assert not (truth & ~claimed(origin, 0)).any()


#: What functions of numbers are given after the first.
MORE: dict[str, tuple[Any, ...]] = {
    "prelu": (torch.tensor(0.3).double(),),
    "threshold": (0.1, 20.0),
    "clamp": (-99, 99),
    "clamp_min": (-99,),
    "clamp_max": (99,),
    "lerp": (3.0, 0.3),
    "fake_quantize_per_tensor_affine": (0.1, 0, -99, 99),
}


@pytest.mark.parametrize("name", rules.POINTWISE.split())
def test_numbers_one_by_one(name: str) -> None:
    spaces = (torch, F, torch.special, Tensor)
    functions = [f for space in spaces if callable(f := getattr(space, name, None))]
    assert functions or name in ("swish", "log_sigmoid"), name
    x = draw().flip(1).flatten(0, 1).abs()[:, None].clamp(0.2, 0.8).expand(-1, 2, -1).contiguous()
    for function in functions:
        numbers = (torch.complex(x, x),) if name in ("angle", "real", "imag") else (x,)
        for more in (MORE.get(name, ()), (x.flip(1) + 0.1,), (x + 0.1, x + 0.2)):
            try:
                function(*numbers, *more)
            except (TypeError, RuntimeError, ValueError):
                continue
            break
        else:
            raise AssertionError(f"no way to call {name} is known; add one")
        out, origin = followed(lambda x: function(x, *more), *numbers)  # noqa: B023
        assert origin.mixed is None and origin.sources[0][0].skip == 0
        assert out.shape == x.shape
        assert origin.is_identity(0)
