"""MambaAttribution: rollout of implicit attention weighted by the target's gradient."""

from __future__ import annotations

import pytest
import torch
from helpers.adapters import telling
from oracles import dense
from oracles.dense import (
    EXACT,
    REDUCTIONS,
    S6,
    UNIFIED,
    Run,
    add_identity,
    double,
    error,
    query_row,
)
from oracles.dense import rollout as product
from zoo.small import CLASSES, classifier, falcon_lm, mamba_lm, token_ids, vision
from zoo.small import images as random_images

from captum_ssm import MambaAttribution, discard_smallest

pytestmark = pytest.mark.slow

CLAMPS = {"relu": lambda x: x * (x > 0), "abs": lambda x: x.abs(), "none": lambda x: x}


def expected_row(run, alphas, query, clamp="relu", normalize=False, start_layer=0):
    """Row ``query`` of the product over layers of I + clamp(g . alpha)."""
    matrices = []
    for alpha, gradient in zip(alphas, run.output_gradients, strict=True):
        g = gradient.sum(-1) / gradient.shape[-1]
        weighted = torch.diag_embed(g) @ alpha
        matrices.append(add_identity(CLAMPS[clamp](weighted), normalize))
    return query_row(product(matrices[start_layer:]), query)


@pytest.mark.parametrize("make", [mamba_lm, falcon_lm])
@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_language_models(make, clamp, dtype, tolerance):
    model, ids = make().to(dtype), token_ids(2, 10)
    reference = double(model) if dtype == torch.float32 else model
    run = Run(reference, ids, select=lambda logits: logits[:, 7, 4])
    expected = expected_row(run, run.alphas(UNIFIED), 7, clamp)
    found = MambaAttribution(model).attribute(ids, target=(7, 4), clamp=clamp)
    assert found.dtype == dtype
    assert error(found, expected) <= tolerance


OPTIONS = [
    {"normalize_rows": True},
    {"normalize_rows": True, "clamp": "abs"},
    {"start_layer": 1},
    {"start_layer": 2, "clamp": "none"},
    {"reduce": "max"},
    {"reduce": "min", "clamp": "abs"},
    {"reduce": "product", "heads": [3, 11]},
    {"heads": [0, 7]},
    {"components": "s6"},
    {"components": "exact", "clamp": "none"},
    {"components": "unified-conv", "normalize_rows": True},
    {"components": ("scan", "skip")},
]
NAMES = {"s6": S6, "unified": UNIFIED, "exact": EXACT, "unified-conv": UNIFIED - {"conv"}}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options):
    model, ids = mamba_lm().double(), token_ids(2, 8)
    components = options.get("components", "unified")
    names = NAMES[components] if isinstance(components, str) else components
    run = Run(model, ids, select=lambda logits: logits[:, 5, 3])
    alphas = run.alphas(
        names, reduce=REDUCTIONS[options.get("reduce", "mean")], heads=options.get("heads")
    )
    expected = expected_row(
        run,
        alphas,
        5,
        options.get("clamp", "relu"),
        options.get("normalize_rows", False),
        options.get("start_layer", 0),
    )
    found = MambaAttribution(model).attribute(ids, target=(5, 3), **options)
    assert error(found, expected) <= 1e-10


def test_discard_smallest_channels():
    model, ids = mamba_lm().double(), token_ids(2, 8)
    run = Run(model, ids, select=lambda logits: logits[:, -1, 0])
    alphas = run.alphas(UNIFIED, reduce=lambda a: dense.mean_of_largest(a, 10))
    found = MambaAttribution(model).attribute(ids, target=(-1, 0), reduce=discard_smallest(0.5))
    assert error(found, expected_row(run, alphas, 7)) <= 1e-10


def test_query_and_target_may_differ():
    model, ids = mamba_lm().double(), token_ids(2, 8)
    run = Run(model, ids, select=lambda logits: logits[:, 6, 2])
    found = MambaAttribution(model).attribute(ids, target=(6, 2), query=4)
    assert error(found, expected_row(run, run.alphas(UNIFIED), 4)) <= 1e-10


def test_a_target_for_each_example():
    model, ids = mamba_lm().double(), token_ids(3, 8)
    positions, tokens = [2, 7, 5], [1, 18, 0]
    run = Run(model, ids, select=lambda logits: logits[range(3), positions, tokens])
    expected = expected_row(run, run.alphas(UNIFIED), torch.tensor(positions))
    found = MambaAttribution(model).attribute(ids, target=list(zip(positions, tokens, strict=True)))
    assert error(found, expected) <= 1e-10


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_classifiers(pool):
    model, ids = classifier(pool).double(), token_ids(2, 7)
    run = Run(model, ids, select=lambda out: out[range(2), [4, 1]])
    rows = [expected_row(run, run.alphas(UNIFIED), q) for q in range(7)]
    expected = rows[-1] if pool == "last" else sum(rows) / 7
    found = MambaAttribution(model).attribute(ids, target=[4, 1])
    assert error(found, expected) <= 1e-10


@pytest.mark.parametrize("cls", ["head", "middle", None])
def test_vision(cls):
    model, pictures = vision(cls).double(), random_images(2).double()
    run = Run(model, pictures, select=lambda out: out[:, CLASSES - 1])
    alphas = run.alphas(UNIFIED)
    if cls is None:
        rows = [expected_row(run, alphas, q) for q in range(alphas[0].shape[-1])]
        expected = sum(rows) / len(rows)
    else:
        expected = expected_row(run, alphas, model.cls_position)
    expected = expected[:, model.patch_tokens()].view(2, 3, 4)
    found = MambaAttribution(model).attribute(pictures, target=-1, per_token=True)
    if cls == "head":  # in a causal model the first token sees no patch
        assert not expected.any() and not found.any()
    else:
        assert error(found, expected) <= 1e-10


def test_one_number_per_example_needs_no_target():
    model, ids = classifier("mean"), token_ids(2, 7)

    def margin(tokens):
        out = model(tokens)
        return out[:, 2] - out[:, 3]

    run = Run(double(model), ids, select=lambda out: out[:, 2] - out[:, 3])
    rows = [expected_row(run, run.alphas(UNIFIED), q) for q in range(7)]
    for function in (margin, lambda tokens: margin(tokens)[:, None]):
        found = MambaAttribution(function, model=model).attribute(ids)
        assert error(found, sum(rows) / 7) <= 1e-5


class Noted(torch.autograd.Function):
    """The identity; says when gradients are taken."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.note()
        return gradient, None


@pytest.mark.parametrize("padded", [False, True])
def test_operators_are_made_once_while_the_model_runs(padded):
    model, ids, done = mamba_lm(), token_ids(2, 6), []
    telling(model.backbone.layers[0].mixer, lambda: done.append("operator"))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0

    def function(ids):
        out = model(ids, attention_mask=mask if padded else None)
        return Noted.apply(out.logits, lambda: done.append("gradients"))

    MambaAttribution(function, model).attribute(ids, target=(-1, 4))
    assert done == [*["operator"] * 3, "gradients"]
