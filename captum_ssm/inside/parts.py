"""Compute the nodes of a graph, and the contributions of all other nodes to each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attr.call.progress import shown
from ..attr.engine.decompose import TOLERANCES, account, changes, not_linear
from ..errors import OptionError
from ..linear import Network, Site
from ..operators.kernels.arithmetic import sum_tensors, unseen
from .features import Readings, active_features, named_directions, tokens_of, whole
from .graph import Graph, Kind, Node, strongest, with_strongest_edges
from .influence import influences, scores


class Parts:
    """The nodes and contributions of one run of a linearized network.

    Args:
        network: the network, after its forward run.
        taken: each layer's nodes: None for whole activations, a list of features, or a dictionary.
        number: the target's value (1,).
        constant: a summand of the target that does not come from a module, or None.
        baselines: for each input of the network, the value to compare with; empty for 0.
        index: the index of the target in the model's output (1, [n,] dims), or None.
    """

    def __init__(
        self,
        network: Network,
        taken: Mapping[Site, Any],
        number: Tensor,
        constant: Tensor | None,
        baselines: Sequence[Tensor],
        index: Tensor | None,
    ) -> None:
        self.network, self.taken = network, taken
        self.number, self.constant, self.baselines = number, constant, baselines
        # a sum over several tokens has no single position
        self.target = [] if index is None or index.dim() > 2 else index[0].tolist()
        for site in taken:
            network.met(site)  # raises if the layer did not run
        self.sites = [site for site in network.sites.met if site in taken]
        self.met = {site: network.met(site) for site in self.sites}
        self.values = {site: tokens_of(self.met[site], site) for site in self.sites}
        self.readings: dict[Site, Readings] = {}
        self.edges: list[Tensor] = []

    def followed(self, top: int) -> Parts:
        """Keep the ``top`` strongest nodes, compute all contributions to each, and return self."""
        with unseen():
            effects = self._read_nodes()
            strength = torch.cat([effects[site].abs() for site in self.sites])
            best = torch.zeros_like(strength, dtype=torch.bool)
            best[strength.topk(min(top, len(strength))).indices] = True
            sizes = [len(effects[site]) for site in self.sites]
            for site, chosen in zip(self.sites, torch.split(best, sizes), strict=True):
                self.readings[site] = self.readings[site].only(chosen.nonzero()[:, 0])
            self.errors = {site: self._error(site) for site in self.sites}
            numbers = list(self._numbers())
            for number, constant, activation in shown(numbers):
                self.edges.append(self._row(number, constant, activation))
        return self

    def graph(
        self, tokens: Sequence[str] | None, inputs: Tensor, keep: float | None = None
    ) -> Graph:
        """Return the graph of the nodes that pruning keeps.

        Each layer has one error node, without incoming edges, per token whose error is not 0.

        Args:
            tokens: a text for each token that the user passed, or None.
            inputs: the explained inputs.
            keep: the share of the influence that remains after pruning, see :meth:`Graph.pruned`.
                Default: None, all nodes and edges.
        """
        texts, ids = self._texts(tokens, inputs)
        image = inputs.dim() == 4
        nodes = [
            Node("token", "", 0, None if image else i, ids[i], 0.0, 0.0, text)
            for i, text in enumerate(texts)
        ]
        nodes += self._inner_nodes()
        last = len(self.sites) + 1
        nodes.append(Node("constants", "", 0, None, None, 0.0, 0.0, "constants"))
        value = float(self.number.detach())
        predicted = self.target[-1] if self.target else None
        known = dict(zip(ids, texts, strict=True))
        label = "target" if predicted is None else known.get(predicted, str(predicted))
        at = self.target[0] if len(self.target) == 2 else None
        nodes.append(Node("target", "", last, at, predicted, value, 0.0, label))
        # row i of found has the contributions of all nodes to the node entered[i]
        rows = [i for i, node in enumerate(nodes) if node.kind in ("feature", "direction", "whole")]
        entered = torch.tensor([*rows, len(nodes) - 1])
        found = torch.stack(self.edges)
        found = torch.cat([found, torch.zeros_like(found[:, :1])], 1)  # the target has no effect
        kinds = [node.kind for node in nodes]
        has_influence, errors, is_token = (
            torch.tensor([kind in which for kind in kinds])
            for which in (set(kinds) - {"constants"}, {"error"}, {"token"})
        )
        _, through = influences(found, has_influence, entered)
        nodes = [
            replace(node, influence=share)
            for node, share in zip(nodes, through.tolist(), strict=True)
        ]
        writes = [*([None] * len(texts)), *self._writes(), None, None]
        which, kept = torch.arange(len(nodes)), 1.0
        if keep is not None:
            which, kept = strongest(nodes, keep)
        place = torch.full((len(nodes),), -1)
        place[which] = torch.arange(len(which))
        edges, into = found.new_zeros(len(which), len(which)), place[entered]
        edges[into[into >= 0]] = found[into >= 0][:, which]
        chosen = which.tolist()
        graph = Graph(
            tuple(nodes[i] for i in chosen),
            edges,
            tuple(texts),
            {**scores(found, has_influence, errors, is_token, entered), "kept": kept},
            tuple(writes[i] for i in chosen),
        )
        return graph if keep is None else with_strongest_edges(graph)

    def _read_nodes(self) -> dict[Site, Tensor]:
        """Set ``readings``; return each node's contribution to the target over all paths, (n,).

        The loop is from the last layer, because paths go through the nodes of later layers.
        """
        leaves = [self.met[site].leaf for site in self.sites]
        gradients, _ = account(self.network.mode, self.number, self.constant, leaves)  # type: ignore[arg-type]
        total = dict(zip(self.sites, gradients, strict=True))
        effects = {}
        for place in reversed(range(len(self.sites))):
            site = self.sites[place]
            gradient = total[site][0].flatten(1)
            found = self._readings(site, gradient)
            self.readings[site] = found
            effects[site] = (gradient[found.positions] * found.writes).sum(1)
            onward = found.reads
            if found.kind != "whole":
                per_unit = (gradient[found.positions] * found.directions).sum(1)
                onward = per_unit[:, None] * found.reads
            through = torch.zeros_like(gradient).index_add(0, found.positions, onward)
            value = self.met[site].value
            earlier = [leaf for leaf in leaves[:place] if leaf is not None]
            if not earlier:
                continue
            more = self.network.mode.gradients(value, earlier, through.view_as(value))
            for before, gradient_there in zip(self.sites[:place], more, strict=True):
                if gradient_there is not None:
                    total[before] = total[before] + gradient_there
        return effects

    def _readings(self, site: Site, gradient: Tensor) -> Readings:
        """Return a layer's nodes: whole activations, directions, or active features."""
        how, met = self.taken[site], self.met[site]
        if how is None:
            return whole(site, met, gradient)
        if isinstance(how, list):
            return named_directions(site, met, how)
        return active_features(site, met, how)

    def _error(self, site: Site) -> Tensor:
        """Return the activation minus the features that are nodes, (L, W)."""
        found = self.readings[site]
        written = torch.zeros_like(self.values[site])
        written = written.index_add(0, found.positions, found.writes)
        return self.values[site] - written - found.rest

    def _numbers(self) -> Iterator[tuple[Tensor, Tensor | None, float]]:
        """Yield (number, constant, activation) for each node with incoming edges.

        The node's activation is number + constant; ``number`` (1,) is linear in the layer's output.
        """
        for site in self.sites:
            found, rows = self.readings[site], self.met[site].value[0].flatten(1)
            there = self.values[site][found.positions]
            constants = found.activations - (found.reads * there).sum(1)
            for i in range(len(constants)):
                number = (found.reads[i] * rows[found.positions[i]]).sum()[None]
                yield number, constants[i : i + 1], float(found.activations[i])
        yield self.number, self.constant, float(self.number.detach())

    def _row(self, number: Tensor, constant: Tensor | None, activation: float) -> Tensor:
        """Return all nodes' contributions to one node; raise unless they sum to ``activation``."""
        roots, leaves = self.network.roots, [self.met[site].leaf for site in self.sites]
        if not number.requires_grad:  # no node is in an earlier layer
            number = number + 0 * roots[0].sum()
        gradients, biases = account(
            self.network.mode,
            number,
            constant,
            [*roots, *leaves],  # type: ignore[list-item]
        )
        starts, others = gradients[: len(roots)], gradients[len(roots) :]
        kept = sum((b.sum() for b in biases.values()), number.new_zeros(()).detach())
        for gradient, baseline in zip(starts, self.baselines, strict=False):
            kept = kept + (gradient * baseline).sum()
        parts = [g * x for g, x in zip(starts, changes(self.network, self.baselines), strict=True)]
        if parts[0].dim() == 4:
            row = [parts[0].flatten().sum()[None]]
        else:
            row = [sum_tensors(x[0].reshape(x.shape[1], -1).sum(1) for x in parts)]
        errors, size = [], sum_tensors(x.abs().sum() for x in parts)
        for site, gradient in zip(self.sites, others, strict=True):
            found, rows = self.readings[site], gradient[0].flatten(1)
            row.append((rows[found.positions] * found.writes).sum(1))
            errors.append((rows * self.errors[site]).sum(1)[self._has_error(site)])
            kept = kept + (rows * found.rest).sum()
            size = size + (rows * self.values[site]).abs().sum()
        whole_row = torch.cat([*row, *errors, kept[None]]).detach().cpu().double()
        size = size + sum(b.abs().sum() for b in biases.values()) + abs(activation)
        limit = TOLERANCES.get(number.dtype, 1e-3) * float(size)
        if abs(float(whole_row.sum()) - activation) > limit:
            raise not_linear(number)
        return whole_row

    def _has_error(self, site: Site) -> Tensor:
        return self.errors[site].any(1)

    def _inner_nodes(self) -> Iterator[Node]:
        """Yield the nodes of all layers, then the error nodes of all layers."""
        for depth, site in enumerate(self.sites, 1):
            found = self.readings[site]
            kind: Kind = found.kind
            for i, position in enumerate(found.positions.tolist()):
                value = float(found.activations[i])
                index, label = found.indices[i], found.labels[i]
                yield Node(kind, site.name, depth, position, index, value, 0.0, label)
        for depth, site in enumerate(self.sites, 1):
            norms = self.errors[site].norm(dim=1).tolist()
            for position in self._has_error(site).nonzero()[:, 0].tolist():
                size = norms[position]
                yield Node("error", site.name, depth, position, None, size, 0.0, "error")

    def _writes(self) -> Iterator[Tensor]:
        """Yield the vector that each inner node adds to its layer's activation, (W,)."""
        for site in self.sites:
            yield from self.readings[site].writes.detach().unbind()
        for site in self.sites:
            yield from self.errors[site][self._has_error(site)].detach().unbind()

    def _texts(
        self, tokens: Sequence[str] | None, inputs: Tensor
    ) -> tuple[list[str], list[int | None]]:
        """Return a text and an id for each token that the model reads."""
        if inputs.dim() == 4:
            return ["image"], [None]
        length, places = inputs.shape[1], self.network.mode.given
        ids: list[int | None] = [None] * length if inputs.dim() == 3 else inputs[0].tolist()
        if tokens is None:
            tokens = [str(i if x is None else x) for i, x in enumerate(ids)]
        if isinstance(tokens, str) or len(tokens) != length:
            raise OptionError(
                f"tokens={tokens!r} does not name {length} tokens. Pass one text per token."
            )
        if places is None:
            return list(tokens), ids
        read = places[0].tolist()
        return (
            [tokens[i] if i >= 0 else "(virtual)" for i in read],
            [ids[i] if i >= 0 else None for i in read],
        )
