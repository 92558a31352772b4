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
#: Mixers of transformers round parts of their scans to float32.
CLOSE = 1e-6

#: What is put behind a mixer, from the modules of a block, what the mixer returned and the stream.
Behind = Callable[[Any, Tensor, Tensor], Tensor]


def layer_norm(block: Any, v: Tensor, out: Tensor, x: Tensor) -> Tensor:
    spread = (out.var(-1, correction=0, keepdim=True) + block.norm.eps).sqrt()
    return (v - v.mean(-1, keepdim=True)) / spread * block.norm.weight


def gate(block: Any, x: Tensor) -> Tensor:
    return torch.sigmoid(block.gate(x))


#: By name: what a block puts behind its mixer, and that on a vector ``v`` with all else frozen, of
#: the tokens of ``out`` and ``x``.
KINDS: dict[str, tuple[Behind, Callable[[Any, Tensor, Tensor, Tensor], Tensor]]] = {
    "layer norm": (lambda b, out, x: b.norm(out), layer_norm),
    "a gate": (lambda b, out, x: out * gate(b, x), lambda b, v, out, x: v * gate(b, x)),
    "a gate of each example": (
        lambda b, out, x: out * torch.tanh(b.conditions),
        lambda b, v, out, x: v * torch.tanh(b.conditions),
    ),
    "a projection": (lambda b, out, x: b.gate(out), lambda b, v, out, x: v @ b.gate.weight.T),
    "a projection with an adapter": (
        lambda b, out, x: b.gate(out) + 0.5 * b.up(b.down(out)),
        lambda b, v, out, x: v @ (b.gate.weight + 0.5 * b.up.weight @ b.down.weight).T,
    ),
    "a projection and a norm": (
        lambda b, out, x: b.norm(b.gate(out)) * 0.7,
        lambda b, v, out, x: 0.7 * layer_norm(b, v @ b.gate.weight.T, b.gate(out), x),
    ),
    "constants": (lambda b, out, x: out + b.gain - 0.5, lambda b, v, out, x: v),
    "an addition to itself": (
        lambda b, out, x: out + b.gate(out),
        lambda b, v, out, x: v + v @ b.gate.weight.T,
    ),
}


class Block(nn.Module):
    def __init__(self, index: int, behind: Behind | None, flips: bool = False) -> None:
        super().__init__()
        config = MambaConfig(hidden_size=WIDTH, state_size=3, num_hidden_layers=3)
        self.mixer = randomise(MambaMixer(config, index))
        self.norm, self.gate = nn.LayerNorm(WIDTH, eps=0.01), nn.Linear(WIDTH, WIDTH)
        self.conditions = nn.Parameter(torch.randn(2, 1, WIDTH))
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.behind, self.flips = behind, flips
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.behind is None:
            out: Tensor = self.mixer(x)
            return out
        if not self.flips:
            return x + self.behind(self, self.mixer(x), x)
        return x + self.behind(self, self.mixer(x.flip(1)), x.flip(1)).flip(1)


class Blocks(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Tensor], count: int = 2) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList(Block(i, None) for i in range(count)), run
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.blocks, x)


def drawn(make: Callable[[], list[nn.Module]]) -> tuple[Any, Tensor]:
    torch.manual_seed(1)
    return nn.Sequential(*make()).double().eval(), torch.randn(2, TOKENS, WIDTH).double()


def model_of(*behind: Behind | None, flips: bool = False) -> tuple[Any, Tensor]:
    return drawn(lambda: [Block(i, each, flips) for i, each in enumerate(behind)])


def joined(joins: Behind) -> tuple[Any, Tensor]:
    return drawn(lambda: [Blocks(lambda b, x: joins(b[0], x, b[0](x)), 1) for _ in range(2)])


def run_by(run: Callable[[Any, Tensor], Tensor], count: int = 2) -> tuple[Any, Tensor]:
    return drawn(lambda: [Blocks(run, count)])


@torch.no_grad()
def layers_of(model: Any, x: Tensor) -> list[Any]:
    with trace(model) as record:
        model(x)
    return record.layers


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
        (layer,) = layers_of(block, x)
        vectors = own_vectors(layer)
        sent = [KINDS[kind][1](block, vectors[:, :, j], layer.output, given) for j in range(TOKENS)]
        joined, x = torch.stack(sent, 2), block(x)
        found.append((joined.flip(1, 2), given.flip(1)) if block.flips else (joined, given))
    return found


def projections(vectors: Tensor, stream: Tensor) -> Tensor:
    parts = vectors.clone()
    parts[:, range(TOKENS), range(TOKENS)] += stream
    y = parts.sum(2)
    shares: Tensor = torch.einsum("bije,bie->bij", parts, y) / y.square().sum(-1)[..., None]
    return shares


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_of_what_joins_the_stream(kind: str) -> None:
    behind = KINDS[kind][0]
    for flips in (False, True):
        model, x = model_of(behind, behind, flips=flips)
        wanted = [oracle.alti(*each) for each in vectors_and_streams(model, x, kind)]
        maps = LatimALTI(model).maps(x)  # by the tokens as the first mixer reads them
        for found, expected in zip(maps, wanted, strict=True):
            assert relative_error(found, expected.flip(1, 2) if flips else expected) <= CLOSE
        row = LatimALTI(model).attribute(x, TARGET).sum(-1)
        assert relative_error(row, (wanted[1] @ wanted[0])[:, -1]) <= CLOSE


@pytest.mark.parametrize("numbers", [(0, 1, 2), (0, 2)])
@pytest.mark.parametrize("kind", ["layer norm", "a projection"])
def test_layers_that_are_named(kind: str, numbers: tuple[int, ...]) -> None:
    behind = KINDS[kind][0]
    model, x = model_of(behind, behind, behind)
    wanted = [oracle.alti(*each) for each in vectors_and_streams(model, x, kind)]
    names = [f"{number}.mixer" for number in numbers]
    maps = LatimALTI(model, layers=names).maps(x)
    for found, number in zip(maps, numbers, strict=True):
        assert relative_error(found, wanted[number]) <= CLOSE
    assert LatimLogit(model, layers=names).decompose(x, TARGET).delta.abs().max() <= 1e-6


@pytest.mark.parametrize("mixing", ["alti", "projection"])
@pytest.mark.parametrize("kind", ["layer norm", "a gate", "a projection and a norm"])
def test_what_is_traced_back_by_them(kind: str, mixing: str) -> None:
    behind = KINDS[kind][0]
    model, x = model_of(behind, behind)
    first, (vectors, _) = vectors_and_streams(model, x, kind)
    shares = oracle.alti(*first) if mixing == "alti" else projections(*first)
    found = LatimLogit(model).decompose(x, TARGET, mixing=mixing)
    written = vectors[:, -1, :, TARGET[1]]
    assert relative_error(found.layers[1], torch.einsum("bi,bij->bj", written, shares)) <= CLOSE
    assert found.delta.abs().max() <= 1e-6
    each = [v[:, -1].abs().sum(-1) for v in (first[0], vectors)]
    norms = LatimNorm(model, p=1).attribute(x, TARGET).sum(-1)
    assert relative_error(norms, (each[0] + each[1]) / 2) <= CLOSE


#: What joins the stream of two mixers, and that of both mixers' vectors, given what they returned.
IN_TURN: dict[str, tuple[Any, Any]] = {
    "norms": (
        lambda b, x, m, n: x + b[0].norm(m) + b[1].norm(n),
        lambda b, v, w, m, n: layer_norm(b[0], v, m, m) + layer_norm(b[1], w, n, n),
    ),
    "the second alone": (
        lambda b, x, m, n: x + m + b[1].norm(n),
        lambda b, v, w, m, n: v + layer_norm(b[1], w, n, n),
    ),
}


@pytest.mark.parametrize("kind", IN_TURN)
def test_mixers_that_join_the_stream_in_turn(kind: str) -> None:
    joins, of_vectors = IN_TURN[kind]
    model, x = drawn(lambda: [Blocks(lambda b, x: joins(b, x, b[0](x), b[1](x))) for _ in range(2)])
    for one, module in zip(LatimALTI(model).maps(x), model, strict=True):
        layers = layers_of(module, x)
        m, n = (layer.output for layer in layers)
        v, w = map(own_vectors, layers)
        with torch.no_grad():
            each = [of_vectors(module.blocks, v[:, :, j], w[:, :, j], m, n) for j in range(TOKENS)]
            assert relative_error(one, oracle.alti(torch.stack(each, 2), x)) <= CLOSE
            x = module(x)


@pytest.mark.parametrize("method", [LatimNorm, LatimALTI, LatimLogit])
def test_a_hook_counts_once_in_every_call(method: Any) -> None:
    model, x = model_of(*[lambda block, out, x: out] * 2)
    model[0].mixer.register_forward_hook(lambda module, args, out: out * 0.3)
    expected = method(model_of(lambda b, out, x: 0.3 * out, lambda b, out, x: out)[0])
    wanted = expected.attribute(x, TARGET)
    for _ in range(2):
        assert relative_error(method(model).attribute(x, TARGET), wanted) <= CLOSE


# --- no stream at all ----------------------------------------------------------------------------


def dense(model: Any, x: Tensor) -> list[Tensor]:
    """The mean over channels of each layer's matrix (B, L, L)."""
    return [layer.operator.per_channel().dense("mean") for layer in layers_of(model, x)]


def rollout(model: Any, x: Tensor, layers: Any = None, **options: Any) -> Tensor:
    method = ImplicitAttentionRollout(model, layers=layers)
    return method.attribute(x, TARGET, components="exact", **options).sum(-1)


EYE = torch.eye(TOKENS).double()


@pytest.mark.parametrize("normalize_rows", [False, True])
def test_the_identity_stands_for_a_stream_alone(normalize_rows: bool) -> None:
    model, x = model_of(None, None)
    first, second = dense(model, x)
    if normalize_rows:
        first, second = (m / m.sum(-1, keepdim=True) for m in (first, second))
    found = rollout(model, x, normalize_rows=normalize_rows)
    assert relative_error(found, (second @ first)[:, -1]) <= CLOSE


def halves(m: Tensor, x: Tensor) -> Any:
    return torch.cat([m, x], -1).chunk(2, -1)


def wide(block: Any, x: Tensor) -> Tensor:
    return F.linear(x, torch.cat([block.gate.weight, block.gate.weight.flip(0)], -1))


#: Ways of joining what was read to what the mixer returned.
GATES: dict[str, Behind] = {
    "a gate": lambda b, x, m: m * gate(b, x),
    "a gate and a norm": lambda b, x, m: b.norm(gate(b, x) * m),
    "a gate and a constant": lambda b, x, m: torch.addcmul(b.gain, m, gate(b, x)),
    "a gate of both": lambda b, x, m: m * gate(b, m + x),
    "a gated unit": lambda b, x, m: F.glu(torch.cat([m, b.gate(x)], -1), -1),
    "halves": lambda b, x, m: (lambda one, other: one * torch.sigmoid(other))(*halves(m, x)),
}
STREAMS: dict[str, Behind] = {
    "a product and a sum": lambda b, x, m: torch.addcmul(x, m, gate(b, x)),
    "both gated": lambda b, x, m: (lambda g: g * m + (1 - g) * x)(gate(b, x)),
    "a gate of the output": lambda b, x, m: x * gate(b, m) + m,
    "a projection of both": lambda b, x, m: wide(b, torch.cat([m, x], -1)),
    "of a gated output, too": lambda b, x, m: wide(b, torch.cat([m * gate(b, x), x], -1)),
    "weights of a stack": lambda b, x, m: (
        torch.stack([m, x], -1) * torch.softmax(wide(b, torch.cat([x, m], -1))[..., None, :2], -1)
    ).sum(-1),
    "a sum of halves": lambda b, x, m: sum(halves(m * gate(b, x), x)),
}


@pytest.mark.parametrize("kind", [*GATES, *STREAMS])
def test_the_identity_stands_for_what_outputs_are_added_to(kind: str) -> None:
    model, x = joined((GATES | STREAMS)[kind])
    first, second = (m + EYE if kind in STREAMS else m for m in dense(model, x))
    for layers in (None, [module.blocks[0].mixer for module in model]):
        assert relative_error(rollout(model, x, layers), (second @ first)[:, -1]) <= CLOSE
        if kind == "a gate and a norm":
            one, other = map(own_vectors, layers_of(model, x))
            found = LatimALTI(model, layers=layers).attribute(x, TARGET).sum(-1)
            assert relative_error(found, (oracle.alti(other) @ oracle.alti(one))[:, -1]) <= CLOSE


def turns(blocks: Any, x: Tensor) -> Tensor:
    g = gate(blocks[0], x)
    return g * blocks[0](x) + (1 - g) * blocks[1](x.flip(1)).flip(1)


def test_directions_that_take_turns_have_no_stream() -> None:
    model, x = drawn(lambda: [Blocks(turns), Blocks(turns)])
    one, other, *later = dense(model, x)
    first, second = one + other.flip(1, 2), later[0] + later[1].flip(1, 2)
    assert relative_error(rollout(model, x), (second @ first)[:, -1]) <= CLOSE


class Local(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.blocks[0](x).mT).mT


def test_what_mixes_tokens_behind_named_layers_is_vouched_for() -> None:
    """The stream is there all the same."""
    model, x = drawn(lambda: [Local(turns, 1), Local(turns, 1)])
    first, second = (m + EYE for m in dense(model, x))
    layers = [module.blocks[0].mixer for module in model]
    assert relative_error(rollout(model, x, layers), (second @ first)[:, -1]) <= CLOSE
    with pytest.raises(InputError, match="conv"):
        rollout(model, x)


# --- what is refused -----------------------------------------------------------------------------


def later(blocks: Any, x: Tensor, m: Tensor) -> Tensor:
    x = blocks[0].norm(x + m)
    return x + blocks[1].mixer(x) + m / 2


def late(blocks: Any, x: Tensor) -> Tensor:
    h = blocks[0](x) * gate(blocks[0], x)
    return h + blocks[1](h) + x


VECTORS, STREAM = (LatimALTI, LatimLogit), (ImplicitAttentionRollout, LatimALTI, MambaAttribution)
FACTORS = "may pass only factors"
#: A model and its input, the methods that refuse it, and by which words.
REFUSED: dict[str, tuple[Callable[[], tuple[Any, Tensor]], tuple[Any, ...], str]] = {
    "an adapter that is added to the output": (
        lambda: model_of(*[lambda b, out, x: out + b.up(F.gelu(b.down(out)))] * 2), VECTORS, FACTORS
    ),
    "no factor and no projection": (
        lambda: model_of(*[lambda b, out, x: b.up(F.gelu(b.down(out)))] * 2), VECTORS,
        r"'\d\.mixer'.*may pass only factors.*residual=False",
    ),
    "its own gate": (
        lambda: model_of(*[lambda b, out, x: gate(b, out) * out] * 2), VECTORS, FACTORS
    ),
    "once more behind a norm": (
        lambda: joined(lambda b, x, m: x + m + b.norm(m)), VECTORS, FACTORS
    ),
    "once more, later": (
        lambda: run_by(lambda b, x: later(b, x, b[0](x))), VECTORS, FACTORS
    ),
    "features that later layers replace": (
        lambda: joined(lambda b, x, m: torch.where(torch.arange(WIDTH) < 3, m, x)),
        (ImplicitAttentionRollout,), r"but not all tensors.*the output of layer '0",
    ),
    "a gate first, and added later": (lambda: run_by(late), STREAM, "bypasses several layers"),
    "both layers passed at once": (
        lambda: run_by(lambda b, x: x + b[1](b[0](x))), (*STREAM[:2], LatimLogit),
        "bypasses several layers",
    ),
    "a part of what is read": (
        lambda: run_by(lambda b, x: x + b[1](x + b[0](x))), (*STREAM, LatimLogit),
        r"but not all tensors.*the output of layer '0\.blocks\.0\.mixer' is missing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, methods, said = REFUSED[case]
    model, x = make()
    for method in methods:
        with pytest.raises(InputError, match=said):
            method(model).attribute(x, TARGET)
    if LatimNorm not in methods:
        assert LatimFlow(model).decompose(x, TARGET).delta.abs().max() < 1e-5
    if case == "no factor and no projection":
        maps = LatimALTI(model, residual=False).maps(x)
        assert relative_error(maps[1], oracle.alti(own_vectors(layers_of(model, x)[1]))) <= CLOSE


# --- mixers that are brought together ------------------------------------------------------------


class Parallel(nn.Module):
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
    return drawn(lambda: [Parallel(i, kind, adds) for i in range(2)])


@pytest.mark.parametrize(
    ("kind", "adds"),
    [(kind, adds) for kind in ("plain", "projected", "side by side") for adds in (False, True)],
)
def test_mixers_that_are_brought_together(kind: str, adds: bool) -> None:
    model, x = parallel(kind, adds)
    wanted, stream = EYE.expand(2, -1, -1), x
    for block in model:
        one, other = map(own_vectors, layers_of(block, stream))
        sent = block.sent(one, other.flip(1, 2))
        wanted = oracle.alti(sent, stream if adds else None) @ wanted
        stream = block(stream).detach()
    found = LatimALTI(model).attribute(x, TARGET).sum(-1)
    assert relative_error(found, wanted[:, -1]) <= CLOSE
