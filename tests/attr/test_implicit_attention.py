"""ImplicitAttention: its matrices, and raw attention as a row of their mean."""

from __future__ import annotations

import pytest
import torch
from oracles import dense
from oracles.dense import EXACT, REDUCTIONS, S6, UNIFIED, Run, channel_matrices, error, query_row
from torch import nn
from zoo.small import CHANNELS, falcon_lm, mamba_lm, token_ids

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    MambaAttribution,
    discard_smallest,
)

pytestmark = pytest.mark.slow

COMPONENTS = [
    ("s6", S6),
    ("unified", UNIFIED),
    ("exact", EXACT),
    ("unified-conv", UNIFIED - {"conv"}),
    ("exact-gate-skip", EXACT - {"gate", "skip"}),
    ("unified-activation", UNIFIED - {"activation"}),
    ({"skip"}, {"skip"}),
    (["conv", "gate"], {"conv", "gate"}),
    (("scan", "activation"), {"scan", "activation"}),
]


@pytest.mark.parametrize("make", [mamba_lm, falcon_lm])
@pytest.mark.parametrize("components, names", COMPONENTS)
def test_every_channel_matrix_is_the_dense_formula(make, components, names):
    model, ids = make(), token_ids(2, 7)
    found = ImplicitAttention(model).matrices(ids, reduce=None, components=components)
    expected = Run(model, ids).alphas(names, reduce=lambda alpha: alpha)
    assert len(found) == 3
    for matrix, dense_matrix in zip(found, expected, strict=True):
        assert matrix.shape == (2, CHANNELS, 7, 7) and matrix.dtype == torch.float32
        assert error(matrix, dense_matrix) <= 1e-5


@pytest.mark.parametrize("make", [mamba_lm, falcon_lm])
@pytest.mark.parametrize("reduce", [*REDUCTIONS, None])
def test_reductions_in_float64(make, reduce):
    model, ids = make().double(), token_ids(3, 13)
    function = (lambda alpha: alpha) if reduce is None else REDUCTIONS[reduce]
    expected = Run(model, ids).alphas(UNIFIED, reduce=function)
    found = ImplicitAttention(model).matrices(ids, reduce=reduce)
    for matrix, dense_matrix in zip(found, expected, strict=True):
        assert matrix.dtype == torch.float64
        assert error(matrix, dense_matrix) <= 1e-10


@pytest.mark.parametrize("ratio, dropped", [(0.4, 8), (0.0, 0), (0.99, 19), (0.26, 5)])
def test_discard_smallest(ratio, dropped):
    model, ids = mamba_lm(), token_ids(2, 5)
    found = ImplicitAttention(model).matrices(ids, reduce=discard_smallest(ratio))
    expected = Run(model, ids).alphas(
        UNIFIED, reduce=lambda alpha: dense.mean_of_largest(alpha, dropped)
    )
    for matrix, dense_matrix in zip(found, expected, strict=True):
        assert matrix.shape == (2, 5, 5)
        assert error(matrix, dense_matrix) <= 1e-5


def test_each_channel_of_mamba_1_is_a_head():
    model, ids = mamba_lm(), token_ids(2, 5)
    attention = ImplicitAttention(model)
    for by_head, by_channel in zip(
        attention.matrices(ids, reduce="heads"), attention.matrices(ids, reduce=None), strict=True
    ):
        assert by_head.shape == (2, CHANNELS, 5, 5)
        assert error(by_head, by_channel) <= 1e-6


@pytest.mark.parametrize("reduce", ["mean", "max", "min", "product", "heads", None])
@pytest.mark.parametrize("heads", [[3], [7, 0, 4], [-1, 2]])
def test_chosen_heads(reduce, heads):
    model, ids = mamba_lm(), token_ids(2, 6)
    function = REDUCTIONS.get(reduce, lambda alpha: alpha)
    expected = Run(model, ids).alphas(UNIFIED, reduce=function, heads=heads)
    found = ImplicitAttention(model).matrices(ids, reduce=reduce, heads=heads)
    for matrix, dense_matrix in zip(found, expected, strict=True):
        assert error(matrix, dense_matrix) <= 1e-5


def test_chosen_layers_come_in_the_order_asked_for():
    model, ids = mamba_lm(), token_ids(1, 5)
    attention = ImplicitAttention(model)
    first, middle, last = attention.matrices(ids)
    assert not torch.equal(first, last)
    for layers, expected in [
        ([0, -1], [first, last]),
        ([2, 0], [last, first]),
        ([1], [middle]),
        ([-2, 1], [middle, middle]),
        ([], []),
    ]:
        found = attention.matrices(ids, layers=layers)
        assert len(found) == len(expected)
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_matrices_are_lower_triangular_and_detached():
    model, ids = mamba_lm(), token_ids(2, 9)
    for matrix in ImplicitAttention(model).matrices(ids):
        assert not matrix.requires_grad and matrix.is_contiguous()
        assert not matrix.triu(1).any()
        assert (matrix.tril() != 0).sum() == 2 * 45


def test_matrices_of_a_padded_batch():
    model, ids = mamba_lm(), token_ids(2, 8)
    mask = torch.ones(2, 8).long()
    mask[0, 5:] = 0
    alone = ImplicitAttention(model).matrices(ids[:1, :5])
    padded = ImplicitAttention(model).matrices(ids, additional_forward_args=mask)
    for one, both in zip(alone, padded, strict=True):
        assert error(both[:1, :5, :5], one) <= 1e-6
        assert not both[0, :, 5:].any()  # nothing is taken from padding


def test_matrices_take_a_tuple_embeddings_and_a_mask():
    model, ids = mamba_lm(), token_ids(2, 6)
    attention = ImplicitAttention(model)
    expected = attention.matrices(ids)
    for inputs in [(ids,), model.get_input_embeddings()(ids)]:
        for found, wanted in zip(attention.matrices(inputs), expected, strict=True):
            assert error(found, wanted) <= 1e-6


def test_exact_matrices_times_values_plus_bias_are_the_mixers_output():
    model, ids = mamba_lm(use_bias=True).double(), token_ids(2, 9)
    run = Run(model, ids)
    for index, mixer in enumerate(run.mixers):
        hidden = run.inputs[index]
        alpha = ImplicitAttention(model).matrices(
            ids, layers=[index], reduce=None, components="exact"
        )[0]
        x = mixer.in_proj(hidden).chunk(2, -1)[0]
        values = torch.einsum("bcij,bjc->bic", alpha, x)
        # what the convolution's bias becomes: the chain without its first part
        rest = channel_matrices(mixer, hidden, EXACT - {"conv"})
        bias = mixer.conv1d.bias.expand_as(x)
        values = values + torch.einsum("bcij,bjc->bic", rest, bias)
        # transformers rounds A, D and the step's bias to float32
        assert error(mixer.out_proj(values), run.outputs[index]) <= 1e-5


# --- raw attention -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mamba_lm, falcon_lm])
@pytest.mark.parametrize("start_layer", [0, 1, 2])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_raw_attention_is_a_row_of_the_mean_over_layers(make, start_layer, dtype, tolerance):
    model, ids = make().to(dtype), token_ids(2, 10)
    alphas = Run(model, ids).alphas(UNIFIED)[start_layer:]
    expected = query_row(sum(alphas) / len(alphas), 7)
    found = ImplicitAttention(model).attribute(ids, query=7, start_layer=start_layer)
    assert found.dtype == dtype
    assert error(found, expected) <= tolerance


@pytest.mark.parametrize("components, names", COMPONENTS[1:4])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_raw_attention_with_reductions_and_components(components, names, reduce):
    model, ids = mamba_lm().double(), token_ids(2, 6)
    alphas = Run(model, ids).alphas(names, reduce=REDUCTIONS[reduce], heads=[0, 9, 3])
    expected = query_row(sum(alphas) / 3, 4)
    found = ImplicitAttention(model).attribute(
        ids, query=4, components=components, reduce=reduce, heads=[0, 9, 3]
    )
    assert error(found, expected) <= 1e-10


def test_raw_attention_with_a_function_as_reduction():
    model, ids = mamba_lm(), token_ids(2, 6)
    alphas = Run(model, ids).alphas(UNIFIED, reduce=lambda alpha: alpha.square().sum(1).sqrt())
    found = ImplicitAttention(model).attribute(ids, query=5, reduce=lambda a: a.norm(dim=-1))
    assert error(found, query_row(sum(alphas) / 3, 5)) <= 1e-5


# --- chosen layers -------------------------------------------------------------------------------

folds = pytest.mark.parametrize(
    "method", [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution]
)


@folds
def test_chosen_layers(method):
    model, ids = mamba_lm(), token_ids(2, 5)
    names = ["backbone.layers.1.mixer", "backbone.layers.2.mixer"]
    late = method(model, layers=names).attribute(ids, target=(3, 2))
    for layers in ([model.backbone.layers[1].mixer, names[1]], names[::-1], tuple(names)):
        found = method(model, layers=layers).attribute(ids, target=(3, 2))
        torch.testing.assert_close(found, late, rtol=1e-5, atol=1e-6)


@folds
def test_chosen_layers_of_a_wrapped_model(method):
    model, ids = mamba_lm(), token_ids(2, 5)
    layer = model.backbone.layers[1].mixer
    expected = method(model, layers=[layer]).attribute(ids, target=(3, 2))
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        for layers in ([layer], ["backbone.layers.1.mixer"]):
            found = method(wrapped, layers=layers).attribute(ids, target=(3, 2))
            assert torch.equal(found, expected)
