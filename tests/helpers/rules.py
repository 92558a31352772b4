"""LatimFlow and its kin under the rule whose constants are biases alone."""

from __future__ import annotations

from functools import partial

from captum_ssm import LatimFlow, LayerLatimFlow, NeuronLatimFlow

frozen_flow = partial(LatimFlow, rule="frozen")
frozen_layer = partial(LayerLatimFlow, rule="frozen")
frozen_neuron = partial(NeuronLatimFlow, rule="frozen")
