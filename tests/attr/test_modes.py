"""Half precision, autograd's modes, copies and failures: the same explanations."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from oracles import relative_error
from torch import nn
from zoo.architectures import ZOO, Case, Explained, every, explain, hook_count

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, MambaAttribution
from captum_ssm.errors import GradientModeError
from captum_ssm.tracing import find_mixers

SAME = 1e-6


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    return ZOO[request.param](monkeypatch)


# --- half precision ------------------------------------------------------------------------------


@every()
def test_bfloat16_is_explained_in_float32(case: Case) -> None:
    half = copy.deepcopy(case.model).bfloat16()
    if case.inputs.is_floating_point():
        case.inputs = case.inputs.bfloat16()
    found = explain(half, case)
    assert {t.dtype for t in found.tensors()} == {torch.float32}
    assert all(torch.isfinite(t).all() for t in found.tensors())
    if case.inputs.is_floating_point():
        case.inputs = case.inputs.float()
    rounded = copy.deepcopy(case.model)
    for parameter in rounded.parameters():  # buffers, of which some adapters know better, are not
        parameter.data = parameter.data.bfloat16().float()
    wanted = explain(rounded, case)
    # later layers of a mixture of experts may route another way
    assert relative_error(found.matrices[0], wanted.matrices[0]) <= 0.15


# --- modes ---------------------------------------------------------------------------------------


@every()
def test_no_grad_and_inference_mode(case: Case) -> None:
    model = case.model
    expected = explain(model, case, query=None)
    with torch.no_grad():
        assert expected.difference(explain(model, case, query=None)) <= SAME
    with torch.inference_mode():
        inside = explain(model, case, gradients=False, query=None)
        with pytest.raises(GradientModeError, match=r"torch\.inference_mode\(\) forbids"):
            MambaAttribution(model).attribute(case.inputs, **case.target)
    assert Explained(expected.matrices, expected.rollout).difference(inside) <= SAME


@every()
def test_models_made_under_inference_mode(case: Case) -> None:
    expected = explain(case.model, case, query=None)
    with torch.inference_mode():
        model = copy.deepcopy(case.model)
        inside = explain(model, case, gradients=False, query=None)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(t.is_inference() for t in tensors.values())
    assert expected.difference(explain(model, case, query=None)) <= SAME
    assert Explained(expected.matrices, expected.rollout).difference(inside) <= SAME
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(after) == list(tensors)
    assert all(after[name] is tensor for name, tensor in tensors.items())


# --- copies --------------------------------------------------------------------------------------


@every()
def test_copied_and_pickled_after_a_call(case: Case) -> None:
    model = case.model
    before = hook_count(model)
    expected = explain(model, case)
    assert hook_count(model) == before
    for twin in (copy.deepcopy(model), pickled(model)):
        assert hook_count(twin) == before
        assert expected.difference(explain(twin, case)) <= SAME


def pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    pickle.dump(model, buffer)
    buffer.seek(0)
    return pickle.load(buffer)


@every()
def test_a_forward_that_fails_leaves_nothing(case: Case) -> None:
    model = case.model
    expected = explain(model, case)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    *_, last = find_mixers(model)
    handle = last.module.register_forward_pre_hook(fail)
    before = hook_count(model)
    calls = (
        lambda: ImplicitAttention(model).matrices(case.inputs),
        lambda: ImplicitAttentionRollout(model).attribute(case.inputs),
        lambda: MambaAttribution(model).attribute(case.inputs, **case.target),
    )
    for call in calls:
        with pytest.raises(ZeroDivisionError):
            call()
        assert hook_count(model) == before
    handle.remove()
    assert expected.difference(explain(copy.deepcopy(model), case)) <= SAME
