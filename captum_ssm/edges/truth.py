"""Compare estimated effects of edges with the effects of true interventions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attr.call.head import kept_positions
from ..attr.call.inputs import BatchPart, call_model
from ..attr.call.targets import Against, contrasted, logits_of, target_index
from .cutting import knock_out
from .effects import Edge, Effects
from .given import same_for_copies
from .pairs import Edges
from .uncut import UncutRun

#: Share of the sampled edges that are drawn in proportion to their effects, the others evenly.
_LARGE = 0.5


@dataclass(frozen=True, eq=False)
class Truth:
    """Estimated and true effects of cutting edges, or of removing nodes.

    Attributes:
        edges: the edges, as :class:`~captum_ssm.edges.Edge` if they were sampled; or the nodes.
        examples: the index of each edge's example.
        estimated: the estimated decrease of the output (n,).
        true: the true decrease of the output (n,).
        rounding: the absolute value below which a true effect counts as rounding error.
    """

    edges: Sequence[Any]
    examples: Sequence[int]
    estimated: Tensor
    true: Tensor
    rounding: float

    @property
    def pearson(self) -> float:
        """The Pearson correlation of estimated and true effects; NaN for fewer than three edges."""
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
        Pairs of an example's index and an edge.
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
    """Runs a model while edges are cut, to compute the explained number without them.

    Args:
        forward_func, model, inputs, additional, target, contrast: the run and the explained number.
        at_a_time: the number of copies of an example in one batch.
        tokens: the number of input tokens.
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: torch.nn.Module,
        inputs: Tensor,
        additional: tuple[Any, ...],
        target: Any,
        contrast: Any = None,
        *,
        at_a_time: int,
        tokens: int,
    ) -> None:
        self.forward_func, self.model = forward_func, model
        self.inputs, self.additional = inputs, additional
        self.target, self.contrast = target, contrast
        self.at_a_time, self.tokens = at_a_time, tokens
        self._uncut: tuple[int, UncutRun] | None = None

    def numbers(self, *edges: Edges) -> Tensor:
        """Return the explained number of every example while ``edges`` are cut, (B,)."""
        with torch.no_grad(), knock_out(self.model, *edges):
            output = logits_of(call_model(self.forward_func, self.inputs, self.additional))
        return contrasted(output, self.target, self.contrast)[0]

    def of_single(self, edges: Sequence[tuple[int, Edge]]) -> Tensor:
        """Cut each of n (example, edge) pairs separately; return the explained numbers, (n,)."""
        groups: dict[int, list[int]] = defaultdict(list)
        for i, (example, _) in enumerate(edges):
            groups[example].append(i)
        found = torch.zeros(len(edges), dtype=torch.float64)
        for example, members in groups.items():
            for some, output in self.outputs([(edges[i][1],) for i in members], example):
                found[[members[n] for n in some]] = self.explained(output, example)
        return found

    def explained(self, output: Tensor, example: int = 0) -> Tensor:
        """Return the explained number in the outputs of n copies of an example, (n,)."""
        asked, kept = self._asked(example), self.uncut(example).kept
        each = [contrasted(output[i : i + 1], *asked, kept)[0] for i in range(len(output))]
        return torch.cat(each).cpu().double()

    def index(self, output: Tensor, example: int = 0) -> Tensor | None:
        """Return the target's indices in the output (1, ...) of one copy; None without a target."""
        (target, _), kept = self._asked(example), self.uncut(example).kept
        target = target if kept is None else kept.among(output, target, None)[0]
        return target_index(target, output)

    def uncut(self, example: int = 0) -> UncutRun:
        """Return an example's run without cuts; the latest one is cached."""
        if self._uncut is None or self._uncut[0] != example:
            inputs, additional = self._copies(example, 1)
            asked = [Against(*self._asked(example))]
            kept = kept_positions(self.forward_func, inputs, additional, asked)
            self._uncut = example, UncutRun(self.forward_func, self.model, inputs, additional, kept)
        return self._uncut[1]

    def outputs(
        self, cuts: Sequence[Sequence[Edge | int]], example: int = 0
    ) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Run one example with each set of edges in ``cuts`` cut; yield batches of outputs.

        A number in place of an edge cuts all messages from this token to other tokens. Each batch
        comes with its indices in ``cuts``. Cuts with the same first layer are in one batch, and
        reuse the states below. A run of a single copy maps the layers' tokens to the input.
        """
        uncut = self.uncut(example)
        named = [{"" if isinstance(x, int) else x.name for x in cut} for cut in cuts]
        left = sorted(range(len(cuts)), key=lambda i: (uncut.before(named[i]), sorted(named[i])))
        size = self.at_a_time if uncut.tokens else 1
        while left:
            count = uncut.before(named[left[0]]) if uncut.tokens else 0
            size = max(1, size - (count not in uncut.checked))
            some, left = left[:size], left[size:]
            yield some, self._run([cuts[i] for i in some], example, count)
            size = self.at_a_time

    def _run(self, cuts: Sequence[Sequence[Edge | int]], example: int, count: int) -> Tensor:
        """Return outputs with cuts (n, ...), where the first ``count`` blocks reuse states."""
        uncut = self.uncut(example)
        check = count not in uncut.checked
        copies = len(cuts) + check
        inputs, additional = self._copies(example, copies)
        try:
            with (
                same_for_copies(uncut.tokens, copies),
                uncut.reused(count, copies),
                knock_out(self.model, *self._masked(cuts, copies)),
            ):
                output = uncut.call(inputs, additional)
        except Exception:
            if count == 0:
                raise
            uncut.forget()  # a later block may need more than the tensors that blocks returned
            return self._run(cuts, example, 0)
        if check and not uncut.check(count, output[-1:]):
            return self._run(cuts, example, 0)
        return output[: len(cuts)]

    def _asked(self, example: int) -> tuple[Any, Any]:
        """Return one example's target and contrast."""
        cut = BatchPart(slice(example, example + 1), len(self.inputs))
        return cut.target(self.target), cut.target(self.contrast)

    def _copies(self, example: int, count: int) -> tuple[Tensor, tuple[Any, ...]]:
        """Return inputs and additional arguments with ``count`` copies of one example."""
        part = BatchPart(slice(example, example + 1), len(self.inputs))

        def copies(value: Any) -> Any:
            one = part(value)
            of_example = one is not value or len(self.inputs) == 1
            if of_example and isinstance(one, Tensor) and one.dim() and len(one) == 1:
                return one.repeat_interleave(count, 0)
            return one

        return copies(self.inputs), tuple(map(copies, self.additional))

    def _masked(self, cuts: Sequence[Sequence[Edge | int]], size: int) -> list[Edges]:
        """Combine the edges to cut in each copy of an example into Edges with masks (copies, L).

        Each edge of a copy gets its own Edges: one shared mask would also cut from its source to
        the other edges' targets.
        """
        found: dict[tuple[int, str], Edges] = {}
        for copy, cut in enumerate(cuts):
            for place, edge in enumerate(cut):
                one = Edge(0, "", 0, edge, 0.0) if isinstance(edge, int) else edge
                empty = torch.zeros(2, size, self.tokens, dtype=torch.bool)
                made = Edges(one.name or None, empty[0], empty[1] if one.name else "other")
                edges = found.setdefault((place, one.name), made)
                for mask, token in ((edges.sources, one.source), (edges.targets, one.target)):
                    if isinstance(mask, Tensor):
                        mask[copy, token] = True
        return list(found.values())
