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
class PlainRun:
    """A plain run of forward_func without hooks, to compare explained values with.

    Attributes:
        request: the arguments of the run.
        limit: the largest accepted error of an explained value, relative to the largest output.
    """

    request: Request
    limit: float

    def require_equal(self, explained: Sequence[tuple[Against, Tensor]]) -> None:
        """Raise unless each explained value (B,) equals the value that forward_func returns."""
        output = self.request.output_alone  # runs the model on the first use
        # errors are relative to each example's largest finite output
        largest = output.detach().abs().nan_to_num(0, 0, 0).reshape(len(output), -1).amax(1)
        for question, value in explained:
            target, contrast = question.target, question.contrast
            with unseen(), torch.no_grad():
                plain, _ = contrasted(output, target, contrast, self.request.kept)
            error = (value - plain.to(value)).abs() / largest.to(value).clamp_min(1e-30)
            if not at_most(error.max(), self.limit):
                example = int(error.argmax())
                raise ReconstructionError(
                    f"The explained run computes {float(value[example]):.4g} for target={target!r} "
                    f"of example {example}, but forward_func returns {float(plain[example]):.4g} "
                    "in a plain run. Explained runs use no cache and record gradients. Does "
                    "forward_func split the inputs into chunks, or depend on gradient mode? Pass "
                    "the whole sequence to the model in one call, or verify=False to skip this "
                    "comparison."
                )


def plain_run(request: Request, calls: Mapping[Any, int], tolerance: float) -> PlainRun | None:
    """Return the plain run to compare with; None if the explained run is itself a plain run.

    It is one if forward_func is the model and runs each mixer once. ``calls`` counts the calls of
    each mixer; ``tolerance`` is the largest one with which an operator was checked.
    """
    if request.is_model and max(calls.values()) == 1:
        return None
    return PlainRun(request, min(_TIMES * len(calls) * tolerance, _MOST))


def require_alone(
    run: Run, verify: bool | float, explained: Sequence[tuple[Against, Tensor]]
) -> None:
    """Raise unless a traced run and a plain run compute the same explained values.

    ``explained`` has pairs of a target with its contrast, and the explained value (B,). ``verify``
    is the option of ``attribute``; False skips the comparison.
    """
    if verify is False:
        return
    tolerance = max(layer.tolerance if verify is True else verify for layer in run.layers)
    plain = plain_run(run.request, Counter(layer.mixer for layer in run.layers), tolerance)
    if plain is not None:
        plain.require_equal(explained)
