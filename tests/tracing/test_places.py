"""Sources, skips, ids, what runs out of sight, cost, and functions one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.origins import (
    MASK,
    WEIGHT,
    B,
    E,
    L,
    check,
    depends,
    draw,
    followed,
    is_right,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from captum_ssm.operators.kernels.arithmetic import unseen
from captum_ssm.tracing.places import Mixed, Places, token_places
from captum_ssm.tracing.places.origin import OTHERS

pytestmark = pytest.mark.slow


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
    assert min(origin.sources) >= OTHERS and origin.mixed is None


def test_tokens_from_elsewhere_are_told_apart() -> None:
    origin = followed(lambda x: torch.cat([draw(B, 2, E), x], 1).flip(1), draw())[1]
    (other,) = (source for source in origin.sources if source >= OTHERS)
    assert origin.tokens(other)[0].tolist() == [[-1] * L + [1, 0], [-1] * L + [3, 2]]
    # they are no tokens of the input, and may meet those that are
    assert (
        followed(lambda x: torch.cat([draw(B, 2, E), x], 1)[:, 1:3].sum(1), draw())[1].mixed is None
    )


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


def _gate(x: Tensor) -> Tensor:
    """Of a size that no number of products makes too small or too large to be seen to change."""
    return 1 + 0.5 * torch.sin(x)


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
    out.transpose(0, 1)[a % x.shape[1] :].mul_(_gate(x[:, b % x.shape[1]]))
    return out


#: On the tensor that is there, one kept from before, another source, and two numbers.  What comes
#: from no token is not zero, or a product with it would come from none.
STEPS: dict[str, Callable[[Tensor, Tensor, Tensor, int, int], Tensor]] = {
    "flip": lambda x, kept, y, a, b: x.flip(1),
    "roll": lambda x, kept, y, a, b: x.roll(a, 1),
    "slice": lambda x, kept, y, a, b: x[:, a % x.shape[1] :: 1 + b % 2],
    "virtual": lambda x, kept, y, a, b: torch.cat([torch.ones(B, 1 + a % 2, E), x], 1),
    "beside": lambda x, kept, y, a, b: torch.cat([kept, x[:, :1]], 1),
    "sum": lambda x, kept, y, a, b: x + kept if x.shape == kept.shape else x + kept[:, :1],
    "other": lambda x, kept, y, a, b: torch.cat([x, y[:, a % 2 :]], 1)[:, b % 2 :],
    "product": lambda x, kept, y, a, b: x * _gate(kept if x.shape == kept.shape else y[:, :1]),
    "norm": lambda x, kept, y, a, b: F.layer_norm(x, (E,), None, WEIGHT[0]),
    "linear": lambda x, kept, y, a, b: F.linear(x, WEIGHT),
    "mlp": lambda x, kept, y, a, b: x + torch.sin(x @ WEIGHT) @ WEIGHT.T,
    "heads": lambda x, kept, y, a, b: x.unflatten(-1, (2, -1)).transpose(1, 2).sin().transpose(
        1, 2
    ).flatten(2),
    "index": lambda x, kept, y, a, b: x[:, [a % x.shape[1], b % x.shape[1], 0]],
    "repeat": lambda x, kept, y, a, b: x.repeat_interleave(1 + a % 2, dim=1)[:, :6],
    "shift": lambda x, kept, y, a, b: F.pad(x, (0, 0, 1, -1), value=0.5),
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
@settings(max_examples=50)
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
