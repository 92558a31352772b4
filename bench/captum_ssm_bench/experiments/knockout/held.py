"""Runs in which later layers go by the coefficients that they had before a message was cut.

Shapes: N copies of one input, L tokens, E width of the stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_ssm.attr.call.targets import contrasted, logits_of
from captum_ssm.edges import Edge, Edges, Effects, knock_out
from captum_ssm.mixers.base import Call, LinearMixer, first_tensor
from captum_ssm.tracing import Mixer, find_mixers
from captum_ssm.tracing.gradients import in_graph
from captum_ssm.tracing.hooks import hooked, swap_first
from captum_ssm.tracing.observe import Watcher, observe
from captum_ssm.tracing.offload import linearize

#: What can be held: operators of mixers, the scales of norms outside of them, and what MLPs
#: multiply with.
Kind = Literal["mixers", "norms", "gates"]
KINDS: tuple[Kind, ...] = ("mixers", "norms", "gates")

#: The layers that make the gates of MLPs; others have none, or none that a module makes.
_GATES = ("gate_proj", "feed_forward.receptance")


class PlainRun(Watcher):
    """What a model's layers went by in a run on copies of one input.

    Args:
        model: the model.
        inputs: the copies (N, ...).
        target: the explained output, in Captum's form.
    """

    def __init__(self, model: nn.Module, inputs: Tensor, target: Any) -> None:
        self.model, self.inputs, self.target = model, inputs, target
        self.mixers = find_mixers(model)
        inside = {part for mixer in self.mixers for part in mixer.module.modules()}
        outside = [(name, m) for name, m in model.named_modules() if m not in inside]
        self._norms = [m for _, m in outside if "Norm" in type(m).__name__]
        self._gates = [m for name, m in outside if name.endswith(_GATES)]
        self.linear: dict[nn.Module, LinearMixer] = {}
        self.scales: dict[nn.Module, Tensor] = {}
        self.gates: dict[nn.Module, Tensor] = {}
        with torch.no_grad(), ExitStack() as stack:
            observe(model, self.mixers, (self,), stack, gradients=False, vouched=False)
            for norm in self._norms:
                stack.enter_context(hooked(norm.register_forward_hook, self._note_scale))
            for gate in self._gates:
                stack.enter_context(hooked(gate.register_forward_hook, self._note_gate))
            self.number()

    def number(self) -> Tensor:
        """The explained number of each copy, (N,)."""
        return contrasted(logits_of(self.model(self.inputs)), self.target, None)[0]

    def returned(self, mixer: Mixer, call: Call) -> None:
        self.linear[mixer.module] = linearize(mixer, call, running=True)

    def _note_scale(self, norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.scales[norm] = scale_of(norm, args[0])

    def _note_gate(self, gate: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.gates[gate] = output

    @contextmanager
    def held(self, kinds: Collection[Kind], cut_at: Tensor | None = None) -> Iterator[Outputs]:
        """A context in which the model's layers go by the coefficients of this run.

        Yields the watcher of the outputs of mixers.  ``cut_at`` is the number of the mixer whose
        message each copy lacks (N,); the mixers up to it are left alone.
        """
        watcher = _Held(self, "mixers" in kinds, cut_at)
        with ExitStack() as stack:
            gradients = torch.is_grad_enabled()
            observe(self.model, self.mixers, (watcher,), stack, gradients=gradients, vouched=False)
            for norm in self._norms if "norms" in kinds else ():
                hook = partial(_rescaled, scale=self.scales[norm])
                stack.enter_context(hooked(norm.register_forward_hook, hook))
            for gate in self._gates if "gates" in kinds else ():
                hook = partial(_kept, output=self.gates[gate])
                stack.enter_context(hooked(gate.register_forward_hook, hook))
            yield watcher

    def effects(
        self, edges: Sequence[Edge], effects: Effects, kinds: Collection[Kind]
    ) -> tuple[Tensor, Tensor]:
        """The effects of cutting edges, to first order and true, (N,), with some kinds held."""
        with torch.enable_grad(), self.held(kinds) as run:
            before = self.number()
            own = with_gradients(effects, torch.autograd.grad(before.sum(), run.outputs))
        cut_at = torch.tensor([edge.layer for edge in edges], device=before.device)
        with torch.no_grad(), self.held(kinds, cut_at), knock_out(self.model, *_each(edges, own)):
            after = self.number()
        return along(own, edges), (before - after).detach().cpu().double()


class Outputs(Watcher):
    """Keeps what leaves mixers."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def left(self, mixer: Mixer, output: Any) -> Any:
        if torch.is_grad_enabled():
            output, _ = swap_first(output, in_graph)
        self.outputs.append(first_tensor(output))
        return output


class _Held(Outputs):
    """Lets mixers go by their operators of the plain run."""

    def __init__(self, plain: PlainRun, hold: bool, cut_at: Tensor | None) -> None:
        super().__init__()
        self._plain, self._hold, self._cut_at = plain, hold, cut_at

    def returned(self, mixer: Mixer, call: Call) -> Tensor | None:
        if not self._hold:
            return None
        now = linearize(mixer, call, running=True)
        held = now.project(self._plain.linear[mixer.module].operator.affine(now.values))
        if self._cut_at is None:
            return held
        is_later = self._cut_at < self._plain.mixers.index(mixer)
        return torch.where(is_later[:, None, None], held, call.output_tensor)


def with_gradients(effects: Effects, gradients: Sequence[Tensor]) -> Effects:
    """Effects by other gradients at the outputs of layers, of copies of the input (N, L, E)."""
    layers = (
        replace(layer, gradient=gradient[:1].to(layer.gradient))
        for layer, gradient in zip(effects.layers, gradients, strict=True)
    )
    return replace(effects, layers=tuple(layers))


def along(effects: Effects, edges: Sequence[Edge]) -> Tensor:
    """The effects of single edges of one input, (N,)."""
    found = [effects.rows([edge.target], edge.layer)[0, 0, edge.source] for edge in edges]
    return torch.stack(found).cpu().double()


def _each(edges: Sequence[Edge], effects: Effects) -> Iterator[Edges]:
    """Of each copy its own edge."""
    for name in {edge.name for edge in edges}:
        sources, targets = torch.zeros(2, len(edges), effects.tokens, dtype=torch.bool)
        for copy, edge in enumerate(edges):
            if edge.name == name:
                sources[copy, edge.source] = targets[copy, edge.target] = True
        yield Edges(name, sources, targets)


def scale_of(norm: nn.Module, x: Tensor) -> Tensor:
    """The factor (..., 1) that a LayerNorm, or a root mean square norm, has for tokens (..., E)."""
    if isinstance(norm, nn.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _rescaled(norm: nn.Module, args: tuple[Any, ...], output: Tensor, *, scale: Tensor) -> Tensor:
    """What a norm returns if it multiplies with the scale of another run."""
    factor = scale / scale_of(norm, args[0])
    bias = getattr(norm, "bias", None)
    return output * factor if bias is None else (output - bias) * factor + bias


def _kept(gate: nn.Module, args: tuple[Any, ...], given: Tensor, *, output: Tensor) -> Tensor:
    return output
