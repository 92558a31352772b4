"""Captum's tools around a method: noise, texts, interpretable embeddings."""

from __future__ import annotations

import inspect

import pytest
import torch
from captum.attr import (
    LLMGradientAttribution,
    NoiseTunnel,
    Saliency,
    TextTokenInput,
    configure_interpretable_embedding_layer,
    remove_interpretable_embedding_layer,
)
from helpers.every_method import each_method
from zoo.language import word_tokenizer
from zoo.small import mamba_lm, token_ids

pytestmark = [
    pytest.mark.filterwarnings("ignore:Input Tensor . did not already require gradients"),
    pytest.mark.slow,
]


def embedded():
    model = mamba_lm()
    return model, model.get_input_embeddings()(token_ids(2, 6)).detach(), {"target": (4, 3)}


@each_method
def test_noise_tunnel_hands_options_on(method, watched):
    model, inputs, _ = embedded()
    tunnel = NoiseTunnel(method(watched(model)))
    parameters = inspect.signature(method.attribute).parameters
    of_some = {"query": 3, "components": "s6", "start_layer": 1, "contrast": "mean"}
    own = {name: value for name, value in of_some.items() if name in parameters}
    assert own
    options = {"target": (3, 3), "nt_samples": 3, "stdevs": 0.1} | own
    torch.manual_seed(1)
    whole = tunnel.attribute(inputs, **options)
    torch.manual_seed(1)
    parts = tunnel.attribute(inputs, internal_batch_size=2, **options)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    torch.manual_seed(1)
    per_token = tunnel.attribute(inputs, per_token=True, **options)
    torch.testing.assert_close(per_token, whole.sum(-1), rtol=1e-4, atol=1e-6)
    assert not whole[:, 4:].any()  # query and target were at the fourth token


def of_log_probabilities(method, model, whole, token):
    def log_probability(ids):
        return model(ids).logits[:, -1].log_softmax(-1)[:, token, None]

    return method(log_probability, model=model).attribute(whole, target=0)


@each_method
def test_llm_gradient_attribution_itself(method, watched):
    model, tokenizer, skipped = watched(mamba_lm()), word_tokenizer(), ["owns", "."]
    prompt = TextTokenInput("anna owns the lamp .", tokenizer, skip_tokens=skipped)
    found = LLMGradientAttribution(method(model), tokenizer).attribute(prompt, "bob $5")
    text = tokenizer.encode("bob $5", add_special_tokens=False)
    if len(found.token_attr) > len(text):  # Captum 0.8 puts the marks of a whole text around it
        text = tokenizer.encode("bob $5")
    words = tokenizer.convert_ids_to_tokens(prompt.inp_tensor[0])
    kept = [i for i, word in enumerate(words) if word not in skipped]
    assert found.token_attr.shape == (len(text), len(kept)) == (len(text), 4)
    for index, row in enumerate(found.token_attr):
        whole = torch.cat([prompt.inp_tensor, torch.tensor([text[:index]]).long()], 1)
        expected = of_log_probabilities(method, model, whole, text[index])
        torch.testing.assert_close(row, expected[0, kept], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.seq_attr, found.token_attr.sum(0))
    with pytest.raises(AssertionError, match="does not support"):
        LLMGradientAttribution(Saliency(model), tokenizer)


@each_method
def test_interpretable_embeddings(method, watched):
    model, ids = watched(mamba_lm()), token_ids(2, 6)
    expected = method(model).attribute(ids, target=(4, 3))
    layer = configure_interpretable_embedding_layer(model, "backbone.embeddings")
    try:
        embeddings = layer.indices_to_embeddings(ids)
        for function, named in [(model, None), (lambda x: model(x), model)]:
            found = method(function, model=named).attribute(embeddings, target=(4, 3))
            assert found.shape == embeddings.shape
            torch.testing.assert_close(found.sum(-1), expected, rtol=1e-5, atol=1e-6)
    finally:
        remove_interpretable_embedding_layer(model, layer)
    assert torch.equal(method(model).attribute(ids, target=(4, 3)), expected)
