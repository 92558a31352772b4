"""Errors of every kind: what they are, and what they tell the user.

Each row of the tables is a call, the builtin a Captum user would expect, and fragments of the
message: the argument by its name, what was found, what to do.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.every_method import each_method, each_of_queries
from torch import nn
from transformers import DynamicCache
from zoo.small import VOCABULARY, WIDTH, classifier, images, mamba_lm, mixers_of, token_ids, vision

from captum_ssm import (
    CaptumSSMError,
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimFlow,
    MambaAttribution,
    discard_smallest,
)

pytestmark = pytest.mark.slow


def check(call, builtin, fragments):
    with pytest.raises(CaptumSSMError) as caught:
        call()
    assert isinstance(caught.value, builtin)
    message = str(caught.value)
    assert not [f for f in fragments if f not in message], message
    assert message.endswith((".", "?", ")"))


# --- arguments of attribute ----------------------------------------------------------------------

ANY_METHOD = {
    "unknown preset": ({"components": "unifed"}, ["components='unifed'", "'unified'", "'s6'"]),
    "unknown name": ({"components": {"scan", "gates"}}, ["components=", "'gates'", "'gate'"]),
    "unknown reduction": ({"reduce": "median"}, ["reduce='median'", "'mean'", "discard_smallest"]),
    "no reduction": ({"reduce": None}, ["reduce=None", "several matrices", "'mean'"]),
    "unknown recipe": ({"recipe": "code"}, ["recipe='code'", "'paper'", "'published_code'"]),
    "recipe and reduction": (
        {"recipe": "published_code", "reduce": "max"},
        ["recipe='published_code'", "reduce='mean'"],
    ),
    "start beyond the end": ({"start_layer": 3}, ["start_layer=3", "the model has 3", "0 to 2"]),
    "head outside": ({"heads": [3, 20]}, ["heads=[3, 20]", "between 0 and 19"]),
    "unknown query": ({"query": "first"}, ["query='first'", "'cls'", "'last'", "'mean'"]),
    "query outside": ({"query": 7}, ["query position 7", "7 tokens", "from -7 to 6"]),
    "tensor query outside": ({"query": torch.tensor([0, 12])}, ["query position 12", "7 tokens"]),
    "query of another batch": (
        {"query": torch.tensor([0, 1, 2])},
        ["query", "3 examples", "the batch holds 2", "an int"],
    ),
    "float query": ({"query": 1.5}, ["query=1.5", "neither a name nor positions"]),
    "no examples at a time": ({"internal_batch_size": 0}, ["internal_batch_size=0", "at least 1"]),
    "mask of another batch": (
        {"additional_forward_args": torch.ones(3, 7)},
        ["batch of 2", "additional_forward_args[0] has 3", "(3, 7)"],
    ),
    "second argument of another batch": (
        {"additional_forward_args": (None, torch.ones(5, 7, WIDTH))},
        ["batch of 2", "additional_forward_args[1] has 5", "(5, 7, 10)"],
    ),
    "position outside": ({"target": (7, 3)}, ["target=(7, 3)", "out of range", "(2, 7, 19)"]),
}


@pytest.mark.parametrize("case", ANY_METHOD)
def test_arguments(case):
    options, fragments = ANY_METHOD[case]
    model, ids = mamba_lm(), token_ids(2, 7)
    options = {"target": (-1, 3)} | options
    check(lambda: MambaAttribution(model).attribute(ids, **options), ValueError, fragments)


ONE_METHOD = {
    "negative ratio": (
        ImplicitAttentionRollout,
        {"discard_ratio": -0.1},
        ["discard_ratio=-0.1", "at least 0", "below 1"],
    ),
    "recipe and normalisation": (
        ImplicitAttentionRollout,
        {"recipe": "published_code", "normalize_rows": True},
        ["recipe='published_code'", "normalize_rows"],
    ),
    "recipe and ratio": (
        ImplicitAttentionRollout,
        {"recipe": "published_code", "discard_ratio": 0.1},
        ["recipe='published_code'", "discard_ratio"],
    ),
    "recipe and several queries": (
        ImplicitAttention,
        {"recipe": "published_code", "query": [1, 2]},
        ["recipe='published_code'", "one query token", "'last'"],
    ),
    "baselines": (
        MambaAttribution,
        {"baselines": None},
        ["baselines is not an argument of MambaAttribution", "Leave it out", "contrast="],
    ),
    "features": (LatimFlow, {"feature_mask": 3}, ["feature_mask is not an argument", "Leave it"]),
    "steps": (LatimFlow, {"n_steps": 3}, ["n_steps is not an argument of LatimFlow", "Leave it"]),
    "unknown clamp": (
        MambaAttribution,
        {"clamp": "gelu"},
        ["clamp='gelu'", "'relu'", "'abs'", "'none'"],
    ),
    "recipe and clamp": (
        MambaAttribution,
        {"recipe": "published_code", "clamp": "abs"},
        ["recipe='published_code'", "clamp"],
    ),
    "no target": (
        MambaAttribution,
        {"target": None},
        ["(7, 19)", "a target is needed", "(position, token)"],
    ),
}


@pytest.mark.parametrize("case", ONE_METHOD)
def test_arguments_of_one_method(case):
    method, options, fragments = ONE_METHOD[case]
    model, ids = mamba_lm(), token_ids(2, 7)
    options = {"target": (-1, 3)} | options
    check(lambda: method(model).attribute(ids, **options), ValueError, fragments)


def test_matrices():
    model, ids = mamba_lm(), token_ids(2, 7)
    matrices = ImplicitAttention(model).matrices
    for options, fragments in [
        ({"layers": [3]}, ["layers names 3", "3 mixers", "0 to 2"]),
        ({"layers": [0, -4]}, ["layers names -4", "3 mixers"]),
        ({"reduce": "median"}, ["reduce='median'", "'heads'", "None"]),
        ({"components": "all"}, ["components='all'", "'exact'"]),
        ({"heads": [20]}, ["heads=[20]", "0 and 19"]),
        ({"additional_forward_args": torch.ones(3, 7)}, ["batch of 2", "has 3"]),
    ]:
        check(lambda options=options: matrices(ids, **options), ValueError, fragments)
    check(lambda: matrices(ids[0]), ValueError, ["(7,)", "batch dimension"])


@pytest.mark.parametrize("ratio", [1.0, -0.5, 7])
def test_discard_smallest(ratio):
    check(lambda: discard_smallest(ratio), ValueError, ["discard_smallest", "0 <= ratio < 1"])


# --- inputs --------------------------------------------------------------------------------------

INPUTS = {
    "no batch dimension": (
        lambda: token_ids()[0],
        ["inputs", "(11,)", "batch dimension", "(B, L)"],
    ),
    "a number": (lambda: torch.tensor(3), ["inputs", "()", "batch dimension"]),
    "no tokens": (lambda: torch.empty(2, 0).long(), ["inputs is empty", "(2, 0)"]),
    "no examples": (lambda: torch.empty(0, 5).long(), ["inputs is empty", "(0, 5)"]),
    "no embedded tokens": (lambda: torch.empty(2, 0, WIDTH), ["inputs is empty", "(2, 0, 10)"]),
    "two inputs": (
        lambda: (token_ids(), token_ids()),
        ["inputs holds 2 tensors", "additional_forward_args"],
    ),
    "empty tuple": (lambda: (), ["inputs holds 0 tensors"]),
    "a list": (lambda: token_ids().tolist(), ["inputs must be a tensor", "list"]),
    "a tuple of a list": (lambda: (token_ids().tolist(),), ["inputs must be a tensor", "list"]),
    "text": (lambda: "hello", ["inputs must be a tensor", "str", "SSMLLMAttribution"]),
    "lists of ids": (lambda: [[1, 2], [3, 4]], ["torch.tensor(inputs)"]),
    "array": (lambda: np.ones((2, 3)), ["torch.from_numpy(inputs)"]),
    "tensors": (lambda: [torch.ones(3), torch.ones(3)], ["torch.stack(inputs)"]),
    "nothing": (lambda: None, ["token ids (B, L), embeddings (B, L, E) or images (B, C, H, W)"]),
    "dict": (lambda: {"a": 1}, ["out of ['a']"]),
    "pixels of a dict": (
        lambda: {"pixel_values": torch.ones(1, 3, 4, 4)},
        ["inputs=encoding['pixel_values']."],
    ),
    "ids of three dimensions": (lambda: torch.ones(2, 5, 1).long(), ["token ids are (B, L)"]),
    "pixels that are integers": (lambda: torch.ones(2, 3, 4, 4).byte(), ["image processor"]),
    "booleans": (lambda: torch.ones(2, 5).bool(), ["dtype torch.bool"]),
    "complex numbers": (lambda: torch.ones(2, 5, WIDTH) * 1j, ["dtype torch.complex64"]),
}


@pytest.mark.parametrize("case", INPUTS)
def test_inputs(case):
    make, fragments = INPUTS[case]
    model = mamba_lm()
    method = ImplicitAttention(model)
    check(lambda: method.attribute(make(), target=(-1, 3)), ValueError, fragments)


@each_method
def test_inputs_that_are_not_embedded(method):
    model, ids = mamba_lm(), torch.tensor([[3, VOCABULARY, 4]])
    for function in (model, lambda x: model(x).logits):
        check(
            lambda function=function: method(function, model).attribute(ids.float(), (-1, 3)),
            ValueError,
            ["integers (B, L)", "NoiseTunnel, need embeddings"],
        )
    check(
        lambda: method(model).attribute(ids, (-1, 3)),
        ValueError,
        ["from 3 to 19, of which", "tokenizer"],
    )
    check(
        lambda: method(lambda x: model(x).logits).attribute(torch.randn(2, 5, WIDTH), (-1, 3)),
        ValueError,
        ["model(inputs_embeds=inputs)"],
    )


def test_embeddings_twice():
    model, embeddings = mamba_lm(), torch.randn(2, 5, WIDTH)
    check(
        lambda: LatimFlow(model).attribute(embeddings, (-1, 3), (None, embeddings)),
        ValueError,
        ["additional_forward_args", "both hold embeddings"],
    )


@each_method
def test_sequences_that_became_fewer_tokens(method):
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm = classifier("last")

        def forward(self, series):
            return self.lm(inputs_embeds=series[:, ::2])

    model, series = Strided(), torch.randn(2, 9, WIDTH)
    found = method(model).attribute(series, target=1)
    assert found.shape == series.shape and not found[:, 1::2].any()
    read = method(model.lm).attribute(series[:, ::2], target=1)
    torch.testing.assert_close(found[:, ::2], read, rtol=1e-4, atol=1e-6)


@each_of_queries
def test_examples_that_are_not_explained_by_themselves(method):
    """The model makes another batch of its input: each image in two crops, say."""
    model, ids = mamba_lm(), token_ids(2, 6)
    twice = method(lambda x: model(x.repeat(2, 1)), model=model)
    check(lambda: twice.attribute(ids, target=(-1, 3)), ValueError, ["batch of 2", "4"])
    summed = method(lambda x: model(x).logits.sum(0, keepdim=True), model=model)
    check(lambda: summed.attribute(ids, target=(-1, 3)), ValueError, ["batch of 2", "batch of 1"])


# --- models --------------------------------------------------------------------------------------


class SomeSSM(nn.Module):
    """A mixer without adapter, by its name."""

    def forward(self, x):
        return x.cumsum(1)


class Beside(nn.Module):
    """A language model that calls another module first."""

    def __init__(self, extra):
        super().__init__()
        self.lm, self.extra = mamba_lm(), extra

    def forward(self, ids):
        self.extra(torch.zeros(1, 2, 3))
        return self.lm(ids)


def run_with(extra):
    return lambda method: method(Beside(extra)).attribute(torch.tensor([[3, 1, 2]]))


MODELS = {
    "no mixer": (
        lambda method: method(nn.Sequential(nn.Linear(3, 2))),
        ValueError,
        ["No token mixer", "Sequential", "Falcon Mamba", "docs/", "register_mixer"],
    ),
    "unsupported mixer alone": (
        lambda method: method(nn.Sequential(SomeSSM())),
        TypeError,
        ["'0'", "SomeSSM", "no adapter", "Mamba, Falcon Mamba", "docs/", "register_mixer"],
    ),
    "unsupported mixer beside a supported one": (
        run_with(SomeSSM()),
        TypeError,
        ["'extra'", "SomeSSM", "no adapter, and it ran", "register_mixer", "layers=[...]"],
    ),
    "recurrent layer": (run_with(nn.LSTM(3, 3)), TypeError, ["'extra'", "LSTM", "no adapter"]),
    "gru": (run_with(nn.GRU(3, 3)), TypeError, ["'extra'", "GRU"]),
    "function without a module": (
        lambda method: method(lambda x: x),
        TypeError,
        ["forward_func", "lambda", "model=module"],
    ),
    "model that is no module": (
        lambda method: method(lambda x: x, model="mamba"),
        TypeError,
        ["model must be a torch.nn.Module", "str"],
    ),
    "unknown layer": (
        lambda method: method(mamba_lm(), layers=["backbone.layers.7.mixer"]),
        ValueError,
        ["layers", "'backbone.layers.7.mixer'", "backbone.layers.0.mixer"],
    ),
    "layer that is no mixer": (
        lambda method: method(mamba_lm(), layers=["lm_head"]),
        ValueError,
        ["layers", "'lm_head'", "backbone.layers.2.mixer"],
    ),
    "layer of another model": (
        lambda method: method(mamba_lm(), layers=[mixers_of(mamba_lm())[0]]),
        ValueError,
        ["layers", "MambaMixer", "backbone.layers.2.mixer"],
    ),
    "no layers": (lambda method: method(mamba_lm(), layers=[]), ValueError, ["layers"]),
    "a name instead of a list": (
        lambda method: method(mamba_lm(), layers="backbone.layers.0.mixer"),
        ValueError,
        ["layers"],
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(case):
    call, builtin, fragments = MODELS[case]
    check(lambda: call(ImplicitAttention), builtin, fragments)


@each_method
def test_layers_vouch_for_other_mixers(method):
    """The error can be overridden by naming the layers."""
    model = Beside(SomeSSM())
    ids = token_ids()
    chosen = [f"lm.backbone.layers.{i}.mixer" for i in range(3)]
    found = method(model, layers=chosen)
    expected = method(model.lm).attribute(ids, target=(-1, 3))
    assert torch.equal(found.attribute(ids, target=(-1, 3)), expected)


@each_method
def test_a_function_that_runs_another_model(method):
    other, ids = mamba_lm(), token_ids()
    wrong = method(lambda x: other(x), model=mamba_lm())
    check(
        lambda: wrong.attribute(ids, target=(-1, 3)),
        ValueError,
        ["called none of them", "backbone.layers.0.mixer", "forward_func"],
    )


OUTPUTS = {
    "nothing": lambda out: None,
    "text": lambda out: "cat",
    "dict": lambda out: {"prediction": out},
    "empty tuple": lambda out: (),
    "tuple of text": lambda out: ("cat", out),
    "array": lambda out: out.detach().numpy(),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs(case):
    model, ids = mamba_lm(), token_ids()
    odd = MambaAttribution(lambda x: OUTPUTS[case](model(x).logits), model=model)
    name = type(OUTPUTS[case](torch.zeros(1))).__name__
    check(
        lambda: odd.attribute(ids, target=(-1, 3)),
        TypeError,
        [name, "neither a tensor nor", "logits", "forward_func", "model=module"],
    )


@each_method
def test_a_cache(method):
    model, ids = mamba_lm(), token_ids(1, 5)
    cache = DynamicCache(config=model.config)
    check(
        lambda: method(model).attribute(ids, (-1, 3), (None, None, cache)),
        ValueError,
        ["cache_params=DynamicCache", "the whole sequence", "without a cache"],
    )


@pytest.mark.parametrize(
    "method", [ImplicitAttention, ImplicitAttentionRollout]
)  # autograd refuses such a model by itself
def test_a_model_that_writes_into_a_mixers_input(method):
    model, ids = mamba_lm(), token_ids()

    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model.backbone.layers[1].norm
            self.weight = self.inner.weight

        def forward(self, x):
            self.seen = self.inner(x)
            return self.seen

    norm = model.backbone.layers[1].norm = Overwrites()

    class Head(nn.Module):
        def forward(self, x):
            norm.seen.detach().mul_(2)
            return x

    model.backbone.norm_f = Head()
    check(
        lambda: method(model).attribute(ids, target=(-1, 3)),
        (ValueError, RuntimeError),
        ["backbone.layers.1.mixer", "in place"],
    )


# --- numbers that are not finite -----------------------------------------------------------------


def spoil_gate(mixer):
    mixer.in_proj.weight[mixer.intermediate_size :] = torch.nan


def spoil_scan(mixer):
    mixer.A_log.fill_(torch.nan)


def spoil_skip(mixer):
    mixer.D[3] = torch.inf


def spoil_convolution(mixer):
    mixer.conv1d.weight[2, 0, 1] = torch.nan


SPOILS = {"gate": spoil_gate, "scan": spoil_scan, "skip": spoil_skip, "conv": spoil_convolution}


@each_method
def test_not_finite(method):
    """The layer where it begins, and the component at fault."""
    for component, spoil in SPOILS.items():
        model, ids, layer = mamba_lm(), token_ids(), 1
        with torch.no_grad():
            spoil(mixers_of(model)[layer])
        check(
            lambda model=model, ids=ids: method(model).attribute(ids, target=(-1, 3)),
            (ValueError, ArithmeticError),
            [f"'backbone.layers.{layer}.mixer'", f"the {component} component", "NaN or infinity"],
        )


@pytest.mark.parametrize("cls", ["middle", None])
@pytest.mark.parametrize("method", [ImplicitAttention, MambaAttribution])
def test_not_finite_in_a_model_whose_query_has_to_be_found(method, cls):
    model, pictures = vision(cls), images()
    with torch.no_grad():
        mixers_of(model)[1].A_log.fill_(torch.nan)
    check(
        lambda: method(model).attribute(pictures, target=1),
        (ValueError, ArithmeticError),
        ["'blocks.1.mixer'", "the scan component", "NaN or infinity"],
    )


@each_method
def test_inputs_that_are_not_finite(method):
    model, embeddings = mamba_lm(), torch.randn(2, 5, WIDTH)
    embeddings[1, 2, 3] = torch.nan
    check(
        lambda: method(model).attribute(embeddings, target=(-1, 3)),
        (ValueError, ArithmeticError),
        ["'backbone.layers.0.mixer'", "component", "NaN or infinity", "Check the input"],
    )


def test_not_finite_matrices():
    model, ids = mamba_lm(), token_ids()
    with torch.no_grad():
        mixers_of(model)[2].D[0] = torch.nan
    check(
        lambda: ImplicitAttention(model).matrices(ids),
        (ValueError, ArithmeticError),
        ["'backbone.layers.2.mixer'", "the skip component"],
    )


# --- verification --------------------------------------------------------------------------------


def changed_mixers(model, factor):
    """Mixers of a subclass whose output is not what the adapter expects."""
    for mixer in mixers_of(model):
        base = type(mixer)

        class Changed(base):
            def forward(self, *args, **kwargs):
                return super().forward(*args, **kwargs) * factor

        mixer.__class__ = Changed
    return model


@each_method
def test_reconstruction(method):
    ids = token_ids()
    model = changed_mixers(mamba_lm(), 1.001)
    check(
        lambda: method(model).attribute(ids, target=(-1, 3)),
        RuntimeError,
        ["mixer' (Mamba", "error of", "more than 1e-05"],
    )
    method(model).attribute(ids, target=(-1, 3), verify=False)
    method(model).attribute(ids, target=(-1, 3), verify=0.02)
    check(
        lambda: method(model).attribute(ids, target=(-1, 3), verify=1e-4),
        RuntimeError,
        ["mixer'", "more than 1e-04"],
    )


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["paper", "published_code"])
def test_inference_mode(recipe):
    model, ids = mamba_lm(), token_ids()
    with torch.inference_mode():
        check(
            lambda: MambaAttribution(model).attribute(ids, target=(-1, 3), recipe=recipe),
            RuntimeError,
            ["MambaAttribution", "torch.inference_mode()", "no_grad"],
        )


@pytest.mark.parametrize("recipe", ["paper", "published_code"])
def test_models_that_cut_the_gradient(recipe):
    model, ids = mamba_lm(), token_ids()

    def without_grad(x):
        with torch.no_grad():
            return model(x)

    def detached(x):
        return model(x).logits.detach()

    for function in (without_grad, detached):
        check(
            lambda function=function: MambaAttribution(function, model=model).attribute(
                ids, target=(-1, 3), recipe=recipe
            ),
            RuntimeError,
            ["no gradients", "no_grad", "detach"],
        )


@pytest.mark.parametrize("recipe", ["paper", "published_code"])
def test_a_layer_out_of_the_gradients_reach(recipe):
    model, ids = mamba_lm(num_hidden_layers=4), token_ids()

    class Cut(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, *args, **kwargs):
            return self.block(*args, **kwargs).detach()

    model.backbone.layers[1] = Cut(model.backbone.layers[1])
    check(
        lambda: MambaAttribution(model).attribute(ids, target=(-1, 3), recipe=recipe),
        RuntimeError,
        ["No gradient of the target reaches", "'backbone.layers.0.mixer'", "layers=[...]"],
    )
    last = MambaAttribution(model, layers=[f"backbone.layers.{i}.mixer" for i in (2, 3)])
    assert last.attribute(ids, target=(-1, 3), recipe=recipe).any()


@each_method
def test_there_is_no_asynchronous_form(method):
    with pytest.raises(NotImplementedError, match=method.get_name()):
        method(mamba_lm()).attribute_future()
