"""compare: several methods from one forward run, each as if it had been called alone."""

from __future__ import annotations

import weakref

import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients, NoiseTunnel
from helpers.every_method import METHODS, without_replays
from helpers.latim_vectors import a_model
from helpers.pages import read_page
from zoo.small import classifier, mamba_lm, token_ids

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
from captum_ssm.models import load_bundled

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


@pytest.mark.parametrize("name", ["mamba", "vim"])
def test_as_the_single_calls(name, monkeypatch):
    case = a_model(name, monkeypatch)
    found = compare(case.model, case.inputs, METHODS, **case.target)
    assert list(found) == [method.get_name() for method in METHODS]
    for method in METHODS:
        alone = method(case.model).attribute(case.inputs, **case.target, per_token=True)
        close(found[method.get_name()], alone)


def test_one_method_under_two_rules():
    model, ids = mamba_lm(), token_ids(2, 9)
    rules = {"content": {"rule": "frozen"}, "cause": {"rule": "centered", "baselines": 0.0}}
    for methods in ({"content": LatimFlow, "cause": LatimFlow}, dict.fromkeys(rules, "LatimFlow")):
        found = compare(model, ids, methods, (-1, 4), options=rules)
        for name, options in rules.items():
            close(found[name], LatimFlow(model).attribute(ids, (-1, 4), **options))
    assert not torch.allclose(found["content"], found["cause"], rtol=0.1)
    both, one = {"LatimFlow": {"baselines": 0.0}}, {"LatimFlow, frozen": {"rule": "half"}}
    found = compare(model, ids, target=(-1, 4), options=both | one)
    for name, rule in {"LatimFlow, balanced": "balanced", "LatimFlow, frozen": "half"}.items():
        close(found[name], LatimFlow(model).attribute(ids, (-1, 4), baselines=0.0, rule=rule))


def test_embeddings_with_a_mask_and_parts_of_the_batch():
    model, mask = classifier("last"), torch.ones(3, 6).long()
    mask[1, 4:] = 0
    embeddings = model.backbone.embeddings(token_ids(3, 6)).detach()

    def forward(x, mask):
        return model(inputs_embeds=x, attention_mask=mask)

    query = torch.tensor([2, 3, 5])
    options = {"MambaAttribution": {"query": query}, "LatimFlow": {"contrast": [0, 1, 2]}}
    methods = [*SHARING, LatimFlow]
    asked = {"model": model, "options": options, "per_token": False}
    whole, parts = (
        compare(forward, embeddings, methods, [1, 0, 4], mask, internal_batch_size=size, **asked)
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
    found = compare(forward, embeddings, methods, [1, 2], model=model, options=options)
    assert list(found) == list(methods)
    expected = methods["path"].attribute(embeddings, target=[1, 2], **options["path"])
    close(found["path"], expected.detach().sum(-1))
    expected = methods["gradient"].attribute(embeddings.clone(), target=[1, 2])
    close(found["gradient"], expected.detach().sum(-1))
    assert not found["gradient"].requires_grad


def test_names_are_made_unique():
    model, ids = mamba_lm(), token_ids(1, 5)
    methods = [LatimNorm(model, p=1), ImplicitAttentionRollout, LatimNorm(model, p=2), LatimNorm]
    options = {"LatimNorm (2)": {"start_layer": 1}}
    found = compare(model, ids, methods, (-1, 3), options=options)
    rollout = "ImplicitAttentionRollout"
    assert list(found) == ["LatimNorm", rollout, "LatimNorm (2)", "LatimNorm (3)"]
    expected = LatimNorm(model).attribute(ids, (-1, 3), start_layer=1)
    close(found["LatimNorm (2)"], expected)
    close(found["LatimNorm"], LatimNorm(model, p=1).attribute(ids, (-1, 3)))


MISUSE = {
    "contains the class NoiseTunnel, which needs further arguments": ([NoiseTunnel], {}),
    "LatimFlow returned tuple, not one tensor": (
        [LatimFlow],
        {"options": {"LatimFlow": {"return_convergence_delta": True}}},
    ),
}


@pytest.mark.parametrize("message", MISUSE)
def test_misuse(message):
    methods, options = MISUSE[message]
    with pytest.raises(OptionError, match=message.replace(".", r"\.")):
        compare(mamba_lm(), token_ids(1, 4), methods, (-1, 3), **options)


class Counted(torch.autograd.Function):
    passes = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Counted.passes += 1
        return gradient


def counted(model):
    runs = []

    def function(*args):
        out = model(*args)
        runs.append(weakref.ref(out.logits))
        return Counted.apply(out.logits)

    Counted.passes = 0
    return function, runs


def test_one_forward_and_one_backward():
    """And one forward of the function alone, with which explained numbers are compared."""
    function, runs = counted(model := mamba_lm())
    gradient = TransformerAttribution(function, model, form="gradient")
    methods = [*(m(function, model) for m in SHARING), MambaAttribution(function, model), gradient]
    with without_replays(runs):
        compare(function, token_ids(2, 6), methods, (-1, 3))
    assert (len(runs), Counted.passes) == (2, 1)


def test_no_graph_where_nobody_takes_gradients():
    model, ids, recording = mamba_lm(), token_ids(1, 5), []
    model.backbone.layers[0].mixer.register_forward_hook(
        lambda module, args, output: recording.append(torch.is_grad_enabled())
    )
    with without_replays(recording):
        compare(model, ids, [ImplicitAttention, LatimNorm, LatimFlow], (-1, 3))
    assert len(recording) == 2 and not recording[0]  # the second run is LatimFlow's own
    recording.clear()
    with torch.no_grad(), without_replays(recording):
        compare(model, ids, [ImplicitAttention, MambaAttribution], (-1, 3))
    assert recording == [True]


def test_two_prompts_and_two_models_by_aligned_tokens():
    model, vocabulary = load_bundled()
    prompts = ["anna owns the lamp . ? anna owns the", "anna owns the drum . bob ? anna owns the"]
    given = {"methods": ["LatimFlow"], "tokenizer": vocabulary}
    one, other = (
        compare(model, prompt, target=word, **given)
        for prompt, word in zip(prompts, ("lamp", "drum"), strict=True)
    )
    found = other.against(one)
    tokens = "anna,owns,the,lamp → drum,.,bob,?,anna,owns,the"
    assert ",".join(found.names[0]) == tokens
    before = one["LatimFlow"][0]
    wanted = torch.cat([before[:5], torch.zeros(1), before[5:]])
    torch.testing.assert_close(found["LatimFlow, before"][0], wanted)
    torch.testing.assert_close(found["LatimFlow"], other["LatimFlow"])
    torch.testing.assert_close(found["LatimFlow, difference"][0], other["LatimFlow"][0] - wanted)
    assert "lamp → drum" in str(read_page(found.to_html()).facts)
    # of another model of the same tokens
    ids = torch.tensor([vocabulary.encode(prompts[0])])
    changed = compare(mamba_lm(vocab_size=len(vocabulary)), ids, ["LatimFlow"], (-1, 3))
    plain = compare(model, ids, ["LatimFlow"], (-1, 3))
    difference = changed.against(plain)["LatimFlow, difference"]
    torch.testing.assert_close(difference, changed["LatimFlow"] - plain["LatimFlow"])
    with pytest.raises(InputError, match="aligned without names"):
        changed.against(compare(model, ids[:, :4], ["LatimFlow"], (-1, 3)))
    with pytest.raises(InputError, match="the same methods"):
        changed.against(compare(model, ids, ["LatimNorm"], (-1, 3)))
