"""Estimates by gradients on the way to a run in which a layer writes less.

What a token is written, y, loses a message m when that is cut: about the share s = <m, y> / <y, y>
of itself.  Where the gradient is g(t) when the layer writes (1 - t) y,

    effect = mean over t from 0 to s of <g(t), m> ,

which is the gradient's own estimate for a small share, and knows for a large one that the norms
behind it will grow.  The gradients serve all edges of a layer together.

Shapes: N edges, L tokens, E width of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from captum_ssm.edges import Edge, Effects
from captum_ssm.mixers.base import Call
from captum_ssm.tracing import Mixer
from captum_ssm.tracing.observe import observe

from .held import Outputs, PlainRun, along, with_gradients

#: Parts of the way to a layer that writes nothing.
STEPS = 8
#: What a token that is written nothing is divided by.
_TINY = torch.finfo(torch.float32).tiny


def by_share(run: PlainRun, effects: Effects, edges: Sequence[Edge]) -> Tensor:
    """The estimated effects of cutting edges, (N,)."""
    written = [layer.linear.output() for layer in effects.layers]
    shares = [y / y.square().sum(-1, keepdim=True).clamp_min(_TINY) for y in written]
    share = along(with_gradients(effects, shares), edges).clamp(0, 1)
    kept = torch.linspace(1, 0, STEPS + 1).tolist()
    found = [
        along(with_gradients(effects, [_gradient(run, n, one) for n in range(len(written))]), edges)
        for one in kept
    ]
    return mean_up_to(torch.stack(found), share)


def mean_up_to(values: Tensor, end: Tensor) -> Tensor:
    """Means over [0, end] of lines through values (S + 1, N) at steps from 0 to 1, (N,)."""
    steps = len(values) - 1
    place = end * steps
    whole = place.long().clamp_max(steps - 1)
    part = place - whole
    sums = torch.cat([torch.zeros_like(values[:1]), (values[1:] + values[:-1]).cumsum(0) / 2])
    low, high, before = (x.gather(0, whole[None])[0] for x in (values[:-1], values[1:], sums))
    area = before + part * (low + part * (high - low) / 2)
    return torch.where(place > 0, area / place.clamp_min(_TINY), values[0])


class _Scaled(Outputs):
    """Lets one mixer write less."""

    def __init__(self, number: int, kept: float) -> None:
        super().__init__()
        self._number, self._kept = number, kept

    def returned(self, mixer: Mixer, call: Call) -> Tensor | None:
        return call.output_tensor * self._kept if len(self.outputs) == self._number else None


def _gradient(run: PlainRun, number: int, kept: float) -> Tensor:
    """The gradient at a layer's output where it writes a share of what it writes, (1, L, E)."""
    watcher = _Scaled(number, kept)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        observe(run.model, run.mixers, (watcher,), stack, gradients=True, vouched=False)
        output = run.number().sum()
        (found,) = torch.autograd.grad(output, watcher.outputs[number])
    return found
