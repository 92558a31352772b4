"""One traced forward run, and what is asked of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...errors import GradientModeError
from ...tracing import Layer

#: Elements of the tensors kept from one question to the next (1 GiB in float32).
_KEPT_ELEMENTS = 2**28

#: Gradients by the tensor they belong to; None where none arrived.
Taken = dict[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked of a run.

    Attributes:
        weights: the query as row weights (B, L).
        selected: the target's value per example (B,), part of the graph; None for methods
            without gradients.
        taken: the gradients of ``selected`` that methods sharing the run have taken; None if the
            run is not shared.
    """

    weights: Tensor
    selected: Tensor | None
    taken: Taken | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class Run:
    """One traced forward run of a (sub-)batch.

    Attributes:
        layers: the recorded layers, in the order in which they ran.
        mask: True for real tokens (B, L), or None.
        questions: what is asked of it, now the first; the graph is kept for those that follow.
        kept: what :meth:`once` keeps for all questions.
        given: which token of the input each of the first layer's is (B, L), -1 for one that comes
            from elsewhere; None if they are the same.
    """

    layers: Sequence[Layer]
    mask: Tensor | None
    questions: Sequence[Question]
    kept: dict[Layer, Tensor] = field(default_factory=dict, kw_only=True)
    given: Tensor | None = field(default=None, kw_only=True)

    @functools.cached_property
    def streams(self) -> Mapping[Layer, Tensor | None]:
        """The residual stream (B, L, E) entering each layer's block; None where none was kept."""
        return {layer: layer.residual_in_order for layer in self.layers}

    @property
    def weights(self) -> Tensor:
        """The query as row weights (B, L)."""
        return self.questions[0].weights

    def each(self) -> Iterator[Run]:
        """The same run, at one question after the other."""
        for first in range(len(self.questions)):
            yield replace(self, questions=self.questions[first:])

    def once(
        self, layer: Layer, elements: int, room: int, make: Callable[[], Tensor]
    ) -> Tensor | None:
        """A layer's tensor that is the same for all questions, made for the first and kept.

        Args:
            layer: the layer.
            elements: how many the tensor has.
            room: how many may be kept of all layers.
            make: makes the tensor.

        Returns:
            The tensor; None if there is no room, or no further question that would use it.
        """
        if layer not in self.kept:
            held = sum(tensor.numel() for tensor in self.kept.values())
            if len(self.questions) == 1 or held + elements > min(room, _KEPT_ELEMENTS):
                return None
            self.kept[layer] = make()
        return self.kept[layer]

    def gradients(self, tensors: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
        """d(selected, summed over the batch) / d(each tensor)."""
        selected = self.questions[0].selected
        if selected is None or not selected.requires_grad:
            raise GradientModeError(
                "The model's output records no gradients although they are enabled here. Does its "
                "forward run under no_grad, or detach?"
            )
        shared = self.questions[0].taken
        again = len(self.questions) > 1 or shared is not None
        taken: Taken = {} if shared is None else shared
        wanted = [x for x in tensors if x not in taken]
        if wanted:
            found = torch.autograd.grad(
                selected.sum(), wanted, retain_graph=again, allow_unused=True
            )
            taken.update(zip(wanted, found, strict=True))
        gradients = [taken[x] for x in tensors]
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                raise GradientModeError(
                    f"No gradient of the target reaches layer {name!r}. Is it cut off by detach, "
                    "no_grad or gradient checkpointing, or unused by this target? Leave it out "
                    "with layers=[...]."
                )
        return [gradient.detach() for gradient in gradients if gradient is not None]
