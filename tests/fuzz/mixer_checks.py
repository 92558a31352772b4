"""Mixers of random configurations under the contract of adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers.contract import CORE, PADDING
from hypothesis import strategies as st
from torch import Tensor, nn

from captum_ssm.testing.adapters import check_adapter


@dataclass
class Made:
    """A module with random parameters, and how it is called.

    Attributes:
        module: a mixer.
        width: features of its input.
        call: keyword arguments beside the input, of the input and the mask (B, L) or None.
        sides: on which padding changes nothing.
        upcast: whether the module runs in bfloat16 and can be compared with itself in float32,
            which no module can whose buffers are rounded.
    """

    module: Any
    width: int
    call: Callable[[Tensor, Tensor | None], dict[str, Any]] = lambda hidden, mask: {}
    sides: tuple[str, ...] = ()
    upcast: bool = True


@dataclass(frozen=True)
class Inputs:
    """Tokens of an input, and the seed of the input and the parameters."""

    tokens: int
    seed: int


class Called(nn.Module):
    """A mixer that is called as its maker says."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.module, self.call = made.module, made.call

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.module(hidden, **self.call(hidden, attention_mask))


def inputs() -> st.SearchStrategy[Inputs]:
    """Inputs of a few tokens, and now and then of many."""
    tokens = st.one_of(st.integers(3, 12), st.integers(3, 12), st.integers(60, 80))
    return st.builds(Inputs, tokens=tokens, seed=st.integers(0, 2**31 - 1))


def check_any(
    options: dict[str, Any],
    make: Callable[[dict[str, Any]], Made],
    data: st.DataObject,
    drawn: Inputs,
) -> None:
    """Check a mixer of options that are drawn."""
    chosen = data.draw(st.fixed_dictionaries(options), label="options")
    torch.manual_seed(drawn.seed)
    check(make(chosen), drawn)


def check(made: Made, drawn: Inputs) -> None:
    """The contract's clauses on an operator, but for those that the mixer does not keep."""
    unkept = {name for name in PADDING if name.split()[0] not in made.sides}
    unkept |= set() if made.upcast else {"bfloat16"}
    hidden = torch.randn(2, drawn.tokens, made.width)
    clauses = [name for name in CORE if name not in unkept]
    check_adapter(lambda: Called(made), hidden, clauses=clauses)


def randomised(module: nn.Module, spread: dict[str, Callable[[Tensor], Tensor]]) -> nn.Module:
    """Parameters whose names end in a key are made anew, by a function of noise of their shape."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            for end, function in spread.items():
                if name.endswith(end):
                    parameter.copy_(function(torch.randn_like(parameter)))
    return module
