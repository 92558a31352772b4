"""Inside a model: any activation as what is explained, or as what explains."""

from .layer import LayerLatimFlow, LayerMambaLRP
from .neuron import NeuronLatimFlow, NeuronMambaLRP

__all__ = ["LayerLatimFlow", "LayerMambaLRP", "NeuronLatimFlow", "NeuronMambaLRP"]
