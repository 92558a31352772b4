"""Features: directions of an activation, each with vectors to measure and to add the feature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..errors import OptionError
from ..linear.sites import Site, SiteActivation
from .layer import Layer


class Dictionary(Protocol):
    """An encoder and decoder of features, such as a sparse autoencoder."""

    def encode(self, x: Tensor) -> Tensor:
        """Return the activations of the features (..., F) for vectors (..., E)."""

    def decode(self, features: Tensor) -> Tensor:
        """Return the vectors (..., E) for activations of the features (..., F)."""


@dataclass(frozen=True, eq=False)
class Feature:
    """A direction of an activation, as a node of a graph.

    Attributes:
        layer: a module of the model, or the module's qualified name.
        direction: the vector that the feature adds to the activation (E,), or a neuron's index.
        position: the token's position; negative ones count from the end. Default: None, all tokens.
        encode: the vector (E,) whose product with the activation is the feature's value. Default:
            None, the least-squares solution with the other features of the layer and token.
        label: the displayed name. Default: ``""``, the feature's index.

    Example:
        >>> from captum_ssm.inside import Feature
        >>> Feature("backbone.layers.0", 7, position=-1).direction
        7
    """

    layer: Layer
    direction: Tensor | int
    position: int | None = None
    encode: Tensor | None = None
    label: str = ""


@dataclass(frozen=True, eq=False)
class Readings:
    """The n features of one layer's activation in a run, which become nodes of a graph.

    Attributes:
        site: the layer's output in the model.
        positions: the position of each feature's token (n,).
        indices: the index of each feature; None for a whole activation.
        labels: the displayed name of each feature.
        activations: each feature's value (n,); a whole activation's contribution to the target.
        directions: the vector that one unit of each feature adds to the activation (n, W); for a
            whole activation, the activation itself.
        reads: the derivative of each feature with respect to the activation at its token (n, W).
        rest: the constant part of the activation, (L, W) or (W,), which belongs to no feature.
        kind: ``"feature"`` of a dictionary, ``"direction"`` or ``"whole"``.
    """

    site: Site
    positions: Tensor
    indices: list[int | None]
    labels: list[str]
    activations: Tensor
    directions: Tensor
    reads: Tensor
    rest: Tensor
    kind: Literal["feature", "direction", "whole"]

    @property
    def writes(self) -> Tensor:
        """Return the vector that each feature adds to the activation at its token, (n, W)."""
        if self.kind == "whole":
            return self.directions
        return self.activations[:, None] * self.directions

    def select(self, feature_index: Tensor) -> Readings:
        """Return the features with the given indices (k,)."""
        numbers = feature_index.tolist()
        return Readings(
            site=self.site,
            positions=self.positions[feature_index],
            indices=[self.indices[i] for i in numbers],
            labels=[self.labels[i] for i in numbers],
            activations=self.activations[feature_index],
            directions=self.directions[feature_index],
            reads=self.reads[feature_index],
            rest=self.rest,
            kind=self.kind,
        )


def tokens_of(activation: SiteActivation, site: Site) -> Tensor:
    """Return an activation of one example as one row for each token, (L, W).

    Raises:
        OptionError: if the activation has no token dimension, or several examples.
    """
    value = activation.value.detach()
    if value.dim() < 3 or len(value) != 1:
        raise OptionError(
            f"nodes names {site.name!r}, whose activation has the shape {tuple(value.shape)}; a "
            "graph needs one example with tokens, (1, L, E). Pass a layer with tokens."
        )
    return value[0].flatten(1)


def whole_activations(site: Site, activation: SiteActivation, gradient: Tensor) -> Readings:
    """Return whole activations as nodes: one for each token, or one for each head and token.

    Args:
        site, activation: the layer's output, and its activation in the run.
        gradient: the gradient of the target with respect to the activation.
    """
    x = tokens_of(activation, site)
    heads = activation.value.shape[2] if site.at == "heads" else 1
    split = x.view(len(x), heads, -1)
    # (1, node's head, head, 1): a node has the values of one head, and 0 elsewhere
    one_head = torch.eye(heads).to(x)[None, :, :, None]
    writes = (split[:, None] * one_head).flatten(2).flatten(0, 1)  # (L * heads, W)
    reads = (gradient.reshape(split.shape)[:, None] * one_head).flatten(2).flatten(0, 1)
    positions = torch.arange(len(x), device=x.device).repeat_interleave(heads)
    labels = [f"head {head}" if heads > 1 else "" for _ in range(len(x)) for head in range(heads)]
    indices = [head if heads > 1 else None for _ in range(len(x)) for head in range(heads)]
    activations = (writes * reads).sum(1)  # contributions to the target
    rest = x.new_zeros(x.shape[1])
    return Readings(site, positions, indices, labels, activations, writes, reads, rest, "whole")


def active_features(site: Site, activation: SiteActivation, dictionary: Dictionary) -> Readings:
    """Return the active features of a dictionary as nodes: one for each token and active feature.

    Raises:
        OptionError: when the dictionary does not fit the activation.
    """
    x = tokens_of(activation, site)
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        features = _encode_checked(dictionary, leaf, site)
        positions, indices = features.detach().nonzero(as_tuple=True)
        reads = _derivatives(features, leaf, positions, indices)
    with torch.no_grad():
        # decode each used feature once; `unit_of` expands the directions to all nodes
        used_ids, unit_of = torch.unique(indices, return_inverse=True)
        zeros = features.new_zeros(1, features.shape[-1])
        rest = dictionary.decode(zeros)[0].to(x)  # constant: it belongs to no feature
        units = zeros.expand(len(used_ids), -1).scatter(1, used_ids[:, None], 1.0)
        directions = (dictionary.decode(units).to(x) - rest)[unit_of] if len(used_ids) else x[:0]
        activations = features.detach()[positions, indices].to(x)
    feature_ids: list[int | None] = list(indices.tolist())
    labels = [f"feature {i}" for i in feature_ids]
    return Readings(
        site, positions, feature_ids, labels, activations, directions, reads, rest, "feature"
    )


def _encode_checked(dictionary: Dictionary, x: Tensor, site: Site) -> Tensor:
    """Encode activations (L, W) to (L, F); raise unless the dictionary decodes them to (L, W)."""
    try:
        features = dictionary.encode(x)
        fits = isinstance(features, Tensor) and features.shape[:-1] == x.shape[:1]
        decoded = dictionary.decode(features.detach()) if fits else x.new_zeros(0)
    except RuntimeError as error:
        raise _does_not_fit(site, x, dictionary, str(error)) from error
    if not fits or decoded.shape != x.shape:
        raise _does_not_fit(site, x, dictionary, f"encode returns {_shape(features)}")
    return features


def _derivatives(features: Tensor, x: Tensor, positions: Tensor, indices: Tensor) -> Tensor:
    """Return the derivative of each active feature with respect to its token's activation, (n, W).

    Tokens are encoded separately, so one backward pass computes one feature's derivative per token.
    """
    reads = x.new_zeros(len(positions), x.shape[1])
    if not len(positions):
        return reads
    order = torch.arange(len(positions), device=positions.device)
    rank = order - torch.searchsorted(positions, positions)  # index among the token's features
    for turn in range(int(rank.max()) + 1):
        in_turn = (rank == turn).nonzero()[:, 0]
        total = features[positions[in_turn], indices[in_turn]].sum()
        (gradient,) = torch.autograd.grad(total, x, retain_graph=True)
        reads[in_turn] = gradient[positions[in_turn]]
    return reads


def named_directions(
    site: Site, activation: SiteActivation, features: Sequence[Feature]
) -> Readings:
    """Return the user's directions as nodes: one for each token and direction.

    Raises:
        OptionError: for a direction of a wrong width, or a position outside of the tokens.
    """
    x = tokens_of(activation, site)
    length, width = x.shape
    by_position: dict[int, list[tuple[int, Feature]]] = {}
    for index, feature in enumerate(features):
        for position in _positions(feature, length):
            by_position.setdefault(position, []).append((index, feature))
    positions, indices, labels, reads, directions = [], [], [], [], []
    for position, here in sorted(by_position.items()):
        # least squares: the rows of the pseudoinverse measure the directions of this token
        vectors = torch.stack([_vector(f.direction, x, site, "direction") for _, f in here])
        duals = torch.linalg.pinv(vectors.cpu().double()).mT.to(vectors)
        for (index, feature), direction, dual in zip(here, vectors, duals, strict=True):
            encode = feature.encode
            positions.append(position)
            indices.append(index)
            labels.append(feature.label or f"direction {index}")
            reads.append(dual if encode is None else _vector(encode, x, site, "encode"))
            directions.append(direction)
    rows = torch.stack(reads)
    tokens = torch.tensor(positions, device=x.device)
    activations = (rows * x[tokens]).sum(1)
    along, rest = torch.stack(directions), x.new_zeros(width)  # no constant part
    return Readings(
        site, tokens, list(indices), labels, activations, along, rows, rest, "direction"
    )


def _positions(feature: Feature, length: int) -> Iterator[int]:
    """Yield the positions of a feature's tokens as nonnegative indices."""
    if feature.position is None:
        yield from range(length)
        return
    if not -length <= feature.position < length:
        raise OptionError(
            f"Feature(position={feature.position}) is outside of the {length} tokens of layer "
            f"{feature.layer!r}. Pass the position of a token, or None for all tokens."
        )
    yield feature.position % length


def _vector(value: Any, x: Tensor, site: Site, name: str) -> Tensor:
    """Convert a vector (W,) or the index of a neuron to a direction (W,)."""
    width = x.shape[1]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < width:
        return torch.zeros_like(x[0]).index_fill(0, torch.tensor([value], device=x.device), 1.0)
    if isinstance(value, Tensor) and value.shape == (width,) and bool(value.any()):
        return value.detach().to(x)
    got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise OptionError(
        f"Feature({name}={got}) is not a direction at {site.name!r}, whose activation has {width} "
        f"features. Pass the index of a feature, or a tensor ({width},) that is not 0."
    )


def _does_not_fit(site: Site, x: Tensor, dictionary: Any, problem: str) -> OptionError:
    """Return the error for a dictionary that does not fit the activation x (L, W)."""
    return OptionError(
        f"The dictionary {type(dictionary).__name__} does not fit the activation of "
        f"{site.name!r}, {tuple(x.shape)}: {problem}. Pass the layer that it was trained for."
    )


def _shape(features: Any) -> str:
    return str(tuple(features.shape)) if isinstance(features, Tensor) else type(features).__name__
