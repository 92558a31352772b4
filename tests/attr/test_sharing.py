"""One forward run and one backward for several methods, and nothing of it left behind."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from helpers.snapshots import context
from zoo.small import mamba_lm, token_ids

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
    TransformerAttribution,
    compare,
)
from captum_ssm.errors import TargetError

pytestmark = pytest.mark.slow

SHARING = [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution, LatimNorm, LatimALTI]


def close(found, expected):
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-6)


class Counted(torch.autograd.Function):
    """The identity; counts the backward passes that begin at it."""

    passes = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Counted.passes += 1
        return gradient


def counted(model):
    """A function that runs the model, the list of its runs, and their outputs."""
    runs = []

    def function(*args):
        out = model(*args)
        runs.append(weakref.ref(out.logits))
        return Counted.apply(out.logits)

    Counted.passes = 0
    return function, runs


def test_one_forward_and_one_backward():
    function, runs = counted(model := mamba_lm())
    methods = [m(function, model) for m in SHARING]
    methods += [
        MambaAttribution(function, model),
        TransformerAttribution(function, model, form="gradient"),
    ]
    compare(function, methods, token_ids(2, 6), (-1, 3))
    assert (len(runs), Counted.passes) == (1, 1)


def test_what_runs_under_rules_of_its_own_runs_by_itself():
    function, runs = counted(model := mamba_lm())
    compare(function, [*SHARING, LatimFlow, MambaLRP], token_ids(2, 6), (-1, 3), model=model)
    assert len(runs) == 5  # each of the two, and once to compare the number
    runs.clear()
    lrp = TransformerAttribution(function, model, form="lrp")
    compare(function, [MambaAttribution, lrp], token_ids(2, 6), (-1, 3), model=model)
    assert len(runs) == 2


def test_no_graph_where_nobody_takes_gradients():
    model, ids, recording = mamba_lm(), token_ids(1, 5), []
    model.backbone.layers[0].mixer.register_forward_hook(
        lambda module, args, output: recording.append(torch.is_grad_enabled())
    )
    compare(model, [ImplicitAttention, LatimNorm, LatimFlow], ids, (-1, 3))
    assert len(recording) == 2 and not recording[0]  # the second run is LatimFlow's own
    recording.clear()
    with torch.no_grad():
        compare(model, [ImplicitAttention, MambaAttribution], ids, (-1, 3))
    assert recording == [True]


def test_nothing_is_left_behind():
    function, runs = counted(model := mamba_lm())
    before = copy.deepcopy(model.state_dict())
    compare(function, SHARING, token_ids(2, 6), (-1, 3), model=model)
    with pytest.raises(TargetError):
        compare(function, SHARING, token_ids(2, 6), (-1, 99), model=model)
    gc.collect()
    assert len(runs) == 2 and all(run() is None for run in runs)
    assert context() == {}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_batches_in_parts_hold_one_run_at_a_time():
    alive = []
    model = mamba_lm()
    runs = []

    def function(ids):
        gc.collect()
        alive.append(sum(run() is not None for run in runs))
        out = model(ids).logits
        runs.append(weakref.ref(out))
        return Counted.apply(out)

    compare(function, SHARING, token_ids(4, 5), (-1, 3), model=model, internal_batch_size=1)
    assert len(runs) == 4 and not any(alive)
