"""One forward run and one backward for several methods, and nothing of it left behind."""

from __future__ import annotations

import copy
import gc
import threading
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
from captum_ssm.attr.engine.sharing import shared_forward
from captum_ssm.errors import TargetError

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


@pytest.mark.full
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


def test_only_the_same_call_is_shared():
    function, runs = counted(model := mamba_lm())
    ids = token_ids(2, 6)

    def row(ids, layers=None, target=(-1, 3), method=MambaAttribution):
        return method(function, model, layers).attribute(ids, target)

    calls = [  # inputs, options, whether the model runs
        (ids, {}, True),
        (ids.clone(), {}, False),
        (ids, {"target": (2, 5)}, False),
        (ids, {"method": LatimNorm}, False),
        (ids.flip(0), {}, True),
        (ids.flip(1), {}, True),
        (ids, {"layers": ["backbone.layers.1.mixer"]}, True),
        (ids, {"layers": ["backbone.layers.2.mixer"]}, True),
    ]
    alone = [row(inputs, **options) for inputs, options, _ in calls]
    runs.clear()
    with shared_forward("all", streams=True):
        for (inputs, options, new), expected in zip(calls, alone, strict=True):
            before = len(runs)
            close(row(inputs, **options), expected)
            assert len(runs) - before == new


def test_arguments_that_differ_are_not_shared():
    model, ids = mamba_lm(), token_ids(2, 6)
    runs = []

    def function(ids, mask, flag=None):
        runs.append(flag)
        return model(ids, attention_mask=mask).logits

    half = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    method = ImplicitAttentionRollout(function, model)
    with shared_forward("tail"):
        full = method.attribute(ids, (-1, 3), torch.ones(2, 6).long())
        padded = method.attribute(ids, (-1, 3), half)
        again = method.attribute(ids, (-1, 3), half.clone())
        flagged = method.attribute(ids, (-1, 3), (half, "flag"))
    assert runs == [None, None, "flag"]
    assert full[:, :2].any() and not padded[:, :2].any()
    assert torch.equal(padded, again) and torch.equal(padded, flagged)


def test_threads_share_nothing():
    models = [mamba_lm(), mamba_lm()]
    ids, found = token_ids(2, 6), {}
    barrier = threading.Barrier(2)

    def explain(i):
        barrier.wait()
        found[i] = compare(models[i], SHARING, ids, (-1, 3))

    threads = [threading.Thread(target=explain, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, model in enumerate(models):
        for name, relevance in compare(model, SHARING, ids, (-1, 3)).items():
            close(found[i][name], relevance)


def test_another_thread_sees_no_sharing():
    function, runs = counted(model := mamba_lm())
    explain, ids = ImplicitAttentionRollout(function, model), token_ids(2, 6)
    with shared_forward("tail"):
        explain.attribute(ids, (-1, 3))
        thread = threading.Thread(target=lambda: explain.attribute(ids, (-1, 3)))
        thread.start()
        thread.join()
        assert len(runs) == 2
        explain.attribute(ids, (-1, 3))
    assert len(runs) == 2
