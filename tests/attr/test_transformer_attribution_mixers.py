"""TransformerAttribution on mixers other than attention, on hybrids, and as Captum calls it."""

from __future__ import annotations

import pytest
import torch
from helpers.latim_vectors import a_model
from oracles import relative_error, vim
from oracles.transformer import betas_to_row, channel_betas, mamba_betas
from zoo.mamba import padded_batch, transformers_model

from captum_ssm import TransformerAttribution
from captum_ssm.models import VisionMamba

pytestmark = pytest.mark.slow

FORMS = ("lrp", "gradient")
forms = pytest.mark.parametrize("form", FORMS)


@forms
@pytest.mark.parametrize("options", [{}, {"components": "s6"}, {"heads": [1, 8]}], ids=str)
def test_mamba(form, options):
    model, ids = transformers_model(), torch.randint(19, (2, 8))

    def select(logits):
        return logits[:, 5, 3]

    betas = mamba_betas(model, ids, select, form, **options)
    # the scan of transformers rounds to float32
    found = TransformerAttribution(model.double(), form=form).attribute(ids, (5, 3), **options)
    assert relative_error(found, betas_to_row(betas, [5, 5])) <= 1e-5
    assert not found[:, 6:].any()


@forms
def test_padding_of_mamba(form):
    model = transformers_model()
    lengths = [9, 5, 2]
    ids, mask = padded_batch(lengths)
    found = TransformerAttribution(model, form=form).attribute(ids, (-1, 3), mask)
    for b, n in enumerate(lengths):
        alone = ids[b : b + 1, -n:]
        betas = mamba_betas(model, alone, lambda logits: logits[:, -1, 3], form)
        assert relative_error(found[b : b + 1, -n:], betas_to_row(betas, [n - 1])) <= 1e-5
        assert not found[b, :-n].any()


@forms
def test_a_log_probability(form):
    """What a function does with the model's output is differentiated."""
    model, ids = transformers_model(), torch.randint(19, (2, 7))

    def log_probability(ids):
        return model(ids).logits[:, -1].log_softmax(-1)

    betas = mamba_betas(model, ids, lambda logits: logits[:, -1].log_softmax(-1)[:, 2], form)
    found = TransformerAttribution(log_probability, model, form=form).attribute(ids, 2)
    assert relative_error(found, betas_to_row(betas, [6, 6])) <= 1e-5


@forms
def test_a_function_that_looks_up_more_than_the_inputs(form):
    """As Captum's wrappers do: the prompt is explained, the model reads what follows it too."""
    model, ids, more = transformers_model(), torch.randint(19, (1, 5)), torch.randint(19, (1, 2))

    def continued(ids):
        return model(torch.cat([ids, more], 1)).logits[:, -1]

    whole = torch.cat([ids, more], 1)
    betas = mamba_betas(model, whole, lambda logits: logits[:, -1, 4], form)
    found = TransformerAttribution(continued, model, form=form).attribute(ids, 4)
    assert relative_error(found, betas_to_row(betas, [6])[:, :5]) <= 1e-5


HYBRIDS = ["bamba", "jamba", "mamba2", "recurrent_gemma", "rwkv", "qwen3_next"]


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


# --- the rest of the interface -------------------------------------------------------------------
