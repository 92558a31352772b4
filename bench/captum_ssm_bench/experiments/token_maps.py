"""Relevance of every token to every target of one example, by any method: (T, L).

Shapes: T targets, L tokens, E width of the embeddings, V words, N points of the embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from captum.attr._utils.approximation_methods import approximation_parameters
from torch import Tensor, nn

from captum_ssm.attr import (
    ImplicitAttention,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
    TransformerAttribution,
)
from captum_ssm.tracing import repaired_scans

from ..harness.experiment import Cell

#: A position and the token that the logits there are asked about.
Target = tuple[int, int]
#: (model, ids (1, L), targets) to maps (T, L) by row; see :meth:`.Experiment.measure`.
TokenMap = Callable[[nn.Module, Tensor, Sequence[Target]], Mapping[str, Tensor]]

COMPONENTS = ("s6", "unified")
ACTIVATIONS = ("linearized", "silu")
#: Of the integral of integrated gradients.
STEPS = 20


def token_maps() -> dict[Cell, TokenMap]:
    """Every method that explains models of texts, in each formulation."""
    maps: dict[Cell, TokenMap] = {}
    for components in COMPONENTS:
        for name, find in (
            ("ImplicitAttention", _attention),
            ("ImplicitAttentionRollout", _attention_rollout),
        ):
            maps[Cell(name, components)] = partial(find, components=components)
        maps[Cell("MambaAttribution", components)] = partial(
            _by_target, kind=MambaAttribution, components=components
        )
    for activation in ACTIVATIONS:
        for p in (1, 2):
            norm = partial(_layer_maps, kind=LatimNorm, p=p, activation=activation)
            maps[Cell(f"LatimNorm l{p}", activation)] = norm
        maps[Cell("LatimALTI", activation)] = partial(
            _layer_maps, kind=LatimALTI, activation=activation
        )
        maps[Cell("LatimALTI rollout", activation)] = partial(_alti_rollout, activation=activation)
        logit = partial(LatimLogit, activation=activation)
        maps[Cell("LatimLogit", activation)] = partial(_by_target, kind=logit)
    maps[Cell("LatimFlow", "frozen")] = partial(_by_target, kind=LatimFlow, rule="frozen")
    maps[Cell("MambaLRP", "half")] = partial(_by_target, kind=MambaLRP)
    for form in ("lrp", "gradient"):
        by_form = partial(TransformerAttribution, form=form)
        maps[Cell("TransformerAttribution", form)] = partial(_by_target, kind=by_form)
    maps[Cell("Saliency")] = _saliency
    maps[Cell("InputXGradient")] = _input_x_gradient
    maps[Cell("IntegratedGradients")] = _integrated_gradients
    maps[Cell("FeatureAblation")] = _ablation
    return maps


def _attention(
    model: nn.Module, ids: Tensor, targets: Sequence[Target], components: str
) -> dict[str, Tensor]:
    matrices = ImplicitAttention(model).matrices(ids, components=components)
    return _by_layer([matrix[0, _positions(targets)] for matrix in matrices])


def _attention_rollout(
    model: nn.Module, ids: Tensor, targets: Sequence[Target], **options: Any
) -> dict[str, Tensor]:
    """:class:`ImplicitAttentionRollout` of all queries at once."""
    matrices = ImplicitAttention(model).matrices(ids, **options)
    own = torch.eye(ids.shape[1]).to(matrices[0])
    return {"": _product([own + matrix[0] for matrix in matrices])[_positions(targets)]}


def _layer_maps(
    model: nn.Module, ids: Tensor, targets: Sequence[Target], kind: Any, **options: Any
) -> dict[str, Tensor]:
    maps = kind(model, **options).maps(ids, positions=_positions(targets))
    return _by_layer([found[0] for found in maps])


def _alti_rollout(
    model: nn.Module, ids: Tensor, targets: Sequence[Target], activation: str
) -> dict[str, Tensor]:
    """What ``attribute`` of :class:`LatimALTI` says, of all queries at once."""
    maps = LatimALTI(model, activation=activation).maps(ids)
    return {"": _product([found[0] for found in maps])[_positions(targets)]}


def _by_layer(maps: Sequence[Tensor]) -> dict[str, Tensor]:
    """Each layer's map, and their mean."""
    found = {f"layer {i}": each for i, each in enumerate(maps)}
    return {**found, "mean": torch.stack(list(maps)).mean(0)}


def _product(matrices: Sequence[Tensor]) -> Tensor:
    """The product (L, L) of matrices, later ones on the left."""
    return reduce(lambda product, later: later @ product, matrices)


def _positions(targets: Sequence[Target]) -> list[int]:
    return [position for position, _ in targets]


def _by_target(
    model: nn.Module, ids: Tensor, targets: Sequence[Target], kind: Any, **options: Any
) -> dict[str, Tensor]:
    return {"": kind(model).attribute_each(ids, list(targets), **options)[:, 0]}


# What classes of Captum of these names say of the embeddings, summed over features; they would run
# the model once more for every target.


def _saliency(model: nn.Module, ids: Tensor, targets: Sequence[Target]) -> dict[str, Tensor]:
    embedded = _embedded(model, ids)
    return {"": _gradients(model, embedded, targets)[:, 0].abs().sum(-1)}


def _input_x_gradient(
    model: nn.Module, ids: Tensor, targets: Sequence[Target]
) -> dict[str, Tensor]:
    embedded = _embedded(model, ids)
    return {"": (embedded * _gradients(model, embedded, targets)[:, 0]).sum(-1)}


def _integrated_gradients(
    model: nn.Module, ids: Tensor, targets: Sequence[Target]
) -> dict[str, Tensor]:
    """From a baseline of zeros, with Captum's default rule."""
    embedded = _embedded(model, ids)
    sizes, places = approximation_parameters("gausslegendre")
    weights, shares = (torch.tensor(x(STEPS)).to(embedded) for x in (sizes, places))
    gradients = _gradients(model, shares[:, None, None] * embedded, targets)
    return {"": (embedded * torch.einsum("n,tnle->tle", weights, gradients)).sum(-1)}


def _ablation(model: nn.Module, ids: Tensor, targets: Sequence[Target]) -> dict[str, Tensor]:
    """What the logits lose if the embedding of one token after the other is zero."""
    embedded = _embedded(model, ids)  # (1, L, E)
    kept = 1 - torch.eye(ids.shape[1]).to(embedded)
    with torch.no_grad(), repaired_scans():
        logits = _logits(model, torch.cat([embedded, embedded * kept[..., None]]))  # (1 + L, L, V)
    answers = torch.stack([_asked(logits, target) for target in targets])
    return {"": answers[:, :1] - answers[:, 1:]}


def _gradients(model: nn.Module, points: Tensor, targets: Sequence[Target]) -> Tensor:
    """The gradient of each target at points (N, L, E), all from one forward run: (T, N, L, E)."""
    points = points.clone().requires_grad_()
    with torch.enable_grad(), repaired_scans():
        logits = _logits(model, points)
        found = [
            torch.autograd.grad(_asked(logits, target).sum(), points, retain_graph=True)[0]
            for target in targets
        ]
    return torch.stack(found)


def _asked(logits: Tensor, target: Target) -> Tensor:
    """What a target is about, (N,), of logits (N, L, V)."""
    position, token = target
    return logits[:, position, token]


def _embedded(model: Any, ids: Tensor) -> Tensor:
    embedded: Tensor = model.get_input_embeddings()(ids)
    return embedded.detach()


def _logits(model: Any, embedded: Tensor) -> Tensor:
    logits: Tensor = model(inputs_embeds=embedded, use_cache=False).logits
    return logits
