"""Every kind of operator with random coefficients, beside the matrices that define it.

A kind is a function of the sizes.  Matrices are functions of the coefficients, written without the
package, so that automatic differentiation gives the gradients that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import oracles
import torch
from oracles import token_loops
from oracles.kernels import decays_between, selective_scan
from torch import Tensor
from torch.nn.functional import normalize

from captum_ssm.operators import (
    WKV,
    Chain,
    DeltaProduct,
    DeltaRule,
    DenseHeads,
    Diagonal,
    DirectSum,
    ElementwiseRecurrence,
    FeedbackRecurrence,
    HeadCentering,
    LongConv,
    Operator,
    Permute,
    ScalarDecayHeads,
    SelectiveScan,
    Shape,
    ShortConv,
    Sum,
    VectorDecayHeads,
)
from captum_ssm.operators.heads import HeadOperator, ScoredHeads, SoftmaxHeads
from captum_ssm.operators.reorder import Windowed, Windows
from captum_ssm.testing.operators import check_operator

STATES = 3
#: By dimension, whether coefficients vary along it.
Varies = tuple[int, int, int, int]
EVERY: Varies = (1, 1, 1, 1)


@dataclass
class Case:
    """An operator by its coefficients, and what :func:`check_operator` compares it with."""

    make: Callable[..., Operator]
    matrices: Callable[..., Tensor]
    coefficients: Mapping[str, Tensor] = field(default_factory=dict)
    offset: Callable[..., Tensor] | None = None
    bound: Callable[..., Tensor] | None = None

    @property
    def operator(self) -> Operator:
        return self.make(**self.coefficients)

    def exact(self) -> Tensor:
        """The matrices of these coefficients."""
        return self.matrices(**self.coefficients)

    def size(self, **z: Tensor) -> Tensor:
        """The size of terms that may cancel in the matrices."""
        return self.matrices(**z).abs() if self.bound is None else self.bound(**z)

    def constant(self, **z: Tensor) -> Tensor | float:
        return 0.0 if self.offset is None else self.offset(**z)

    def check(self, **options: Any) -> None:
        given = {"offset": self.offset, "bound": self.bound, **options}
        check_operator(self.make, self.matrices, self.coefficients, **given)


Kind = Callable[[Shape], Case]


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def of_size(shape: Shape, varies: Varies) -> list[int]:
    return [full if along else 1 for full, along in zip(shape, varies, strict=True)]


def logs(*size: int) -> Tensor:
    """Logarithms of decays from almost 1 to almost 0; some tokens forget everything."""
    return -torch.exp(2 * randn(*size) - 1).masked_fill(torch.rand(*size) < 0.08, torch.inf)


def by_channel(matrices: Tensor, shape: Shape) -> Tensor:
    """One matrix for each channel of those of heads (B, H, L, L), (H, L, L) or (L, L)."""
    batch, tokens, heads, per_head = shape
    of_heads = matrices.expand(batch, heads, tokens, tokens)
    return of_heads.repeat_interleave(per_head, 1)


# --- elementary operators ------------------------------------------------------------------------


def diagonal(varies: Varies = EVERY, name: str | None = "gate") -> Kind:
    def build(shape: Shape) -> Case:
        def matrices(weight: Tensor) -> Tensor:
            return torch.diag_embed(weight.expand(shape).flatten(2).mT)

        weight = randn(*of_size(shape, varies))
        return Case(lambda weight: Diagonal(weight, shape, name), matrices, {"weight": weight})

    return build


def conv(*lags: int, bias: Varies | None = None) -> Kind:
    def build(shape: Shape) -> Case:
        given = {"weight": randn(shape.heads, shape.per_head, len(lags))}
        if bias is not None:
            given["bias"] = randn(*of_size(shape, bias))
        return Case(
            lambda weight, bias=None: ShortConv(weight, shape, bias, lags),
            lambda weight, bias=None: oracles.conv_matrices(weight, lags, shape),
            given,
            None if bias is None else lambda weight, bias: bias,
            lambda weight, bias=None: oracles.conv_matrices(weight.abs(), lags, shape),
        )

    return build


def map_conv(shape: Shape) -> Case:
    """Over a map of the tokens, as nearly square as their number allows."""
    tokens = shape.tokens
    width = max(w for w in range(1, tokens + 1) if tokens % w == 0 and w * w <= tokens)
    lags = [(-1, 0), (0, -1), (0, 0), (1, 2), (1, -1), (0, -1)]
    weight = randn(shape.heads, shape.per_head, len(lags))
    return Case(
        lambda weight, bias: ShortConv(weight, shape, bias, lags, width=width),
        lambda weight, bias: oracles.map_conv_matrices(weight, lags, width, shape),
        {"weight": weight, "bias": randn(1, 1, *shape[2:])},
        lambda weight, bias: bias,
        lambda weight, bias: oracles.map_conv_matrices(weight.abs(), lags, width, shape),
    )


def long_conv(shared: bool = False, extra: int = 0) -> Kind:
    """A kernel of as many taps as there are tokens, or more, or fewer; one for all of a head."""

    def build(shape: Shape) -> Case:
        length = max(1, shape.tokens + extra)

        def matrices(kernel: Tensor) -> Tensor:
            every = kernel.expand(-1, shape.per_head, -1)
            return oracles.conv_matrices(every, range(length), shape)

        def bound(kernel: Tensor) -> Tensor:
            # a Fourier transform's rounding errors are those of its largest sums
            return matrices(kernel).abs() + kernel.abs().max()

        kernel = randn(shape.heads, 1 if shared else shape.per_head, length)
        make = lambda kernel: LongConv(kernel, shape)  # noqa: E731
        return Case(make, matrices, {"kernel": kernel}, bound=bound)

    return build


def permute(shape: Shape) -> Case:
    order = torch.randperm(shape.tokens)
    matrix = torch.eye(shape.tokens, dtype=torch.float64)[order]
    return Case(lambda: Permute(order, shape), lambda: by_channel(matrix, shape))


def flip(shape: Shape) -> Case:
    matrix = torch.eye(shape.tokens, dtype=torch.float64).flip(0)
    order = torch.arange(shape.tokens).flip(0)
    return Case(lambda: Permute(order, shape, "scan"), lambda: by_channel(matrix, shape))


def given(shape: Shape) -> Case:
    batch, tokens, heads, per_head = shape
    return Case(
        lambda matrices: DenseHeads(matrices, per_head),
        lambda matrices: by_channel(matrices, shape),
        {"matrices": randn(batch, heads, tokens, tokens)},
    )


def softmax(shape: Shape) -> Case:
    """Attention whose first token is padding in the last example, and reads nothing."""
    batch, tokens, heads, per_head = shape
    hidden = torch.ones(batch, 1, tokens, tokens, dtype=torch.bool).triu(1)
    hidden[-1, :, :, :1] = True

    def probabilities(query: Tensor, key: Tensor) -> Tensor:
        scores = (0.7 * query @ key.mT).masked_fill(hidden.to(query.device), -1e9)
        return scores.softmax(-1).masked_fill(hidden.to(query.device), 0)

    def matrices(query: Tensor, key: Tensor) -> Tensor:
        weights = (0.7 * torch.einsum("bihn,bjhn->bhij", query, key)).exp() * ~hidden
        return by_channel(weights / weights.sum(-1, keepdim=True).clamp_min(1e-300), shape)

    query, key = randn(2, batch, tokens, heads, STATES)
    return Case(
        lambda query, key: SoftmaxHeads(query, key, probabilities, 0.7, per_head),
        matrices,
        {"query": query, "key": key},
    )


# --- recurrences ---------------------------------------------------------------------------------


def scan(groups: int | None = None, states: int = STATES) -> Kind:
    """Vectors common to all heads, or to groups of them; for heads of one channel."""

    def build(shape: Shape) -> Case:
        batch, tokens, heads, _ = shape
        apart = 1 if groups is None or heads % groups else groups
        vectors = (tokens, states) if groups is None else (tokens, apart, states)
        a = -0.7 * randn(heads, states).exp()
        a[0] = 0
        dt = 0.5 * randn(batch, tokens, heads).exp()

        return Case(
            lambda dt, a, B, C: SelectiveScan(dt, a, B, C),
            lambda dt, a, B, C: selective_scan(dt, a, B, C),
            {
                "dt": dt.where(torch.rand_like(dt) > 0.1, 0),
                "a": a,
                "B": randn(batch, *vectors),
                "C": randn(batch, *vectors),
            },
            bound=lambda dt, a, B, C: selective_scan(dt, a, B.abs(), C.abs()),
        )

    return build


def elementwise(shape: Shape) -> Case:
    return Case(
        lambda decay: ElementwiseRecurrence(decay),
        lambda decay: decays_between(decay.mT),
        {"decay": logs(*shape[:3]).exp()},
    )


def wkv(shape: Shape) -> Case:
    batch, tokens, heads, _ = shape
    i, j = torch.arange(tokens)[:, None, None], torch.arange(tokens)[:, None]

    def scores(key: Tensor, log_decay: Tensor, bonus: Tensor) -> Tensor:
        found = (i - 1 - j) * log_decay + key[:, None]  # (B, i, j, H)
        return found.where(i != j, bonus + key[:, None]).where(j <= i, -torch.inf)

    def matrices(**z: Tensor) -> Tensor:
        return scores(**z).softmax(2).permute(0, 3, 1, 2)

    def bound(**z: Tensor) -> Tensor:
        # an exponential is as exact as its exponent is large
        found = scores(**z)
        return matrices(**z) * (1 + found[found.isfinite()].abs().max())

    coefficients = {
        "key": 3 * randn(batch, tokens, heads),
        "log_decay": -torch.rand(heads).double(),
        "bonus": randn(heads),
    }
    return Case(lambda key, log_decay, bonus: WKV(key, log_decay, bonus), matrices, coefficients,
                bound=bound)  # fmt: skip


def scalar_decay(groups: int = 1, scaled: bool = True) -> Kind:
    def build(shape: Shape) -> Case:
        batch, tokens, heads, per_head = shape
        apart = groups if groups and heads % groups == 0 else heads

        matrices = looped(token_loops.scalar_decay, shape, scale=None)
        query, key = randn(2, batch, tokens, apart, STATES)
        coefficients = {"query": query, "key": key, "log_decay": logs(batch, tokens, heads)}
        if scaled:
            coefficients["scale"] = randn(batch, tokens, heads).exp()
        return Case(
            lambda query, key, log_decay, scale=None: ScalarDecayHeads(
                query, key, log_decay, scale, per_head
            ),
            matrices,
            coefficients,
            bound=lambda query, key, **z: matrices(query=query.abs(), key=key.abs(), **z),
        )

    return build


def vector_decay(has_bonus: bool = False) -> Kind:
    def build(shape: Shape) -> Case:
        batch, tokens, heads, per_head = shape

        matrices = looped(token_loops.vector_decay, shape, bonus=None)
        query, key = randn(2, batch, tokens, heads, STATES)
        coefficients = {"query": query, "key": key, "log_decay": logs(batch, tokens, heads, STATES)}
        if has_bonus:
            coefficients["bonus"] = randn(heads, STATES)

        def bound(log_decay: Tensor, **z: Tensor) -> Tensor:
            return matrices(log_decay=log_decay, **{name: x.abs() for name, x in z.items()})

        return Case(
            lambda query, key, log_decay, bonus=None: VectorDecayHeads(
                query, key, log_decay, per_head, bonus
            ),
            matrices,
            coefficients,
            bound=bound,
        )

    return build


def looped(loop: token_loops.Loop, shape: Shape, **constants: Any) -> Callable[..., Tensor]:
    """Matrices by a loop over the tokens."""

    def matrices(**z: Tensor) -> Tensor:
        return by_channel(
            token_loops.matrices(loop, SimpleNamespace(**{**constants, **z, "shape": shape})), shape
        )

    return matrices


def corrected(matrices: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The size of what cancels where states are corrected: that of the largest entry."""
    return lambda **z: matrices(**z).abs() + 1.0


def delta_rule(decays: int = 0, erase: bool = False, steps: bool = False) -> Kind:
    """Of no decay, one for each head (1), or one for each key channel (2)."""

    def build(shape: Shape) -> Case:
        batch, tokens, heads, per_head = shape
        size = batch, tokens, heads, STATES
        coefficients = {
            "query": randn(*size),
            "key": normalize(randn(*size), dim=-1),
            "beta": randn(*size[:3]).sigmoid(),
        }
        if decays:
            coefficients["log_decay"] = logs(*size[: 2 + decays])
        if erase:
            coefficients["erase"] = normalize(randn(*size), dim=-1)
        if steps:
            coefficients["erase_step"] = randn(*size).sigmoid()

        def make(
            query: Tensor, key: Tensor, beta: Tensor, log_decay: Tensor | None = None, **own: Tensor
        ) -> Operator:
            return DeltaRule(query, key, beta, log_decay, per_head, **own)

        matrices = looped(token_loops.delta_rule, shape, log_decay=None)
        return Case(make, matrices, coefficients, bound=corrected(matrices))

    return build


def delta_product(decays: bool = False) -> Kind:
    def build(shape: Shape) -> Case:
        batch, tokens, heads, per_head = shape
        writes = [(0, 1, 1, 0)[head % 4] for head in range(heads)]
        coefficients = {
            "query": randn(batch, tokens, heads, STATES),
            "key": normalize(randn(batch, tokens, 2, heads, STATES), dim=-1),
            "beta": randn(batch, tokens, 2, heads).sigmoid(),
        }
        if decays:
            coefficients["log_decay"] = logs(batch, tokens, heads)
        matrices = looped(token_loops.delta_product, shape, log_decay=None, writes=writes)
        return Case(
            lambda query, key, beta, log_decay=None: DeltaProduct(
                query, key, beta, log_decay, writes, per_head
            ),
            matrices,
            coefficients,
            bound=corrected(matrices),
        )

    return build


def scored(reads: Kind, forgets: bool = False, padded: bool = False) -> Kind:
    """Softmax attention by the matrices of another operator."""

    def build(shape: Shape) -> Case:
        batch, tokens, heads, per_head = shape
        inner = reads(shape)
        seen = torch.ones(batch, 1, tokens, tokens, dtype=torch.bool).tril()
        mask = torch.ones(batch, tokens, dtype=torch.bool)
        mask[-1, : tokens // 2] = not padded
        seen = seen & mask[:, None, None] & mask[:, None, :, None]

        def make(**z: Tensor) -> Operator:
            own = inner.make(**{name: x for name, x in z.items() if name != "forget"})
            assert isinstance(own, HeadOperator)
            there = mask.to(z["query"].device) if padded else None
            return ScoredHeads(own, z.get("forget"), per_head, there)

        def scores(**z: Tensor) -> Tensor:
            own = {name: x for name, x in z.items() if name != "forget"}
            found = inner.matrices(**own)[:, ::per_head]
            if "forget" in z:
                ago = torch.ones(tokens, tokens).tril(-1).double()  # token t lies after j
                passed = torch.ones(tokens, tokens).tril().double()[:, None] * ago.T
                found = found + torch.einsum("bth,ijt->bhij", z["forget"], passed)
            return found

        def matrices(**z: Tensor) -> Tensor:
            weights = scores(**z).exp() * seen
            total = weights.sum(-1, keepdim=True).clamp_min(1e-300)
            return by_channel(weights / total, shape)

        def bound(**z: Tensor) -> Tensor:
            return matrices(**z) * (1 + scores(**z).abs().max())

        forget = {"forget": randn(batch, tokens, heads).sigmoid().log()} if forgets else {}
        return Case(make, matrices, {**inner.coefficients, **forget}, bound=bound)

    return build


# --- operators that mix the channels of a head ---------------------------------------------------


def _feedback(shape: Shape) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    batch, tokens, heads, per_head = shape
    channels = torch.eye(per_head).double()

    def matrices(decay: Tensor, write: Tensor, gate: Tensor, feedback: Tensor) -> Tensor:
        state = torch.zeros(batch, heads, per_head, per_head, tokens, dtype=torch.float64)
        heard, rows = state, []  # of each channel and token that went in
        for t, unit in enumerate(torch.eye(tokens).double()):
            entered = channels[..., None] * unit + heard
            keep, enter, read = (x[:, t, :, :, None, None] for x in (decay, write, gate))
            state = keep * state + enter * entered
            rows.append(read * state)
            heard = torch.einsum("hpq,bhqcj->bhpcj", feedback, rows[-1])
        return torch.stack(rows, -2)

    coefficients = {name: torch.rand_like(randn(*shape)) for name in ("decay", "gate")}
    coefficients["write"] = 0.2 * randn(*shape)
    coefficients["feedback"] = randn(heads, per_head, per_head)
    return coefficients, matrices


def feedback(shape: Shape) -> Case:
    coefficients, matrices = _feedback(shape)
    return Case(lambda **z: FeedbackRecurrence(**z), matrices, coefficients)


def own_shares(shape: Shape) -> Case:
    coefficients, matrices = _feedback(shape)

    def own(**z: Tensor) -> Tensor:
        return matrices(**z).diagonal(0, 2, 3).movedim(-1, 2).flatten(1, 2)

    def make(**z: Tensor) -> Operator:
        return FeedbackRecurrence(**z).per_channel()

    return Case(make, own, coefficients)


def centering(shape: Shape) -> Case:
    """Every second head is centered."""
    batch, tokens, heads, per_head = shape

    def matrices(centered: Tensor) -> Tensor:
        share = torch.eye(per_head) - centered[:, None, None].expand(-1, per_head, -1) / per_head
        every = share[:, :, :, None, None] * torch.eye(tokens).double()
        return every.expand(batch, *every.shape)

    centered = (torch.arange(heads) % 2 == 0).double()
    make = lambda centered: HeadCentering(shape, centered, centered=centered)  # noqa: E731
    return Case(make, matrices, {"centered": centered})


# --- an operator that leaves everything to be derived --------------------------------------------


class RunningSum(Operator):
    """The least that a custom operator defines."""

    component = "scan"

    def __init__(self, weight: Tensor, per_head: int) -> None:
        self.weight = weight.detach()
        batch, tokens, heads = weight.shape
        self.shape = Shape(batch, tokens, heads, per_head)

    def apply(self, v: Tensor) -> Tensor:
        return (self.weight[..., None] * v).cumsum(-3)

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def select(self, heads: Sequence[int]) -> Operator:
        return RunningSum(self.weight[:, :, list(heads)], self.shape.per_head)


def running_sum(shape: Shape) -> Case:
    tokens = shape.tokens

    def matrices(weight: Tensor) -> Tensor:
        return by_channel(torch.ones(tokens, tokens).tril() * weight.mT[:, :, None], shape)

    weight = randn(*shape[:3])
    return Case(lambda weight: RunningSum(weight, shape.per_head), matrices, {"weight": weight})


# --- products and sums ---------------------------------------------------------------------------


def _combined(
    combine: Callable[[Sequence[Operator]], Operator],
    parts: Sequence[Case],
    matrices: Callable[[Sequence[Tensor]], Tensor],
    offset: Callable[[Sequence[Tensor], Sequence[Any]], Tensor],
) -> Case:
    def own(z: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        named = [(*name.partition("."), x) for name, x in z.items()]
        return [{n: x for at, _, n, x in named if int(at) == i} for i in range(len(parts))]

    def each(of: Callable[[Case], Callable[..., Any]], z: Mapping[str, Tensor]) -> list[Any]:
        return [of(part)(**mine) for part, mine in zip(parts, own(z), strict=True)]

    return Case(
        lambda **z: combine(each(lambda part: part.make, z)),
        lambda **z: matrices(each(lambda part: part.matrices, z)),
        {f"{i}.{n}": x for i, part in enumerate(parts) for n, x in part.coefficients.items()},
        lambda **z: offset(
            each(lambda part: part.matrices, z), each(lambda part: part.constant, z)
        ),
        lambda **z: matrices(each(lambda part: part.size, z)),
    )


def chain(*kinds: Kind) -> Kind:
    """The product; an offset passes through everything that acts later."""

    def product(each: Sequence[Tensor]) -> Tensor:
        out = each[-1]
        for matrices in each[-2::-1]:
            out = matrices @ out
        return out

    def build(shape: Shape) -> Case:
        def offset(matrices: Sequence[Tensor], each: Sequence[Any]) -> Tensor:
            out = torch.zeros(shape, dtype=torch.float64)
            for later, own in zip(matrices[::-1], each[::-1], strict=True):
                out = oracles.times(later, out) + own
            return out

        return _combined(lambda p: Chain(*p), [kind(shape) for kind in kinds], product, offset)

    return build


def total(*kinds: Kind) -> Kind:
    return lambda shape: _combined(
        lambda parts: Sum(*parts),
        [kind(shape) for kind in kinds],
        lambda each: torch.stack([*each]).sum(0),
        lambda _, each: torch.stack([torch.zeros(shape).double() + x for x in each]).sum(0),
    )


def beside(first: Kind, second: Kind) -> Kind:
    """Each on heads of its own; of one head there is the second alone."""

    def build(shape: Shape) -> Case:
        if shape.heads == 1:
            return second(shape)
        shapes = shape._replace(heads=1), shape._replace(heads=shape.heads - 1)
        return _combined(
            lambda parts: DirectSum(*parts),
            [first(shapes[0]), second(shapes[1])],
            lambda each: torch.cat([*each], 1),
            lambda _, each: torch.cat(
                [torch.zeros(s).double() + x for s, x in zip(shapes, each, strict=True)], 2
            ),
        )

    return build


def windowed(kind: Kind, more: int = 1) -> Kind:
    """Within windows of three places; there are ``more`` windows than the tokens need."""

    def build(shape: Shape) -> Case:
        tokens, count = shape.tokens, -(-shape.tokens // 3) + more
        places = torch.full((3 * count,), -1)
        places[torch.randperm(len(places))[:tokens]] = torch.arange(tokens)
        places = places.view(-1, 3)
        inner = kind(shape._replace(batch=shape.batch * count, tokens=3))
        padding = randn(*shape._replace(batch=shape.batch * count, tokens=3))
        padding = padding if inner.coefficients else 0 * padding
        empty = (places < 0).double().repeat(shape.batch, 1)[:, :, None, None]
        held = [(w, i, int(t)) for w, row in enumerate(places) for i, t in enumerate(row) if t >= 0]

        def make(**z: Tensor) -> Operator:
            own = inner.make(**z)
            windows = Windows(places.to(own.device))
            # reorderings have no coefficients, which would tell the dtype of what padding adds
            told = windows.padding(padding.to(own.device, own.dtype)) if z else None
            return Windowed(own, windows, told)

        def placed(blocks: Tensor) -> Tensor:
            out = torch.zeros(shape.batch, blocks.shape[1], tokens, tokens, dtype=torch.float64)
            for window, i, row in held:
                for other, j, column in held:
                    if window == other:
                        out[:, :, row, column] = blocks[window::count, :, i, j]
            return out

        def offset(**z: Tensor) -> Tensor:
            constant = oracles.times(inner.matrices(**z), padding * empty) + inner.constant(**z)
            out = torch.zeros(shape, dtype=torch.float64)
            for window, i, token in held:
                out[:, token] = constant[window::count, i]
            return out

        return Case(
            make,
            lambda **z: placed(inner.matrices(**z)),
            inner.coefficients,
            offset,
            lambda **z: placed(inner.size(**z)),
        )

    return build


# --- the rows ------------------------------------------------------------------------------------

SKIP, PER_CHANNEL = (0, 0, 1, 0), (0, 0, 1, 1)
#: Elementary operators of heads with any number of channels.
LEAVES: dict[str, Kind] = {
    "diagonal": diagonal(), "diagonal per head": diagonal(SKIP, "skip"),
    "diagonal per token": diagonal((1, 1, 0, 0), None),
    "diagonal per channel": diagonal(PER_CHANNEL), "conv": conv(0, 1, 2, 3),
    "conv of one tap": conv(0, bias=PER_CHANNEL),
    "conv with a bias per token": conv(0, 1, bias=(1, 1, 1, 0)),
    "conv both ways": conv(-2, 0, 1, 1, 3, bias=(0, 1, 0, 1)), "conv ahead": conv(-1, -4),
    "conv of a far lag": conv(7), "conv over a map": map_conv, "long conv": long_conv(),
    "long conv shared by heads": long_conv(shared=True, extra=5),
    "long conv of a short kernel": long_conv(extra=-4), "running sum": running_sum,
    "permute": permute, "flip": flip, "given": given, "softmax": softmax,
    "scalar decay": scalar_decay(0, scaled=False), "scalar decay of one group": scalar_decay(1),
    "scalar decay of groups": scalar_decay(2), "vector decay": vector_decay(),
    "vector decay, bonus": vector_decay(has_bonus=True), "delta rule": delta_rule(),
    "delta rule, decay": delta_rule(1), "delta rule, decay of channels": delta_rule(2),
    "delta rule of two keys": delta_rule(erase=True, steps=True),
    "delta rule of two keys, decay": delta_rule(1, erase=True, steps=True),
    "delta rule of two keys, decay of channels": delta_rule(2, erase=True, steps=True),
    "delta rule asked by another key": delta_rule(1, erase=True), "delta product": delta_product(),
    "delta product, decay": delta_product(decays=True),
    "scored by scalar decay": scored(scalar_decay(0, scaled=False), forgets=True),
    "scored by delta rule": scored(delta_rule(erase=True, steps=True), padded=True),
}  # fmt: skip
#: Those of heads with one channel.
SINGLE: dict[str, Kind] = {
    "scan": scan(), "scan of one state": scan(states=1), "scan of groups": scan(2),
    "elementwise": elementwise, "wkv": wkv,
}  # fmt: skip
#: Those that mix the channels of a head, and what is left of them in per_channel().
MIXING: dict[str, Kind] = {"feedback": feedback, "own shares": own_shares, "centering": centering}
_core = total(scan(), diagonal(SKIP, "skip"))
#: Products and sums whose fast versions differ; ``True`` for heads with one channel.
COMPOSED: dict[str, tuple[Kind, bool]] = {
    "mamba": (chain(
        diagonal(), _core, diagonal((1, 1, 0, 0), None), diagonal(EVERY, "activation"),
        conv(0, 1, 2, 3, bias=PER_CHANNEL),
    ), True),
    "both ways": (chain(diagonal(), total(_core, chain(flip, elementwise, flip))), True),
    "heads in a mixer": (chain(
        diagonal(), total(scalar_decay(), diagonal(SKIP, "skip")), diagonal((1, 1, 1, 0)),
        conv(0, 1, bias=PER_CHANNEL),
    ), False),
    "heads in another order": (chain(
        diagonal(), permute, total(delta_rule(1), diagonal(PER_CHANNEL)), permute,
    ), False),
    "long conv in gates": (chain(diagonal((1, 1, 1, 0)), long_conv(), diagonal()), False),
    "convs across both ends": (chain(
        diagonal(), conv(0, 1, 2, bias=EVERY), diagonal(), conv(1, -1, bias=PER_CHANNEL),
    ), False),
    "core between convs": (chain(conv(0, -1), elementwise, conv(-2, 20)), True),
    "scan after scan": (chain(scan(), diagonal(), scan(), conv(0, 1)), True),
    "scan after sum": (chain(scan(), total(diagonal(), conv(0, -1))), True),
    "diagonals": (chain(diagonal(), diagonal((0, 1, 1, 0))), False),
    "sum": (total(
        conv(0, 1, bias=EVERY), chain(diagonal(), conv(-2, 5, bias=EVERY)), diagonal(),
    ), False),
    "sum of one": (total(conv(0, 1, bias=EVERY)), False),
    "beside": (beside(delta_rule(), conv(1, 0, -1, bias=PER_CHANNEL)), False),
    "conv after scan beside conv": (chain(
        conv(2, -1), beside(scan(), conv(1, 0)), diagonal(),
    ), True),
    "windows": (windowed(chain(diagonal(), conv(0, 1, bias=PER_CHANNEL))), False),
    "windows in a mixer": (chain(diagonal(), windowed(beside(scan(), conv(0, 1)), 0)), True),
}  # fmt: skip
KINDS = {
    **{name: (kind, False) for name, kind in (LEAVES | MIXING).items()},
    **{name: (kind, True) for name, kind in SINGLE.items()},
    **COMPOSED,
}
