"""A layer's matrix by strips of few rows gives what the whole matrix gives."""

from __future__ import annotations

import pytest
import torch
from oracles import relative_error
from zoo import architectures
from zoo.small import mamba_lm, token_ids

from captum_ssm import ImplicitAttentionRollout, MambaAttribution
from captum_ssm.attr.engine import strips
from captum_ssm.errors import OptionError
from captum_ssm.operators import Operator, discard_smallest

pytestmark = pytest.mark.slow

MODELS = ("mamba", "mamba2", "vim", "recurrent_gemma", "rwkv", "bamba")
#: Numbers a strip may hold for one of two or three rows, of two examples of 9 tokens.
FEW = 4 * 2 * 9 * 3


@pytest.fixture
def heights(monkeypatch):
    """How many rows every strip had, however it was made."""
    seen, made, read = [], strips._strip_of_rows, Operator.rows

    def strip(operator, rows, reduce):
        seen.append(len(rows))
        return made(operator, rows, reduce)

    def as_rows(self, positions, reduce="mean"):
        seen.extend([len(positions)] * (reduce == "mean"))
        return read(self, positions, reduce)

    monkeypatch.setattr(strips, "_strip_of_rows", strip)
    monkeypatch.setattr(Operator, "rows", as_rows)
    return seen


def check(method, heights, budget, *args, tolerance=1e-5, **options):
    heights.clear()
    found = method.attribute(*args, memory_budget=budget, **options)
    few = list(heights)
    heights.clear()
    wanted = method.attribute(*args, **options)
    assert few and max(few) <= 3 and len(few) > len(heights)
    assert relative_error(found, wanted) <= tolerance
    return found


@pytest.mark.parametrize("case", MODELS)
def test_absolute_rollouts(case, heights, monkeypatch):
    made = architectures.ZOO[case](monkeypatch)
    model = made.model.double()
    inputs = made.inputs.double() if made.inputs.is_floating_point() else made.inputs
    budget = 4 * len(inputs) * 16 * 8 * 2
    for normalize_rows in (False, True):
        asked = {"query": "mean", "absolute": True, "normalize_rows": normalize_rows}
        rollout = ImplicitAttentionRollout(model)
        check(rollout, heights, budget, inputs, tolerance=1e-12, **asked)


# unclamped rows may sum to nearly zero, which leaves no digits to compare once normalised
CLAMPS = [("relu", False), ("relu", True), ("abs", False), ("abs", True), ("none", False)]


@pytest.mark.parametrize("clamp, normalize_rows", CLAMPS)
def test_every_clamp(clamp, normalize_rows, heights):
    method, ids = MambaAttribution(mamba_lm().double()), token_ids(2, 9)
    options = {"clamp": clamp, "normalize_rows": normalize_rows}
    check(method, heights, FEW * 8, ids, (7, 2), tolerance=1e-12, **options)


@pytest.mark.parametrize("reduce", ["max", "min", "product", discard_smallest(0.3)])
def test_other_reductions(reduce, heights):
    model, ids = mamba_lm().double(), token_ids(2, 9)
    options = {"reduce": reduce, "heads": [4, 0, 9]}
    budget = 8 * FEW * 3 - 1  # a row of three channels; the whole matrix would take a byte more
    check(MambaAttribution(model), heights, budget, ids, (8, 2), tolerance=1e-12, **options)
    rollout = ImplicitAttentionRollout(model)
    check(rollout, heights, budget, ids, query="mean", tolerance=1e-12, **options)
    check(rollout, heights, budget, ids, query=6, tolerance=1e-12, absolute=True, **options)


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
    made, refused = strips._strip_of_rows, []

    def scarce(operator, rows, reduce):
        if len(rows) > 3:
            refused.append(len(rows))
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return made(operator, rows, reduce)

    monkeypatch.setattr(strips, "_strip_of_rows", scarce)
    found = MambaAttribution(model).attribute(ids, **asked)
    assert set(refused) == {21, 10, 5}
    assert relative_error(found, wanted) <= 1e-6
