"""ImplicitAttentionRollout: a row of the product over layers of I + alpha."""

from __future__ import annotations

import pytest
import torch
from oracles import dense
from oracles.dense import (
    EXACT,
    REDUCTIONS,
    S6,
    UNIFIED,
    Run,
    add_identity,
    error,
    query_row,
    rollout,
)
from zoo.small import falcon_lm, mamba_lm, token_ids

from captum_ssm import ImplicitAttentionRollout, discard_smallest


def without_smallest(matrix, ratio):
    """Each example's smallest non-zero entries become zero, one by one."""
    result = matrix.clone()
    for example in result:
        present = [(float(example[i, j]), i, j) for i, j in example.nonzero().tolist()]
        for _, i, j in sorted(present)[: int(ratio * len(present))]:
            example[i, j] = 0
    return result


@pytest.mark.parametrize("make", [mamba_lm, falcon_lm])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("tokens", [1, 2, 13])
def test_row_of_the_dense_product(make, dtype, tolerance, tokens):
    model, ids = make().to(dtype), token_ids(3, tokens)
    alphas = Run(model, ids).alphas(UNIFIED)
    query = torch.randint(tokens, (3,))
    expected = query_row(rollout([add_identity(a) for a in alphas]), query)
    found = ImplicitAttentionRollout(model).attribute(ids, query=query)
    assert found.dtype == dtype
    assert error(found, expected) <= tolerance


OPTIONS = [
    {"normalize_rows": True},
    {"absolute": True},
    {"absolute": True, "normalize_rows": True},
    {"discard_ratio": 0.37},
    {"discard_ratio": 0.9, "absolute": True},
    {"discard_ratio": 0.5, "normalize_rows": True, "start_layer": 1},
    {"reduce": "max"},
    {"reduce": "min", "normalize_rows": True},
    {"reduce": "product", "heads": [4, 2]},
    {"reduce": "max", "discard_ratio": 0.2},
    {"start_layer": 1},
    {"start_layer": 2, "normalize_rows": True},
    {"components": "s6"},
    {"components": "s6", "normalize_rows": True},
    {"components": "exact"},
    {"components": "unified-conv"},
    {"components": "exact-activation-gate"},
    {"components": ("scan", "gate")},
    {"heads": [5]},
    {"heads": [1, 0, 13], "normalize_rows": True},
    {"heads": [1, 0, 13], "absolute": True, "components": "exact"},
]
NAMES = {
    "s6": S6,
    "unified": UNIFIED,
    "exact": EXACT,
    "unified-conv": UNIFIED - {"conv"},
    "exact-activation-gate": EXACT - {"activation", "gate"},
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10)])
def test_options(options, dtype, tolerance):
    model, ids = mamba_lm(), token_ids(2, 9)
    components = options.get("components", "unified")
    names = NAMES[components] if isinstance(components, str) else components
    run = Run(model.to(dtype), ids)
    alphas = run.alphas(
        names, reduce=REDUCTIONS[options.get("reduce", "mean")], heads=options.get("heads")
    )
    if options.get("absolute"):
        alphas = [alpha.abs() for alpha in alphas]
    alphas = [without_smallest(alpha, options.get("discard_ratio", 0)) for alpha in alphas]
    normalize = options.get("normalize_rows", False)
    matrices = [add_identity(alpha, normalize) for alpha in alphas[options.get("start_layer", 0) :]]
    if normalize and dtype == torch.float32:
        # a row sum near zero magnifies the rounding of its terms
        smallest = min(float(add_identity(a).sum(-1).abs().min()) for a in alphas)
        tolerance = tolerance / min(1.0, smallest) ** 2
    expected = query_row(rollout(matrices), 7)
    found = ImplicitAttentionRollout(model).attribute(ids, query=7, **options)
    assert error(found, expected) <= tolerance


def test_discard_smallest_channels():
    model, ids = mamba_lm(), token_ids(2, 7)
    alphas = Run(model, ids).alphas(UNIFIED, reduce=lambda a: dense.mean_of_largest(a, 6))
    expected = query_row(rollout([add_identity(a) for a in alphas]), 6)
    found = ImplicitAttentionRollout(model).attribute(ids, query=6, reduce=discard_smallest(0.3))
    assert error(found, expected) <= 1e-5


def test_normalized_rows_sum_to_one():
    model, ids = mamba_lm().double(), token_ids(2, 7)
    method = ImplicitAttentionRollout(model)
    for options in [{}, {"reduce": "max"}, {"absolute": True}]:
        found = method.attribute(ids, normalize_rows=True, **options)
        torch.testing.assert_close(found.sum(-1), torch.ones(2).double(), rtol=1e-8, atol=1e-8)


def test_the_rollout_does_not_depend_on_the_target_but_for_its_position():
    model, ids = mamba_lm(), token_ids(2, 7)
    method = ImplicitAttentionRollout(model)
    assert torch.equal(method.attribute(ids, target=(4, 1)), method.attribute(ids, target=(4, 9)))
    assert torch.equal(method.attribute(ids, target=(4, 1)), method.attribute(ids, query=4))
    assert not torch.equal(method.attribute(ids, target=(5, 1)), method.attribute(ids, query=4))
