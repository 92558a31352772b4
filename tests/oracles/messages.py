"""Knock-outs by hand: a mixer's whole matrix, over tokens and channels, with entries zeroed.

Nothing is shared with the package's knock-outs but the operators themselves, as they are traced;
every output is put in place by a hook of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from captum_ssm import trace
from captum_ssm.operators import Operator
from captum_ssm.tracing import Layer

#: Which entries of a layer's matrix are zeroed, as booleans (B, L, L); row i reads column j.
Zeroed = Mapping[int, Tensor]


def whole_matrix(operator: Operator) -> Tensor:
    """All an operator is, over tokens and channels, (B, L, C, L, C), of unit vectors."""
    batch, tokens, heads, per_head = operator.shape
    channels = heads * per_head
    dtype = operator.dtype if operator.dtype.is_floating_point else torch.float64
    units = torch.eye(tokens * channels, dtype=dtype).view(-1, 1, tokens, heads, per_head)
    made = operator.apply(units.expand(-1, batch, -1, -1, -1))
    return made.reshape(tokens, channels, batch, tokens, channels).permute(2, 3, 4, 0, 1)


def cut_output(
    layer: Layer, zeroed: Tensor, change: Callable[[Operator], Tensor] = whole_matrix
) -> Tensor:
    """What a mixer returns without the entries zeroed, (B, L, E).

    ``change`` makes the matrix of which the entries are subtracted.
    """
    linear = layer.linear
    lost = change(linear.operator) * zeroed[:, :, None, :, None]
    values = linear.values.flatten(2)
    before = torch.einsum("bicjd,bjd->bic", lost, values).view(linear.values.shape)
    at_rest = linear.project(torch.zeros_like(before))
    # of what the module itself returned, which rounds in its own way
    return layer.in_order(layer.output) - (linear.project(before) - at_rest)


def run_without(
    model: Any, inputs: Tensor, zeroed: Zeroed, change: Callable[[Operator], Tensor] = whole_matrix,
    **options: Any,
) -> tuple[Any, list[Tensor]]:  # fmt: skip
    """What the model returns without some entries, and what the mixers with any returned.

    ``zeroed`` holds the entries by the number of the mixer call.
    """
    outputs: list[Tensor] = []
    with torch.no_grad(), ExitStack() as stack:
        for number in sorted(zeroed):
            with trace(model) as record:
                model(inputs, **options)
            layer = record.layers[number]
            out = cut_output(layer, zeroed[number], change)
            outputs.append(out)
            returned = out
            if layer.map is not None:  # places that hold no token keep what they hold
                lost = layer.in_order(layer.output) - out
                returned = layer.output - layer.map.as_returned(lost)
            hook = layer.mixer.module.register_forward_hook(_returning(returned))
            stack.callback(hook.remove)
        with trace(model, operators=False):  # which keeps no cache
            return model(inputs, **options), outputs


def _returning(out: Tensor) -> Any:
    def hook(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return out
        return (out.to(output[0]), *output[1:])

    return hook
