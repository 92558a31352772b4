"""What results are like, and that a call leaves no trace in the model or the session."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from zoo.small import (
    WIDTH,
    classifier,
    falcon_lm,
    images,
    mamba_lm,
    mixers_of,
    token_ids,
    vision,
)

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, MambaAttribution

METHODS = [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution]
CLASS_AGNOSTIC = METHODS[:2]


def language(**options):
    model = mamba_lm(**options)
    return model, token_ids(2, 7), {"target": (-1, 3)}


def embeddings():
    model, ids, options = language()
    return model, model.get_input_embeddings()(ids), options


def picture(cls="middle"):
    return vision(cls), images(2), {"target": 2}


CASES = {
    "ids": language,
    "embeddings": embeddings,
    "images": picture,
    "mean pooling": lambda: picture(None),
    "classifier": lambda: (classifier("last"), token_ids(2, 7), {"target": [1, 3]}),
    "falcon": lambda: (falcon_lm(), token_ids(2, 7), {"target": (-1, 3)}),
}
RECIPES = ["paper", "published_code"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_results_are_plain_tensors_and_repeat(method, case, recipe):
    model, inputs, options = CASES[case]()
    if case == "mean pooling" and recipe == "published_code":
        options["query"] = "last"
    for per_token in (False, True):
        both = [
            method(model).attribute(inputs, per_token=per_token, recipe=recipe, **options)
            for _ in range(2)
        ]
        found = both[0]
        assert torch.equal(*both)
        assert type(found) is torch.Tensor and found.is_leaf
        assert not found.requires_grad and found.grad_fn is None
        assert found.is_contiguous() and not found.is_inference()
        assert found.device == inputs.device and found.dtype == torch.float32
        assert torch.isfinite(found).all()
        if not per_token:
            assert found.shape == inputs.shape
        found.mul_(2)  # no part of it is shared
    found.view(-1)


# --- modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", [c for c in CASES if c != "mean pooling"])
@pytest.mark.parametrize("method", METHODS)
def test_no_grad_changes_nothing(method, case, recipe):
    model, inputs, options = CASES[case]()
    expected = method(model).attribute(inputs, recipe=recipe, **options)
    with torch.no_grad():
        assert torch.equal(method(model).attribute(inputs, recipe=recipe, **options), expected)
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", CLASS_AGNOSTIC)
def test_inference_mode_changes_nothing_where_no_gradient_is_needed(method, case):
    model, inputs, options = CASES[case]()
    expected = method(model).attribute(inputs, **options)
    with torch.inference_mode():
        for given in (inputs, inputs.clone()):  # the second is an inference tensor
            found = method(model).attribute(given, **options)
            assert torch.equal(found, expected)
        assert torch.is_inference_mode_enabled()
    inference_tensor = given
    found = method(model).attribute(inference_tensor, **options)
    assert torch.equal(found, expected)


def test_matrices_in_inference_mode():
    model, ids, _ = language()
    expected = ImplicitAttention(model).matrices(ids)
    with torch.inference_mode():
        for given in (ids, ids.clone(), model.get_input_embeddings()(ids)):
            found = ImplicitAttention(model).matrices(given)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_inputs_made_under_inference_mode(method):
    model, _, options = embeddings()
    with torch.inference_mode():
        inputs = torch.randn(2, 7, WIDTH)
        mask = torch.ones(2, 7)
    expected = method(model).attribute(inputs.clone(), **options)
    assert torch.equal(method(model).attribute(inputs, **options), expected)
    found = method(model).attribute(inputs, additional_forward_args=mask, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("method", CLASS_AGNOSTIC)
def test_models_made_under_inference_mode(method):
    expected_model, inputs, options = picture()
    # in float32 another kernel may convolve with weights made there
    expected_model, inputs = expected_model.double(), inputs.double()
    with torch.inference_mode():
        model = copy.deepcopy(expected_model)
    expected = method(expected_model).attribute(inputs, query="last", **options)
    assert torch.equal(method(model).attribute(inputs, query="last", **options), expected)


@pytest.mark.parametrize("method", METHODS)
def test_inputs_that_record_gradients(method):
    """A leaf that requires grad, and the result of a computation; neither gets a gradient."""
    model, inputs, options = embeddings()
    expected = method(model).attribute(inputs.detach(), **options)
    leaf = inputs.detach().clone().requires_grad_()
    for given in (leaf, leaf * 1, inputs):
        found = method(model).attribute(given, **options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert not found.requires_grad
    assert leaf.grad is None and leaf.requires_grad
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", [c for c in CASES if c != "mean pooling"])
@pytest.mark.parametrize("method", METHODS)
def test_frozen_parameters_change_nothing(method, case, recipe):
    model, inputs, options = CASES[case]()
    inputs = inputs.detach()
    expected = method(model).attribute(inputs, recipe=recipe, **options)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = method(model).attribute(inputs, recipe=recipe, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# --- dtypes --------------------------------------------------------------------------------------


def scale(expected):
    """The largest relevance; the entries of a token itself, where shown, are about one."""
    return float(expected.abs().max().clamp_min(0.02))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_half_precision(method, case, dtype):
    model, inputs, options = CASES[case]()
    half = model.to(dtype)
    single = copy.deepcopy(half).float()
    inputs = inputs.detach()
    given = inputs.to(dtype) if inputs.is_floating_point() else inputs
    expected = method(single).attribute(given.float() if given is not inputs else given, **options)
    found = method(half).attribute(given, **options)
    assert found.dtype == torch.float32 and torch.isfinite(found).all()
    assert (found - expected).abs().max() <= 0.1 * scale(expected)


@pytest.mark.parametrize("method", METHODS)
def test_autocast(method):
    model, ids, options = language()
    expected = method(model).attribute(ids, **options)
    with torch.autocast("cpu", torch.bfloat16):
        found = method(model).attribute(ids, **options)
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() <= 0.1 * scale(expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_double_precision(method, case):
    model, inputs, options = CASES[case]()
    expected = method(model).attribute(inputs, **options)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    found = method(model.double()).attribute(inputs, **options)
    assert found.dtype == torch.float64
    assert (found - expected).abs().max() <= 1e-4 * scale(expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [mamba_lm, falcon_lm])
@pytest.mark.parametrize("method", METHODS)
def test_healthy_models_pass_their_verification(method, make, dtype):
    model, ids = make(use_bias=True).to(dtype), token_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    options = {"target": [(5, 1), (8, 2)], "additional_forward_args": mask}
    expected = method(model).attribute(ids, **options)
    assert torch.equal(method(model).attribute(ids, verify=True, **options), expected)
    assert torch.equal(method(model).attribute(ids, verify=0.2, **options), expected)


# --- nothing is left behind ----------------------------------------------------------------------

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
)


def snapshot(model, *inputs):
    """Everything a call might have changed."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "tensors": {name: t.detach().clone() for name, t in tensors.items()},
        "identities": {name: (id(t), t._version) for name, t in tensors.items()},
        "grads": {name: None if t.grad is None else t.grad.clone() for name, t in tensors.items()},
        "requires_grad": {name: t.requires_grad for name, t in tensors.items()},
        "tensor hooks": {name: len(t._backward_hooks or {}) for name, t in tensors.items()},
        "training": {name: m.training for name, m in model.named_modules()},
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "hooks": {
            (name, kind): list(getattr(m, kind))
            for name, m in model.named_modules()
            for kind in HOOKS
        },
        "global hooks": (
            len(nn.modules.module._global_forward_hooks),
            len(nn.modules.module._global_forward_pre_hooks),
        ),
        "inputs": [(x.detach().clone(), x.requires_grad, x._version, x.grad) for x in inputs],
        "torch random": torch.get_rng_state(),
        "numpy random": np.random.get_state()[1].copy(),
        "python random": random.getstate(),
        "modes": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_anomaly_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            _get_current_function_mode_stack(),
        ),
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def check_untouched(before, after):
    changed = [key for key in before if not same(before[key], after[key])]
    assert not changed


def unusual(model):
    """A state that a careless restoration would not restore."""
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 != 0)
        parameter.grad = torch.randn_like(parameter) if index % 2 else None
    for index, module in enumerate(model.modules()):
        module.training = index % 4 == 1
    model.register_forward_hook(lambda *_: None)
    mixers_of(model)[0].register_forward_pre_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", [c for c in CASES if c != "mean pooling"])
@pytest.mark.parametrize("method", METHODS)
def test_a_call_leaves_everything_as_it_was(method, case, recipe, grad):
    model, inputs, options = CASES[case]()
    unusual(model)
    inputs = inputs.detach()
    with torch.set_grad_enabled(grad):
        before = snapshot(model, inputs)
        method(model).attribute(inputs, recipe=recipe, verify=True, **options)
        method(model).attribute(inputs, internal_batch_size=1, recipe=recipe, **options)
        if method is ImplicitAttention:
            method(model).matrices(inputs)
        check_untouched(before, snapshot(model, inputs))


def fail(module, error):
    def forward(*args, **kwargs):
        raise error

    module.forward = forward
    return type(error)


def break_head(model):
    return fail(model.lm_head if hasattr(model, "lm_head") else model.head, RuntimeError("boom"))


def break_first_mixer(model):
    return fail(mixers_of(model)[0].out_proj, KeyError("boom"))


def break_last_mixer(model):
    return fail(mixers_of(model)[-1].x_proj, KeyboardInterrupt("boom"))


def break_a_block(model):
    norm = next(m for n, m in model.named_modules() if n.endswith("s.1.norm"))
    return fail(norm, AssertionError("boom"))


def break_a_parameter(model):
    with torch.no_grad():
        mixers_of(model)[-1].D.fill_(torch.inf)
    return ValueError


BREAKS = [break_head, break_first_mixer, break_last_mixer, break_a_block, break_a_parameter]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", ["ids", "embeddings", "images", "classifier"])
@pytest.mark.parametrize("method", METHODS)
def test_a_failing_call_leaves_everything_as_it_was(method, case, break_it, grad):
    model, inputs, options = CASES[case]()
    inputs = inputs.detach()
    error = break_it(model)
    unusual(model)
    with torch.set_grad_enabled(grad):
        before = snapshot(model, inputs)
        with pytest.raises(error):
            method(model).attribute(inputs, **options)
        check_untouched(before, snapshot(model, inputs))
        if method is ImplicitAttention:
            with pytest.raises(error):
                method(model).matrices(inputs)
            check_untouched(before, snapshot(model, inputs))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "bad", [{"target": (99, 0)}, {"target": (-1, 3), "query": 99}, {"start_layer": 99}]
)
def test_an_error_of_the_users_leaves_everything_as_it_was(method, bad):
    model, ids, _ = language()
    unusual(model)
    before = snapshot(model, ids)
    with pytest.raises(ValueError):
        method(model).attribute(ids, **({"target": (-1, 3)} | bad))
    check_untouched(before, snapshot(model, ids))


@pytest.mark.parametrize("method", METHODS)
def test_the_model_computes_what_it_computes(method):
    """While it is watched, too: what forward_func returns is what the model returns alone."""
    model, ids, options = language()
    seen = []

    def function(x):
        out = model(x).logits
        seen.append(out.detach().clone())
        return out

    method(function, model=model).attribute(ids, **options)
    with torch.no_grad():
        expected = model(ids).logits
    assert seen
    for out in seen:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_one_forward_run_is_enough_for_ids(method):
    model, ids, options = language()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    method(model).attribute(ids, **options)
    assert len(calls) == 1


def living_tensors():
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_memory_is_given_back(method):
    """Nothing of a call stays alive: neither its tensors nor the model."""
    model, ids, options = language()
    attribution = method(model)
    attribution.attribute(ids, **options)
    gc.collect()
    gc.disable()
    try:
        before = living_tensors()
        attribution.attribute(ids, **options)
        gc.collect()
        after = living_tensors()
    finally:
        gc.enable()
    assert after <= before
    reference = weakref.ref(model)
    del model, attribution
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("method", METHODS)
def test_progress_is_shown_only_if_asked_for(method, capsys):
    model, ids, options = language()
    method(model).attribute(ids, **options)
    assert capsys.readouterr() == ("", "")
    method(model).attribute(ids, show_progress=True, **options)
    shown = capsys.readouterr()
    assert shown.out == "" and method.get_name() in shown.err and "100%" in shown.err
