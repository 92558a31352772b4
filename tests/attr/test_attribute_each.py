"""Several targets of one forward run, against one call of attribute per target."""

from __future__ import annotations

import oracles
import pytest
import torch
from helpers.every_method import each_method, without_replays
from zoo import mamba2
from zoo.small import images, mamba_lm, token_ids, vision

from captum_ssm import LatimFlow, MambaAttribution
from captum_ssm.attr.call.targets import Each

pytestmark = pytest.mark.slow

#: How often a model runs for all targets, where that is not once.
RUNS = {"TransformerAttribution": 2, "LatimLogit": 2}
MODELS = {"mamba": mamba_lm, "bamba": lambda: mamba2.make_model("bamba")}


def check(method, inputs, targets, *args, **options):
    runs = []
    model = method.forward_func
    handle = model.register_forward_hook(lambda *_: runs.append(1))
    with without_replays(runs):
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
    runs, distinct = check(method(MODELS[model]()), token_ids(2, 7), targets)
    assert runs <= RUNS.get(method.__name__, 1) and distinct == len(targets)


@each_method
def test_batches_run_in_parts(method):
    targets = [[(6, 3), (1, 2), (-1, 4)], (4, 1)]
    runs, distinct = check(method(mamba_lm()), token_ids(3, 7), targets, internal_batch_size=2)
    assert runs <= 2 * RUNS.get(method.__name__, 1) and distinct == 2


@each_method
def test_classes_of_images_give_grids(method):
    runs, _ = check(method(vision()), images(2), [1, [0, 3]])
    # methods that look for the patches do so once in a further run, which ends at the first block
    assert runs <= RUNS.get(method.__name__, 1)


def test_checkpointed_graphs_serve_every_target():
    model = mamba_lm()
    model.gradient_checkpointing_enable()
    model.train()
    # blocks run again, inside the model's one run, for the backward pass of each target
    assert check(MambaAttribution(model), token_ids(2, 6), [(5, 3), (2, 2), (5, 1)]) == (1, 3)


def test_deltas_come_with_the_flow_of_each_target():
    explain, ids = LatimFlow(mamba_lm()), token_ids(2, 6)
    found, deltas = explain.attribute(ids, Each([(5, 3), (2, 1)]), return_convergence_delta=True)
    assert found.shape == (2, 2, 6) and deltas.shape == (2, 2)
    assert deltas.abs().max() <= 1e-4
