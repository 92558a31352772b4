"""Raw attention, its rollout and MambaAttribution: rows of dense matrices in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.dense import (
    EXACT,
    REDUCTIONS,
    S6,
    UNIFIED,
    Run,
    add_identity,
    channel_matrices,
    double,
    error,
    mean_of_largest,
    query_row,
    rollout,
)
from torch import Tensor
from zoo.small import CLASSES, classifier, falcon_lm, mamba_lm, token_ids, vision
from zoo.small import images as random_images

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    MambaAttribution,
    discard_smallest,
)

#: By the option: the components that it stands for.
COMPONENTS: dict[Any, frozenset[str]] = {
    "s6": S6, "unified": UNIFIED, "exact": EXACT, "unified-conv": UNIFIED - {"conv"},
    "exact-gate-skip": EXACT - {"gate", "skip"}, "unified-activation": UNIFIED - {"activation"},
    ("skip",): frozenset({"skip"}), ("conv", "gate"): frozenset({"conv", "gate"}),
    ("scan", "activation"): frozenset({"scan", "activation"}),
}  # fmt: skip


def norm(channels: Tensor) -> Tensor:
    return channels.norm(dim=-1)


#: By the option: how channels, dimension 1, are reduced.
REDUCE: dict[Any, Callable[[Tensor], Tensor]] = {
    **REDUCTIONS,
    None: lambda alpha: alpha,
    "heads": lambda alpha: alpha,  # of which each channel is one
    norm: lambda alpha: alpha.square().sum(1).sqrt(),
}
CLAMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x * (x > 0),
    "abs": Tensor.abs,
    "none": lambda x: x,
}


def dropping(ratio: float, dropped: int) -> Any:
    reduce = discard_smallest(ratio)
    REDUCE[reduce] = lambda alpha: mean_of_largest(alpha, dropped)
    return reduce


def alphas(run: Run, options: dict[str, Any]) -> list[Tensor]:
    components = COMPONENTS[options.get("components", "unified")]
    reduce = REDUCE[options.get("reduce", "mean")]
    return run.alphas(components, reduce=reduce, heads=options.get("heads"))


HALF, ALL_BUT_ONE = dropping(0.4, 8), dropping(0.99, 19)
MATRICES: list[dict[str, Any]] = [
    *({"components": name, "reduce": None} for name in COMPONENTS),
    *({"reduce": reduce} for reduce in REDUCE),
    *({"reduce": reduce, "heads": [7, 0, 4]} for reduce in ("mean", "product", "heads", None)),
    {"reduce": "max", "heads": [-1, 2]},
]


def shown(value: Any) -> str:
    """The id of a method or of options, the same in every process."""
    return re.sub(r" at 0x\w+", "", str(getattr(value, "__name__", value)))


@pytest.mark.slow
@pytest.mark.parametrize("options", MATRICES, ids=shown)
def test_matrices(options: dict[str, Any]) -> None:
    for make in (mamba_lm, falcon_lm):
        model, ids = make().double(), token_ids(2, 7)
        found = ImplicitAttention(model).matrices(ids, **options)
        for matrix, expected in zip(found, alphas(Run(model, ids), options), strict=True):
            assert matrix.dtype == torch.float64 and matrix.shape == expected.shape
            assert not matrix.requires_grad and matrix.is_contiguous()
            assert error(matrix, expected) <= 1e-10


def test_chosen_layers_come_in_the_order_asked_for() -> None:
    attention, ids = ImplicitAttention(mamba_lm()), token_ids(1, 5)
    whole = attention.matrices(ids)
    for layers in ([0, -1], [2, 0], [1], [-2, 1], []):
        found = attention.matrices(ids, layers=layers)
        assert len(found) == len(layers)
        assert all(torch.equal(m, whole[i]) for m, i in zip(found, layers, strict=True))


@pytest.mark.slow
def test_matrices_of_a_padded_batch() -> None:
    model, ids = mamba_lm(), token_ids(2, 8)
    mask = torch.ones(2, 8).long()
    mask[0, 5:] = 0
    alone = ImplicitAttention(model).matrices(ids[:1, :5])
    padded = ImplicitAttention(model).matrices(ids, additional_forward_args=mask)
    for one, both in zip(alone, padded, strict=True):
        assert error(both[:1, :5, :5], one) <= 1e-6
        assert not both[0, :, 5:].any()  # nothing is taken from padding


@pytest.mark.slow
def test_exact_matrices_times_values_plus_bias_are_the_mixers_output() -> None:
    model, ids = mamba_lm(use_bias=True).double(), token_ids(2, 9)
    run = Run(model, ids)
    for index, mixer in enumerate(run.mixers):
        hidden = run.inputs[index]
        (alpha,) = ImplicitAttention(model).matrices(
            ids, layers=[index], reduce=None, components="exact"
        )
        x = mixer.in_proj(hidden).chunk(2, -1)[0]
        # what the convolution's bias becomes: the chain without its first part
        rest = channel_matrices(mixer, hidden, EXACT - {"conv"})
        bias = mixer.conv1d.bias.expand_as(x)
        values = torch.einsum("bcij,bjc->bic", alpha, x)
        values = values + torch.einsum("bcij,bjc->bic", rest, bias)
        # transformers rounds A, D and the step's bias to float32
        assert error(mixer.out_proj(values), run.outputs[index]) <= 1e-5


def without_smallest(matrix: Tensor, ratio: float) -> Tensor:
    result = matrix.clone()
    for example in result:
        present = [(float(example[i, j]), i, j) for i, j in example.nonzero().tolist()]
        for _, i, j in sorted(present)[: int(ratio * len(present))]:
            example[i, j] = 0
    return result


def row(method: Any, run: Run, query: Any, **options: Any) -> Tensor:
    matrices = alphas(run, options)
    if method is MambaAttribution:
        clamp = CLAMPS[options.get("clamp", "relu")]
        scale = [g.sum(-1) / g.shape[-1] for g in run.output_gradients]
        matrices = [clamp(g[..., None] * a) for g, a in zip(scale, matrices, strict=True)]
    matrices = matrices[options.get("start_layer", 0) :]
    if method is ImplicitAttention:
        return query_row(sum(matrices) / len(matrices), query)
    if options.get("absolute"):
        matrices = [matrix.abs() for matrix in matrices]
    matrices = [without_smallest(matrix, options.get("discard_ratio", 0)) for matrix in matrices]
    normalize = options.get("normalize_rows", False)
    return query_row(rollout([add_identity(matrix, normalize) for matrix in matrices]), query)


#: Options of all three, of the latter two, and of each of these alone.
COMMON: list[dict[str, Any]] = [
    {},
    {"start_layer": 1},
    {"components": "s6"},
    {"components": "exact", "heads": [1, 0, 13]},
    {"components": ("conv", "gate"), "start_layer": 2},
    {"reduce": "max"},
    {"reduce": "min", "heads": [5]},
    {"reduce": "product", "heads": [4, 2]},
    {"reduce": HALF},
    {"reduce": norm},
]
FOLDED: list[dict[str, Any]] = [
    {"normalize_rows": True},
    {"normalize_rows": True, "components": "unified-conv", "start_layer": 1},
]
OF_ROLLOUT: list[dict[str, Any]] = [
    {"absolute": True},
    {"absolute": True, "normalize_rows": True, "components": "exact"},
    {"discard_ratio": 0.37},
    {"discard_ratio": 0.9, "absolute": True, "reduce": "max"},
    {"discard_ratio": 0.5, "normalize_rows": True, "start_layer": 1},
]
OF_GRADIENTS: list[dict[str, Any]] = [
    {"clamp": "abs"},
    {"clamp": "none", "start_layer": 2},
    {"clamp": "abs", "normalize_rows": True, "reduce": "min"},
]
ROWS = [
    *((ImplicitAttention, options) for options in COMMON),
    *((ImplicitAttentionRollout, options) for options in COMMON + FOLDED + OF_ROLLOUT),
    *((MambaAttribution, options) for options in COMMON + FOLDED + OF_GRADIENTS),
]


@pytest.mark.parametrize(
    ("method", "options"),
    [pytest.param(*row, marks=[pytest.mark.slow] * bool(i % 4)) for i, row in enumerate(ROWS)],
    ids=shown,
)
def test_rows(method: Any, options: dict[str, Any]) -> None:
    model, ids = mamba_lm().double(), token_ids(2, 9)
    run = Run(model, ids, select=lambda logits: logits[:, 6, 4])
    found = method(model).attribute(ids, target=(6, 4), query=5, **options)
    assert error(found, row(method, run, 5, **options)) <= 1e-10


METHODS = pytest.mark.parametrize(
    "method", [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution]
)


@pytest.mark.slow
@METHODS
@pytest.mark.parametrize(("make", "tokens"), [(mamba_lm, 1), (mamba_lm, 13), (falcon_lm, 2)])
def test_a_target_for_each_example(method: Any, make: Any, tokens: int) -> None:
    model, ids = make(), token_ids(3, tokens)
    positions, words = torch.randint(tokens, (3,)), [1, 18, 0]
    run = Run(double(model), ids, select=lambda logits: logits[range(3), positions, words])
    target = list(zip(positions.tolist(), words, strict=True))
    found = method(model).attribute(ids, target=target)
    assert found.dtype == torch.float32
    assert error(found, row(method, run, positions)) <= 1e-5


@pytest.mark.slow
@METHODS
def test_classifiers_and_images(method: Any) -> None:
    for pool in ("last", "mean"):
        model, ids = classifier(pool).double(), token_ids(2, 7)
        run = Run(model, ids, select=lambda out: out[range(2), [4, 1]])
        rows = [row(method, run, q) for q in range(7)]
        expected = rows[-1] if pool == "last" else sum(rows) / 7
        assert error(method(model).attribute(ids, target=[4, 1]), expected) <= 1e-10
    for cls in ("middle", None):
        model, pictures = vision(cls).double(), random_images(2).double()
        run = Run(model, pictures, select=lambda out: out[:, CLASSES - 1])
        queries = range(12) if cls is None else [model.cls_position]
        rows = [row(method, run, query) for query in queries]
        expected = (sum(rows) / len(rows))[:, model.patch_tokens()].view(2, 3, 4)
        found = method(model).attribute(pictures, target=-1, per_token=True)
        assert error(found, expected) <= 1e-10


@pytest.mark.slow
@METHODS
def test_chosen_layers(method: Any) -> None:
    model, ids = mamba_lm(), token_ids(2, 5)
    names = ["backbone.layers.1.mixer", "backbone.layers.2.mixer"]
    late = method(model).attribute(ids, target=(3, 2), start_layer=1)
    for layers in ([model.backbone.layers[1].mixer, names[1]], names[::-1], tuple(names)):
        for given in (model, torch.compile(model, backend="eager")):
            found = method(given, layers=layers).attribute(ids, target=(3, 2))
            torch.testing.assert_close(found, late, rtol=1e-5, atol=1e-6)
