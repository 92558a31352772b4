"""Comparison of the explained output value with a plain run of forward_func.

An explained run keeps no cache, uses eager attention, and checks each mixer against its operator.
The model's output does not change, but a custom forward_func may depend on these settings.
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

#: The accepted error of an explained value, relative to the largest output: ``_TIMES`` times the
#: sum of the tolerances of all operators, and never more than ``_MOST``.
_TIMES, _MOST = 16, 0.25


@dataclass(frozen=True, eq=False)
class Alone:
    """A plain run of forward_func without hooks, to compare explained output values with.

    Attributes:
        request: the arguments of the run.
        limit: the largest accepted error of an explained value, relative to the largest output.
    """

    request: Request
    limit: float

    def require(self, explained: Sequence[tuple[Against, Tensor]]) -> None:
        """Raise unless each explained value (B,) equals the value that forward_func returns."""
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
                    "in a plain run. Explained runs use no cache and record gradients. Does "
                    "forward_func split the inputs into chunks, or depend on gradient mode? Pass "
                    "the whole sequence to the model in one call, or verify=False to skip this "
                    "comparison."
                )


def alone(request: Request, calls: Mapping[Any, int], granted: float) -> Alone | None:
    """Return the plain run to compare with; None if forward_func is the model and runs mixers once.

    Args:
        request: the arguments of the run.
        calls: how many times each mixer was called.
        granted: the largest tolerance with which an operator was checked.
    """
    if request.is_model and max(calls.values()) == 1:
        return None
    return Alone(request, min(_TIMES * len(calls) * granted, _MOST))


def require_alone(
    run: Run, verify: bool | float, explained: Sequence[tuple[Against, Tensor]]
) -> None:
    """Raise unless a traced run and a plain run compute the same explained values.

    If forward_func is the model itself and runs each mixer once, nothing is compared: the traced
    run is then the plain run.

    Args:
        run: the traced run.
        verify: the ``verify`` option of ``attribute``. False skips the comparison.
        explained: pairs of a target with its contrast, and the explained value (B,).
    """
    if verify is False:
        return
    granted = max(layer.tolerance if verify is True else verify for layer in run.layers)
    by_itself = alone(run.request, Counter(layer.mixer for layer in run.layers), granted)
    if by_itself is not None:
        by_itself.require(explained)
