"""Mixers by themselves under ``check_adapter``, and pieces of the formulas that they are given."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from oracles import relative_error
from torch import Tensor, nn

from captum_ssm import trace
from captum_ssm.testing.adapters import CLAUSES, Formula, check_adapter
from captum_ssm.tracing import Layer

#: Clauses on the operator alone; those on whole models run over the zoo.
CORE = tuple(list(CLAUSES)[: list(CLAUSES).index("sums")])
PADDING = ("left padding", "right padding")
#: Padding on the left leaks a bias of the input projection through the convolution.
LEAKS = {"left padding": "in a batch and by themselves|takes no attention_mask"}
#: Components of Mamba's matrices, alone and left out.
ABLATIONS = (
    *("s6", "unified", "exact", "exact-scan-skip"),
    *(f"unified-{name}" for name in ("conv", "activation", "scan", "gate")),
    *(f"exact-{name}" for name in ("conv", "activation", "scan", "skip", "gate")),
)
#: Largest relative error of float32 against float32 or float64, for any draw of the parameters.
FLOAT32 = 1e-5


class Called(nn.Module):
    """A mixer that is called with further arguments."""

    def __init__(self, mixer: nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.mixer, self.arguments = mixer, arguments

    def forward(self, hidden: Tensor) -> Any:
        return self.mixer(hidden, **self.of(hidden))

    def of(self, hidden: Tensor) -> dict[str, Any]:
        """The arguments, in the precision of the input; functions are given it."""
        found = {}
        for name, x in self.arguments.items():
            x = x(hidden) if callable(x) else x
            is_floating = isinstance(x, Tensor) and x.is_floating_point()
            found[name] = x.to(hidden.dtype) if is_floating else x
        return found


class CalledWithMask(Called):
    """The same for a mixer that takes a mask of tokens."""

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.mixer(hidden, attention_mask=attention_mask, **self.of(hidden))


def holds(
    mixer: Any, width: int, formula: Formula | None = None,
    refuses: Mapping[str, str] | None = None, *, tokens: int = 8, masked: bool | None = None,
    clauses: Collection[str] = CORE, **arguments: Any,
) -> None:  # fmt: skip
    """Check a mixer of embeddings (2, L, E).

    ``formula``, ``refuses`` and ``clauses`` are those of ``check_adapter``. Without a mask both
    paddings are refused. Further arguments are passed to the mixer; functions get its input.
    """
    if masked is None:
        masked = "attention_mask" in inspect.signature(mixer.forward).parameters
    refused = {} if masked else dict.fromkeys(PADDING, "takes no attention_mask")
    refused |= refuses or {}
    model = (CalledWithMask if masked else Called)(mixer, arguments)
    kept = {name: why for name, why in refused.items() if name in clauses}
    check_adapter(lambda: model, torch.randn(2, tokens, width), formula, kept, clauses)


def record(model: Any, *args: Any, **kwargs: Any) -> list[Layer]:
    """The layers of a run, whose operators are made where a test asks for them."""
    with torch.no_grad(), trace(model, operators=False) as t:
        model(*args, **kwargs)
    return t.layers


def record_one(mixer: Any, *args: Any, **kwargs: Any) -> Layer:
    (layer,) = record(mixer, *args, **kwargs)
    return layer


def check(layer: Layer, tolerance: float = FLOAT32) -> None:
    """The operator is the module, within what float32 allows by default."""
    error = relative_error(layer.linear.output(), layer.in_order(layer.output))
    assert error <= tolerance, f"{layer.name or layer.architecture}: {error:.1e}"
    assert layer.reconstruction_error() <= tolerance
