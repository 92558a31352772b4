"""Several targets of one forward run, against one call of attribute per target."""

from __future__ import annotations

import oracles
import pytest
import torch
from helpers.every_method import each_method
from zoo import mamba2
from zoo.small import classifier, images, mamba_lm, token_ids, vision

from captum_ssm import (
    CaptumSSMError,
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimFlow,
    MambaAttribution,
)
from captum_ssm.attr.call.targets import Each
from captum_ssm.attr.engine import run
from captum_ssm.operators import Chain, Operator

MODELS = {
    "mamba": mamba_lm,
    "bamba": lambda: mamba2.make_model("bamba"),
}


def check(method, inputs, targets, *args, **options):
    """One call for all targets, one for each; how often the model ran in the former."""
    runs = []
    model = method.forward_func
    handle = model.register_forward_hook(lambda *_: runs.append(1))
    found = method.attribute_each(inputs, targets, *args, **options)
    handle.remove()
    wanted = [method.attribute(inputs, t, *args, per_token=True, **options) for t in targets]
    assert oracles.relative_error(found, torch.stack(wanted)) <= 1e-6
    distinct = {tuple(row.flatten().tolist()) for row in found}
    assert type(found) is torch.Tensor and found.is_contiguous() and not found.requires_grad
    return len(runs), len(distinct)


@pytest.mark.parametrize("model", MODELS)
@each_method
def test_each_target_is_explained_as_by_itself(method, model):
    targets = [(6, 3), (0, 2), [(-1, 4), (2, 1)], torch.tensor([[3, 0], [3, 0]])]
    assert check(method(MODELS[model]()), token_ids(2, 7), targets) == (1, len(targets))


@each_method
def test_batches_run_in_parts(method):
    targets = [[(6, 3), (1, 2), (-1, 4)], (4, 1)]
    runs, distinct = check(method(mamba_lm()), token_ids(3, 7), targets, internal_batch_size=2)
    assert (runs, distinct) == (2, 2)


@each_method
def test_classes_of_embeddings_with_a_mask(method):
    model = classifier("last")
    embeddings = model.backbone.get_input_embeddings()(token_ids(2, 6)).detach()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])

    def forward(x, attention_mask):
        return model(None, attention_mask, x)

    explain = method(forward, model=model)
    found = explain.attribute_each(embeddings, [0, 2, [1, 4]], mask)
    wanted = [explain.attribute(embeddings, t, mask, per_token=True) for t in (0, 2, [1, 4])]
    assert found.shape == (3, 2, 6) and not found[:, 0, :2].any()
    assert oracles.relative_error(found, torch.stack(wanted)) <= 1e-6


@each_method
def test_classes_of_images_give_grids(method):
    runs, _ = check(method(vision()), images(2), [1, [0, 3]])
    # methods that look for the patches do so once in a further run, which ends at the first block
    assert runs == 1


@pytest.mark.parametrize("recipe", ["paper", "published_code"])
@pytest.mark.parametrize("method", [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution])
def test_options_reach_the_method(method, recipe):
    options = {"recipe": recipe, "components": "s6", "start_layer": 1}
    explain, ids = method(mamba_lm()), token_ids(1, 6)
    while not explain.attribute(ids, (5, 3), **options).any():  # all of it negative, and clamped
        explain, ids = method(mamba_lm()), token_ids(1, 6)
    assert check(explain, ids, [(5, 3), (2, 2)], **options) == (1, 2)


def test_a_query_of_the_users_holds_for_every_target():
    explain = ImplicitAttentionRollout(mamba_lm())
    found = explain.attribute_each(token_ids(1, 6), [(5, 3), (2, 2)], query=4)
    assert torch.equal(found[0], found[1]) and not found[:, :, 5:].any()


def test_checkpointed_graphs_serve_every_target():
    model = mamba_lm()
    model.gradient_checkpointing_enable()
    model.train()
    # blocks run again, inside the model's one run, for the backward pass of each target
    assert check(MambaAttribution(model), token_ids(2, 6), [(5, 3), (2, 2), (5, 1)]) == (1, 3)


@pytest.mark.parametrize("room", [0, 40, 2**20])
def test_matrices_are_kept_as_far_as_there_is_room(room, monkeypatch):
    model, formed = mamba_lm(), []
    monkeypatch.setattr(run, "_KEPT_ELEMENTS", room)
    for name in ("dense", "reduced_strip", "rows"):
        made = getattr(Operator, name)
        monkeypatch.setattr(Chain, name, lambda *a, made=made: formed.append(1) or made(*a))
    targets = [(5, 3), (2, 2), (5, 1)]
    found = MambaAttribution(model).attribute_each(token_ids(1, 6), targets)
    assert found.shape == (3, 1, 6)
    # three layers of 36 elements each: none, one or all of them are formed only once
    assert len(formed) == {0: 9, 40: 7, 2**20: 3}[room]
    assert check(MambaAttribution(model), token_ids(1, 6), targets) == (1, 3)


def test_deltas_come_with_the_flow_of_each_target():
    explain, ids = LatimFlow(mamba_lm()), token_ids(2, 6)
    found, deltas = explain.attribute(ids, Each([(5, 3), (2, 1)]), return_convergence_delta=True)
    assert found.shape == (2, 2, 6) and deltas.shape == (2, 2)
    assert deltas.abs().max() <= 1e-4


@each_method
def test_no_target_is_an_error(method):
    with pytest.raises(CaptumSSMError, match="targets is empty") as caught:
        method(mamba_lm()).attribute_each(token_ids(1, 4), [])
    assert isinstance(caught.value, ValueError)


@each_method
def test_a_wrong_target_among_them_is_an_error(method):
    with pytest.raises(CaptumSSMError, match="out of range"):
        method(mamba_lm()).attribute_each(token_ids(1, 4), [(1, 2), (4, 2)])
