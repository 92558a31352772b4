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
from .features import Readings, active_features, named_directions, tokens_of, whole_activations
from .graph import Graph, Kind, Node, strongest, with_strongest_edges
from .influence import influences, scores


class Parts:
    """The nodes and contributions of one run of a linearized network.

    Args:
        network: the network, after its forward run.
        selections: nodes of each layer: None (whole activations), a list of features, a dictionary.
        value: the target's value (1,).
        constant: a summand of the target that does not come from a module, or None.
        baselines: for each input of the network, the value to compare with; empty for 0.
        index: the index of the target in the model's output (1, [n,] dims), or None.
    """

    def __init__(
        self,
        network: Network,
        selections: Mapping[Site, Any],
        value: Tensor,
        constant: Tensor | None,
        baselines: Sequence[Tensor],
        index: Tensor | None,
    ) -> None:
        self.network, self.selections = network, selections
        self.value, self.constant, self.baselines = value, constant, baselines
        # a sum over several tokens has no single position
        self.target = [] if index is None or index.dim() > 2 else index[0].tolist()
        for site in selections:
            network.met(site)  # raises if the layer did not run
        self.sites = [site for site in network.sites.met if site in selections]
        self.met = {site: network.met(site) for site in self.sites}
        self.values = {site: tokens_of(self.met[site], site) for site in self.sites}
        self.readings: dict[Site, Readings] = {}
        self.edges: list[Tensor] = []

    def keep_strongest(self, top: int) -> Parts:
        """Keep the ``top`` strongest nodes, compute all contributions to each, and return self."""
        with unseen():  # the run has ended, so no rule needs to see these steps
            effects = self._read_nodes()
            strength = torch.cat([effects[site].abs() for site in self.sites])
            is_kept = torch.zeros_like(strength, dtype=torch.bool)
            is_kept[strength.topk(min(top, len(strength))).indices] = True
            sizes = [len(effects[site]) for site in self.sites]
            for site, mask_of_layer in zip(self.sites, torch.split(is_kept, sizes), strict=True):
                self.readings[site] = self.readings[site].select(mask_of_layer.nonzero()[:, 0])
            self.errors = {site: self._error(site) for site in self.sites}
            values = list(self._values_to_explain())
            for value, constant, activation in shown(values):
                self.edges.append(self._row_of(value, constant, activation))
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
        texts, ids = self._texts_and_ids(tokens, inputs)
        # Node(kind, layer, depth, position, index, activation, influence, label); influence: below
        image = inputs.dim() == 4
        nodes = [
            Node("token", "", 0, None if image else i, ids[i], 0.0, 0.0, text)
            for i, text in enumerate(texts)
        ]
        nodes += self._inner_nodes()
        last = len(self.sites) + 1
        nodes.append(Node("constants", "", 0, None, None, 0.0, 0.0, "constants"))
        value = float(self.value.detach())
        predicted = self.target[-1] if self.target else None
        text_of = dict(zip(ids, texts, strict=True))
        label = "target" if predicted is None else text_of.get(predicted, str(predicted))
        position = self.target[0] if len(self.target) == 2 else None
        nodes.append(Node("target", "", last, position, predicted, value, 0.0, label))
        # row i of contributions has the contributions of all nodes to the node entered[i]
        rows = [i for i, node in enumerate(nodes) if node.kind in ("feature", "direction", "whole")]
        entered = torch.tensor([*rows, len(nodes) - 1])
        contributions = torch.stack(self.edges)
        # a column for the target, which contributes to no node
        contributions = torch.cat([contributions, torch.zeros_like(contributions[:, :1])], 1)
        kinds = [node.kind for node in nodes]
        has_influence = torch.tensor([kind != "constants" for kind in kinds])
        errors = torch.tensor([kind == "error" for kind in kinds])
        is_token = torch.tensor([kind == "token" for kind in kinds])
        _, influence = influences(contributions, has_influence, entered)
        with_shares = zip(nodes, influence.tolist(), strict=True)
        nodes = [replace(node, influence=share) for node, share in with_shares]
        # in the order of nodes; tokens, constants and the target write no vectors
        vectors = [*([None] * len(texts)), *self._written_vectors(), None, None]
        kept_nodes, kept_share = torch.arange(len(nodes)), 1.0
        if keep is not None:
            kept_nodes, kept_share = strongest(nodes, keep)
        place_of = torch.full((len(nodes),), -1)  # of each node among the kept ones
        place_of[kept_nodes] = torch.arange(len(kept_nodes))
        edges = contributions.new_zeros(len(kept_nodes), len(kept_nodes))
        row_of = place_of[entered]
        edges[row_of[row_of >= 0]] = contributions[row_of >= 0][:, kept_nodes]
        kept_list = kept_nodes.tolist()
        graph = Graph(
            tuple(nodes[i] for i in kept_list),
            edges,
            tuple(texts),
            {**scores(contributions, has_influence, errors, is_token, entered), "kept": kept_share},
            tuple(vectors[i] for i in kept_list),
        )
        return graph if keep is None else with_strongest_edges(graph)

    def _read_nodes(self) -> dict[Site, Tensor]:
        """Set ``readings``; return each node's contribution to the target over all paths, (n,).

        The loop is from the last layer, because paths go through the nodes of later layers.
        """
        leaves = [self.met[site].leaf for site in self.sites]
        gradients, _ = account(self.network.mode, self.value, self.constant, leaves)  # type: ignore[arg-type]
        gradient_of = dict(zip(self.sites, gradients, strict=True))
        effects = {}
        for depth in reversed(range(len(self.sites))):
            site = self.sites[depth]
            gradient = gradient_of[site][0].flatten(1)
            readings = self._readings(site, gradient)
            self.readings[site] = readings
            effects[site] = (gradient[readings.positions] * readings.writes).sum(1)
            # each node passes the gradient at its value on to the activation that it reads
            per_reading = readings.reads  # of a whole activation, reads are the gradient
            if readings.kind != "whole":
                per_unit = (gradient[readings.positions] * readings.directions).sum(1)
                per_reading = per_unit[:, None] * readings.reads
            at_activation = torch.zeros_like(gradient).index_add(0, readings.positions, per_reading)
            value = self.met[site].value
            earlier = [leaf for leaf in leaves[:depth] if leaf is not None]
            if not earlier:
                continue
            further = self.network.mode.gradients(value, earlier, at_activation.view_as(value))
            for earlier_site, gradient_there in zip(self.sites[:depth], further, strict=True):
                if gradient_there is not None:
                    gradient_of[earlier_site] = gradient_of[earlier_site] + gradient_there
        return effects

    def _readings(self, site: Site, gradient: Tensor) -> Readings:
        """Return a layer's nodes: whole activations, directions, or active features."""
        selection, activation = self.selections[site], self.met[site]
        if selection is None:
            return whole_activations(site, activation, gradient)
        if isinstance(selection, list):
            return named_directions(site, activation, selection)
        return active_features(site, activation, selection)

    def _error(self, site: Site) -> Tensor:
        """Return the activation minus the features that are nodes, (L, W)."""
        readings = self.readings[site]
        sum_of_features = torch.zeros_like(self.values[site])
        sum_of_features = sum_of_features.index_add(0, readings.positions, readings.writes)
        return self.values[site] - sum_of_features - readings.rest

    def _values_to_explain(self) -> Iterator[tuple[Tensor, Tensor | None, float]]:
        """Yield (value, constant, activation) for each node with incoming edges.

        The node's activation is value + constant; ``value`` (1,) is linear in the layer's output.
        """
        for site in self.sites:
            readings, rows = self.readings[site], self.met[site].value[0].flatten(1)
            at_tokens = self.values[site][readings.positions]
            constants = readings.activations - (readings.reads * at_tokens).sum(1)
            for i in range(len(constants)):
                value = (readings.reads[i] * rows[readings.positions[i]]).sum()[None]
                yield value, constants[i : i + 1], float(readings.activations[i])
        yield self.value, self.constant, float(self.value.detach())

    def _row_of(self, value: Tensor, constant: Tensor | None, activation: float) -> Tensor:
        """Return all nodes' contributions to one node; raise unless they sum to ``activation``."""
        roots = self.network.roots
        tensors: Any = [*roots, *(self.met[site].leaf for site in self.sites)]
        if not value.requires_grad:  # no node is in an earlier layer: make gradients 0
            value = value + 0 * roots[0].sum()
        gradients, biases = account(self.network.mode, value, constant, tensors)
        at_roots, at_leaves = gradients[: len(roots)], gradients[len(roots) :]
        constants = sum((b.sum() for b in biases.values()), value.new_zeros(()).detach())
        for gradient, baseline in zip(at_roots, self.baselines, strict=False):
            constants = constants + (gradient * baseline).sum()
        products = [
            g * x for g, x in zip(at_roots, changes(self.network, self.baselines), strict=True)
        ]
        if products[0].dim() == 4:  # an image is one node
            row = [products[0].flatten().sum()[None]]
        else:
            row = [sum_tensors(x[0].reshape(x.shape[1], -1).sum(1) for x in products)]
        errors, scale = [], sum_tensors(x.abs().sum() for x in products)
        for site, gradient in zip(self.sites, at_leaves, strict=True):
            readings, rows = self.readings[site], gradient[0].flatten(1)
            row.append((rows[readings.positions] * readings.writes).sum(1))
            errors.append((rows * self.errors[site]).sum(1)[self._has_error(site)])
            constants = constants + (rows * readings.rest).sum()
            scale = scale + (rows * self.values[site]).abs().sum()
        # in the order of nodes: tokens, features of all layers, errors of all layers, constants
        row_of_all = torch.cat([*row, *errors, constants[None]]).detach().cpu().double()
        scale = scale + sum(b.abs().sum() for b in biases.values()) + abs(activation)
        limit = TOLERANCES.get(value.dtype, 1e-3) * float(scale)
        if abs(float(row_of_all.sum()) - activation) > limit:
            raise not_linear(value)
        return row_of_all

    def _has_error(self, site: Site) -> Tensor:
        """Return a mask (L,) of the tokens at which a layer has an error node."""
        return self.errors[site].any(1)

    def _inner_nodes(self) -> Iterator[Node]:
        """Yield the nodes of all layers, then the error nodes of all layers."""
        for depth, site in enumerate(self.sites, 1):
            readings = self.readings[site]
            kind: Kind = readings.kind
            for i, position in enumerate(readings.positions.tolist()):
                value = float(readings.activations[i])
                index, label = readings.indices[i], readings.labels[i]
                yield Node(kind, site.name, depth, position, index, value, 0.0, label)
        for depth, site in enumerate(self.sites, 1):
            norms = self.errors[site].norm(dim=1).tolist()
            for position in self._has_error(site).nonzero()[:, 0].tolist():
                norm = norms[position]
                yield Node("error", site.name, depth, position, None, norm, 0.0, "error")

    def _written_vectors(self) -> Iterator[Tensor]:
        """Yield the vector that each inner node adds to its layer's activation, (W,)."""
        for site in self.sites:
            yield from self.readings[site].writes.detach().unbind()
        for site in self.sites:
            yield from self.errors[site][self._has_error(site)].detach().unbind()

    def _texts_and_ids(
        self, tokens: Sequence[str] | None, inputs: Tensor
    ) -> tuple[list[str], list[int | None]]:
        """Return a text and an id for each token that the model reads."""
        if inputs.dim() == 4:
            return ["image"], [None]
        length, input_places = inputs.shape[1], self.network.mode.given
        ids: list[int | None] = [None] * length if inputs.dim() == 3 else inputs[0].tolist()
        if tokens is None:
            tokens = [str(i if x is None else x) for i, x in enumerate(ids)]
        if isinstance(tokens, str) or len(tokens) != length:
            raise OptionError(
                f"tokens={tokens!r} does not name {length} tokens. Pass one text per token."
            )
        if input_places is None:
            return list(tokens), ids
        read_places = input_places[0].tolist()
        texts = [tokens[i] if i >= 0 else "(virtual)" for i in read_places]
        return texts, [ids[i] if i >= 0 else None for i in read_places]
