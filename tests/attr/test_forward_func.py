"""What may be given as forward_func, and what a model may return."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.every_method import each_method
from peft import LoraConfig, get_peft_model
from torch import nn
from zoo.small import classifier, mamba_lm, mixers_of, token_ids

pytestmark = [each_method, pytest.mark.slow]


class Holder:
    """An object that is no module but has one."""

    def __init__(self, model):
        self.model = model

    def logits(self, ids):
        return self.model(ids).logits


WAYS = {
    "bound method": lambda model: (model.forward, None),
    "bound __call__": lambda model: (model.__call__, None),
    "partial": lambda model: (partial(model, use_cache=True), None),
    "partial of a bound method": lambda model: (partial(partial(model.forward)), None),
    "lambda": lambda model: (lambda ids: model(ids), model),
    "lambda of logits": lambda model: (lambda ids: model(ids).logits, model),
    "lambda and a part of the model": lambda model: (lambda ids: model(ids), model.backbone),
    "method of another object": lambda model: (Holder(model).logits, model),
    "DataParallel": lambda model: (nn.DataParallel(model), None),
    "lambda and DataParallel": lambda model: (lambda ids: model(ids), nn.DataParallel(model)),
    "inside another module": lambda model: (nn.Sequential(model), None),
    "compiled": lambda model: (torch.compile(model, backend="eager"), None),
    "DataParallel of compiled": lambda model: (
        nn.DataParallel(torch.compile(model, backend="eager")),
        None,
    ),
    "compiled without hooks": lambda model: (
        lambda ids: model(ids),
        torch.compile(model, backend="eager"),
    ),
}


def test_ways_to_name_the_same_model(method):
    model, ids = mamba_lm(), token_ids(2, 5)
    expected = method(model).attribute(ids, target=(3, 2))
    for way, make in WAYS.items():
        function, named = make(model)
        found = method(function, model=named).attribute(ids, target=(3, 2))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=way)
        assert method(function, named).model is named


@pytest.mark.parametrize("part", ["block", "model"])
def test_models_compiled_in_place(method, part):
    model, ids = mamba_lm(), token_ids(2, 5)
    expected = method(model).attribute(ids, target=(3, 2))
    compiled = {"block": model.backbone.layers[1], "mixer": mixers_of(model)[0], "model": model}
    compiled[part].compile(backend="eager")
    with torch.no_grad():
        # compiled code without hooks exists; caches of version 4 cannot be compiled
        model(ids, use_cache=False)
    found = method(model).attribute(ids, target=(3, 2))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_lora(method):
    ids = token_ids(2, 5)
    base = mamba_lm()
    before = method(base).attribute(ids, target=(3, 2))
    adapter = LoraConfig(r=2, target_modules=["in_proj", "x_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, adapter).eval()
    untouched = method(model).attribute(ids, target=(3, 2))  # LoRA starts as no change
    torch.testing.assert_close(untouched, before, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    found = method(model).attribute(ids, target=(3, 2), verify=True)
    assert not torch.allclose(found, before, rtol=1e-2)
    embeddings = model.get_input_embeddings()(ids)
    of_embeddings = method(model).attribute(embeddings, target=(3, 2), per_token=True)
    torch.testing.assert_close(of_embeddings, found, rtol=1e-5, atol=1e-6)
    merged = model.merge_and_unload()
    expected = method(merged).attribute(ids, target=(3, 2))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


class Returning(nn.Module):
    def __init__(self, model, form):
        super().__init__()
        self.model = model
        self.form = form

    def forward(self, ids):
        return self.form(self.model(ids))


FORMS = {
    "tensor": lambda out: out.logits,
    "tuple": lambda out: (out.logits, "more"),
    "list": lambda out: [out.logits],
    "HF tuple": lambda out: out.to_tuple(),
    "HF output": lambda out: out,
}


def test_forms_of_output(method):
    model, ids = mamba_lm(), token_ids(2, 5)
    expected = method(model).attribute(ids, target=(3, 2))
    for form, make in FORMS.items():
        found = method(Returning(model, make)).attribute(ids, target=(3, 2))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=form)


def test_return_dict_false(method):
    model, ids = mamba_lm(), token_ids(2, 5)
    expected = method(model).attribute(ids, target=(3, 2))
    model.config.return_dict = False
    assert torch.equal(method(model).attribute(ids, target=(3, 2)), expected)


def test_base_models(method):
    """Without a head the target is a feature of a position of the last hidden state."""
    model, ids = classifier().backbone, token_ids(2, 5)
    found = method(model).attribute(ids, target=(3, 9))
    by_hand = method(lambda x: (model(x)[0],), model=model)
    torch.testing.assert_close(found, by_hand.attribute(ids, target=(3, 9)))


def test_the_model_may_change_between_calls(method):
    model, ids = mamba_lm(), token_ids(2, 5)
    attribution = method(model)
    before = attribution.attribute(ids, target=(3, 2))
    with torch.no_grad():
        for mixer in mixers_of(model):
            mixer.A_log.add_(1)
    after = attribution.attribute(ids, target=(3, 2))
    assert torch.equal(after, method(model).attribute(ids, target=(3, 2)))
    assert not torch.allclose(after, before, rtol=1e-3)
