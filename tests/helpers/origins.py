"""Where the elements of a function's result come from, claimed and true.

What is true is found by changing one token after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from captum_ssm.tracing.places import Origin, Places

B, L, E = 2, 5, 4


def draw(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, L, E)), dtype=torch.float64)


def followed(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, Origin | None]:
    """What a function returns and where that comes from; its inputs are sources 0, 1, ..."""
    places = Places(lambda: "here")
    inputs = tuple(x.clone() for x in inputs)
    with torch.no_grad(), places:
        for source, x in enumerate(inputs):
            places.begin(x, source)
        out = function(*inputs)
    return out, places.origin(out)


def depends(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Which elements change with which tokens of each input: (shape of the output, B * L)."""
    found = []
    with torch.no_grad():
        before = function(*(x.clone() for x in inputs))
        for i, x in enumerate(inputs):
            changes = []
            for token in range(x.shape[0] * x.shape[1]):
                change = torch.zeros(before.shape, dtype=torch.bool)
                for size in (10, -10):  # so that it comes to be, and not to be, a maximum
                    others = [y.clone() for y in inputs]
                    others[i].flatten(0, 1)[token] += size * (1 + draw(*x.shape[2:]).abs())
                    change |= (function(*others) - before).abs() > 1e-12
                changes.append(change)
            found.append(torch.stack(changes, -1))
    return found


def claimed(origin: Origin, source: int) -> Tensor:
    batch, tokens = origin.sizes[source]
    out = torch.zeros(*origin.shape, batch * tokens, dtype=torch.bool)
    for entry in origin.sources.get(source, []):
        places = entry.places.expand(origin.shape).long()
        out |= places[..., None] == torch.arange(batch * tokens)
    return out


def is_right(origin: Origin, truth: list[Tensor]) -> bool:
    """Whether what is claimed is what is true, taken together where tokens are not told apart."""
    entries = [e for found in origin.sources.values() for e in found]
    for source, wanted in enumerate(truth):
        found = claimed(origin, source)
        if (wanted & ~found).any():
            return False
        for dim in range(len(origin.shape)):
            if all(e.places.size(dim) == 1 for e in entries):
                found, wanted = found.any(dim, keepdim=True), wanted.any(dim, keepdim=True)
        if not torch.equal(found, wanted):
            return False
    return True


def check(function: Callable[..., Tensor], *inputs: Tensor) -> Origin:
    inputs = inputs or (draw(),)
    origin = followed(function, *inputs)[1]
    assert origin is not None
    assert origin.mixed is None, origin.mixed
    assert is_right(origin, depends(function, inputs))
    return origin


#: Orthogonal, so that what goes through it often is neither lost nor grows.
WEIGHT = torch.linalg.qr(
    torch.randn(E, E, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
).Q
ORDER = torch.tensor([3, 0, 4, 1, 2])
MASK = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]]).bool()
PICKS = torch.tensor([[3, 0], [1, 1]])
