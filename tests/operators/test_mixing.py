"""Each composition says how it mixes tokens, in the words of the hidden-attention paper.

Fixed: the matrices are parameters.  Gated: diag(r) F diag(w) of a fixed F, with factors that follow
from their own tokens.  Controlled: anything else.
"""

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

from captum_ssm.operators import Chain, DenseHeads, Diagonal, LongConv, Mixing, Operator, Shape
from captum_ssm.operators.reorder import Windowed, Windows

BATCH, TOKENS, HEADS = 2, 9, 3
#: Kinds whose matrices are neither of any form at given inputs nor of one form at all of them.
NONE = {name for name in KINDS if name.startswith("diagonal")} | {"conv of one tap", "centering"}
FIXED = {name for name in KINDS if name.startswith(("conv", "long conv"))} - NONE
FIXED |= {"permute", "flip", "sum of one"}
FIXED -= {"long conv in gates", "convs across both ends", "conv after scan beside conv"}
GATED = {"long conv in gates"}


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
        if name not in ("given", "windows")  # of which other tests are
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


@pytest.mark.parametrize("name", ROWS)
def test_each_kind_says_how_it_mixes(name: str) -> None:
    """Coefficients of tokens follow from the input, biases aside; all others are parameters."""
    word, kind, per_head = ROWS[name]
    case = kind(Shape(BATCH, TOKENS, HEADS, per_head))
    changes = any(
        x.shape[:2] == (BATCH, TOKENS)
        for n, x in case.coefficients.items()
        if not n.endswith("bias")
    )
    check(case.operator, word, changes)


def check(operator: Operator, word: str, changes: bool) -> None:
    for told in (operator, operator.select([operator.shape.heads - 1, 0]), Chain(operator)):
        assert told.mixing is Mixing(word)
        assert (told.mixes_tokens, told.data_dependent) == (word != "none", changes)


@pytest.mark.parametrize("gated", [False, True])
def test_windows_mix_as_they_do_inside(gated: bool) -> None:
    places = torch.randperm(TOKENS).view(-1, 3)
    windows, shape = Windows(places), Shape(BATCH * len(places), 3, HEADS, 1)
    inner = LongConv(randn(HEADS, 1, 3), shape)
    gate = Diagonal(windows.cut(randn(BATCH, TOKENS, HEADS, 1)), shape)
    operator = Windowed(Chain(gate, inner) if gated else inner, windows)
    check(operator, "gated" if gated else "fixed", gated)
    check(Chain(Diagonal(randn(*operator.shape), operator.shape), operator), "gated", True)


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
