"""Cut each of one example's strongest messages separately, to measure the true effects."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .edge_effects import EdgeEffects
from .effects import Edge
from .pairs import Edges


class Held(NamedTuple):
    """A single edge, and the true effect of cutting it.

    Attributes:
        edge: the edge, with its estimated effect.
        true: the decrease of the explained number after the cut.
    """

    edge: Edge
    true: float


def strongest_edges(
    method: EdgeEffects,
    inputs: Tensor,
    target: Any,
    count: int,
    layers: Any = None,
) -> list[Held]:
    """Cut each of the edges with the largest estimated effects on one example separately.

    Args:
        method: the :class:`.EdgeEffects` that estimates effects on the model.
        inputs: the example, a batch of one.
        target: the explained output, in Captum's forms.
        count: number of edges.
        layers: the layers, in the forms of :attr:`Edges.layers <captum_ssm.Edges>`. Default: None,
            all.

    Example:
        >>> import torch
        >>> from captum_ssm import EdgeEffects
        >>> from captum_ssm.edges.strongest import strongest_edges
        >>> from captum_ssm.models import load_bundled
        >>> model, vocabulary = load_bundled()
        >>> prompt = "anna owns the lamp . bob owns the kite . ? anna owns the"
        >>> ids, lamp = torch.tensor([vocabulary.encode(prompt)]), vocabulary.id_of("lamp")
        >>> (found,) = strongest_edges(EdgeEffects(model), ids, (-1, lamp), 1)
        >>> found.edge.layer, found.edge.source, found.edge.target, found.true > 1
        (1, 3, 13, True)
    """
    edges = method.attribute(inputs, target).top(count, layers)[0]
    if not edges:
        return []
    cuts = [Edges(edge.name, edge.source, edge.target) for edge in edges]
    truth = method.validate(inputs, target, edges=cuts)
    return [Held(edge, true) for edge, true in zip(edges, truth.true.tolist(), strict=True)]
