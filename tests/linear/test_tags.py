"""Which of the explained ids a model looks up, whatever forward_func makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.rules import frozen_flow
from torch import Tensor, nn
from zoo.mamba import transformers_model

from captum_ssm.errors import InputError
from tests.oracles import relative_error

TARGET = (-1, 3)
#: Above all ids: what stands for places in the oracle, and constants do not reach.
FAR = 1000
Change = Callable[[Tensor], Tensor]


def draw(batch: int = 2) -> Tensor:
    torch.manual_seed(0)
    ids = torch.randint(1, 19, (batch, 9))
    ids[:, 3] = ids[:, 5]
    return ids


def mamba() -> Any:
    return transformers_model("mamba").double()


def written_into(x: Tensor) -> Tensor:
    out = torch.zeros(len(x), x.shape[1] + 2, dtype=torch.long)
    out[:, 1:-1] = x
    return out


def rows_written_into(x: Tensor) -> Tensor:
    out = torch.zeros(len(x), x.shape[1] + 1, dtype=torch.long)
    for row, into in zip(x, out, strict=True):
        into[1:].copy_(row)
    return out


def first_replaced(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 7
    return x


def in_a_new_order(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1]).flip(0).expand_as(x)
    return torch.zeros_like(x).scatter(1, places, x)


def before_they_are_cleared(x: Tensor) -> Tensor:
    moved = x.flip(1)
    x.zero_()
    return moved


MOVES: dict[str, Change] = {
    "as they are": lambda x: x,
    "copied": lambda x: x.clone(),
    "a token in front": lambda x: torch.cat([torch.full_like(x[:, :1], 7), x], 1),
    "padded": lambda x: F.pad(x, (3, 1), value=2),
    "reversed": lambda x: x.flip(1),
    "sliced": lambda x: x[:, 2:],
    "cut": lambda x: x[:, :-2],
    "listed": lambda x: x[:, [2, 0, 1]],
    "indexed": lambda x: x[:, torch.tensor([3, 1])],
    "gathered": lambda x: x.gather(1, torch.tensor([[3, 2, 1]]).expand(len(x), -1)),
    "repeated": lambda x: x.repeat(1, 2),
    "interleaved": lambda x: x.repeat_interleave(2, 1),
    "beside themselves": lambda x: torch.cat([x, x.flip(1)], 1),
    "in 32 bits": lambda x: x.int().flip(1),
    "by rows": lambda x: torch.stack([row.flip(0) for row in x]),
    "by columns": lambda x: torch.stack(x.unbind(1)[::-1], 1),
    "transposed": lambda x: x.T.flip(0).T,
    "strided": lambda x: x.contiguous().as_strided((len(x), 4), (x.shape[1], 2)),
    "selected": lambda x: x[x != 0].view(len(x), -1),
    "scattered": in_a_new_order,
    "written": written_into,
    "written by views": rows_written_into,
    "replaced": first_replaced,
    "cleared": before_they_are_cleared,
    "added to zeros": lambda x: torch.zeros_like(x).add_(x.flip(1)),
    "put out": lambda x: torch.cat([x, x], 1, out=torch.empty(len(x), 18, dtype=torch.long)),
    "made anew": lambda x: x.new_tensor(x.flip(1)) if x.is_leaf else x,
    "one after the other": lambda x: F.pad(x[:, 1:].flip(1).int().long(), (1, 0), value=4).clone(),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", MOVES)
def test_relevance_lies_on_the_ids_that_are_moved(name: str) -> None:
    model, ids, moved = mamba(), draw(), MOVES[name]
    places = moved(FAR + torch.arange(9).expand(2, -1).clone()) - FAR
    each = frozen_flow(model).attribute(moved(ids.clone()), target=TARGET)
    expected = torch.zeros(2, 10, dtype=each.dtype)
    expected.scatter_add_(1, places.long().where(places >= 0, 9), each)
    runs: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        runs.append(x)
        logits: Tensor = model(moved(x)).logits
        return logits

    flow = frozen_flow(forward, model)
    found = flow.attribute(ids, target=TARGET, verify=False)
    assert relative_error(found, expected[:, :9]) <= 1e-9
    assert len(runs) == 1


@pytest.mark.parametrize("ids", [[1, 2, 3, 2, 1], [4, 4, 4, 4, 4]])
def test_equal_ids_have_places_of_their_own(ids: list[int]) -> None:
    model, given = mamba(), torch.tensor([ids])
    expected = frozen_flow(model).attribute(given, target=TARGET).flip(1)
    found = frozen_flow(lambda x: model(x.flip(1)).logits, model).attribute(given, target=TARGET)
    assert relative_error(found, expected) <= 1e-9


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_ids_of_few_bits(dtype: torch.dtype) -> None:
    model, ids = mamba(), draw()
    flow = frozen_flow(lambda x: model(x.flip(1).long()).logits, model)
    expected = flow.attribute(ids, target=TARGET)
    assert relative_error(flow.attribute(ids.to(dtype), target=TARGET), expected) <= 1e-9


def test_examples_that_share_memory() -> None:
    model, ids = mamba(), draw(1)
    flow = frozen_flow(lambda x: model(x.flip(1)).logits, model)
    expected = flow.attribute(ids.repeat(3, 1), target=TARGET)
    assert relative_error(flow.attribute(ids.expand(3, -1), target=TARGET), expected) <= 1e-9


def test_ids_that_are_written_to_are_none_of_those_given() -> None:
    model, ids = mamba(), draw()
    before = ids.clone()

    def forward(x: Tensor) -> Tensor:
        x[:, 0] = 7
        logits: Tensor = model(x).logits
        return logits

    found = frozen_flow(forward, model).attribute(ids, target=TARGET, verify=False)
    assert not found[:, 0].any() and found[:, 1:].all()
    assert torch.equal(ids, before)


@pytest.mark.parametrize("other", [3, 0])
def test_ids_that_tests_of_values_replace(other: int) -> None:
    model, ids = mamba(), draw()
    pad = int(ids[0, 1])
    for changed in (
        lambda x: torch.where(x == pad, other, x),
        lambda x: x.masked_fill(x == pad, other),
    ):
        expected = frozen_flow(model).attribute(changed(ids), target=TARGET) * (ids != pad)
        forward = lambda x, changed=changed: model(changed(x)).logits  # noqa: E731
        found = frozen_flow(forward, model).attribute(ids, target=TARGET)
        assert relative_error(found, expected) <= 1e-9


def test_ids_that_come_out_equal_are_known_by_their_values() -> None:
    model, ids = mamba(), draw()
    expected = frozen_flow(model).attribute(ids, target=TARGET)
    for changed in (
        lambda x: x.clamp(max=18),
        lambda x: x % 19,
        lambda x: torch.tensor(x.tolist()),
    ):
        flow = frozen_flow(lambda x, changed=changed: model(changed(x)).logits, model)
        assert relative_error(flow.attribute(ids, target=TARGET), expected) <= 1e-9


COMPUTED: dict[str, Change] = {
    "subtracted": lambda x: 18 - x,
    "next ones": lambda x: (x + 1) % 19,
    "all next ones": lambda x: x + 1 - (x == 18).long(),
    "some next ones": lambda x: torch.where(x == x[0, 1], x + 1, x),
    "doubled": lambda x: x // 2 * 2,
    "by a small modulus": lambda x: x % 16,
    "by low bits": lambda x: x & 15,
    "clamped": lambda x: x.clamp(max=9),
    "sorted": lambda x: x.sort(1).values,
    "by another table": lambda x: torch.arange(20).flip(0)[x],
    "without duplicates": lambda x: x[:1].unique()[None].expand(len(x), -1),
    "low words": lambda x: x.view(torch.int32)[:, ::2].flip(1),
    "floating": lambda x: x.float().flip(1).long(),
    "constant": lambda x: x * 0 + 2,
    "of a list": lambda x: torch.tensor(x.flip(1).tolist()),
    "by numpy": lambda x: torch.from_numpy(x.numpy()[:, ::-1].copy()),
    "between examples": lambda x: x.flip(0),
    "one row": lambda x: x.reshape(1, -1),
    "more rows": lambda x: x[:, :8].reshape(-1, 4),
}


#: Of these each token is still told to be no given one, where they stand beside given ones.
BESIDE = ("subtracted", "next ones", "doubled", "by a small modulus", "by low bits", "clamped",
          "sorted", "by another table", "without duplicates")  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", COMPUTED)
def test_ids_that_are_computed_are_refused(name: str, batch: int) -> None:
    if batch == 1 and name in ("between examples", "one row"):
        return
    model, changed = mamba(), COMPUTED[name]
    flow = frozen_flow(lambda x: model(changed(x)).logits, model)
    said = r"show which token is which|does not show which token"
    with pytest.raises(InputError, match=said):
        flow.attribute(draw(batch), target=TARGET)
    if name in BESIDE:
        flow = frozen_flow(lambda x: model(torch.cat([x, changed(x)], 1)).logits, model)
        with pytest.raises(InputError, match=said):
            flow.attribute(draw(batch), target=TARGET)


class Summed(nn.Module):
    """An embedding, with what another look-up adds before or behind it."""

    def __init__(self, model: Any, more: Callable[..., Tensor], behind: bool) -> None:
        super().__init__()
        self.first, self.more, self.behind = model.backbone.embeddings, more, behind
        self.second = nn.Embedding(64, self.first.embedding_dim).double()

    def forward(self, ids: Tensor) -> Tensor:
        more = None if self.behind else self.more(self, ids)
        first: Tensor = self.first(ids)
        return first + (self.more(self, ids) if more is None else more)


def summed(more: Callable[..., Tensor], behind: bool) -> Any:
    model = mamba()
    model.backbone.embeddings = Summed(model, more, behind)
    return model


EITHER_WAY = pytest.mark.parametrize("behind", [True, False])


@EITHER_WAY
@pytest.mark.parametrize(
    "positions",
    [
        lambda x: torch.arange(x.shape[1])[None],
        lambda x: torch.arange(x.shape[1])[None].expand_as(x),
        lambda x: (x != x[0, 0]).long().cumsum(1),
        lambda x: torch.ones_like(x).cumsum(1) - 1,
        lambda x: torch.zeros_like(x),
    ],
)
def test_other_look_ups_add_constants(positions: Change, behind: bool) -> None:
    model = summed(lambda own, x: own.second(positions(x)), behind)
    for ids in (draw(), torch.arange(8)[None]):
        embedding = model.backbone.embeddings
        first = embedding.first(ids).detach()
        rest = embedding.second(positions(ids)).detach()
        whole = frozen_flow(lambda e: model(inputs_embeds=e).logits, model=model)
        gradient = whole.attribute(first + rest, target=TARGET) / (first + rest)
        found = frozen_flow(model).decompose(ids, target=TARGET)
        assert relative_error(found.tokens, (gradient * first).sum(-1)) <= 1e-9
        assert found.sizes == ()
        assert not frozen_flow(model).attribute(ids, target=TARGET, baselines=ids).any()


@EITHER_WAY
def test_given_and_equal_ids_in_two_tables_are_refused(behind: bool) -> None:
    model = summed(lambda own, x: own.second(x.clamp(max=18)), behind)
    with pytest.raises(InputError, match="Pass embeddings"):
        frozen_flow(model).attribute(draw(), target=TARGET)


class Around(nn.Module):
    """Positions that are looked up before the ids, in one table or two, and behind them."""

    def __init__(self, first: nn.Embedding, before: int) -> None:
        super().__init__()
        self.first = first
        self.more = nn.ModuleList(nn.Embedding(64, 5).double() for _ in range(3))
        self.before = before

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])[None]
        more = [table(positions) for table in self.more[: self.before]]
        found: Tensor = self.first(ids)
        return sum([*more, self.more[2](positions)], found)


def test_ids_that_are_equal_by_chance_to_what_is_looked_up_before() -> None:
    model, ids = mamba(), torch.arange(8)[None]
    first = model.backbone.embeddings
    model.backbone.embeddings = Around(first, 1)
    found = frozen_flow(model).decompose(ids, target=TARGET)
    assert found.sizes == () and found.biases["backbone.embeddings"].any()
    model.backbone.embeddings = Around(first, 2)
    with pytest.raises(InputError, match="Pass embeddings"):
        frozen_flow(model).attribute(ids, target=TARGET)
    assert frozen_flow(model).attribute(ids.flip(1), target=TARGET).all()


@EITHER_WAY
@pytest.mark.parametrize(
    "more",
    [
        lambda own, x: own.second(x.flatten()).view(*x.shape, -1),
        lambda own, x: own.second(x.flip(1).flatten()).view(*x.shape, -1),
        lambda own, x: own.second(x.sort(1).values),
        lambda own, x: F.conv1d(F.one_hot(x, 64).mT.double(), own.second.weight.T[..., None]).mT,
        lambda own, x: own.first(18 - x),
        lambda own, x: F.pad(own.first(18 - x[:, 1:]), (0, 0, 1, 0)),
        lambda own, x: own.second.weight.gather(0, x.view(-1, 1).expand(-1, 5)).view(*x.shape, 5),
    ],
)
def test_other_look_ups_of_the_ids_are_refused(more: Any, behind: bool) -> None:
    model = summed(more, behind)
    for forward in (model, lambda x: model(F.pad(x.flip(1), (1, 0), value=4)).logits):
        with pytest.raises(InputError, match="Pass embeddings"):
            frozen_flow(forward, model).attribute(draw(), target=TARGET)
