"""Relevance of every patch or pixel to classes of an image, by any method: (T, h, w).

Shapes: T classes asked about, C colour channels, h and w patches or pixels down and across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
    TransformerAttribution,
)
from captum_ssm.linear import Rule
from captum_ssm.models.vmamba import VMamba
from captum_ssm.tracing import find_mixers

from ..harness.experiment import Cell
from .image_baselines import (
    ABSOLUTE,
    Explain,
    absolute,
    captum_maps,
    picture_maps,
)

#: Which parts of a mixer the matrices include.
COMPONENTS = ("s6", "unified")
ACTIVATIONS = ("linearized", "silu")


@dataclass(frozen=True)
class ImageMap:
    """A method in one formulation.

    Attributes:
        explain: gives the maps.
        of_attention: whether it says of a model of softmax attention alone what no other
            formulation says. Default: True.
        of_stages: whether it explains models in stages, whose maps become coarser. Default: True.
    """

    explain: Explain
    of_attention: bool = True
    of_stages: bool = True

    def applies(self, model: nn.Module) -> bool:
        """Whether it has something of its own to say of this model."""
        if isinstance(model, VMamba):
            return self.of_stages
        return self.of_attention or not attention_alone(model)


def attention_alone(model: nn.Module) -> bool:
    """Whether all mixers of a model are softmax attention, which has a single component."""
    paths = [mixer.architecture.class_path for mixer in find_mixers(model)]
    return all(path.endswith("Attention") for path in paths)


def image_maps() -> dict[Cell, ImageMap]:
    """Every method that explains image classifiers, in each formulation."""
    maps: dict[Cell, ImageMap] = {}
    for components in COMPONENTS:
        for kind in (ImplicitAttention, ImplicitAttentionRollout):
            explain: Explain = partial(_common, kind=kind, components=components)
            of_attention = components == "unified"
            maps[Cell(kind.__name__, components)] = ImageMap(explain, of_attention)
        # its gradients' mean over channels LayerNorms make zero in a ViT
        explain = partial(_each, kind=MambaAttribution, components=components)
        maps[Cell("MambaAttribution", components)] = ImageMap(explain, of_attention=False)
    maps |= {**_latim_maps(), **_flow_maps()}
    for form in ("lrp", "gradient"):
        explain = partial(_each, kind=partial(TransformerAttribution, form=form))
        maps[Cell("TransformerAttribution", form)] = ImageMap(explain)
    for cell, explain in {**captum_maps(), **picture_maps()}.items():
        maps[cell] = ImageMap(explain)
    return maps


def _latim_maps() -> dict[Cell, ImageMap]:
    kinds: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("LatimNorm l1", partial(LatimNorm, p=1), {}),
        ("LatimNorm l2", partial(LatimNorm, p=2), {}),
        ("LatimALTI rollout", LatimALTI, {"aggregate": "rollout"}),
        ("LatimALTI mean", LatimALTI, {"aggregate": "mean"}),
    )
    maps = {}
    for activation in ACTIVATIONS:
        exact = activation == "linearized"  # attention has no activation to be divided
        for name, kind, options in kinds:
            explain = partial(_common, kind=partial(kind, activation=activation), **options)
            maps[Cell(name, activation)] = ImageMap(explain, exact)
        logit = partial(_each, kind=partial(LatimLogit, activation=activation))
        maps[Cell("LatimLogit", activation)] = ImageMap(logit, exact, of_stages=False)
    return maps


def _flow_maps() -> dict[Cell, ImageMap]:
    maps = {}
    rules: dict[type[LatimFlow], Rule] = {LatimFlow: "frozen", MambaLRP: "half"}
    for kind, rule in rules.items():
        patches, pixels = (partial(of, kind=kind, rule=rule) for of in (_each, _pixels))
        for name, explain in (
            ("patches", patches),
            ("patches, against the mean class", partial(patches, contrast="mean")),
            ("pixels", pixels),
            (ABSOLUTE, absolute(pixels)),
        ):
            maps[Cell(kind.__name__, name)] = ImageMap(explain)
    default: dict[str, Any] = {"kind": LatimFlow, "rule": "balanced"}
    maps[Cell("LatimFlow", "balanced, patches")] = ImageMap(partial(_each, **default))
    maps[Cell("LatimFlow", f"balanced, {ABSOLUTE}")] = ImageMap(
        absolute(partial(_pixels, **default))
    )
    return maps


def _common(
    model: nn.Module, image: Tensor, classes: Sequence[int], kind: Any, **options: Any
) -> Tensor:
    """One map for all classes."""
    found: Tensor = kind(model).attribute(image, per_token=True, **options)
    return found.expand(len(classes), -1, -1)


def _each(
    model: nn.Module, image: Tensor, classes: Sequence[int], kind: Any, **options: Any
) -> Tensor:
    """A map of patches for each class."""
    found: Tensor = kind(model).attribute_each(image, list(classes), **options)
    return found[:, 0]


def _pixels(
    model: nn.Module, image: Tensor, classes: Sequence[int], kind: Any, rule: Rule
) -> Tensor:
    """A map of pixels for each class."""
    found = kind(model).decompose_each(image, list(classes), rule=rule, roles=False)
    return torch.cat([each.inputs.sum(1) for each in found]).detach()
