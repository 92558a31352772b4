"""compare: several methods from one forward run, each as if it had been called alone."""

from __future__ import annotations

import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients, NoiseTunnel
from helpers.every_method import METHODS
from helpers.latim_vectors import a_model
from zoo.small import classifier, images, mamba_lm, token_ids, vision

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimNorm,
    MambaAttribution,
    TransformerAttribution,
    compare,
)
from captum_ssm.errors import InputError, OptionError

pytestmark = pytest.mark.slow

#: Those that read one traced forward run, and those that need one of their own.
SHARING = [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution, LatimNorm, LatimALTI]
#: Captum says so when it makes its inputs require gradients.
REQUIRES_GRAD = pytest.mark.filterwarnings(
    "ignore:Input Tensor . did not already require gradients"
)


def close(found, expected):
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-6)


# --- as alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba", "vim"])
def test_as_the_single_calls(name, monkeypatch):
    case = a_model(name, monkeypatch)
    found = compare(case.model, METHODS, case.inputs, **case.target)
    assert list(found) == [method.get_name() for method in METHODS]
    for method in METHODS:
        alone = method(case.model).attribute(case.inputs, **case.target, per_token=True)
        close(found[method.get_name()], alone)


def test_one_method_under_two_rules():
    model, ids = mamba_lm(), token_ids(2, 9)
    rules = {"content": {"rule": "frozen"}, "cause": {"rule": "centred", "baselines": 0.0}}
    for methods in ({"content": LatimFlow, "cause": LatimFlow}, dict.fromkeys(rules, "LatimFlow")):
        found = compare(model, methods, ids, (-1, 4), options=rules)
        for name, options in rules.items():
            close(found[name], LatimFlow(model).attribute(ids, (-1, 4), **options))
    assert not torch.allclose(found["content"], found["cause"], rtol=0.1)


@pytest.mark.parametrize("per_token", [True, False])
def test_images(per_token):
    model, pictures = vision("middle"), images(2)
    methods = [*SHARING, TransformerAttribution, LatimFlow]
    found = compare(model, methods, pictures, [1, 4], per_token=per_token)
    for method in methods:
        relevance = found[method.get_name()]
        assert relevance.shape == ((2, 3, 4) if per_token else pictures.shape)
        close(relevance, method(model).attribute(pictures, [1, 4], per_token=per_token))


def test_embeddings_with_a_mask_and_parts_of_the_batch():
    model, mask = classifier("last"), torch.ones(3, 6).long()
    mask[1, 4:] = 0
    embeddings = model.backbone.embeddings(token_ids(3, 6)).detach()

    def forward(x, mask):
        return model(inputs_embeds=x, attention_mask=mask)

    query = torch.tensor([2, 3, 5])
    options = {"MambaAttribution": {"query": query}, "LatimFlow": {"contrast": [0, 1, 2]}}
    methods = [*SHARING, LatimFlow]
    whole, parts = (
        compare(
            forward,
            methods,
            embeddings,
            [1, 0, 4],
            mask,
            model=model,
            options=options,
            per_token=False,
            internal_batch_size=size,
        )
        for size in (None, 2)
    )
    for method in methods:
        name = method.get_name()
        alone = method(forward, model).attribute(
            embeddings, [1, 0, 4], mask, **options.get(name, {})
        )
        close(whole[name], alone)
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-6)
        assert whole[name].shape == embeddings.shape and not whole[name][1, 4:].any()


@REQUIRES_GRAD
def test_captums_own_methods_join_the_table():
    model = classifier("mean")
    embeddings = model.backbone.embeddings(token_ids(2, 5)).detach()

    def forward(x):
        return model(inputs_embeds=x)

    methods = {
        "gradient": InputXGradient(forward),
        "path": IntegratedGradients(forward),
        "rollout": ImplicitAttentionRollout(forward, model),
    }
    options = {"path": {"n_steps": 3, "baselines": torch.ones_like(embeddings)}}
    found = compare(forward, methods, embeddings, [1, 2], model=model, options=options)
    assert list(found) == list(methods)
    expected = methods["path"].attribute(embeddings, target=[1, 2], **options["path"])
    close(found["path"], expected.detach().sum(-1))
    expected = methods["gradient"].attribute(embeddings.clone(), target=[1, 2])
    close(found["gradient"], expected.detach().sum(-1))
    assert not found["gradient"].requires_grad


@REQUIRES_GRAD
def test_captums_own_methods_get_the_additional_arguments():
    model = classifier("last")
    embeddings = model.backbone.embeddings(token_ids(2, 6)).detach()
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])

    def forward(x, mask=None):
        return model(inputs_embeds=x, attention_mask=mask)

    method = InputXGradient(forward)
    found = compare(forward, [method], embeddings, 2, mask, model=model)["Input X Gradient"]
    expected = method.attribute(embeddings.clone(), target=2, additional_forward_args=mask)
    close(found, expected.detach().sum(-1))
    assert not found[1, 4:].any() and found[0, 4:].any()


# --- names, options, errors ----------------------------------------------------------------------


def test_names_are_made_unique():
    model, ids = mamba_lm(), token_ids(1, 5)
    methods = [LatimNorm(model, p=1), ImplicitAttentionRollout, LatimNorm(model, p=2), LatimNorm]
    options = {"LatimNorm (2)": {"start_layer": 1}}
    found = compare(model, methods, ids, (-1, 3), options=options)
    rollout = "ImplicitAttentionRollout"
    assert list(found) == ["LatimNorm", rollout, "LatimNorm (2)", "LatimNorm (3)"]
    expected = LatimNorm(model).attribute(ids, (-1, 3), start_layer=1)
    close(found["LatimNorm (2)"], expected)
    close(found["LatimNorm"], LatimNorm(model, p=1).attribute(ids, (-1, 3)))


def test_names_of_ones_own_and_layers():
    model, ids = mamba_lm(), token_ids(1, 5)
    layers = ["backbone.layers.1.mixer"]
    found = compare(model, {"mine": ImplicitAttention}, ids, (-1, 3), layers=layers)
    assert list(found) == ["mine"]
    close(found["mine"], ImplicitAttention(model, layers=layers).attribute(ids, (-1, 3)))


MISUSE = {
    "methods is empty": ([], {}),
    "is no Captum attribution": ([mamba_lm], {}),
    "holds the class NoiseTunnel. Make an instance": ([NoiseTunnel], {}),
    "options names 'Rollout', but the methods are": ([LatimNorm], {"options": {"Rollout": {}}}),
    "LatimFlow returned tuple in place of one tensor": (
        [LatimFlow],
        {"options": {"LatimFlow": {"return_convergence_delta": True}}},
    ),
}


@pytest.mark.parametrize("message", MISUSE)
def test_misuse(message):
    methods, options = MISUSE[message]
    with pytest.raises(OptionError, match=message.replace(".", r"\.")):
        compare(mamba_lm(), methods, token_ids(1, 4), (-1, 3), **options)


def test_no_input():
    with pytest.raises(InputError, match="inputs is empty"):
        compare(mamba_lm(), [LatimNorm], torch.zeros(1, 0).long())
