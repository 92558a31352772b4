"""What Captum's own classes read off an attribution method."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from captum.attr import (
    Attribution,
    LayerIntegratedGradients,
    LLMGradientAttribution,
    Saliency,
    TextTokenInput,
    configure_interpretable_embedding_layer,
    remove_interpretable_embedding_layer,
)
from captum.attr._core.llm_attr import GradientForwardFunc
from zoo.language import word_tokenizer
from zoo.small import WIDTH, classifier, images, mamba_lm, token_ids, vision

pytestmark = pytest.mark.conformance


def test_the_base_class(method):
    assert issubclass(method, Attribution)
    instance = method(mamba_lm())
    assert isinstance(instance, Attribution)
    assert callable(instance.forward_func)


def test_the_name_is_readable(method):
    name = method.get_name()
    assert name == method(mamba_lm()).get_name()
    assert name and "  " not in name and name == name.strip()
    assert not any(len(word) == 1 for word in name.split())


def test_methods_differ_in_name(methods):
    assert len({method.get_name() for method in methods}) == len(methods)


def test_convergence_delta(method):
    instance = method(mamba_lm())
    delta = instance.has_convergence_delta()
    assert isinstance(delta, bool)
    parameters = inspect.signature(method.attribute).parameters
    assert ("return_convergence_delta" in parameters) == delta
    if not delta:
        with pytest.raises(NotImplementedError):
            instance.compute_convergence_delta()


def test_multiplies_by_inputs(method):
    assert isinstance(method(mamba_lm()).multiplies_by_inputs, bool)


def test_the_signature_starts_as_captums(method):
    parameters = list(inspect.signature(method.attribute).parameters.values())
    names = [p.name for p in parameters]
    assert names[:4] == ["self", "inputs", "target", "additional_forward_args"]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[:4])
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[4:])
    assert all(p.default is not p.empty for p in parameters[2:])
    # what is there without a default would have to be filled by whoever sees it
    assert "baselines" not in names or parameters[names.index("baselines")].default is None


def test_attribute_is_wrapped_once(method, watched):
    """NoiseTunnel, TCAV and Insights call what is beneath the logging decorator."""
    model, ids = watched(mamba_lm()), token_ids(2, 5)
    beneath = method.attribute.__wrapped__
    assert not hasattr(beneath, "__wrapped__")
    instance = method(model)
    found = beneath(instance, ids, target=(-1, 3))
    assert torch.equal(found, instance.attribute(ids, target=(-1, 3)))
    with torch.no_grad():
        assert torch.equal(found, beneath(instance, ids, target=(-1, 3)))


@pytest.mark.parametrize("label", [None, torch.tensor(3)])
def test_as_insights_calls_it(method, watched, label):
    if label is None and method.needs_gradient:
        with pytest.raises(ValueError, match="target is needed"):
            method(vision()).attribute(images(1))
        return
    model, picture = watched(vision("middle")), images(1)
    instance = method(model)
    found = instance.attribute.__wrapped__(
        instance, (picture,), additional_forward_args=None, target=label
    )
    assert isinstance(found, tuple) and len(found) == 1
    assert found[0].shape == picture.shape
    target = None if label is None else 3
    assert torch.equal(found[0], method(model).attribute(picture, target=target))
    # its image feature works on channels last, in numpy
    assert found[0].squeeze(0).permute(1, 2, 0).numpy().shape == (12, 12, 3)
    # its text feature sums over the embedding
    text = watched(classifier("last"))
    embedded = text.backbone.embeddings(token_ids(1, 6)).detach()
    instance = method(text)
    (found,) = instance.attribute.__wrapped__(
        instance, (embedded,), additional_forward_args=None, target=label
    )
    assert found.sum(2).squeeze(0).shape == (6,)


# --- as LLMGradientAttribution does it -----------------------------------------------------------


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


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_copy_with_captums_wrapper_as_forward_func(method, watched, length):
    """The wrapper builds the model's input itself: the prompt and what is generated so far."""
    model, tokenizer = watched(mamba_lm()), Tokenizer()
    layer = LayerIntegratedGradients(model, model.backbone.embeddings)
    outer = LLMGradientAttribution(layer, tokenizer)
    original = method(model)
    copied = copy.copy(original)
    copied.forward_func = GradientForwardFunc(outer)
    prompt = TextTokenInput("t3 t1 t4 t1 t5", tokenizer)
    generated = torch.randint(19, (length,))
    for index in range(length):
        found = copied.attribute(
            prompt.to_tensor(), additional_forward_args=(prompt, generated, index)
        )
        whole = torch.cat([prompt.inp_tensor, generated[None, :index]], dim=1)

        def log_probability(ids, index=index):
            return model(ids).logits[:, -1].log_softmax(-1)[:, generated[index], None]

        expected = method(log_probability, model=model).attribute(whole, target=0)
        torch.testing.assert_close(found, expected[..., None], rtol=1e-5, atol=1e-6)
    assert original.forward_func is model


@pytest.mark.parametrize("skipped", [None, ["owns", "."]])
def test_llm_gradient_attribution_itself(method, watched, skipped):
    """Prompt and text as Captum's users have them; other classes are refused as ever."""
    model, tokenizer = watched(mamba_lm()), word_tokenizer()
    prompt = TextTokenInput("anna owns the lamp .", tokenizer, skip_tokens=skipped)
    found = LLMGradientAttribution(method(model), tokenizer).attribute(prompt, "bob owns $5")
    text = tokenizer.encode("bob owns $5", add_special_tokens=False)
    if len(found.token_attr) > len(text):  # Captum 0.8 puts the marks of a whole text around it
        text = tokenizer.encode("bob owns $5")
    words = tokenizer.convert_ids_to_tokens(prompt.inp_tensor[0])
    kept = [i for i, word in enumerate(words) if word not in (skipped or [])]
    assert found.token_attr.shape == (len(text), len(kept))
    assert len(kept) == (6 if skipped is None else 4)
    for index, row in enumerate(found.token_attr):
        whole = torch.cat([prompt.inp_tensor, torch.tensor([text[:index]]).long()], 1)

        def log_probability(ids, token=text[index]):
            return model(ids).logits[:, -1].log_softmax(-1)[:, token, None]

        expected = method(log_probability, model=model).attribute(whole, target=0)
        torch.testing.assert_close(row, expected[0, kept], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.seq_attr, found.token_attr.sum(0))
    with pytest.raises(AssertionError, match="does not support"):
        LLMGradientAttribution(Saliency(model), tokenizer)


def test_a_copy_shares_nothing_that_a_call_changes(method, watched):
    model, other = watched(mamba_lm()), watched(mamba_lm())
    ids = token_ids(2, 5)
    original = method(model)
    copied = copy.copy(original)
    copied.forward_func = other
    assert torch.equal(
        copied.attribute(ids, target=(-1, 3)), method(other).attribute(ids, target=(-1, 3))
    )
    assert torch.equal(
        original.attribute(ids, target=(-1, 3)), method(model).attribute(ids, target=(-1, 3))
    )


# --- interpretable embeddings --------------------------------------------------------------------


def test_interpretable_embeddings(method, watched):
    model, ids = watched(mamba_lm()), token_ids(2, 6)
    expected = method(model).attribute(ids, target=(4, 3))
    layer = configure_interpretable_embedding_layer(model, "backbone.embeddings")
    try:
        embeddings = layer.indices_to_embeddings(ids)
        assert embeddings.shape == (2, 6, WIDTH)
        for function, named in [(model, None), (lambda x: model(x), model)]:
            found = method(function, model=named).attribute(embeddings, target=(4, 3))
            assert found.shape == embeddings.shape
            torch.testing.assert_close(found.sum(-1), expected, rtol=1e-5, atol=1e-6)
    finally:
        remove_interpretable_embedding_layer(model, layer)
    assert torch.equal(method(model).attribute(ids, target=(4, 3)), expected)
