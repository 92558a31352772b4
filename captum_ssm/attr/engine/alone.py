"""Comparison of the explained number with a plain run of forward_func.

An explained run keeps no cache, attends eagerly, and checks mixers against their operators. The
model computes the same, but a custom forward_func may depend on these settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ReconstructionError
from ...operators.kernels.arithmetic import unseen
from ...operators.kernels.truths import at_most
from ..call.targets import Against, contrasted
from .run import Request, Run

#: How many times the errors granted to all operators together a number may be off, and how far it
#: may be off at most, each in proportion to the largest output.
_TIMES, _MOST = 16, 0.25


@dataclass(frozen=True, eq=False)
class Alone:
    """A plain run of forward_func, without hooks.

    Attributes:
        request: what is run.
        limit: the largest error of a number that is accepted, per largest output.
    """

    request: Request
    limit: float

    def require(self, explained: Sequence[tuple[Against, Tensor]]) -> None:
        """Raise unless explained numbers (B,) equal forward_func's."""
        output = self.request.output_alone
        size = output.detach().abs().nan_to_num(0, 0, 0).reshape(len(output), -1).amax(1)
        for question, number in explained:
            given, contrast = question.target, question.contrast
            with unseen(), torch.no_grad():
                real, _ = contrasted(output, given, contrast, self.request.kept)
            off = (number - real.to(number)).abs() / size.to(number).clamp_min(1e-30)
            if not at_most(off.max(), self.limit):
                example = int(off.argmax())
                raise ReconstructionError(
                    f"The explained run computes {float(number[example]):.4g} for target={given!r} "
                    f"of example {example}, but forward_func returns {float(real[example]):.4g} "
                    "when it runs by itself. Explained runs use no cache and record gradients. "
                    "Does forward_func read the inputs in chunks, or depend on gradient mode? Pass "
                    "the whole sequence in one call of the model. verify=False explains the run "
                    "as it is."
                )


def alone(request: Request, calls: Mapping[Any, int], granted: float) -> Alone | None:
    """Return the plain run to compare with; None if forward_func is the model, run once.

    Args:
        request: the run's request.
        calls: how often each mixer ran.
        granted: the largest error that was accepted of an operator.
    """
    if request.is_model and max(calls.values()) == 1:
        return None
    return Alone(request, min(_TIMES * len(calls) * granted, _MOST))


def require_alone(
    run: Run, verify: bool | float, explained: Sequence[tuple[Against, Tensor]]
) -> None:
    """Raise unless the numbers that a traced run explains equal forward_func's.

    Args:
        run: the run.
        verify: as ``attribute`` takes it; False compares nothing.
        explained: the questions, and the numbers of the run (B,).
    """
    if verify is False:
        return
    granted = max(layer.tolerance if verify is True else verify for layer in run.layers)
    by_itself = alone(run.request, Counter(layer.mixer for layer in run.layers), granted)
    if by_itself is not None:
        by_itself.require(explained)
