"""Relevance of every token to every target of one example, by any method: (T, L).

Shapes: T targets, L tokens, E width of the embeddings, V words, N points of the embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from captum.attr import FeatureAblation, InputXGradient, IntegratedGradients, Saliency
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
    for kind in (Saliency, InputXGradient, FeatureAblation):
        maps[Cell(kind.__name__)] = partial(_by_captum, kind=kind)
    maps[Cell("IntegratedGradients")] = partial(_by_captum, kind=IntegratedGradients, n_steps=STEPS)
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


def _by_captum(
    model: Any, ids: Tensor, targets: Sequence[Target], kind: Any, **options: Any
) -> dict[str, Tensor]:
    """What a class of Captum says of the embeddings, summed over features."""
    embedded = model.get_input_embeddings()(ids).detach()
    explain = kind(lambda points: model(inputs_embeds=points, use_cache=False).logits)
    if kind is FeatureAblation:  # of which each feature of a token has the token's number
        options |= {"feature_mask": torch.arange(ids.shape[1], device=ids.device)[None, :, None]}
    with repaired_scans():
        found = [explain.attribute(embedded, target=target, **options) for target in targets]
    maps = torch.cat(found).detach()
    return {"": maps[..., 0] if kind is FeatureAblation else maps.sum(-1)}
