"""Explain an activation inside a model, or attribute an output to such an activation."""

from .dictionary import SparseAutoencoder
from .features import Dictionary, Feature
from .graph import Graph, Node
from .layer import LayerLatimFlow, LayerMambaLRP
from .make import attribution_graph
from .neuron import NeuronLatimFlow, NeuronMambaLRP
from .removal import validate, without
from .writers import to_graphml, to_json

__all__ = [
    "Dictionary",
    "Feature",
    "Graph",
    "LayerLatimFlow",
    "LayerMambaLRP",
    "NeuronLatimFlow",
    "NeuronMambaLRP",
    "Node",
    "SparseAutoencoder",
    "attribution_graph",
    "to_graphml",
    "to_json",
    "validate",
    "without",
]
