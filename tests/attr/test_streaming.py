"""A layer's matrix by strips of few rows gives what the whole matrix gives."""

from __future__ import annotations

import pytest
import torch
from helpers.sessions import thorough
from oracles import relative_error
from zoo import architectures
from zoo.mamba import padded_batch
from zoo.small import mamba_lm, token_ids

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, MambaAttribution
from captum_ssm.attr.engine import run, strips
from captum_ssm.attr.engine.fold import LayerMatrix, given
from captum_ssm.attr.engine.strips import Budget, in_strips
from captum_ssm.errors import OptionError
from captum_ssm.operators import (
    Chain,
    Diagonal,
    Operator,
    SelectiveScan,
    Shape,
    discard_smallest,
)
from captum_ssm.operators.kernels.rows import Strip

MODELS = ("mamba", "mamba2", "vim", "recurrent_gemma", "rwkv", "bamba")
#: Numbers a strip may hold for one of two or three rows, of two examples of 9 tokens.
FEW = 4 * 2 * 9 * 3


@pytest.fixture
def heights(monkeypatch):
    """How many rows every strip had, however it was made."""
    seen, made, read = [], Operator.reduced_strip, Operator.rows

    def strip(self, rows, reduce="mean"):
        seen.append(len(rows))
        return made(self, rows, reduce)

    def as_rows(self, positions, reduce="mean"):
        seen.extend([len(positions)] * (reduce == "mean"))
        return read(self, positions, reduce)

    monkeypatch.setattr(Operator, "reduced_strip", strip)
    monkeypatch.setattr(Operator, "rows", as_rows)
    return seen


def check(method, heights, budget, *args, tolerance=1e-5, **options):
    """Few rows at a time, and all at once."""
    heights.clear()
    found = method.attribute(*args, memory_budget=budget, **options)
    few = list(heights)
    heights.clear()
    wanted = method.attribute(*args, **options)
    assert few and max(few) <= 3 and len(few) > len(heights)
    assert relative_error(found, wanted) <= tolerance
    return found


@pytest.mark.parametrize("case", thorough(architectures.ZOO, architectures.QUICK))
def test_mamba_attribution_of_every_architecture(case, heights, monkeypatch):
    made = architectures.ZOO[case](monkeypatch)
    budget = 4 * made.inputs.shape[0] * 4 * 16 * 2  # one or two rows of up to 16 tokens
    for options in ({}, {"clamp": "abs", "normalize_rows": True}):
        # a mean query and, over a few layers, every token as well
        asked = {"query": "mean", **options, **made.target}
        check(MambaAttribution(made.model), heights, budget, made.inputs, **asked)


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_absolute_rollouts(case, dtype, tolerance, heights, monkeypatch):
    made = architectures.ZOO[case](monkeypatch)
    model = made.model.to(dtype)
    inputs = made.inputs.to(dtype) if made.inputs.is_floating_point() else made.inputs
    budget = 4 * len(inputs) * 16 * dtype.itemsize * 2
    for normalize_rows in (False, True):
        asked = {"query": "mean", "absolute": True, "normalize_rows": normalize_rows}
        rollout = ImplicitAttentionRollout(model)
        check(rollout, heights, budget, inputs, tolerance=tolerance, **asked)


# unclamped rows may sum to nearly zero, which leaves no digits to compare once normalised
CLAMPS = [("relu", False), ("relu", True), ("abs", False), ("abs", True), ("none", False)]


@pytest.mark.parametrize("clamp, normalize_rows", CLAMPS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_every_clamp(clamp, normalize_rows, dtype, tolerance, heights):
    model, ids = mamba_lm().to(dtype), token_ids(2, 9)
    options = {"clamp": clamp, "normalize_rows": normalize_rows}
    method = MambaAttribution(model)
    check(method, heights, FEW * dtype.itemsize, ids, (7, 2), tolerance=tolerance, **options)


@pytest.mark.parametrize("reduce", ["max", "min", "product", discard_smallest(0.3)])
def test_other_reductions(reduce, heights):
    model, ids = mamba_lm().double(), token_ids(2, 9)
    options = {"reduce": reduce, "heads": [4, 0, 9]}
    budget = 8 * FEW * 3 - 1  # a row of three channels; the whole matrix would take a byte more
    check(MambaAttribution(model), heights, budget, ids, (8, 2), tolerance=1e-12, **options)
    rollout = ImplicitAttentionRollout(model)
    check(rollout, heights, budget, ids, query="mean", tolerance=1e-12, **options)
    check(rollout, heights, budget, ids, query=6, tolerance=1e-12, absolute=True, **options)


def test_padding(heights):
    model = mamba_lm()
    ids, mask = padded_batch([9, 4])
    found = check(MambaAttribution(model), heights, 4 * FEW, ids, (-1, 5), mask)
    assert not found[mask == 0].any()
    alone = MambaAttribution(model).attribute(ids[1:, 5:], (-1, 5), memory_budget=4 * FEW)
    assert relative_error(found[1:, 5:], alone) <= 1e-5


@pytest.mark.parametrize("room", [0, 2**20])
def test_several_targets_share_what_fits(room, heights, monkeypatch):
    model, ids = mamba_lm(), token_ids(2, 9)
    monkeypatch.setattr(run, "_KEPT_ELEMENTS", room)
    method, targets = MambaAttribution(model), [(8, 3), (5, 2), (8, 1)]
    wanted = torch.stack([method.attribute(ids, target) for target in targets])
    heights.clear()
    found = method.attribute_each(ids, targets, memory_budget=100_000)
    assert bool(heights) == (room == 0)  # else the whole matrices serve all targets
    assert relative_error(found, wanted) <= 1e-5


def test_what_exceeds_the_budget_is_not_kept(heights):
    method, ids = MambaAttribution(mamba_lm()), token_ids(2, 9)
    method.attribute_each(ids, [(8, 3), (5, 2)], memory_budget=4 * 2 * 81 - 1)
    assert heights
    heights.clear()
    method.attribute_each(ids, [(8, 3), (5, 2)], memory_budget=4 * 2 * 81 * 3)
    assert not heights


def test_one_query_costs_one_row_of_the_last_layer(heights):
    model, ids = mamba_lm(), token_ids(2, 9)
    MambaAttribution(model).attribute(ids, (6, 2))
    first, *others = heights
    assert first == 1
    # then all tokens up to the query, but for leading ones whose relevance is clamped away
    assert len(others) == 2 and all(1 <= height <= 7 for height in others)
    heights.clear()
    ImplicitAttention(model).attribute(ids, query=4, reduce="max")
    assert heights == [1, 1, 1]


def scan(tokens):
    steps, vectors = torch.rand(2, tokens, 3).double(), torch.randn(2, 2, tokens, 4).double()
    gate = Diagonal(torch.randn(2, tokens, 3, 1).double(), Shape(2, tokens, 3, 1))
    return Chain(gate, SelectiveScan(steps, -torch.rand(3, 4).double(), *vectors))


def way_of(asked, budget, monkeypatch):
    """How a scan is read for the last ``asked`` of 9 tokens; the outcome is held to its matrix."""
    operator, used = scan(9), []
    row = torch.randn(2, 9).double()
    row[:, : 9 - asked] = 0
    wanted = given(operator.dense().abs()).rmatvec(row)
    with monkeypatch.context() as patched:
        for name in ("rows", "reduced_strip"):
            made = getattr(Operator, name)
            patched.setattr(
                Operator, name, lambda *a, name=name, made=made: used.append(name) or made(*a)
            )
        found = in_strips(operator, "mean", budget, lambda strip: strip.entries.abs_()).rmatvec(row)
    assert relative_error(found, wanted) <= 1e-12
    return set(used)


def test_few_rows_are_read_as_rows(monkeypatch):
    few = SelectiveScan.few_rows
    for asked in range(1, 10):
        way = "rows" if asked <= few else "reduced_strip"
        assert way_of(asked, Budget(), monkeypatch) == {way}


def test_rows_of_all_channels_are_within_the_budget(monkeypatch):
    row = 4 * 2 * 9 * 3 * 8  # copies of a number for each example, token and channel
    assert way_of(1, Budget(row), monkeypatch) == {"rows"}
    assert way_of(1, Budget(row - 1), monkeypatch) == {"reduced_strip"}
    assert way_of(2, Budget(2 * row - 1), monkeypatch) == {"reduced_strip"}


def test_a_sum_of_zero_matters_where_a_row_is_used_alone():
    matrix = torch.tensor([[[-1.0, 0.0], [0.5, 0.25]]])
    operator = DenseMatrix(matrix)
    mixing = in_strips(operator, "mean", Budget(), lambda strip: strip.entries)
    assert torch.isfinite(mixing.carried(torch.tensor([[0.0, 1.0]]), True)).all()
    assert not torch.isfinite(mixing.carried(torch.tensor([[1.0, 0.0]]), True)).all()


class DenseMatrix(Operator):
    """One matrix (B, L, L) as an operator of one channel."""

    def __init__(self, matrix):
        self.matrix = matrix
        self.shape = Shape(len(matrix), matrix.shape[-1], 1, 1)

    def tensors(self):
        return {"matrix": self.matrix}

    def strip(self, left, right, rows):
        tokens = self.shape.tokens
        return Strip(self.matrix[:, rows.start : rows.stop].clone(), rows, range(tokens))


@pytest.mark.parametrize("height", [1, 2, 5, 7])
def test_the_maps_are_those_of_the_changed_matrix(height, monkeypatch):
    monkeypatch.setattr(strips, "_ROWS", height)
    matrix = torch.randn(3, 7, 7, dtype=torch.float64)
    row, column = torch.randn(2, 3, 7, dtype=torch.float64)

    def change(strip):
        return strip.entries.abs_()

    wanted: LayerMatrix = given(matrix.abs())
    for whole in (None, matrix):
        kept = matrix.clone()
        found = in_strips(DenseMatrix(matrix), "mean", Budget(), change, whole)
        assert relative_error(found.rmatvec(row), wanted.rmatvec(row)) <= 1e-14
        assert relative_error(found.matvec(column), wanted.matvec(column)) <= 1e-14
        for normalize_rows in (False, True):
            carried = wanted.carried(row, normalize_rows)
            assert relative_error(found.carried(row, normalize_rows), carried) <= 1e-14
        assert not found.rmatvec(torch.zeros_like(row)).any()
        assert torch.equal(matrix, kept), "the matrix was overwritten"


def test_too_little_for_a_row_is_an_error():
    model, ids = mamba_lm(), token_ids(2, 9)
    least = 4 * 4 * 2 * 9
    for method in (
        lambda budget: MambaAttribution(model).attribute(ids, (8, 1), memory_budget=budget),
        lambda budget: ImplicitAttentionRollout(model).attribute(
            ids, absolute=True, memory_budget=budget
        ),
    ):
        assert method(least).shape == (2, 9)
        with pytest.raises(OptionError, match=rf"memory_budget={least - 1} .* at least {least}"):
            method(least - 1)
        with pytest.raises(OptionError, match="memory_budget='lots' is not a size"):
            method("lots")


def test_strips_that_do_not_fit_are_halved(monkeypatch):
    model, ids = mamba_lm(), token_ids(2, 21)
    asked = {"target": (-1, 3), "query": "mean"}
    wanted = MambaAttribution(model).attribute(ids, **asked)
    made, refused = Operator.reduced_strip, []

    def scarce(self, rows, reduce="mean"):
        if len(rows) > 3:
            refused.append(len(rows))
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return made(self, rows, reduce)

    monkeypatch.setattr(Operator, "reduced_strip", scarce)
    found = MambaAttribution(model).attribute(ids, **asked)
    assert set(refused) == {21, 10, 5}
    assert relative_error(found, wanted) <= 1e-6
