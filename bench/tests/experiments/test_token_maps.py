"""Maps that are made of all targets at once: what the methods say of each target alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from zoo import mamba2
from zoo.mamba import transformers_model

from captum_ssm import ImplicitAttentionRollout, LatimALTI
from captum_ssm.attr.engine.run import shared_forward
from captum_ssm_bench import Cell
from captum_ssm_bench.experiments.token_maps import token_maps

Case = tuple[Any, Tensor, list[tuple[int, int]]]

#: The norms and scans of transformers, which Captum's classes run here, compute in float32.
SINGLE = 1e-5


@pytest.fixture(params=["mamba", "mamba2"])
def case(request: pytest.FixtureRequest) -> Case:
    make = {"mamba": transformers_model, "mamba2": mamba2.make_model}[request.param]
    model = make(request.param).double()
    ids = torch.randint(19, (1, 9))
    return model, ids, [(p, random.randrange(19)) for p in (7, 3, 8)]


def found(cell: Cell, case: Case) -> Tensor:
    (only,) = token_maps()[cell](*case).values()
    return only


def test_rollout_of_attention(case: Case) -> None:
    model, ids, targets = case
    explain = ImplicitAttentionRollout(model)
    for components in ("s6", "unified"):
        wanted = [
            explain.attribute(ids, query=p, components=components)[0]  # type: ignore[arg-type]
            for p, _ in targets
        ]
        assert_same(found(Cell("ImplicitAttentionRollout", components), case), wanted)


@pytest.mark.parametrize("activation", ["linearized", "silu"])
def test_rollout_of_alti(case: Case, activation: str) -> None:
    model, ids, targets = case
    explain = LatimALTI(model, activation=activation)
    wanted = [explain.attribute(ids, query=p)[0] for p, _ in targets]
    assert_same(found(Cell("LatimALTI rollout", activation), case), wanted)


def test_gradients_and_ablation_by_hand(case: Case) -> None:
    model, ids, targets = case
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    times, without = [], []
    for position, token in targets:
        logit = logits_of(model)(embedded)[0, position, token]
        (gradient,) = torch.autograd.grad(logit, embedded)
        times.append((gradient * embedded).sum(-1)[0].detach())
        losses = []
        for place in range(ids.shape[1]):
            changed = embedded.detach().clone()
            changed[:, place] = 0
            losses.append((logit - logits_of(model)(changed)[0, position, token]).detach())
        without.append(torch.stack(losses))
    assert_same(found(Cell("InputXGradient"), case), times, SINGLE)
    assert_same(found(Cell("FeatureAblation"), case), without, SINGLE)


def check_shared(cells: Iterable[Cell], case: Case) -> None:
    maps = token_maps()
    for cell in cells:
        alone = maps[cell](*case)
        with shared_forward("all", streams=True):
            maps[Cell("MambaAttribution", "unified")](*case)
            shared = maps[cell](*case)
        assert list(alone) == list(shared)
        for row, numbers in alone.items():
            assert torch.isfinite(numbers).all() and numbers.any(), cell
            assert_same(shared[row], numbers)


def test_sharing_a_run_changes_no_number(case: Case) -> None:
    """One formulation of each method."""
    check_shared({cell.method: cell for cell in token_maps()}.values(), case)


def logits_of(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda embedded: model(inputs_embeds=embedded, use_cache=False).logits


def assert_same(one: Tensor, other: Tensor | list[Tensor], tolerance: float = 1e-9) -> None:
    wanted = other if isinstance(other, Tensor) else torch.stack(other)
    assert one.shape == wanted.shape
    assert float((one - wanted).abs().max()) <= tolerance * float(wanted.abs().max())
