"""What an operator says about its mixing is what its matrices show at several inputs."""

from __future__ import annotations

import pytest
import torch
from operators.kinds import (
    KINDS,
    PER_CHANNEL,
    SKIP,
    Kind,
    beside,
    chain,
    conv,
    diagonal,
    elementwise,
    flip,
    long_conv,
    randn,
    scan,
    total,
)
from oracles.mixing import TOKENS, observe
from torch import Tensor

from captum_ssm.operators import Chain, DenseHeads, Diagonal, LongConv, Mixing, Operator, Shape
from captum_ssm.operators.reorder import Windowed, Windows

BATCH, WIDTH, HEADS = 2, 4, 3
#: Kinds whose matrices are neither of any form at given inputs nor of one form at all of them.
NONE = {name for name in KINDS if name.startswith("diagonal")} | {"conv of one tap", "centering"}
FIXED = {name for name in KINDS if name.startswith(("conv", "long conv"))} - NONE
FIXED |= {"permute", "flip", "sum of one"}
FIXED -= {"long conv in gates", "convs across both ends", "conv after scan beside conv"}
GATED = {"long conv in gates"}
#: Those that say less than their matrices show, those whose lags show nothing of the ratios between
#: entries, and those whose tokens lie in windows.
OTHERS = {"running sum", "given", "sum", "windows", "windows in a mixer"}


def word(name: str) -> str:
    words = {"none": NONE, "fixed": FIXED, "gated": GATED}
    return next((word for word, names in words.items() if name in names), "controlled")


GATE, HEAD_SKIP = diagonal(), diagonal(SKIP, "skip")
WIDE = chain(diagonal((1, 1, 1, 0)), beside(chain(GATE, long_conv()), long_conv()), GATE)
BOTH_WAYS = total(long_conv(), chain(flip, long_conv(), flip))
#: By name: the word, and a kind, with heads of one channel if they hold a scan.
ROWS: dict[str, tuple[str, Kind, int]] = {
    **{
        name: (word(name), kind, 1 if single else 2)
        for name, (kind, single) in KINDS.items()
        if name not in OTHERS
    },
    "shift": ("fixed", conv(1), 2),
    "gated flip": ("gated", chain(GATE, flip, GATE), 2),
    "S4": ("fixed", total(long_conv(), HEAD_SKIP), 2),
    "two convolutions": ("fixed", chain(conv(0, 2), diagonal(PER_CHANNEL), long_conv()), 2),
    "GSS": ("gated", chain(GATE, total(long_conv(), HEAD_SKIP)), 2),
    "gate before": ("gated", chain(long_conv(), GATE), 2),
    "two convolutions in gates": (
        "gated",
        chain(GATE, conv(0, 1), HEAD_SKIP, long_conv(), GATE),
        2,
    ),
    "two steps of Hyena": ("controlled", chain(GATE, long_conv(), GATE, long_conv(), GATE), 2),
    "gates": ("none", chain(GATE, HEAD_SKIP, GATE), 2),
    "conv beside gated conv": ("gated", beside(long_conv(), chain(GATE, long_conv(), GATE)), 2),
    "gated conv beside gated conv": ("gated", WIDE, 2),
    "gated conv beside scan": ("controlled", chain(GATE, beside(scan(), elementwise)), 1),
    "convolutions both ways": ("fixed", BOTH_WAYS, 2),
    "convolutions both ways in gates": ("gated", chain(GATE, BOTH_WAYS, GATE), 2),
    "two gated ways": ("controlled", total(chain(GATE, long_conv()), chain(GATE, long_conv())), 2),
    "conv and gate": ("controlled", total(long_conv(), GATE), 2),
    "gate and skip": ("none", total(GATE, HEAD_SKIP), 2),
    # a gate between the flips is told apart by its place among the tokens
    "flip within gates": ("gated", chain(flip, GATE, long_conv(), flip), 2),
    "gate in flips between convolutions": (
        "controlled",
        chain(long_conv(), flip, GATE, flip, long_conv()),
        2,
    ),
}


def draw() -> Tensor:
    return randn(BATCH, TOKENS, WIDTH)


@pytest.mark.parametrize("name", ROWS)
def test_says_what_the_matrices_show(name: str) -> None:
    """Coefficients of tokens follow from these tokens' data; all others are parameters."""
    wanted, kind, per_head = ROWS[name]
    case = kind(Shape(BATCH, TOKENS, HEADS, per_head))
    of_tokens = {n: x for n, x in case.coefficients.items() if x.shape[:2] == (BATCH, TOKENS)}
    weights = {n: randn(WIDTH, x[0, 0].numel()) for n, x in of_tokens.items()}

    def make(data: Tensor) -> Operator:
        coefficients = dict(case.coefficients)
        for n, x in of_tokens.items():
            factor = (data.flip(1) if "flip" in name and n == "1.weight" else data) @ weights[n]
            coefficients[n] = x * (0.5 + factor.sigmoid() / 2).view_as(x)
        return case.make(**coefficients)

    seen = observe(lambda data: make(data).per_channel().dense(None), draw)
    assert seen.word == wanted
    check(make(draw()), wanted, seen.changes)


def check(operator: Operator, word: str, changes: bool) -> None:
    for told in (operator, operator.select([operator.shape.heads - 1, 0]), Chain(operator)):
        assert told.mixing is Mixing(word)
        assert (told.mixes_tokens, told.data_dependent) == (word != "none", changes)


@pytest.mark.parametrize("gated", [False, True])
def test_windows_mix_as_they_do_inside(gated: bool) -> None:
    places = torch.randperm(TOKENS).view(-1, 3)
    windows, shape = Windows(places), Shape(BATCH * len(places), 3, HEADS, 1)
    inner, weight = LongConv(randn(HEADS, 1, 3), shape), randn(WIDTH, HEADS)

    def make(data: Tensor) -> Operator:
        gates = windows.cut((data @ weight)[..., None])
        return Windowed(Chain(Diagonal(gates, shape), inner) if gated else inner, windows)

    seen = observe(lambda data: make(data).dense(None), draw)
    assert seen.word == ("gated" if gated else "fixed")
    check(make(draw()), seen.word, gated)
    outer = Chain(Diagonal(randn(BATCH, TOKENS, HEADS, 1), make(draw()).shape), make(draw()))
    check(outer, "gated", True)


def test_factors_common_to_all_tokens_are_parameters_unless_told() -> None:
    shape = Shape(BATCH, TOKENS, HEADS, 2)
    common, own = randn(1, 1, HEADS, 1), randn(1, TOKENS, 1, 1)
    assert not Diagonal(common, shape).data_dependent
    assert Diagonal(common, shape, data_dependent=True).data_dependent
    assert Diagonal(own, shape).data_dependent
    assert not Diagonal(own, shape, data_dependent=False).data_dependent
    matrices = randn(BATCH, HEADS, TOKENS, TOKENS)
    check(DenseHeads(matrices, 2, data_dependent=False), "fixed", False)
    check(DenseHeads(matrices, 2, data_dependent=True), "controlled", True)


def test_leaving_the_scan_out_leaves_a_gated_convolution() -> None:
    """A mixer's ablations are told apart too."""
    kind = chain(diagonal(), total(scan(), HEAD_SKIP), diagonal(), conv(0, 1, 2))
    operator = kind(Shape(BATCH, TOKENS, HEADS, 1)).operator
    for components, word in (
        ({"gate", "scan", "skip", "conv"}, "controlled"),
        ({"gate", "skip", "conv"}, "gated"),
        ({"conv", "skip"}, "fixed"),
        ({"gate"}, "none"),
    ):
        kept = operator.restrict(components)
        assert kept is not None and kept.mixing is Mixing(word)
