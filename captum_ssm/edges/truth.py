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
    by_effect = round(samples * _LARGE)
    edges_drawn: dict[tuple[int, int, int, int], Edge] = {}  # by example, layer, target, source
    for count, weighted in ((by_effect, True), (samples, False)):  # then fill up evenly
        candidates: list[tuple[float, int, Edge]] = []
        for layer_index, layer in enumerate(effects.layers):
            tokens = layer.linear.operator.shape.tokens
            for rows, strip in layer.strips(range(tokens)):
                weight = strip.abs().cpu().double()
                uniform = torch.rand(strip.shape, generator=generator, dtype=torch.float64)
                # the largest u ** (1 / w) are a draw in proportion to w (Efraimidis, Spirakis 2006)
                key = uniform.log() / (weight if weighted else 1.0)
                key = key.masked_fill(weight == 0, -torch.inf).flatten()
                values, places = key.topk(min(len(key), samples))
                for value, flat_index in zip(values.tolist(), places.tolist(), strict=True):
                    if value == -torch.inf:
                        break
                    example, rest = divmod(flat_index, len(rows) * tokens)
                    target, source = divmod(rest, tokens)
                    effect = float(strip[example, target, source])
                    edge = effects.edge(example, layer_index, rows[target], source, effect=effect)
                    if edge is not None:
                        candidates.append((value, example, edge))
            # twice as many, because the first draw may have taken some
            candidates = sorted(candidates, key=lambda c: -c[0])[: 2 * samples]
        for _, example, edge in candidates:
            if len(edges_drawn) >= count:
                break
            edges_drawn.setdefault((example, edge.layer, edge.target, edge.source), edge)
    return [(key[0], edge) for key, edge in edges_drawn.items()]


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
        values = torch.zeros(len(edges), dtype=torch.float64)
        for example, members in groups.items():
            for indices, output in self.outputs([(edges[i][1],) for i in members], example):
                # indices into members, which are indices into edges
                values[[members[n] for n in indices]] = self.explained(output, example)
        return values

    def explained(self, output: Tensor, example: int = 0) -> Tensor:
        """Return the explained number in the outputs of n copies of an example, (n,)."""
        question, kept = self._question_of(example), self.uncut(example).kept
        # one copy at a time, because the question is of one example
        values = [contrasted(output[i : i + 1], *question, kept)[0] for i in range(len(output))]
        return torch.cat(values).cpu().double()

    def index(self, output: Tensor, example: int = 0) -> Tensor | None:
        """Return the target's indices in the output (1, ...) of one copy; None without a target."""
        (target, _), kept = self._question_of(example), self.uncut(example).kept
        target = target if kept is None else kept.among(output, target, None)[0]
        return target_index(target, output)

    def uncut(self, example: int = 0) -> UncutRun:
        """Return an example's run without cuts; the latest one is cached."""
        if self._uncut is None or self._uncut[0] != example:
            inputs, additional = self._copies(example, 1)
            questions = [Against(*self._question_of(example))]
            kept = kept_positions(self.forward_func, inputs, additional, questions)
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
        names = [{"" if isinstance(x, int) else x.name for x in cut} for cut in cuts]
        order = [(uncut.calls_before(layer_names), sorted(layer_names)) for layer_names in names]
        remaining = sorted(range(len(cuts)), key=order.__getitem__)
        batch_size = self.at_a_time if uncut.tokens else 1  # of the run that maps tokens
        while remaining:
            # the run that maps tokens must run all blocks
            count = uncut.calls_before(names[remaining[0]]) if uncut.tokens else 0
            # the first run that reuses ``count`` calls also runs a copy without cuts, as a check
            batch_size = max(1, batch_size - (count not in uncut.checked))
            batch, remaining = remaining[:batch_size], remaining[batch_size:]
            yield batch, self._run([cuts[i] for i in batch], example, count)
            batch_size = self.at_a_time

    def _run(self, cuts: Sequence[Sequence[Edge | int]], example: int, count: int) -> Tensor:
        """Return outputs with cuts (n, ...); reuse ``count`` calls of blocks if that is correct."""
        uncut = self.uncut(example)
        checks_reuse = count not in uncut.checked
        copies = len(cuts) + checks_reuse
        inputs, additional = self._copies(example, copies)
        try:
            with (
                same_for_copies(uncut.tokens, copies),
                uncut.reused(count, copies),
                knock_out(self.model, *self._masked_edges(cuts, copies)),
            ):
                output = uncut.call(inputs, additional)
        except Exception:
            if count == 0:
                raise
            uncut.forget()  # a later block may need more than the tensors that blocks returned
            return self._run(cuts, example, 0)
        if checks_reuse and not uncut.check(count, output[-1:]):
            return self._run(cuts, example, 0)
        return output[: len(cuts)]

    def _question_of(self, example: int) -> tuple[Any, Any]:
        """Return one example's target and contrast."""
        cut = BatchPart(slice(example, example + 1), len(self.inputs))
        return cut.target(self.target), cut.target(self.contrast)

    def _copies(self, example: int, count: int) -> tuple[Tensor, tuple[Any, ...]]:
        """Return inputs and additional arguments with ``count`` copies of one example."""
        part = BatchPart(slice(example, example + 1), len(self.inputs))

        def copies(value: Any) -> Any:
            """Repeat the example's row of a tensor; ``part`` returns other values themselves."""
            of_one = part(value)
            of_example = of_one is not value or len(self.inputs) == 1
            if of_example and isinstance(of_one, Tensor) and of_one.dim() and len(of_one) == 1:
                return of_one.repeat_interleave(count, 0)
            return of_one

        return copies(self.inputs), tuple(map(copies, self.additional))

    def _masked_edges(self, cuts: Sequence[Sequence[Edge | int]], size: int) -> list[Edges]:
        """Combine the edges to cut in each copy of an example into Edges with masks (copies, L).

        Each edge of a copy gets its own Edges: one shared mask would also cut from its source to
        the other edges' targets.
        """
        edges_by_name: dict[tuple[int, str], Edges] = {}
        for copy, cut in enumerate(cuts):
            for place, cut_edge in enumerate(cut):
                # a token's messages to others, with the name "" for all layers
                edge = Edge(0, "", 0, cut_edge, 0.0) if isinstance(cut_edge, int) else cut_edge
                empty = torch.zeros(2, size, self.tokens, dtype=torch.bool)
                new_edges = Edges(edge.name or None, empty[0], empty[1] if edge.name else "other")
                edges = edges_by_name.setdefault((place, edge.name), new_edges)
                for mask, token in ((edges.sources, edge.source), (edges.targets, edge.target)):
                    if isinstance(mask, Tensor):
                        mask[copy, token] = True
        return list(edges_by_name.values())
