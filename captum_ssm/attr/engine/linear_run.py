"""Runs of a network that is made linear: decompositions of outputs, and LRP's coefficients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...linear import Gate, Network, linearised
from ...operators.kernels.arithmetic import unseen
from ...tracing import require_deterministic
from ..call.inputs import batch_parts, call_model, explained_ids
from ..call.layout import PatchGrid
from ..call.targets import (
    Against,
    contrasted,
    logits_of,
    require_real_target,
    select,
    target_index,
)
from .decompose import Decomposition, decompose, exact, not_linear, not_reached, stacked


@dataclass(frozen=True)
class Rules:
    """How the network is made linear.

    Attributes:
        gate: where the relevance of a gated product goes.
        constants: whether biases and other constants are kept.
        by_layer: whether the relevance of what enters and leaves the mixers is found as well, for
            which they are held in memory.
        verify: whether operators are held to their modules; a number is the tolerance.
    """

    gate: Gate
    constants: bool
    by_layer: bool
    verify: bool | float


@dataclass(frozen=True, eq=False)
class LinearRuns:
    """What is run, and how.

    Attributes:
        forward_func: runs the model.
        model: the model.
        layers: the mixers to use; None for all.
        rules: how it is made linear.
        grid: notes where the tokens of an image lie; None where nobody asks.
    """

    forward_func: Callable[..., Any]
    model: nn.Module
    layers: Sequence[str | nn.Module] | None
    rules: Rules
    grid: PatchGrid | None

    def decompositions(
        self,
        inputs: Tensor,
        questions: Sequence[Against],
        additional: tuple[Any, ...],
        size: int | None,
    ) -> list[Decomposition]:
        """One decomposition for each question, of at most ``size`` examples at a time."""
        parts = []
        for cut in batch_parts(len(inputs), size):
            asked, rest = list(map(cut.target, questions)), tuple(map(cut, additional))
            with cut.counting():
                parts.append(self._explained(cut(inputs), asked, rest))
        return [stacked(found) for found in zip(*parts, strict=True)]

    def _explained(
        self, inputs: Tensor, questions: Sequence[Against], additional: tuple[Any, ...]
    ) -> list[Decomposition]:
        """One forward run, and one backward pass for each question."""
        require_deterministic(self.model)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            if self.grid is not None:
                stack.enter_context(self.grid.watch())
            network = stack.enter_context(
                linearised(
                    self.model,
                    explained_ids(inputs, additional),
                    gate=self.rules.gate,
                    constants=self.rules.constants,
                    layers=self.layers,
                    steps=self.rules.by_layer,
                    verify=self.rules.verify,
                )
            )
            start = network.mode.begun(inputs)
            output = logits_of(call_model(self.forward_func, start, additional))
            network.check_ran()
            with unseen():
                for question in questions:
                    index = target_index(question.target, output)
                    require_real_target(index, output, network.mask)
                numbers = [contrasted(output, q.target, q.contrast) for q in questions]
                if not output.requires_grad:
                    raise not_reached()
                found = [decompose(network, *number) for number in numbers]
        if all(map(exact, found)):
            return found
        if len(inputs) == 1:
            raise not_linear(output)
        # constants that cannot be told apart by example, such as the biases of experts
        return self.decompositions(inputs, questions, additional, 1)


def coefficients(
    forward_func: Callable[..., Any],
    model: nn.Module,
    layers: Sequence[str | nn.Module] | None,
    inputs: Tensor,
    additional: tuple[Any, ...],
    targets: Sequence[Any],
) -> list[list[Tensor]]:
    """The gradients of targets in the linear network of LRP with respect to each mixer's output.

    Relevance is a coefficient times what it belongs to.

    Args:
        forward_func: what runs the model.
        model: the module.
        layers: names or modules of the mixers to use, or None for all.
        inputs: the one input.
        additional: further arguments of forward_func.
        targets: targets in Captum's forms, each for the whole batch.

    Returns:
        For each target one tensor (B, L, E) per mixer call, in their order.
    """
    ids = explained_ids(inputs, additional)
    with linearised(model, ids, gate="half", layers=layers) as network:
        start = network.mode.begun(inputs)
        output = logits_of(call_model(forward_func, start, additional))
        network.check_ran()
        with unseen():
            numbers = [select(output, target_index(each, output)) for each in targets]
            if not all(number.requires_grad for number in numbers):
                raise not_reached()
            return [_gradients(number, network) for number in numbers]


def _gradients(number: Tensor, network: Network) -> list[Tensor]:
    outputs = [step.output for step in network.steps]
    found = torch.autograd.grad(number.sum(), outputs, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, outputs, strict=True)]
