"""Where elements come from, held to what a function's derivatives say they depend on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_ssm.tracing.places import Origin, Places

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
    """Which elements depend on which tokens of each input: (shape of the output, B * L)."""
    jacobians = torch.autograd.functional.jacobian(
        lambda *xs: function(*(x.clone() for x in xs)), inputs
    )
    return [
        j.abs().flatten(j.dim() - x.dim() + 2).sum(-1).flatten(-2) > 1e-12
        for j, x in zip(jacobians, inputs, strict=True)
    ]


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
    out, origin = followed(function, *inputs)
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
    "detour": lambda x: x.contiguous().detach().requires_grad_(False) if not x.requires_grad else x,
    "data": lambda x: x.data if not x.requires_grad else x,
    "as_strided": lambda x: x.as_strided((B, L - 1, E), (L * E, E, 1)),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "aten": lambda x: torch.ops.aten.transpose.int(x, 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_moves(name: str) -> None:
    origin = check(MOVES[name])
    # what only moves is the source itself at every place that is not empty
    out, _ = followed(MOVES[name], draw())
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
        torch.view_as_complex(x.view(B, L, 2, 2)) * torch.polar(torch.ones(2), torch.ones(2)).to(torch.complex128)
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
    "conv over channels": lambda x: F.conv1d(x.mT, WEIGHT[:2, None, :1], groups=2) if False else
        F.conv1d(x.mT, WEIGHT[:, :1, None], groups=E),
    "conv over features": lambda x: F.conv2d(x[:, None], WEIGHT[:1, None, :][:, :, None][..., :3].reshape(1, 1, 1, 3)),
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
    parts = [
        rows[s:e] @ w for s, e, w in zip([0, *ends[:-1].tolist()], ends.tolist(), draw(3, E, E))
    ]
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
