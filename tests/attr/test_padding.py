"""A padded batch gives what each example gives alone, and padding itself gets nothing."""

from __future__ import annotations

import pytest
import torch
from helpers.sessions import spread
from zoo.small import classifier, falcon_lm, mamba_lm, mixers_of, token_ids

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, MambaAttribution

METHODS = [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution]
LENGTHS = [9, 4, 1, 6]


def padded_batch(side):
    """Random ids everywhere, also where padding is; and the mask."""
    ids = token_ids(len(LENGTHS), max(LENGTHS))
    mask = torch.zeros_like(ids)
    for example, length in enumerate(LENGTHS):
        mask[example, slice(0, length) if side == "right" else slice(9 - length, 9)] = 1
    return ids, mask


def check(method, model, side, inputs_of=lambda ids: ids, target=None, **options):
    ids, mask = padded_batch(side)
    padded = method(model).attribute(inputs_of(ids), target, mask, **options)
    assert padded.shape[:2] == ids.shape
    assert not padded[mask == 0].any()
    for example, length in enumerate(LENGTHS):
        real = mask[example].bool()
        own = target if not isinstance(target, list) else [target[example]]
        if isinstance(own, list) and isinstance(own[0], tuple) and side == "left":
            own = [(own[0][0] - (9 - length), own[0][1])]
        alone = method(model).attribute(inputs_of(ids[example : example + 1, real]), own, **options)
        assert alone.abs().max() > 0
        scale = float(alone.abs().max().clamp_min(1))
        assert (padded[example : example + 1, real] - alone).abs().max() <= 1e-6 * scale


def last_tokens(side):
    return [(8 if side == "left" else length - 1, 3) for length in LENGTHS]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [mamba_lm, falcon_lm])
@pytest.mark.parametrize("method", METHODS)
def test_language_models(method, make, side):
    check(method, make(), side, target=last_tokens(side))


@pytest.mark.parametrize("make", [mamba_lm, falcon_lm])
@pytest.mark.parametrize("method", METHODS)
def test_biases_leak_nothing_from_the_right(method, make):
    check(method, make(use_bias=True), "right", target=last_tokens("right"))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pool", ["last", "mean"])
@pytest.mark.parametrize("method", METHODS)
def test_classifiers(method, pool, side):
    check(method, classifier(pool), side, target=2)


OPTIONS = [
    {"query": "last"},
    {"query": "mean"},
    {"components": "s6"},
    {"components": "exact"},
    {"components": "unified-conv"},
    {"reduce": "max"},
    {"start_layer": 1},
]
MORE = {
    ImplicitAttention: [],
    ImplicitAttentionRollout: [
        {"normalize_rows": True},
        {"absolute": True},
        {"discard_ratio": 0.3},
        {"discard_ratio": 0.6, "absolute": True, "normalize_rows": True},
    ],
    MambaAttribution: [{"clamp": "abs"}, {"clamp": "none"}, {"normalize_rows": True}],
}


@pytest.mark.parametrize(
    "options, method, side",
    spread(
        (options, method, side)
        for method in METHODS
        for options in [*MORE[method], *OPTIONS]
        for side in ("left", "right")
    ),
    ids=str,
)
def test_options(method, options, side):
    if options.get("normalize_rows"):
        options = options | {"reduce": "max"}  # row sums away from zero
    check(method, mamba_lm(), side, target=last_tokens(side), **options)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", METHODS)
def test_embeddings(method, side):
    model = mamba_lm()
    check(method, model, side, inputs_of=model.get_input_embeddings(), target=last_tokens(side))


@pytest.mark.parametrize("method", METHODS)
def test_holes_are_padding_too(method):
    model, ids = mamba_lm(), token_ids(2, 8)
    mask = torch.ones(2, 8).long()
    mask[0, 3:5] = 0
    options = {"clamp": "abs"} if method is MambaAttribution else {}
    found = method(model).attribute(ids, (-1, 2), mask, **options)
    assert not found[0, 3:5].any()
    if method is not MambaAttribution:  # which clamps
        assert found[1].all()
        assert found[0, [0, 1, 2, 5, 6, 7]].all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_dtype(method, dtype):
    model = mamba_lm()
    ids, mask = padded_batch("left")
    expected = method(model).attribute(ids, (-1, 2), mask)
    found = method(model).attribute(ids, (-1, 2), mask.to(dtype))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_a_mask_that_hides_nothing_changes_nothing(method):
    model, ids = mamba_lm(), token_ids(2, 6)
    found = method(model).attribute(ids, (-1, 2), torch.ones_like(ids))
    assert torch.equal(found, method(model).attribute(ids, (-1, 2)))


@pytest.mark.parametrize("method", METHODS)
def test_padded_tokens_may_not_be_asked_for(method):
    model = mamba_lm()
    ids, mask = padded_batch("right")
    with pytest.raises(ValueError, match=r"position 8 is a padded token of example 1"):
        method(model).attribute(ids, (8, 2), mask)
    with pytest.raises(ValueError, match=r"query position 6 is a padded token of example 1"):
        method(model).attribute(ids, (0, 2), mask, query=-3)


@pytest.mark.parametrize("method", METHODS)
def test_mixers_that_hand_on_whatever_they_are_given(method):
    model = mamba_lm()
    for mixer in mixers_of(model):

        class Wrapped(type(mixer)):
            def forward(self, *args, **kwargs):
                return super().forward(*args, **kwargs)

        mixer.__class__ = Wrapped
    check(method, model, "left", target=(-1, 3))
