"""recipe="published_code": what the authors' scripts compute, written out example by example.

Of each layer only the query's row counts. It is added to every row of the identity, rows are
divided by their sums, the layers' matrices are multiplied, and of the query's row of the product
the query's own entry is removed and what is negative set to zero.
"""

from __future__ import annotations

import pytest
import torch
from oracles.dense import S6, UNIFIED, Run, double, error, min_max
from torch import nn
from zoo.small import (
    classifier,
    falcon_lm,
    mamba_lm,
    token_ids,
    vision,
)
from zoo.small import images as random_images

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, MambaAttribution

VARIANTS = [("s6", S6), ("unified", UNIFIED)]


def layer_rows(run, names, example, query):
    """Of each layer, the query's row of every channel, (C, L)."""
    alphas = run.alphas(names, reduce=lambda alpha: alpha)
    return [alpha[example, :, query] for alpha in alphas]


def attribution_row(channel_rows, stream_gradient, variant):
    """The query's row weighted by the gradient, (L,)."""
    strength = stream_gradient * (stream_gradient > 0)  # (L, E)
    strength = min_max(strength.max(-1).values)
    positive = channel_rows * (channel_rows > 0)
    if variant == "s6":
        return min_max(positive).mean(0) * strength
    return min_max(positive.mean(0) * strength)


def broadcast_rollout(rows, query):
    """Every row of a layer's matrix is that of the identity plus the one row."""
    tokens = len(rows[0])
    product = torch.eye(tokens).double()
    for row in rows:
        matrix = torch.eye(tokens).double() + row.expand(tokens, tokens)
        matrix = matrix / matrix.sum(1, keepdim=True)
        product = matrix @ product
    return finish(product[query], query)


def finish(row, query):
    row = row.clone()
    row[query] = 0
    return row * (row > 0)


def expected_attribution(run, names, variant, queries, start_layer=0):
    found = []
    for example, query in enumerate(queries):
        rows = [
            attribution_row(channels, gradient[example], variant)
            for channels, gradient in zip(
                layer_rows(run, names, example, query), run.stream_gradients, strict=True
            )
        ]
        found.append(broadcast_rollout(rows[start_layer:], query))
    return torch.stack(found)


def expected_rollout(run, names, queries, start_layer=0):
    found = []
    for example, query in enumerate(queries):
        rows = [channels.mean(0) for channels in layer_rows(run, names, example, query)]
        found.append(broadcast_rollout(rows[start_layer:], query))
    return torch.stack(found)


def expected_raw(run, names, queries, start_layer=0):
    found = []
    for example, query in enumerate(queries):
        rows = [min_max(channels.mean(0)) for channels in layer_rows(run, names, example, query)]
        rows = rows[start_layer:]
        found.append(finish(sum(rows) / len(rows), query))
    return torch.stack(found)


@pytest.mark.parametrize("make", [mamba_lm, falcon_lm])
@pytest.mark.parametrize("start_layer", [0, 1])
@pytest.mark.parametrize("variant, names", VARIANTS)
def test_mamba_attribution(make, start_layer, variant, names):
    model, ids = make(), token_ids(3, 9)
    run = Run(double(model), ids, select=lambda logits: logits[:, 6, 4])
    expected = expected_attribution(run, names, variant, [6, 6, 6], start_layer)
    options = {"components": variant, "recipe": "published_code", "start_layer": start_layer}
    found = MambaAttribution(model).attribute(ids, target=(6, 4), **options)
    assert error(found, expected) <= 1e-4
    exact = MambaAttribution(model.double()).attribute(ids, target=(6, 4), **options)
    # a minimum and a maximum may amplify transformers' float32 norms
    assert error(exact, expected) <= 1e-10


@pytest.mark.parametrize("start_layer", [0, 2])
@pytest.mark.parametrize("variant, names", VARIANTS)
def test_rollout(start_layer, variant, names):
    model, ids = mamba_lm(), token_ids(3, 9)
    queries = [8, 0, 5]
    run = Run(double(model), ids)
    expected = expected_rollout(run, names, queries, start_layer)
    options = {"components": variant, "recipe": "published_code", "start_layer": start_layer}
    found = ImplicitAttentionRollout(model.double()).attribute(
        ids, query=torch.tensor(queries), **options
    )
    assert error(found, expected) <= 1e-10


@pytest.mark.parametrize("start_layer", [0, 2])
@pytest.mark.parametrize("variant, names", VARIANTS)
def test_raw_attention(start_layer, variant, names):
    model, ids = mamba_lm(), token_ids(3, 9)
    queries = [8, 3, 5]
    run = Run(double(model), ids)
    expected = expected_raw(run, names, queries, start_layer)
    options = {"components": variant, "recipe": "published_code", "start_layer": start_layer}
    found = ImplicitAttention(model.double()).attribute(ids, query=torch.tensor(queries), **options)
    assert error(found, expected) <= 1e-10


@pytest.mark.parametrize("cls", ["head", "middle"])
@pytest.mark.parametrize("variant, names", VARIANTS)
def test_vision(cls, variant, names):
    model, pictures = vision(cls, layers=3), random_images(2)
    run = Run(double(model), pictures.double(), select=lambda out: out[range(2), [4, 2]])
    at = model.cls_position
    without_gradients = Run(double(model), pictures.double())
    raw = expected_raw(without_gradients, names, [at, at], 1)
    rolled = expected_rollout(without_gradients, names, [at, at], 1)
    attribution = expected_attribution(run, names, variant, [at, at], 1)
    for method, expected in [
        (ImplicitAttention, raw),
        (ImplicitAttentionRollout, rolled),
        (MambaAttribution, attribution),
    ]:
        found = method(model.double()).attribute(
            pictures.double(),
            target=torch.tensor([4, 2]),
            components=variant,
            recipe="published_code",
            start_layer=1,
            per_token=True,
        )
        expected = expected[:, model.patch_tokens()].view(2, 3, 4)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("variant, names", VARIANTS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(variant, names, side):
    model, ids = mamba_lm().double(), token_ids(1, 6)
    padding = torch.zeros(1, 3).long()
    whole = torch.cat([padding, ids] if side == "left" else [ids, padding], dim=1)
    mask = torch.cat([padding, ids * 0 + 1] if side == "left" else [ids * 0 + 1, padding], dim=1)
    target = (8, 2) if side == "left" else (5, 2)
    real = mask[0].bool()
    for method in (ImplicitAttention, ImplicitAttentionRollout, MambaAttribution):
        options = {"components": variant, "recipe": "published_code"}
        alone = method(model).attribute(ids, target=(5, 2), **options)
        padded = method(model).attribute(whole, target, mask, **options)
        # the model itself rounds the two runs differently, in float32 norms
        torch.testing.assert_close(padded[:, real], alone, rtol=1e-5, atol=1e-6)
        assert not padded[:, ~real].any()


def test_one_layer_by_hand():
    """Two tokens, one layer: r = channel mean of the last row; (I + 1 r) / (1 + sum r)."""
    model, ids = mamba_lm(num_hidden_layers=1).double(), token_ids(1, 2)
    alpha = Run(model, ids).alphas(UNIFIED)[0][0]
    first, last = alpha[1].tolist()
    expected = max(0.0, first / (1 + first + last))
    found = ImplicitAttentionRollout(model).attribute(ids, query=1, recipe="published_code")
    torch.testing.assert_close(
        found, torch.tensor([[expected, 0.0]]).double(), rtol=1e-6, atol=1e-9
    )


def test_several_queries_are_refused():
    model, ids = classifier("mean"), token_ids(2, 5)
    for method in (ImplicitAttention, ImplicitAttentionRollout, MambaAttribution):
        with pytest.raises(ValueError, match=r"published_code.*one query token.*'last'"):
            method(model).attribute(ids, target=0, recipe="published_code")


def test_mixers_in_a_mere_container_have_no_stream():
    """The container's input is not what enters each of them."""
    mixers = nn.Sequential(*(block.mixer for block in mamba_lm().backbone.layers))
    hidden = torch.randn(2, 5, mixers[0].hidden_size)
    method = MambaAttribution(mixers)
    assert method.attribute(hidden, target=(-1, 0)).isfinite().all()
    with pytest.raises(RuntimeError, match="stands alone"):
        method.attribute(hidden, target=(-1, 0), recipe="published_code")
