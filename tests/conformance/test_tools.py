"""Captum's tools around a method: noise, texts, interpretable embeddings, Insights, pictures."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from captum.attr import (
    LayerIntegratedGradients,
    LLMGradientAttribution,
    NoiseTunnel,
    Saliency,
    TextTokenInput,
    configure_interpretable_embedding_layer,
    remove_interpretable_embedding_layer,
    visualization,
)
from captum.attr._core.llm_attr import GradientForwardFunc
from captum.metrics import infidelity
from helpers.every_method import each_method
from zoo.language import word_tokenizer
from zoo.small import WIDTH, classifier, images, mamba_lm, token_ids, vision

pytestmark = [
    pytest.mark.filterwarnings("ignore:Input Tensor . did not already require gradients"),
    pytest.mark.slow,
]


def embedded():
    model = mamba_lm()
    return model, model.get_input_embeddings()(token_ids(2, 6)).detach(), {"target": (4, 3)}


@each_method
def test_noise_tunnel(method, watched):
    """Noise is Captum's, and of each noisy input the method says what it says of it alone."""
    model, inputs, options = embedded()
    attribution = method(watched(model))
    torch.manual_seed(7)
    tunnel = NoiseTunnel(attribution)
    found = tunnel.attribute(inputs, nt_samples=4, nt_samples_batch_size=2, stdevs=0.1, **options)
    assert found.shape == inputs.shape and not found.requires_grad
    torch.manual_seed(7)
    noise = [torch.normal(0, torch.full((4, 6, WIDTH), 0.1)).view(2, 2, 6, WIDTH) for _ in "12"]
    noisy = inputs[:, None] + torch.cat(noise, dim=1)
    by_hand = torch.stack([attribution.attribute(each, **options).mean(0) for each in noisy])
    torch.testing.assert_close(found, by_hand, rtol=1e-3, atol=1e-5)


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


@each_method
@pytest.mark.parametrize("label", [None, torch.tensor(3)])
def test_as_insights_calls_it(method, watched, label):
    if label is None and (method.needs_gradient or method.__name__ == "LatimLogit"):
        with pytest.raises(ValueError, match="target is needed"):
            method(vision()).attribute(images(1))
        return
    instance, picture = method(watched(vision("middle"))), images(1)
    beneath = instance.attribute.__wrapped__
    (found,) = beneath(instance, (picture,), additional_forward_args=None, target=label)
    target = None if label is None else 3
    assert torch.equal(found, instance.attribute(picture, target=target))
    # its image feature works on channels last, in numpy
    assert found.squeeze(0).permute(1, 2, 0).numpy().shape == (12, 12, 3)


class Tokenizer:
    """Words t0, t1, ... with what Captum asks of a tokenizer."""

    def encode(self, text, add_special_tokens=True, return_tensors=None):
        ids = [int(word[1:]) for word in text.split()]
        return torch.tensor([ids]) if return_tensors == "pt" else ids

    def decode(self, ids):
        return " ".join(f"t{int(i)}" for i in torch.as_tensor(ids).reshape(-1))

    def convert_ids_to_tokens(self, ids):
        return [f"t{i}" for i in ids] if isinstance(ids, list) else f"t{ids}"

    def convert_tokens_to_ids(self, tokens):
        return [int(t[1:]) for t in tokens] if isinstance(tokens, list) else int(tokens[1:])


def of_log_probabilities(method, model, whole, token):
    """What the method says of the log-probability of a token that comes next."""

    def log_probability(ids):
        return model(ids).logits[:, -1].log_softmax(-1)[:, token, None]

    return method(log_probability, model=model).attribute(whole, target=0)


@each_method
def test_a_copy_with_captums_wrapper_as_forward_func(method, watched):
    """The wrapper builds the model's input itself: the prompt and what is generated so far."""
    model, tokenizer = watched(mamba_lm()), Tokenizer()
    layer = LayerIntegratedGradients(model, model.backbone.embeddings)
    original = method(model)
    copied = copy.copy(original)
    copied.forward_func = GradientForwardFunc(LLMGradientAttribution(layer, tokenizer))
    prompt, generated = TextTokenInput("t3 t1 t4 t1 t5", tokenizer), torch.randint(19, (2,))
    for index in range(2):
        found = copied.attribute(
            prompt.to_tensor(), additional_forward_args=(prompt, generated, index)
        )
        whole = torch.cat([prompt.inp_tensor, generated[None, :index]], dim=1)
        expected = of_log_probabilities(method, model, whole, generated[index])
        torch.testing.assert_close(found, expected[..., None], rtol=1e-5, atol=1e-6)
    assert original.forward_func is model


@each_method
def test_llm_gradient_attribution_itself(method, watched):
    """Prompt and text as Captum's users have them; other classes are refused as ever."""
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


@each_method
def test_infidelity(method, watched):
    model = watched(classifier("mean"))
    inputs, target = model.backbone.embeddings(token_ids(2, 6)).detach(), torch.tensor([4, 1])
    relevance = method(model).attribute(inputs, target=target)
    noise = 0.1 * torch.randn_like(inputs)

    def scores(x):
        return model(inputs_embeds=x)

    found = infidelity(scores, lambda x: (noise, x - noise), inputs, relevance, target=target,
                       n_perturb_samples=1)  # fmt: skip
    with torch.no_grad():
        change = (scores(inputs) - scores(inputs - noise))[range(2), target]
    expected = ((noise * relevance).flatten(1).sum(1) - change) ** 2
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


@each_method
def test_image_attributions_can_be_shown(method, watched):
    options = {"query": "last"} if "query" in inspect.signature(method.attribute).parameters else {}
    found = method(watched(vision("middle"))).attribute(images(1), target=[4], **options)
    pixels = torch.rand(12, 12, 3).numpy()
    figure, axis = visualization.visualize_image_attr(
        found[0].permute(1, 2, 0).numpy(), pixels, "blended_heat_map", "absolute_value",
        use_pyplot=False,
    )  # fmt: skip
    shown = axis.images[-1].get_array()
    assert figure.axes and shown.shape[:2] == (12, 12) and shown.max() > shown.min()
