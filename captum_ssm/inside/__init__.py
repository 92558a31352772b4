"""Inside a model: any activation as what is explained, or as what explains."""

from .features import Dictionary, Feature
from .graph import Graph, Node
from .layer import LayerLatimFlow, LayerMambaLRP
from .make import attribution_graph
from .neuron import NeuronLatimFlow, NeuronMambaLRP
from .removal import against_truth, without

__all__ = [
    "Dictionary",
    "Feature",
    "Graph",
    "LayerLatimFlow",
    "LayerMambaLRP",
    "NeuronLatimFlow",
    "NeuronMambaLRP",
    "Node",
    "against_truth",
    "attribution_graph",
    "without",
]
