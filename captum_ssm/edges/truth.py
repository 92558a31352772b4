"""Estimated effects of edges held against true interventions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attr.call.inputs import BatchPart, call_model
from ..attr.call.targets import contrasted, logits_of
from .cutting import knock_out
from .effects import Edge, Effects
from .pairs import Edges

#: Share of the sampled edges that are drawn in proportion to their effects, the others evenly.
_LARGE = 0.5


@dataclass(frozen=True, eq=False)
class Truth:
    """Estimated and true effects of cutting edges, or of removing nodes.

    Attributes:
        edges: the edges, as :class:`~captum_ssm.edges.Edge` where they were sampled; or the nodes.
        examples: the number of the example that each belongs to.
        estimated: what the output was expected to lose (n,).
        true: what it lost (n,).
        rounding: the size below which a true effect is rounding.
    """

    edges: Sequence[Any]
    examples: Sequence[int]
    estimated: Tensor
    true: Tensor
    rounding: float

    @property
    def pearson(self) -> float:
        """The linear correlation of both; NaN for fewer than three edges."""
        if len(self.true) < 3:
            return float("nan")
        return float(torch.corrcoef(torch.stack([self.estimated, self.true]))[0, 1])

    @property
    def sign_agreement(self) -> float:
        """The share of equal signs, among edges whose true effect is more than rounding."""
        counted = self.true.abs() > self.rounding
        if not bool(counted.any()):
            return float("nan")
        return float((self.estimated.sign() == self.true.sign())[counted].double().mean())


def sampled(effects: Effects, samples: int, seed: int) -> list[tuple[int, Edge]]:
    """Draw edges without replacement, half in proportion to their effects and half evenly.

    Edges without any effect, such as edges against causality, are not drawn.

    Returns:
        The example and the edge of each.
    """
    generator = torch.Generator().manual_seed(seed)
    large = round(samples * _LARGE)
    drawn: dict[tuple[int, int, int, int], Edge] = {}
    for count, weighted in ((large, True), (samples, False)):
        best: list[tuple[float, int, Edge]] = []
        for number, layer in enumerate(effects.layers):
            tokens = layer.linear.operator.shape.tokens
            for rows, part in layer.strips(range(tokens)):
                weight = part.abs().cpu().double()
                uniform = torch.rand(part.shape, generator=generator, dtype=torch.float64)
                # the largest u ** (1 / w) are a draw in proportion to w (Efraimidis, Spirakis 2006)
                key = uniform.log() / (weight if weighted else 1.0)
                key = key.masked_fill(weight == 0, -torch.inf).flatten()
                values, at = key.topk(min(len(key), samples))
                for value, where in zip(values.tolist(), at.tolist(), strict=True):
                    if value == -torch.inf:
                        break
                    example, rest = divmod(where, len(rows) * tokens)
                    target, source = divmod(rest, tokens)
                    effect = float(part[example, target, source])
                    edge = effects.edge(example, number, rows[target], source, effect)
                    if edge is not None:
                        best.append((value, example, edge))
            best = sorted(best, key=lambda found: -found[0])[: 2 * samples]
        for _, example, edge in best:
            if len(drawn) >= count:
                break
            drawn.setdefault((example, edge.layer, edge.target, edge.source), edge)
    return [(key[0], edge) for key, edge in drawn.items()]


class Interventions:
    """True effects on one number of a model's output."""

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: torch.nn.Module,
        inputs: Tensor,
        additional: tuple[Any, ...],
        target: Any,
        contrast: Any,
        at_a_time: int,
    ) -> None:
        self.forward_func, self.model = forward_func, model
        self.inputs, self.additional = inputs, additional
        self.target, self.contrast = target, contrast
        self.at_a_time = at_a_time

    def numbers(self, *edges: Edges) -> Tensor:
        """Return the explained number of every example without some edges, (B,)."""
        with torch.no_grad(), knock_out(self.model, *edges):
            output = logits_of(call_model(self.forward_func, self.inputs, self.additional))
        return contrasted(output, self.target, self.contrast)[0]

    def of_single(self, edges: Sequence[tuple[int, Edge]]) -> Tensor:
        """Return the explained number without each of n single edges, (example, edge), (n,)."""
        groups: dict[tuple[int, str], list[int]] = defaultdict(list)
        for i, (example, edge) in enumerate(edges):
            groups[example, edge.name].append(i)
        found = torch.zeros(len(edges), dtype=torch.float64)
        for (example, name), members in groups.items():
            for start in range(0, len(members), self.at_a_time):
                some = members[start : start + self.at_a_time]
                cuts = [edges[i][1] for i in some]
                sources = torch.tensor([[edge.source] for edge in cuts])
                targets = torch.tensor([[edge.target] for edge in cuts])
                found[some] = self._repeated(example, Edges(name, sources, targets), len(some))
        return found

    def _repeated(self, example: int, edges: Edges, times: int) -> Tensor:
        """Return the number of each of ``times`` copies of an example, (times,).

        Edges with positions for each example cut another message in each copy.
        """
        cut = BatchPart(slice(example, example + 1), len(self.inputs))

        def copies(value: Any) -> Any:
            one = cut(value)
            of_example = one is not value or len(self.inputs) == 1
            if of_example and isinstance(one, Tensor) and one.dim() and len(one) == 1:
                return one.repeat_interleave(times, 0)
            return one

        additional = tuple(map(copies, self.additional))
        with torch.no_grad(), knock_out(self.model, edges):
            output = logits_of(call_model(self.forward_func, copies(self.inputs), additional))
        asked = cut.target(self.target), cut.target(self.contrast)
        each = [contrasted(output[i : i + 1], *asked)[0] for i in range(times)]
        return torch.cat(each).cpu().double()
