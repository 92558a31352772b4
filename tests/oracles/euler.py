"""Euler's identity: a function is linear if it is its gradient times its input, plus constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import oracles
from captum_ssm.linear import contribution
from captum_ssm.linear.mode import Linearizing

#: Largest errors, by dtype.
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 2e-3}


@dataclass
class Found:
    """A function under the rules.

    Attributes:
        outputs: its floating results.
        gradients: of a random mixture of them, by input.
        constants: what constants add to that mixture, with the sign they have.
        delta: the mixture less inputs times gradients and constants, per sum of their sizes.
        seen: names of the functions that ran.
    """

    outputs: list[Tensor]
    gradients: list[Tensor]
    constants: list[Tensor]
    delta: float
    seen: set[str]

    @property
    def is_live(self) -> bool:
        return any(out.requires_grad for out in self.outputs)


class Watched(Linearizing):
    """The rules, and the names of all functions that they are asked about."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.add(func.__name__)
        return super().__torch_function__(func, *args, **kwargs)


@contextmanager
def rules(gate: str = "frozen", constants: bool = True) -> Iterator[Watched]:
    """The rules, switched on."""
    mode = Watched(None, gate, lambda _: "here", constants)
    with torch.enable_grad(), mode:
        yield mode


def floating(value: Any) -> list[Tensor]:
    """All floating tensors in a result."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [t for v in value for t in floating(v)] if isinstance(value, tuple | list) else []


def apply(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    gate: str = "frozen",
    constants: bool = True,
) -> Found:
    """``function`` of live copies of ``inputs``."""
    with rules(gate, constants) as mode:
        live = [mode.leaf(x.clone()) for x in inputs]
        outputs = floating(function(*live))
    live_outputs = [out.double() for out in outputs if out.requires_grad]
    mixture = sum((out * torch.randn_like(out)).sum() for out in live_outputs)
    if not isinstance(mixture, Tensor):
        return Found(outputs, [torch.zeros_like(x) for x in inputs], [], 0.0, mode.seen)
    entries: list[Tensor] = []

    def write(gradient: Tensor, constant: Tensor, where: str) -> None:
        assert where == "here"
        entries.append(contribution(gradient, constant).sum())

    with mode.ledger.entries_to(write):
        gradients = torch.autograd.grad(mixture, live, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, live, strict=True)]
    terms = [g * x.detach() for g, x in zip(filled, live, strict=True)] + entries
    total = mixture.detach()
    size = total.abs() + sum(t.abs().sum() for t in terms) + 1e-300
    delta = float((total - sum(t.sum() for t in terms)).abs() / size)
    return Found(outputs, filled, entries, delta, mode.seen)


def check(function: Callable[..., Any], inputs: Sequence[Tensor], gate: str = "frozen") -> Found:
    """Assert that values are torch's own, and that what is live is exactly linear."""
    found = apply(function, inputs, gate)
    wanted = floating(function(*(x.clone() for x in inputs)))
    assert len(found.outputs) == len(wanted)
    for value, own in zip(found.outputs, wanted, strict=True):
        assert value.dtype == own.dtype
        assert oracles.relative_error(value, own) <= LIMITS[own.dtype] or not own.any()
    assert found.delta <= max(LIMITS[out.dtype] for out in wanted)
    return found
