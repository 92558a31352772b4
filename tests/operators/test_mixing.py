"""What an operator says about its mixing is what its matrices show at several inputs."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from oracles.mixing import TOKENS, observe
from torch import Tensor

from captum_ssm import operators
from captum_ssm.operators import (
    WKV,
    Chain,
    DeltaProduct,
    DeltaRule,
    DenseHeads,
    Diagonal,
    ElementwiseRecurrence,
    FeedbackRecurrence,
    HeadCentering,
    LongConv,
    Mixing,
    Operator,
    Permute,
    ScalarDecayHeads,
    SelectiveScan,
    Shape,
    ShortConv,
    Sum,
    VectorDecayHeads,
)
from captum_ssm.operators.combine import DirectSum
from captum_ssm.operators.heads import ScoredHeads, SoftmaxHeads
from captum_ssm.operators.reorder import Windowed, Windows

BATCH, WIDTH, HEADS, VALUES, STATE = 2, 4, 3, 2, 2
SHAPE = Shape(BATCH, TOKENS, HEADS, VALUES)
SINGLE = Shape(BATCH, TOKENS, HEADS, 1)
WIDE, WIDE_SINGLE = (shape._replace(heads=2 * HEADS) for shape in (SHAPE, SINGLE))

#: Data (B, L, E) to an operator, whose parameters are drawn before.
OfData = Callable[[Tensor], Operator]


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def features(*size: int) -> Callable[[Tensor], Tensor]:
    """A random linear map of each token's data, to (B, L, *size)."""
    weight = randn(WIDTH, int(torch.Size(size).numel()))
    return lambda x: (x @ weight).unflatten(-1, size)


def decays(*size: int) -> Callable[[Tensor], Tensor]:
    """Logarithms of decays that follow from the data."""
    f = features(*size)
    return lambda x: -F.softplus(f(x))


def rates(state: int) -> Tensor:
    """Slow enough that no entry is lost in rounding."""
    return 0.2 + torch.rand(HEADS, state, dtype=torch.float64)


def always(operator: Operator) -> OfData:
    return lambda x: operator


# --- elementary operators ------------------------------------------------------------------


def gate(shape: Shape = SHAPE) -> OfData:
    f = features(*shape[2:])
    return lambda x: Diagonal(f(x), shape, "gate")


def norm() -> OfData:
    """One factor per example: a statistic of the whole sequence."""
    return lambda x: Diagonal(x.square().mean((1, 2)).view(-1, 1, 1, 1), SHAPE, "norm")


def skip(shape: Shape = SHAPE) -> OfData:
    return always(Diagonal(randn(1, 1, *shape[2:]), shape, "skip"))


def mask() -> OfData:
    keep = torch.ones(BATCH, TOKENS, 1, 1, dtype=torch.float64)
    keep[0, :2] = 0
    return always(Diagonal(keep, SHAPE, data_dependent=False))


def short_conv(*lags: int) -> OfData:
    return always(ShortConv(randn(HEADS, VALUES, len(lags)), SHAPE, randn(*SHAPE), lags))


def long_conv() -> OfData:
    return always(LongConv(randn(HEADS, VALUES, TOKENS), SHAPE))


def flip() -> OfData:
    return always(Permute(torch.arange(TOKENS - 1, -1, -1), SHAPE))


def centering() -> OfData:
    return always(HeadCentering(SHAPE, randn(1)))


def softmax() -> OfData:
    q, k = features(HEADS, STATE), features(HEADS, STATE)
    return lambda x: DenseHeads(
        torch.einsum("bihn,bjhn->bhij", q(x), k(x)).softmax(-1), VALUES, data_dependent=True
    )


def softmax_of_queries() -> OfData:
    q, k = features(HEADS, STATE), features(HEADS, STATE)
    return lambda x: SoftmaxHeads(q(x), k(x), lambda q, k: (q @ k.mT).softmax(-1), 1.0, VALUES)


def given() -> OfData:
    matrices = randn(BATCH, HEADS, TOKENS, TOKENS)
    return always(DenseHeads(matrices, VALUES, data_dependent=False))


def selective_scan(state: int = STATE) -> OfData:
    dt, b, c, a = decays(HEADS), features(state), features(state), -rates(state)
    return lambda x: SelectiveScan(-dt(x), a, b(x), c(x))


def recurrence() -> OfData:
    decay = decays(HEADS)
    return lambda x: ElementwiseRecurrence(decay(x).exp())


def rwkv() -> OfData:
    key, decay, bonus = features(HEADS), -randn(HEADS).exp(), randn(HEADS)
    return lambda x: WKV(key(x), decay, bonus)


def retention(state: int = STATE) -> OfData:
    """Decays are parameters, queries and keys are data."""
    q, k = features(HEADS, state), features(HEADS, state)
    decay = -torch.rand(HEADS, dtype=torch.float64).expand(BATCH, TOKENS, HEADS)
    return lambda x: ScalarDecayHeads(q(x), k(x), decay, None, VALUES)


def gated_attention() -> OfData:
    q, k, decay = features(HEADS, STATE), features(HEADS, STATE), decays(HEADS, STATE)
    return lambda x: VectorDecayHeads(q(x), k(x), decay(x), VALUES)


def delta_rule() -> OfData:
    q, k, beta = features(HEADS, STATE), features(HEADS, STATE), features(HEADS)
    return lambda x: DeltaRule(
        q(x), F.normalize(k(x), dim=-1), torch.sigmoid(beta(x)), None, VALUES
    )


def feedback() -> OfData:
    decay, write, gate = (features(HEADS, VALUES) for _ in range(3))
    fed = randn(HEADS, VALUES, VALUES)
    return lambda x: FeedbackRecurrence(
        torch.sigmoid(decay(x)), torch.sigmoid(write(x)), torch.sigmoid(gate(x)), fed
    )


def delta_product() -> OfData:
    q, k, beta = features(HEADS, STATE), features(2 * HEADS, STATE), features(2 * HEADS)
    return lambda x: DeltaProduct(
        q(x),
        F.normalize(k(x), dim=-1).unflatten(2, (2, HEADS)),
        torch.sigmoid(beta(x)).unflatten(2, (2, HEADS)),
        None,
        [0] * HEADS,
        VALUES,
    )


def scores() -> OfData:
    make = retention()
    return lambda x: ScoredHeads(make(x), None, VALUES)


# --- products and sums ---------------------------------------------------------------------


def chain(*makers: OfData) -> OfData:
    return lambda x: Chain(*(make(x) for make in makers))


def backwards(make: OfData) -> OfData:
    """What reads the tokens from the last to the first."""
    return lambda x: make(x.flip(1))


def own_shares(make: OfData) -> OfData:
    return lambda x: make(x).per_channel()


def total(*makers: OfData) -> OfData:
    return lambda x: Sum(*(make(x) for make in makers))


def beside(*makers: OfData) -> OfData:
    """Each on heads of its own."""
    return lambda x: DirectSum(*(make(x) for make in makers))


def windowed(gated: bool) -> OfData:
    """A convolution within windows of three tokens, within gates or not."""
    places = torch.randperm(TOKENS).view(-1, 3)
    shape = Shape(BATCH * len(places), 3, HEADS, 1)
    conv, f = LongConv(randn(HEADS, 1, 3), shape), features(HEADS, 1)

    def make(x: Tensor) -> Operator:
        gates = Diagonal(f(Windows(places).cut(x[..., None, :]).squeeze(-2)), shape)
        return Windowed(Chain(gates, conv) if gated else conv, Windows(places))

    return make


@dataclass
class Case:
    make: Callable[[], OfData]
    mixing: str
    mixes: bool = True
    changes: bool = True


FIXED = {"mixing": "fixed", "changes": False}
CASES: dict[str, Case] = {
    "gate": Case(gate, "none", mixes=False),
    "norm": Case(norm, "none", mixes=False),
    "skip": Case(skip, "none", mixes=False, changes=False),
    "mask": Case(mask, "none", mixes=False, changes=False),
    "centering": Case(centering, "none", mixes=False, changes=False),
    "one tap": Case(lambda: short_conv(0), "none", mixes=False, changes=False),
    "short conv": Case(lambda: short_conv(0, 1, 2), **FIXED),
    "shift": Case(lambda: short_conv(1), **FIXED),
    "long conv": Case(long_conv, **FIXED),
    "flip": Case(lambda: chain(skip(), flip()), **FIXED),
    "given matrices": Case(given, **FIXED),
    "softmax": Case(softmax, "controlled"),
    "softmax of queries and keys": Case(softmax_of_queries, "controlled"),
    "selective scan": Case(selective_scan, "controlled"),
    "recurrence": Case(recurrence, "controlled"),
    "wkv": Case(rwkv, "controlled"),
    "retention": Case(retention, "controlled"),
    "gated attention": Case(gated_attention, "controlled"),
    "delta rule": Case(delta_rule, "controlled"),
    "feedback": Case(feedback, "controlled"),
    "own shares": Case(lambda: own_shares(feedback()), "controlled"),
    "delta product": Case(delta_product, "controlled"),
    "softmax of scores": Case(scores, "controlled"),
    # products
    "S4": Case(lambda: total(long_conv(), skip()), **FIXED),
    "padded S4": Case(lambda: chain(mask(), total(long_conv(), skip()), mask()), **FIXED),
    "two convolutions": Case(lambda: chain(short_conv(0, 2), skip(), long_conv()), **FIXED),
    "GSS": Case(lambda: chain(gate(), total(long_conv(), skip())), "gated"),
    "gate before": Case(lambda: chain(long_conv(), gate()), "gated"),
    "Hyena": Case(lambda: chain(gate(), long_conv(), skip(), gate()), "gated"),
    "two convolutions in gates": Case(
        lambda: chain(gate(), short_conv(0, 1), skip(), long_conv(), gate()), "gated"
    ),
    "two steps of Hyena": Case(
        lambda: chain(gate(), long_conv(), gate(), long_conv(), gate()), "controlled"
    ),
    "conv after gate after conv": Case(
        lambda: chain(long_conv(), gate(), short_conv(0, 1)), "controlled"
    ),
    "gates": Case(lambda: chain(gate(), skip(), gate()), "none", mixes=False),
    "gated flip": Case(lambda: chain(gate(), flip(), gate()), "gated"),
    "flip within gates": Case(
        lambda: chain(flip(), backwards(gate()), long_conv(), flip()), "gated"
    ),
    "flips around a gate between convolutions": Case(
        lambda: chain(long_conv(), flip(), backwards(gate()), flip(), long_conv()), "controlled"
    ),
    "scan in gates": Case(
        lambda: chain(gate(SINGLE), selective_scan(), gate(SINGLE)), "controlled"
    ),
    "S6": Case(
        lambda: chain(gate(SINGLE), total(selective_scan(), skip(SINGLE)), gate(SINGLE)),
        "controlled",
    ),
    # side by side and in windows
    "conv beside gated conv": Case(
        lambda: beside(long_conv(), chain(gate(), long_conv(), gate())), "gated"
    ),
    "gated conv beside gated conv": Case(
        lambda: chain(gate(WIDE), beside(chain(gate(), long_conv()), long_conv()), gate(WIDE)),
        "gated",
    ),
    "gated conv beside scan": Case(
        lambda: chain(gate(WIDE_SINGLE), beside(selective_scan(), recurrence())), "controlled"
    ),
    "conv in windows": Case(lambda: windowed(gated=False), **FIXED),
    "gated conv in windows": Case(lambda: windowed(gated=True), "gated"),
    "gates around gated windows": Case(lambda: chain(gate(SINGLE), windowed(gated=True)), "gated"),
    # sums
    "both ways": Case(lambda: total(long_conv(), chain(flip(), long_conv(), flip())), **FIXED),
    "both ways in gates": Case(
        lambda: chain(gate(), total(long_conv(), chain(flip(), long_conv(), flip())), gate()),
        "gated",
    ),
    "two gated ways": Case(
        lambda: total(chain(gate(), long_conv()), chain(gate(), long_conv())), "controlled"
    ),
    "conv and gate": Case(lambda: total(long_conv(), gate()), "controlled"),
    "gate and skip": Case(lambda: total(gate(), skip()), "none", mixes=False),
    "conv and scan": Case(
        lambda: total(chain(selective_scan(), skip(SINGLE)), recurrence()), "controlled"
    ),
}


def draw() -> Tensor:
    return randn(BATCH, TOKENS, WIDTH)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_says_what_the_matrices_show(case: Case) -> None:
    make = case.make()
    seen = observe(lambda x: make(x).per_channel().dense(None), draw)
    assert (seen.word, seen.mixes, seen.changes) == (case.mixing, case.mixes, case.changes)
    operator = make(draw())
    for told in (operator, operator.select([operator.shape.heads - 1, 0]), Chain(operator)):
        assert told.mixing is Mixing(case.mixing)
        assert (told.mixes_tokens, told.data_dependent) == (case.mixes, case.changes)


@pytest.mark.parametrize(
    "make", [recurrence, rwkv, lambda: selective_scan(1), lambda: retention(1)],
    ids=["recurrence", "wkv", "scan of one state", "retention of one state"],
)  # fmt: skip
def test_single_states_are_rescalings(make: Callable[[], OfData]) -> None:
    """Their matrices are one matrix between diagonals, which hold products over the past.

    Except for retention: where the decay is no data, one state is a gate before and one after.
    """
    of_data = make()
    seen = observe(lambda x: of_data(x).dense(None), draw)
    assert seen.rescaled and seen.changes
    assert seen.local == isinstance(of_data(draw()), ScalarDecayHeads)
    assert of_data(draw()).mixing is Mixing.CONTROLLED


def test_every_kind_is_held_against_its_matrices() -> None:
    for module in pkgutil.walk_packages(operators.__path__, f"{operators.__name__}."):
        import_module(module.name)
    made = {
        kind
        for case in CASES.values()
        for operator in [case.make()(draw())]
        for kind in (type(operator), *(type(leaf) for leaf in operator.leaves()))
    }
    missing = set(_kinds(Operator)) - made
    assert not missing, "show in CASES how these kinds mix tokens"


def _kinds(base: type[Operator]) -> Iterator[type[Operator]]:
    """The package's classes of operators that are no bases of others."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith(operators.__name__):
            yield from _kinds(kind) if kind.__subclasses__() else [kind]


def test_factors_common_to_all_tokens_are_parameters_unless_told() -> None:
    common, own = randn(1, 1, HEADS, 1), randn(1, TOKENS, 1, 1)
    assert not Diagonal(common, SHAPE).data_dependent
    assert Diagonal(common, SHAPE, data_dependent=True).data_dependent
    assert Diagonal(own, SHAPE).data_dependent
    assert not Diagonal(own, SHAPE, data_dependent=False).data_dependent


def test_leaving_the_scan_out_leaves_a_gated_convolution() -> None:
    """A mixer's ablations are told apart too."""
    operator = chain(
        gate(SINGLE),
        total(selective_scan(), skip(SINGLE)),
        gate(SINGLE),
        always(ShortConv(randn(HEADS, 1, 3), SINGLE)),
    )(draw())
    assert operator.mixing is Mixing.CONTROLLED
    without = operator.restrict({"gate", "skip", "conv"})
    assert without is not None and without.mixing is Mixing.GATED
    conv = operator.restrict({"conv", "skip"})
    assert conv is not None and conv.mixing is Mixing.FIXED
    gates = operator.restrict({"gate"})
    assert gates is not None and gates.mixing is Mixing.NONE
