"""What stands between a mixer and the residual stream, and stacks that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles import latim as oracle
from oracles import relative_error
from torch import Tensor, nn
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from zoo.mamba import randomise

from captum_ssm import (
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaAttribution,
    trace,
)
from captum_ssm.errors import InputError

pytestmark = pytest.mark.slow

WIDTH, TOKENS, TARGET = 6, 5, (-1, 3)

#: What is put behind a mixer, from the modules of a block, what the mixer returned and the stream.
Behind = Callable[[Any, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """As transformers writes it: by hand, in float32 at least."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.promote_types(dtype, torch.float32))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.02)
        return self.weight * x.to(dtype)


def mean_free(v: Tensor) -> Tensor:
    return v - v.mean(-1, keepdim=True)


def layer_norm(block: Any, v: Tensor, out: Tensor, x: Tensor) -> Tensor:
    spread = (out.var(-1, correction=0, keepdim=True) + block.norm.eps).sqrt()
    return mean_free(v) / spread * block.norm.weight


def rms(out: Tensor, eps: float) -> Tensor:
    return (out.pow(2).mean(-1, keepdim=True) + eps).sqrt()


#: By name: what a block puts behind its mixer, and that on a vector ``v`` with all else frozen, of
#: the tokens of ``out`` and ``x``.
KINDS: dict[str, tuple[Behind, Callable[[Any, Tensor, Tensor, Tensor], Tensor]]] = {
    "a number": (lambda block, out, x: out * 0.3, lambda block, v, out, x: v * 0.3),
    "scaled features": (lambda b, out, x: b.gain * out, lambda b, v, out, x: v * b.gain),
    "layer norm": (lambda b, out, x: b.norm(out), layer_norm),
    "a norm without weights": (
        lambda b, out, x: b.plain(out),
        lambda b, v, out, x: mean_free(v) / (out.var(-1, correction=0, keepdim=True) + 1e-5).sqrt(),
    ),
    "rms norm": (
        lambda b, out, x: b.rms(out),
        lambda b, v, out, x: v / rms(out, b.rms.eps) * b.rms.weight,
    ),
    "rms norm by hand": (
        lambda b, out, x: b.by_hand(out),
        lambda b, v, out, x: v / rms(out, 0.02) * b.by_hand.weight,
    ),
    "a gate": (
        lambda b, out, x: out * torch.sigmoid(b.gate(x)),
        lambda b, v, out, x: v * torch.sigmoid(b.gate(x)),
    ),
    "a gate of its own": (
        lambda b, out, x: torch.sigmoid(b.gate(out)) * out,
        lambda b, v, out, x: v * torch.sigmoid(b.gate(out)),
    ),
    "a gate of each example": (
        lambda b, out, x: out * torch.tanh(b.conditions),
        lambda b, v, out, x: v * torch.tanh(b.conditions),
    ),
    "a projection": (lambda b, out, x: b.gate(out), lambda b, v, out, x: v @ b.gate.weight.T),
    "a projection with an adapter": (
        lambda b, out, x: b.gate(out) + 0.5 * b.up(b.down(out)),
        lambda b, v, out, x: v @ (b.gate.weight + 0.5 * b.up.weight @ b.down.weight).T,
    ),
    "a projection to fewer and back": (
        lambda b, out, x: b.up(b.down(out)),
        lambda b, v, out, x: v @ b.down.weight.T @ b.up.weight.T,
    ),
    "a projection, a gate and a norm": (
        lambda b, out, x: b.norm(b.gate(out) * torch.sigmoid(x) / 2) * 0.7,
        lambda b, v, out, x: (
            0.7
            * layer_norm(
                b, v @ b.gate.weight.T * torch.sigmoid(x) / 2, b.gate(out) * torch.sigmoid(x) / 2, x
            )
        ),
    ),
    "a number of a parameter": (
        lambda b, out, x: b.number * b.norm(out) / torch.tensor(2.0),
        lambda b, v, out, x: b.number * layer_norm(b, v, out, x) / 2,
    ),
    "features in three dimensions": (
        lambda b, out, x: b.gate(out) * b.gain[None, None] + b.gain[None, None],
        lambda b, v, out, x: v @ b.gate.weight.T * b.gain,
    ),
    "constants": (lambda b, out, x: out + b.gain - 0.5, lambda b, v, out, x: v),
    "its negative, and a product": (
        lambda b, out, x: -(out @ b.gate.weight),
        lambda b, v, out, x: -v @ b.gate.weight,
    ),
    "an addition to itself": (
        lambda b, out, x: out + b.gate(out),
        lambda b, v, out, x: v + v @ b.gate.weight.T,
    ),
    "a subtraction": (
        lambda b, out, x: -2 * b.gate(out),
        lambda b, v, out, x: -2 * v @ b.gate.weight.T,
    ),
}


class Block(nn.Module):
    """A mixer, and what may stand behind it."""

    def __init__(self, index: int, behind: Behind | None, flips: bool = False) -> None:
        super().__init__()
        config = MambaConfig(hidden_size=WIDTH, state_size=3, num_hidden_layers=3)
        self.mixer = randomise(MambaMixer(config, index))
        self.norm, self.rms = nn.LayerNorm(WIDTH, eps=0.01), nn.RMSNorm(WIDTH, eps=0.01)
        self.by_hand, self.gate = RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.plain = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.conditions = nn.Parameter(torch.randn(2, 1, WIDTH))
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.gain, self.number = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(()))
        self.behind, self.flips = behind, flips
        for norm in (self.norm, self.rms):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.behind is None:
            out: Tensor = self.mixer(x)
            return out
        if not self.flips:
            return x + self.behind(self, self.mixer(x), x)
        return x + self.behind(self, self.mixer(x.flip(1)), x.flip(1)).flip(1)


def model_of(*behind: Behind | None, flips: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(i, each, flips) for i, each in enumerate(behind)))
    return model.double().eval(), torch.randn(2, TOKENS, WIDTH).double()


@torch.no_grad()
def own_vectors(layer: Any) -> Tensor:
    """T (B, L, L, E) of a mixer by itself: each token's values sent alone, less what zeros give."""
    linear = layer.linear
    rest = linear.project(linear.operator.apply(torch.zeros_like(linear.values)))
    found = []
    for j in range(TOKENS):
        alone = torch.zeros_like(linear.values)
        alone[:, j] = linear.values[:, j]
        found.append(linear.project(linear.operator.apply(alone)) - rest)
    return torch.stack(found, 2)


@torch.no_grad()
def vectors_and_streams(model: Any, x: Tensor, kind: str) -> list[tuple[Tensor, Tensor]]:
    """What joins the stream, by its source tokens, and the stream, of each block."""
    found = []
    for block in model:
        given = x.flip(1) if block.flips else x
        with trace(block) as record:
            x = block(x)
        (layer,) = record.layers
        out, vectors = layer.output, own_vectors(layer)
        sent = [KINDS[kind][1](block, vectors[:, :, j], out, given) for j in range(TOKENS)]
        joined = torch.stack(sent, 2)
        found.append(
            (joined.flip(1, 2) if block.flips else joined, given.flip(1) if block.flips else given)
        )
    return found


def projections(vectors: Tensor, stream: Tensor) -> Tensor:
    parts = vectors.clone()
    parts[:, range(TOKENS), range(TOKENS)] += stream
    y = parts.sum(2)
    shares: Tensor = torch.einsum("bije,bie->bij", parts, y) / y.square().sum(-1)[..., None]
    return shares


@pytest.mark.parametrize("flips", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_of_what_joins_the_stream(kind: str, flips: bool) -> None:
    behind = KINDS[kind][0]
    model, x = model_of(behind, behind, flips=flips)
    wanted = [oracle.alti(*each) for each in vectors_and_streams(model, x, kind)]
    maps = LatimALTI(model).maps(x)  # by the tokens as the first mixer reads them
    for i, (found, expected) in enumerate(zip(maps, wanted, strict=True)):
        assert relative_error(found, expected.flip(1, 2) if flips else expected) <= 1e-9, i
    row = LatimALTI(model).attribute(x, TARGET).sum(-1)
    assert relative_error(row, (wanted[1] @ wanted[0])[:, -1]) <= 1e-9


@pytest.mark.parametrize("numbers", [(0, 1, 2), (0, 2), (2,)])
@pytest.mark.parametrize("kind", ["scaled features", "layer norm", "a projection"])
def test_layers_that_are_named(kind: str, numbers: tuple[int, ...]) -> None:
    """Those between them may mix tokens."""
    behind = KINDS[kind][0]
    model, x = model_of(behind, behind, behind)
    wanted = [oracle.alti(*each) for each in vectors_and_streams(model, x, kind)]
    names = [f"{number}.mixer" for number in numbers]
    maps = LatimALTI(model, layers=names).maps(x)
    for found, number in zip(maps, numbers, strict=True):
        assert relative_error(found, wanted[number]) <= 1e-9
    assert LatimLogit(model, layers=names).decompose(x, TARGET).delta.abs().max() <= 1e-6


@pytest.mark.parametrize("mixing", ["alti", "projection"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_traced_back_by_them(kind: str, mixing: str) -> None:
    """Of the second layer, whose own contributions are the target's column of its vectors."""
    behind = KINDS[kind][0]
    model, x = model_of(behind, behind)
    first, (vectors, _) = vectors_and_streams(model, x, kind)
    shares = oracle.alti(*first) if mixing == "alti" else projections(*first)
    found = LatimLogit(model).decompose(x, TARGET, mixing=mixing)
    written = vectors[:, -1, :, TARGET[1]]
    assert relative_error(found.layers[1], torch.einsum("bi,bij->bj", written, shares)) <= 1e-9
    assert found.delta.abs().max() <= 1e-6


@pytest.mark.parametrize("kind", ["layer norm", "a gate", "a projection"])
def test_norms_are_of_what_joins_the_stream(kind: str) -> None:
    behind = KINDS[kind][0]
    model, x = model_of(behind, behind)
    each = [v[:, -1].abs().sum(-1) for v, _ in vectors_and_streams(model, x, kind)]
    found = LatimNorm(model, p=1).attribute(x, TARGET).sum(-1)
    assert relative_error(found, (each[0] + each[1]) / 2) <= 1e-9


@pytest.mark.parametrize("method", [LatimALTI, LatimLogit])
def test_an_adapter_that_is_added_to_the_output_is_refused(method: Any) -> None:
    """The output is a term of the sum, but not all that comes from it."""
    model, x = model_of(*[lambda b, out, x: out + b.up(F.gelu(b.down(out)))] * 2)
    with pytest.raises(InputError, match="more than factors"):
        method(model).attribute(x, TARGET)


@pytest.mark.parametrize("method", [LatimALTI, LatimLogit])
def test_what_is_no_factor_and_no_projection_is_refused(method: Any) -> None:
    model, x = model_of(*[lambda b, out, x: b.up(F.gelu(b.down(out)))] * 2)
    with pytest.raises(InputError, match=r"'\d\.mixer'.*more than factors.*residual=False"):
        method(model).attribute(x, TARGET)
    maps = LatimALTI(model, residual=False).maps(x)
    torch.testing.assert_close(maps[0].sum(-1), torch.ones(2, TOKENS).double())
    with trace(model) as record:
        model(x)
    assert relative_error(maps[1], oracle.alti(own_vectors(record.layers[1]))) <= 1e-9


@pytest.mark.parametrize("write", [lambda out, gain: out.mul_(gain), lambda out, gain: out.neg_()])
def test_what_is_written_in_place_is_seen_or_refused(
    write: Callable[[Tensor, Tensor], Tensor],
) -> None:
    def behind(block: Any, out: Tensor, x: Tensor) -> Tensor:
        projected = block.gate(out)
        write(projected, block.gain)
        return projected

    model, x = model_of(behind, behind)
    with pytest.raises(InputError, match="more than factors"):
        LatimALTI(model).maps(x)


class Two(nn.Module):
    """Two mixers, of which what a function makes joins the stream."""

    def __init__(self, index: int, joins: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.other = Block(index, None), Block(index, None)
        self.joins = joins

    def forward(self, x: Tensor) -> Tensor:
        return self.joins(self, x, self.one(x), self.other(x))


#: What joins the stream, and that of both mixers' vectors, given what they returned.
IN_TURN: dict[str, tuple[Any, Any]] = {
    "numbers": (lambda b, x, m, n: x + 0.3 * m + 0.7 * n, lambda b, v, w, m, n: 0.3 * v + 0.7 * w),
    "norms": (
        lambda b, x, m, n: x + b.one.norm(m) + b.other.norm(n),
        lambda b, v, w, m, n: layer_norm(b.one, v, m, m) + layer_norm(b.other, w, n, n),
    ),
    "projections": (
        lambda b, x, m, n: x + b.one.gate(m) + b.other.gate(n),
        lambda b, v, w, m, n: v @ b.one.gate.weight.T + w @ b.other.gate.weight.T,
    ),
    "a projection of both": (
        lambda b, x, m, n: x + wide(b.one, torch.cat([m, n], -1)),
        lambda b, v, w, m, n: v @ b.one.gate.weight.T + w @ b.one.gate.weight.flip(0).T,
    ),
    "a gate and a projection of both": (
        lambda b, x, m, n: x + wide(b.one, torch.cat([b.one.norm(m), n * gate(b.one, n)], dim=2)),
        lambda b, v, w, m, n: (
            layer_norm(b.one, v, m, m) @ b.one.gate.weight.T
            + w * gate(b.one, n) @ b.one.gate.weight.flip(0).T
        ),
    ),
    "the second alone": (
        lambda b, x, m, n: x + m + b.other.norm(n),
        lambda b, v, w, m, n: v + layer_norm(b.other, w, n, n),
    ),
}


@pytest.mark.parametrize("kind", IN_TURN)
def test_mixers_that_join_the_stream_in_turn(kind: str) -> None:
    """What the first has become is no part of the stream that the second is added to."""
    torch.manual_seed(1)
    joins, of_vectors = IN_TURN[kind]
    model = nn.Sequential(*(Two(i, joins) for i in range(2))).double().eval()
    x = torch.randn(2, TOKENS, WIDTH).double()
    found = LatimALTI(model).maps(x)
    for block, one in zip(model, found, strict=True):
        with torch.no_grad(), trace(block) as record:
            after = block(x)
        m, n = (layer.output for layer in record.layers)
        v, w = (own_vectors(layer) for layer in record.layers)
        with torch.no_grad():
            each = [of_vectors(block, v[:, :, j], w[:, :, j], m, n) for j in range(TOKENS)]
        assert relative_error(one, oracle.alti(torch.stack(each, 2), x)) <= 1e-9
        x = after


#: Ways of joining that are refused, or the same as a sum.
OTHERS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "once more": lambda b, x, m: x + m + b.gain * m,
    "once more behind a norm": lambda b, x, m: x + m + b.norm(m),
    "by another function": lambda b, x, m: torch.addcmul(x, m, b.gain.expand_as(m)),
}


class Joined(nn.Module):
    def __init__(self, index: int, joins: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.joins = Block(index, None), joins

    def forward(self, x: Tensor) -> Tensor:
        return self.joins(self.block, x, self.block(x))


def joined(joins: Callable[[Any, Tensor, Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(*(Joined(i, joins) for i in range(2))).double().eval()
    return model, torch.randn(2, TOKENS, WIDTH).double()


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("method", [LatimALTI, LatimLogit])
def test_other_ways_of_joining_are_refused(method: Any, kind: str) -> None:
    model, x = joined(OTHERS[kind])
    with pytest.raises(InputError, match="more than factors"):
        method(model).attribute(x, TARGET)


def test_a_sum_that_is_made_again_is_one_stream() -> None:
    def again(block: Any, x: Tensor, m: Tensor) -> Tensor:
        h = block.norm(x + m)
        return x + m + block.up(F.gelu(block.down(h)))

    model, x = joined(again)
    found = LatimALTI(model).maps(x)
    with torch.no_grad(), trace(model) as record:
        model(x)
    first = record.layers[0]
    assert relative_error(found[0], oracle.alti(own_vectors(first), x)) <= 1e-9


# --- no stream at all ----------------------------------------------------------------------------


@torch.no_grad()
def dense(model: Any, x: Tensor) -> list[Tensor]:
    """The mean over channels of each layer's matrix (B, L, L)."""
    with trace(model) as record:
        model(x)
    return [layer.operator.per_channel().dense("mean") for layer in record.layers]


@pytest.mark.parametrize("normalize_rows", [False, True])
def test_the_identity_stands_for_a_stream_alone(normalize_rows: bool) -> None:
    """Between layers without one, matrices are multiplied as they are."""
    model, x = model_of(None, None)
    first, second = dense(model, x)
    if normalize_rows:
        first, second = (m / m.sum(-1, keepdim=True) for m in (first, second))
    found = ImplicitAttentionRollout(model).attribute(
        x, TARGET, components="exact", normalize_rows=normalize_rows
    )
    assert relative_error(found.sum(-1), (second @ first)[:, -1]) <= 1e-9


def test_shares_of_layers_without_a_stream() -> None:
    model, x = model_of(None, None)
    with torch.no_grad(), trace(model) as record:
        model(x)
    first, second = (own_vectors(layer) for layer in record.layers)
    wanted = oracle.alti(second) @ oracle.alti(first)
    found = LatimALTI(model).attribute(x, TARGET).sum(-1)
    assert relative_error(found, wanted[:, -1]) <= 1e-9
    for mixing in ("alti", "projection"):
        parts = LatimLogit(model).decompose(x, TARGET, mixing=mixing)
        nothing = torch.zeros_like(first[:, 0, 0])
        shares = oracle.alti(first) if mixing == "alti" else projections(first, nothing[:, None])
        written = second[:, -1, :, TARGET[1]]
        assert relative_error(parts.tokens, torch.einsum("bi,bij->bj", written, shares)) <= 1e-9
        assert not parts.layers[0].any() and parts.delta.abs().max() <= 1e-6


def test_a_stack_of_which_one_layer_has_a_stream() -> None:
    model, x = model_of(None, KINDS["a number"][0], None)
    matrices = dense(model, x)
    eye = torch.eye(TOKENS).double()
    wanted = matrices[2] @ (eye + matrices[1]) @ matrices[0]
    found = ImplicitAttentionRollout(model).attribute(x, TARGET, components="exact").sum(-1)
    assert relative_error(found, wanted[:, -1]) <= 1e-9


def gate(block: Any, x: Tensor) -> Tensor:
    return torch.sigmoid(block.gate(x))


def wide(block: Any, x: Tensor) -> Tensor:
    """A projection of twice the width."""
    return F.linear(x, torch.cat([block.gate.weight, block.gate.weight.flip(0)], -1))


def halves(m: Tensor, x: Tensor) -> Any:
    return torch.cat([m, x], -1).chunk(2, -1)


#: Ways of joining what was read to what the mixer returned.
GATES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a gate": lambda b, x, m: m * gate(b, x),
    "a gate and a norm": lambda b, x, m: b.norm(gate(b, x) * m),
    "a gate and a constant": lambda b, x, m: torch.addcmul(b.gain, m, gate(b, x)),
    "a gate in letters": lambda b, x, m: torch.einsum("ble,ble->ble", m, gate(b, x)),
    "a gate in place": lambda b, x, m: b.norm(m).mul_(gate(b, x)),
    "a divisor": lambda b, x, m: m / (1 + x.square()),
    "a gate of both": lambda b, x, m: m * gate(b, m + x),
    "a gate of both together": lambda b, x, m: m * torch.sigmoid(wide(b, torch.cat([m, x], -1))),
    "a distance": lambda b, x, m: m * (m - x).norm(dim=-1, keepdim=True),
    "a gated unit": lambda b, x, m: F.glu(torch.cat([m, b.gate(x)], -1), -1),
    "halves": lambda b, x, m: (lambda one, other: one * torch.sigmoid(other))(*halves(m, x)),
    "halves of what was normed": lambda b, x, m: (
        lambda one, other: one * torch.tanh(other)
    )(*(lambda c: c * c.pow(2).mean(-1, keepdim=True).rsqrt())(torch.cat([m, x], -1)).chunk(2, -1)),
}  # fmt: skip
STREAMS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a product and a sum": lambda b, x, m: torch.addcmul(x, m, gate(b, x)),
    "by name": lambda b, x, m: torch.addcmul(input=x, tensor1=m, tensor2=gate(b, x)),
    "a sum in place": lambda b, x, m: x.clone().add_(m),
    "a weighted sum": lambda b, x, m: torch.lerp(x, m, 0.3),
    "a gated sum": lambda b, x, m: torch.lerp(x, m, gate(b, x)),
    "both gated": lambda b, x, m: (lambda g: g * m + (1 - g) * x)(gate(b, x)),
    "both gated by the output": lambda b, x, m: (lambda g: g * m + (1 - g) * x)(gate(b, m)),
    "a gate of the output": lambda b, x, m: x * gate(b, m) + m,
    "gates of each other": lambda b, x, m: m * gate(b, x) + x * gate(b, m),
    "a factor near one": lambda b, x, m: x * (1 + m),
    "the same as a sum": lambda b, x, m: x + x * m,
    "a projection of both": lambda b, x, m: wide(b, torch.cat([m, x], -1)),
    "of a gated output, too": lambda b, x, m: wide(b, torch.cat([m * gate(b, x), x], -1)),
    "a sum of a stack": lambda b, x, m: torch.stack([m, x]).sum(0),
    "of a gated stack": lambda b, x, m: torch.stack([x, m * gate(b, x)]).sum(0),
    "weights of a stack": lambda b, x, m: (
        torch.stack([m, x], -1) * torch.softmax(wide(b, torch.cat([x, m], -1))[..., None, :2], -1)
    ).sum(-1),
    "parts of a stack": lambda b, x, m: (lambda both: both[0] + both[1])(torch.stack([x, m])),
    "a sum of halves": lambda b, x, m: sum(halves(m * gate(b, x), x)),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", [*GATES, *STREAMS])
def test_the_identity_stands_for_what_outputs_are_added_to(kind: str, named: bool) -> None:
    model, x = joined((GATES | STREAMS)[kind])
    first, second = dense(model, x)
    if kind in STREAMS:
        first, second = (m + torch.eye(TOKENS).double() for m in (first, second))
    layers = [block.block.mixer for block in model] if named else None
    found = ImplicitAttentionRollout(model, layers=layers).attribute(x, TARGET, components="exact")
    assert relative_error(found.sum(-1), (second @ first)[:, -1]) <= 1e-9


@pytest.mark.parametrize("named", [False, True])
def test_shares_of_layers_with_gates_in_place_of_streams(named: bool) -> None:
    model, x = joined(GATES["a gate and a norm"])
    with torch.no_grad(), trace(model) as record:
        model(x)
    first, second = (own_vectors(layer) for layer in record.layers)
    layers = [block.block.mixer for block in model] if named else None
    found = LatimALTI(model, layers=layers).attribute(x, TARGET).sum(-1)
    wanted = oracle.alti(second) @ oracle.alti(first)
    assert relative_error(found, wanted[:, -1]) <= 1e-9


class Again(nn.Module):
    """What the model was given is added once more between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i, None) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        given = x
        for block in self.blocks:
            x = 0.8 * x + 0.2 * given
            x = x + block.mixer(block.norm(x))
        return x


@pytest.mark.parametrize("method", [LatimALTI, LatimLogit])
def test_a_stream_that_is_not_clear_is_refused(method: Any) -> None:
    torch.manual_seed(1)
    model, x = Again().eval(), torch.randn(2, TOKENS, WIDTH)
    with pytest.raises(InputError, match=r"but stands alone\. Use residual=False"):
        method(model).attribute(x, TARGET)


class Late(nn.Module):
    """What the first layer reads is its gate, and is added to the output of all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i, None) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        h = first(x) * gate(first, x)
        return h + second(h) + x


class Merged(nn.Module):
    """Two directions that take turns by a gate, and no stream."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.one, self.other = Block(index, None), Block(index, None)

    def forward(self, x: Tensor) -> Tensor:
        g = gate(self.one, x)
        found: Tensor = g * self.one(x) + (1 - g) * self.other(x.flip(1)).flip(1)
        return found


def test_directions_that_take_turns_have_no_stream() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Merged(0), Merged(1)).double().eval()
    x = torch.randn(2, TOKENS, WIDTH).double()
    one, other, *later = dense(model, x)
    first, second = one + other.flip(1, 2), later[0] + later[1].flip(1, 2)
    found = ImplicitAttentionRollout(model).attribute(x, TARGET, components="exact").sum(-1)
    assert relative_error(found, (second @ first)[:, -1]) <= 1e-9


class Local(nn.Module):
    """x + a convolution over tokens of what the mixer returned."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.block, self.conv = Block(index, None), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.block(x).mT).mT


def test_what_mixes_tokens_behind_named_layers_is_vouched_for() -> None:
    """The stream is there all the same."""
    torch.manual_seed(1)
    model = nn.Sequential(Local(0), Local(1)).double().eval()
    x = torch.randn(2, TOKENS, WIDTH).double()
    first, second = (m + torch.eye(TOKENS).double() for m in dense(model, x))
    layers = [block.block.mixer for block in model]
    found = ImplicitAttentionRollout(model, layers=layers).attribute(x, TARGET, components="exact")
    assert relative_error(found.sum(-1), (second @ first)[:, -1]) <= 1e-9
    with pytest.raises(InputError, match="conv1d"):
        ImplicitAttentionRollout(model).attribute(x, TARGET)


def test_features_that_later_layers_replace_are_missed() -> None:
    model, x = joined(lambda b, x, m: torch.where(torch.arange(WIDTH) < 3, m, x))
    with pytest.raises(InputError, match=r"beside a part.*without what layer '0"):
        ImplicitAttentionRollout(model).attribute(x, TARGET)


@pytest.mark.parametrize("method", [ImplicitAttentionRollout, LatimALTI, MambaAttribution])
def test_what_is_a_gate_first_and_added_later_is_refused(method: Any) -> None:
    torch.manual_seed(1)
    model, x = Late().eval(), torch.randn(2, TOKENS, WIDTH)
    with pytest.raises(InputError, match="passes several layers by"):
        method(model).attribute(x, TARGET)


class Around(nn.Module):
    """x + f2(f1(x)): what passes both layers by at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i, None) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.blocks[1](self.blocks[0](x))


@pytest.mark.parametrize("method", [ImplicitAttentionRollout, LatimALTI, LatimLogit])
def test_what_passes_several_layers_by_is_refused(method: Any) -> None:
    torch.manual_seed(1)
    model, x = Around().eval(), torch.randn(2, TOKENS, WIDTH)
    with pytest.raises(InputError, match="passes several layers by"):
        method(model).attribute(x, TARGET)
    assert LatimFlow(model).decompose(x, TARGET).delta.abs().max() < 1e-5


class Skipping(nn.Module):
    """x + f2(x + f1(x)): what passes the second layer by is not all that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i, None) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = x + self.blocks[0](x)
        return x + self.blocks[1](inner)


@pytest.mark.parametrize(
    "method", [ImplicitAttentionRollout, LatimALTI, LatimLogit, MambaAttribution]
)
def test_a_part_of_what_is_read_that_passes_by_alone_is_refused(method: Any) -> None:
    torch.manual_seed(1)
    model, x = Skipping().eval(), torch.randn(2, TOKENS, WIDTH)
    with pytest.raises(InputError, match=r"beside a part.*without what layer 'blocks\.0\.mixer'"):
        method(model).attribute(x, TARGET)
    assert LatimFlow(model).decompose(x, TARGET).delta.abs().max() < 1e-5


class Parallel(nn.Module):
    """Two mixers, of which the second reads the other way round, beside a stream or alone.

    What they return is weighted and added up, then projected or not, or is projected side by side.
    """

    def __init__(self, index: int, kind: str, adds: bool) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(Block(index, None).mixer for _ in range(2))
        width = 2 * WIDTH if kind == "side by side" else WIDTH
        self.projection, self.kind, self.adds = nn.Linear(width, WIDTH), kind, adds

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.mixers[0](x), self.mixers[1](x.flip(1)).flip(1)
        if self.kind == "side by side":
            out: Tensor = self.projection(torch.cat([one, other], -1))
        else:
            out = 0.3 * one + 0.7 * other
            out = self.projection(out) if self.kind == "projected" else out
        return x + out if self.adds else out

    def sent(self, one: Tensor, other: Tensor) -> Tensor:
        """What joins the stream, of vectors of both mixers; without one, what is projected."""
        weight = self.projection.weight.detach()
        if self.kind == "side by side":
            return torch.cat([one, other], -1) @ weight.T
        out = 0.3 * one + 0.7 * other
        return out @ weight.T if self.kind == "projected" and self.adds else out


def parallel(kind: str, adds: bool) -> tuple[Any, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(*(Parallel(i, kind, adds) for i in range(2))).double().eval()
    return model, torch.randn(2, TOKENS, WIDTH).double()


@pytest.mark.parametrize(
    ("kind", "adds"),
    [
        ("plain", False),
        ("plain", True),
        ("projected", False),
        ("projected", True),
        ("side by side", True),
    ],
)
def test_mixers_that_are_brought_together(kind: str, adds: bool) -> None:
    model, x = parallel(kind, adds)
    wanted = torch.eye(TOKENS).double().expand(2, -1, -1)
    stream = x
    for block in model:
        with torch.no_grad(), trace(block) as record:
            after = block(stream)
        one, other = (own_vectors(layer) for layer in record.layers)
        sent = block.sent(one, other.flip(1, 2))
        wanted, stream = oracle.alti(sent, stream if adds else None) @ wanted, after
    found = LatimALTI(model).attribute(x, TARGET).sum(-1)
    assert relative_error(found, wanted[:, -1]) <= 1e-9


@pytest.mark.parametrize("method", [LatimALTI, LatimLogit, LatimNorm])
def test_mixers_that_are_not_added_to_each_other_nor_to_a_stream_are_refused(method: Any) -> None:
    """Of no vector each of them is a term."""
    model, x = parallel("side by side", False)
    with pytest.raises(InputError, match=r"'\d\.mixers\.\d'.*more than factors"):
        method(model).attribute(x, TARGET)
