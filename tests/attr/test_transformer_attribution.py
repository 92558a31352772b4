"""TransformerAttribution, raw attention and rollout against float64 formulas."""

from __future__ import annotations

import pytest
import torch
from helpers.latim_vectors import a_model
from oracles import relative_error, vim
from oracles.transformer import betas_to_row, channel_betas, chefer
from zoo import attention as attention_models
from zoo.mamba import transformers_model

from captum_ssm import TransformerAttribution
from captum_ssm.models import VisionMamba

pytestmark = pytest.mark.slow


FORMS = ("lrp", "gradient")


forms = pytest.mark.parametrize("form", FORMS)


def a_transformer(family, batch=2, tokens=7):
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


@forms
def test_a_log_probability(form):
    model, ids = transformers_model().double(), torch.randint(19, (2, 7))

    def log_probability(ids):
        return model(ids).logits[:, -1].log_softmax(-1)

    betas = channel_betas(model, ids, lambda out: out.logits[:, -1].log_softmax(-1)[:, 2], form)
    found = TransformerAttribution(log_probability, model, form=form).attribute(ids, 2)
    assert relative_error(found, betas_to_row(betas, [6, 6])) <= 1e-5


HYBRIDS = ["bamba", "jamba", "qwen3_next"]


@forms
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name, form, monkeypatch):
    case = a_model(name, monkeypatch)
    tokens = case.inputs.shape[1]
    betas = channel_betas(case.model, case.inputs, lambda output: output.logits[:, -1, 3], form)
    found = TransformerAttribution(case.model, form=form).attribute(case.inputs, (-1, 3))
    assert relative_error(found, betas_to_row(betas, [tokens - 1] * 2)) <= 1e-5


@forms
def test_vision_mamba(form):
    model = VisionMamba(
        img_size=12, patch_size=4, embed_dim=6, depth=2, d_state=3, num_classes=4
    ).double()
    vim.randomise(model)
    images = torch.randn(2, 3, 12, 12).double()
    betas = channel_betas(model, images, lambda output: output[:, 2], form)
    expected = betas_to_row(betas, [4, 4])  # cls stands in the middle
    expected = expected[:, [0, 1, 2, 3, 5, 6, 7, 8, 9]].unflatten(1, (3, 3))
    method = TransformerAttribution(model, form=form)
    assert relative_error(method.attribute(images, 2, per_token=True), expected) <= 1e-10
    assert method.attribute(images, 2).shape == images.shape
