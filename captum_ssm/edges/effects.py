"""Estimated effects of cutting edges, to first order, for all edges of a run at once.

    effect[i, j] = <d output / d y_i, T_i(x_j)>

y_i is a mixer's output at token i, and T_i(x_j) the message from token j. If the model's output
were linear in y_i, removing the message would decrease the output by the effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optional import optional
from ..attr.call import checks
from ..attr.call.layout import to_input_tokens
from ..attr.vectors.contributions import locals_and_cores
from ..attr.vectors.latim import query_index
from ..errors import InputError, OptionError
from ..mixers.base import LinearMixer
from ..operators import Operator
from ..operators.kernels.arithmetic import sum_tensors, underflow_flushed
from ..operators.kernels.rows import Positions, at_positions, in_stacks, slices
from ..tracing import Mixer
from ..tracing.projection import projection_of
from .messages import is_attention, share_of, sum_messages
from .pairs import Edges, pairs_of
from .readers import Readers

#: The number of target tokens whose effects are in memory at once.
_ROWS = 256


class Edge(NamedTuple):
    """One message, and the estimated effect of cutting it.

    Attributes:
        layer: index of the layer, in the order in which the layers ran.
        name: the name of the layer's mixer.
        target: the position of the token that receives the message.
        source: the position of the token that sends the message.
        effect: the estimated decrease of the output if the message is cut.
        first_order: whether norms after the layer are approximated to first order, which is
            inexact for large messages. Default: False.
    """

    layer: int
    name: str
    target: int
    source: int
    effect: float
    first_order: bool = False


@dataclass(frozen=True, eq=False)
class LayerEffects:
    """Estimated effects of cutting one layer's edges.

    Attributes:
        mixer: the mixer.
        kept: the mixer's linear form, or a function that builds the linear form again.
        gradient: the gradient at the mixer's output, (B, L, E).
        readers: the norms that read the layer's output, for effects with exact norms. Default:
            None, effects to first order.
    """

    mixer: Mixer
    kept: LinearMixer | Callable[[], LinearMixer]
    gradient: Tensor
    readers: Readers | None = None

    @property
    def linear(self) -> LinearMixer:
        """The mixer's linear form at the run's input."""
        return self.kept if isinstance(self.kept, LinearMixer) else self.kept()

    @property
    def name(self) -> str:
        """The mixer's qualified name in the model."""
        return self.mixer.name

    @property
    def _unprojected_gradient(self) -> Tensor:
        """The output's gradient before the mixer's output projection, (B, L, H, P)."""
        unprojected = self.gradient @ projection_of(self.linear).weight.T
        return unprojected.view(self.linear.operator.shape)

    def _factors_of(self, gradient: Tensor) -> list[tuple[Tensor, Operator]]:
        """Return pairs of a factor (B, L, H, P) and a channelwise operator, for effects.

        effect[i, j] sums factor[i] operator[i, j] values[j] over pairs, heads and channels. Local
        parts, which act last and within tokens, become part of the factor by their transposes.
        """
        products = locals_and_cores(self.linear.operator, like=self.linear.values)
        return [
            (reduce(lambda x, local: local.transpose(x), parts, gradient), core)
            for parts, core in products
        ]

    def _unprojected_gradient_at(self, index: Tensor) -> Tensor:
        """Unproject only the gradients at ``index`` (B, Q); return (B, L, H, P), 0 elsewhere."""
        weight = projection_of(self.linear).weight
        example = torch.arange(len(index), device=index.device)[:, None]
        unprojected = weight.new_zeros(*self.gradient.shape[:2], len(weight))
        unprojected[example, index] = self.gradient[example, index] @ weight.T
        return unprojected.view(self.linear.operator.shape)

    @torch.no_grad()
    def rows(self, index: Tensor) -> Tensor:
        """Return the effects (B, Q, L) of all messages to the targets at ``index`` (B, Q)."""
        if self.readers is not None:
            return self.readers.rows(index)
        factors = self._factors_of(self._unprojected_gradient_at(index))
        values = self.linear.values
        effects = values.new_zeros(*index.shape, values.shape[1])
        for stack in in_stacks(range(index.shape[1]), values.numel(), values.device):
            targets = index[:, stack.start : stack.stop].T
            weighted = sum_tensors(  # (Q, B, L, H, P)
                core.unit_rows(targets, at_positions(factor, targets)) * values
                for factor, core in factors
            )
            effects[:, stack.start : stack.stop] = weighted.sum((-1, -2)).transpose(0, 1)
        return effects

    def matrix(self) -> Tensor:
        """Return the effects of all messages by target and source, (B, L, L)."""
        rows = range(self.linear.operator.shape.tokens)
        return torch.cat([part for _, part in self.strips(rows)], 1)

    @torch.no_grad()
    def strips(self, rows: range) -> Iterator[tuple[range, Tensor]]:
        """Yield chunks of :meth:`matrix`: a range of R targets, and their effects (B, R, L)."""
        linear = self.linear
        gradient = self._unprojected_gradient if self.readers is None else None
        batch, tokens = linear.operator.shape[:2]
        factors = [] if gradient is None else self._factors_of(gradient)
        for chunk in slices(rows, _ROWS):
            targets = range(chunk.start, chunk.stop)
            if self.readers is None:
                by_factor = [  # {0: values}: columns are multiplied with values, at lag 0
                    core.entries(factor, {0: linear.values}, targets).full(tokens)
                    for factor, core in factors
                ]
                yield targets, sum_tensors(by_factor)
            else:
                index = torch.tensor(targets, device=self.gradient.device)
                yield targets, self.readers.rows(index.expand(batch, -1))

    @torch.no_grad()
    def by_source(self) -> Tensor:
        """Return the effects of each source, summed over targets, (B, L)."""
        if self.readers is not None:
            return self._summed(1)
        # the sum over i of <gradient[i], operator[i, j] values[j]>
        sent = self.linear.operator.transpose(self._unprojected_gradient)
        return (sent * self.linear.values).sum((-1, -2))

    @torch.no_grad()
    def by_target(self) -> Tensor:
        """Return the effects at each target, summed over sources, (B, L)."""
        if self.readers is not None:
            return self._summed(2)
        received = self.linear.operator.apply(self.linear.values)
        return (received * self._unprojected_gradient).sum((-1, -2))

    def _summed(self, over: int) -> Tensor:
        """Sum :meth:`matrix` over targets (``over=1``) or sources (2) in chunks, to (B, L)."""
        rows = range(self.linear.operator.shape.tokens)
        sums = [strip.sum(over) for _, strip in self.strips(rows)]
        return sum_tensors(sums) if over == 1 else torch.cat(sums, 1)

    @torch.no_grad()
    def along(self, edges: Edges, size: tuple[int, int], given: Tensor | None) -> Tensor:
        """Return the effect of cutting all messages along ``edges`` together, (B,).

        Raises:
            OptionError: for edges with ``selection``.
        """
        if edges.selection:
            raise OptionError(
                "selection=True also removes sources from the coefficients, whose effect is not "
                "estimated: the gradient at the mixer's output covers only the message. Leave "
                "selection out, or run the model in knock_out."
            )
        share = share_of(edges)
        if not edges.is_of_kind(is_attention(self.linear)):
            return self.gradient.new_zeros(len(self.gradient))
        pairs = pairs_of([edges], size, given, by_target=share.constants)
        if share.is_whole:  # no relations, so pairs_of yields one product
            ((targets, _),) = pairs
            keep = targets[0].to(self.gradient)[..., None]
            return self._effect_of_subtracting(self.linear.output() * keep)
        messages = sum_messages(self.linear, pairs, share, self.name)
        if self.readers is None:
            return (messages * self._unprojected_gradient).flatten(1).sum(1)
        return self._effect_of_subtracting(projection_of(self.linear).product(messages.flatten(-2)))

    def _effect_of_subtracting(self, lost: Tensor) -> Tensor:
        """Return the effect (B,) of subtracting ``lost`` (B, L, E) from the mixer's output."""
        if self.readers is None:
            return (self.gradient * lost).flatten(1).sum(1)
        positions = torch.arange(lost.shape[1], device=lost.device).expand(len(lost), -1)
        messages = lost[:, :, None]  # one per target, (B, L, 1, E)
        return self.readers.effects(messages, positions).flatten(1).sum(1)


@dataclass(frozen=True, eq=False)
class Effects:
    """Estimated effects of cutting the messages of a run, as :class:`EdgeEffects` returns them.

    Matrices are computed on request, in chunks of rows. An effect is the expected decrease of the
    output without the message: positive if the message increases the output.

    Attributes:
        layers: one :class:`LayerEffects` for each mixer call, in the order in which they ran.
        mixers: the model's mixers, in the model's order.
        output: the explained number (B,).
        tokens: the number of input tokens L.
        given: the input position of each token that the layers read (B, L'), -1 for a token that is
            not in the input. None if the layers read the input's tokens in order.
    """

    layers: tuple[LayerEffects, ...]
    mixers: Sequence[Mixer]
    output: Tensor
    tokens: int
    given: Tensor | None

    def __repr__(self) -> str:
        kind = "of first order" if self.first_order else "with exact norms"
        return f"Effects({len(self.layers)} layers of {self.tokens} tokens, {kind})"

    @property
    def names(self) -> list[str]:
        """The mixers' names, in the order in which they ran."""
        return [layer.name for layer in self.layers]

    @property
    def first_order(self) -> list[str]:
        """The names of the layers whose norms are approximated to first order."""
        return [layer.name for layer in self.layers if layer.readers is None]

    @underflow_flushed()
    def matrix(self, layers: Any = None) -> Tensor:
        """Return the effects by target and source, summed over layers, (B, L, L).

        Args:
            layers: a number, a name, a range or slice, or a list of these. Default: None, all.
        """
        total = self._total(layers, LayerEffects.matrix)
        return self._at_input_tokens(self._at_input_tokens(total).mT).mT

    @underflow_flushed()
    def rows(self, positions: Positions, layers: Any = None) -> Tensor:
        """Return the effects of messages to some targets, summed over layers, (B, Q, L).

        Args:
            positions: the targets: Q positions common to all examples, or a tensor (B, Q).
            layers: as in :meth:`matrix`. Default: None, all.
        """

        def rows_of(layer: LayerEffects) -> Tensor:
            """Return one layer's effects, with sources counted in the tokens that it reads."""
            tokens = layer.linear.operator.shape.tokens
            size = len(layer.gradient), tokens if self.given is None else self.tokens
            return layer.rows(
                self._layer_positions(query_index(positions, size, layer.gradient.device))
            )

        return self._at_input_tokens(self._total(layers, rows_of).mT).mT

    def by_layer(self) -> Tensor:
        """Return the sum of all effects in each of N layers, (N, B)."""
        return torch.stack([layer.by_source().sum(-1) for layer in self.layers])

    def by_source(self, layers: Any = None) -> Tensor:
        """Return the effects of each source, summed over targets and layers, (B, L)."""
        return self._at_input_tokens(self._total(layers, LayerEffects.by_source))

    def by_target(self, layers: Any = None) -> Tensor:
        """Return the effects at each target, summed over sources and layers, (B, L)."""
        return self._at_input_tokens(self._total(layers, LayerEffects.by_target))

    def of(self, *edges: Edges) -> Tensor:
        """Estimate the effect of cutting all ``edges`` together as the sum of their effects, (B,).

        A message that is in two of the edges counts twice.
        """
        total = torch.zeros_like(self.output)
        for edge_set in edges:
            selected_mixers = {mixer.module for mixer in edge_set.chosen(self.mixers)}
            for layer in self.layers:
                if layer.mixer.module not in selected_mixers:
                    continue
                shape = layer.linear.operator.shape
                size = shape.batch, shape.tokens if self.given is None else self.tokens
                given = None if self.given is None else self.given.cpu()
                total = total + layer.along(edge_set, size, given).to(total)
        return total

    def to_pandas(self, count: int = 100) -> Any:
        """Return the ``count`` strongest edges of each example as a ``pandas.DataFrame``."""
        rows = [
            {"example": example, **edge._asdict()}
            for example, edges in enumerate(self.top(count))
            for edge in edges
        ]
        return optional("pandas", "pandas", "to_pandas()").DataFrame(rows)

    @underflow_flushed()
    def top(self, count: int, layers: Any = None) -> list[list[Edge]]:
        """Return each example's edges with the largest absolute effects, without effects of 0.

        Args:
            count: the number of edges of each example.
            layers: as in :meth:`matrix`. Default: None, all.
        """
        checks.count("count", count)
        batch = len(self.output)
        best: list[list[Edge]] = [[] for _ in range(batch)]
        for layer in self._layers_of(layers):
            layer_index, tokens = self.layers.index(layer), layer.linear.operator.shape.tokens
            for rows, strip in layer.strips(range(tokens)):
                flat = strip.flatten(1)
                sizes, places = flat.abs().topk(min(count, flat.shape[1]))
                for b in range(batch):
                    threshold = abs(best[b][-1].effect) if len(best[b]) == count else 0.0
                    for place, strength in zip(places[b].tolist(), sizes[b].tolist(), strict=True):
                        if strength <= threshold:
                            break
                        target, source = rows[place // tokens], place % tokens
                        edge = self.edge(
                            b, layer_index, target, source, effect=float(flat[b, place])
                        )
                        best[b] += [] if edge is None else [edge]
                    best[b] = sorted(best[b], key=lambda e: -abs(e.effect))[:count]
        return best

    def _layers_of(self, layers: Any) -> list[LayerEffects]:
        """Return the layers that the option ``layers`` selects."""
        if layers is None:
            return list(self.layers)
        if isinstance(layers, slice):
            return list(self.layers[layers])
        single = isinstance(layers, str) or not isinstance(layers, Iterable)
        entries = [layers] if single else layers
        return [layer for entry in entries for layer in self._layers_named(entry)]

    def _layers_named(self, layer: Any) -> list[LayerEffects]:
        """Return the layers that one entry of ``layers``, a number or a name, selects."""
        index = checks.as_integer(layer)
        count = len(self.layers)
        if index is not None and -count <= index < count:
            return [self.layers[index]]
        layers = [candidate for candidate in self.layers if layer in candidate.mixer.names]
        if not layers:
            raise OptionError(
                f"layers contains {layer!r}, which did not run. Pass a number from 0 to "
                f"{count - 1}, or a name: {', '.join(self.names)}."
            )
        return layers

    def _total(self, layers: Any, quantity: Callable[[LayerEffects], Tensor]) -> Tensor:
        """Sum ``quantity`` over the selected layers; raise if layers read different tokens."""
        selected = self._layers_of(layers)
        if not selected:
            raise OptionError(
                f"layers={layers!r} selects no layer. Pass at least one, or None for all."
            )
        first, *others = selected
        total = quantity(first)
        for layer in others:
            of_layer = quantity(layer)
            if total.shape != of_layer.shape:
                raise InputError(
                    f"layers={layers!r} selects layers of {total.shape[1]} and {of_layer.shape[1]} "
                    "tokens, which cannot be summed. Pass layers that read the same tokens."
                )
            total = total + of_layer
        return total

    def _at_input_tokens(self, x: Tensor) -> Tensor:
        """Rearrange values from the layers' tokens (B, L', ...) to input tokens (B, L, ...)."""
        return x if self.given is None else to_input_tokens(x, self.given, self.tokens)

    def _layer_positions(self, index: Tensor) -> Tensor:
        """Convert input positions (B, Q) to positions among the tokens that the layers read."""
        if self.given is None:
            return index
        match = index[:, :, None] == self.given.to(index.device)[:, None]
        unread = index[~match.any(-1)]
        if len(unread):
            raise InputError(f"positions: no layer reads token {int(unread[0])}. Leave it out.")
        return match.int().argmax(-1)  # the first of the layers' tokens at each position

    def edge(
        self, example: int, layer: int, target: int, source: int, effect: float
    ) -> Edge | None:
        """Return an edge between input tokens; None if source or target is not in the input.

        Args:
            example, layer, target, source: indices of the example, the layer, and its tokens.
            effect: the estimated effect of cutting the edge.
        """
        if self.given is not None:
            target, source = (int(self.given[example, token]) for token in (target, source))
            if min(target, source) < 0:
                return None
        at_layer = self.layers[layer]
        return Edge(layer, at_layer.name, target, source, effect, at_layer.readers is None)
