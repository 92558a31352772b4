"""TransformerAttribution, raw attention and rollout on transformers, in float64 formulas."""

from __future__ import annotations

import copy

import pytest
import torch
from oracles import relative_error
from oracles.transformer import betas_to_row, chefer, written_out
from zoo import attention as attention_models

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, TransformerAttribution
from captum_ssm.errors import OptionError

pytestmark = pytest.mark.slow

FORMS = ("lrp", "gradient")
forms = pytest.mark.parametrize("form", FORMS)


def a_transformer(family, batch=2, tokens=7):
    """The model, its inputs, a target, the query's position."""
    # an activation written out in products is propagated through as these
    options = {"activation_function": "gelu"} if family == "gpt2" else {}
    model = attention_models.attention_model(family, **options)
    if family in attention_models.IMAGES:
        return model, {"pixel_values": torch.randn(batch, 3, 12, 12)}, 2, 0
    ids = torch.randint(23, (batch, tokens))
    return (model, {"input_ids": ids}, *((1, 0) if family == "bert" else ((4, 9), 4)))


TRANSFORMERS = ["bert", "vit", "gpt_neox", "gpt2"]


@forms
@pytest.mark.parametrize("family", TRANSFORMERS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_transformers(family, form, dtype, tolerance):
    model, inputs, target, query = a_transformer(family)
    (tensor,) = inputs.values()
    matrices = chefer(model, inputs, target, form)
    model = model.to(dtype)
    tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
    method = TransformerAttribution(lambda x: model(x).logits, model, form=form)
    everything = betas_to_row(matrices, [query, query])
    found = method.attribute(tensor, target, query=query, per_token=True)
    if family == "vit":
        everything = everything[:, 1:].unflatten(1, (3, 3))  # the first token is cls
    assert found.dtype == dtype
    assert relative_error(found, everything) <= tolerance
    assert torch.equal(found, method.attribute(tensor, target, per_token=True))


@forms
def test_rows_may_be_normalised_and_layers_left_out(form):
    model, inputs, target, query = a_transformer("bert")
    matrices = chefer(model, inputs, target, form)
    method = TransformerAttribution(model.double(), form=form)
    found = method.attribute(inputs["input_ids"], target, normalize_rows=True)
    assert relative_error(found, betas_to_row(matrices, [query] * 2, normalize=True)) <= 1e-10
    found = method.attribute(inputs["input_ids"], target, start_layer=1)
    assert relative_error(found, betas_to_row(matrices[1:], [query] * 2)) <= 1e-10


@forms
def test_a_transformers_padding_on_the_right(form):
    model = attention_models.attention_model("bert").double()
    lengths, ids = [7, 4, 1], torch.randint(23, (3, 7))
    mask = torch.stack([(torch.arange(7) < n).long() for n in lengths])
    found = TransformerAttribution(model, form=form).attribute(ids, 2, mask)
    for b, n in enumerate(lengths):
        inputs = {"input_ids": ids[b : b + 1, :n]}
        alone = betas_to_row(chefer(model, inputs, 2, form), [0])
        assert relative_error(found[b : b + 1, :n], alone) <= 1e-10
        assert not found[b, n:].any()


@pytest.mark.parametrize("family", ["bert", "vit", "gpt_neox"])
def test_raw_attention_and_rollout_of_transformers(family):
    model, inputs, target, query = a_transformer(family)
    model, inputs = (
        model.double(),
        {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()},
    )
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    with torch.no_grad(), written_out(twin, cut=False) as attention:
        twin(**inputs)
    with torch.no_grad():
        own = twin(**inputs, output_attentions=True).attentions  # rounded to float32 by some
    for matrices, real in zip(attention, own, strict=True):
        assert relative_error(real, matrices) <= 1e-6
    attention = [matrices.mean(1) for matrices in attention]
    eye = torch.eye(attention[0].shape[-1]).double()
    (tensor,) = inputs.values()
    raw = sum(a[:, query] for a in attention) / len(attention)
    products = [
        (raw, ImplicitAttention(model).attribute(tensor, target, per_token=True)),
        (
            betas_to_row([eye + a for a in attention], [query] * 2),
            ImplicitAttentionRollout(model).attribute(tensor, target, per_token=True),
        ),
        (  # Abnar & Zuidema 2020
            betas_to_row([0.5 * a + 0.5 * eye for a in attention], [query] * 2),
            ImplicitAttentionRollout(model).attribute(
                tensor, target, normalize_rows=True, per_token=True
            ),
        ),
    ]
    for expected, found in products:
        expected = expected[:, 1:].unflatten(1, (3, 3)) if family == "vit" else expected
        assert relative_error(found, expected) <= 1e-10


def test_an_unknown_form():
    with pytest.raises(OptionError, match="form='alpha-beta' is not known"):
        TransformerAttribution(attention_models.attention_model("bert"), form="alpha-beta")
