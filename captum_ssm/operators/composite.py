"""What operators made of other operators have in common."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from .base import Operator
from .streams import Portion


class Composite(Operator):
    """An operator made of others, its ``parts``."""

    parts: tuple[Operator, ...]

    @property
    def mixes_tokens(self) -> bool:
        return any(part.mixes_tokens for part in self.parts)

    @property
    def data_dependent(self) -> bool:
        return any(part.data_dependent for part in self.parts)

    @property
    def portion(self) -> Portion:
        elements, most, multiple = zip(*(part.portion for part in self.parts), strict=True)
        return Portion(min(elements), min(most), max(multiple))

    def leaves(self) -> Iterator[Operator]:
        for part in self.parts:
            yield from part.leaves()

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{k}": t for i, p in enumerate(self.parts) for k, t in p.tensors().items()}
