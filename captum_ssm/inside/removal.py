"""Run a model without some nodes of a graph, and compare with the graph's estimates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..attr.call.inputs import as_tuple, call_model, single_input
from ..attr.call.targets import contrasted, logits_of
from ..edges.truth import Truth
from ..errors import LayerError, OptionError
from ..linear import find_site
from ..tracing import find_model
from ..tracing.hooks import hooked
from .graph import Graph, Node

#: Kinds of nodes whose estimated effect is compared with the true effect.
_COMPARED = ("feature", "direction", "whole")


@contextmanager
def without(model: nn.Module, graph: Graph, nodes: Sequence[Node]) -> Iterator[None]:
    """Subtract the vectors of some of a graph's nodes from activations while a model runs.

    The vectors have their values from the graph's run. All later modules run as usual, so this is
    an intervention, not an estimate. The input must have as many tokens as the graph's input.

    Args:
        model: the model.
        graph: the graph of the nodes.
        nodes: features, directions, whole activations or errors of the graph.

    Raises:
        OptionError: for a node outside the graph, a token, constants, the target, or a head. Cut
            heads with :func:`~captum_ssm.knock_out`.
        LayerError: when the shape of a layer's output differs from the graph's run.

    Example:
        >>> import torch
        >>> from captum_ssm import attribution_graph
        >>> from captum_ssm.inside import without
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp . ? anna owns the")])
        >>> answer = int(model(ids).logits[0, -1].argmax())
        >>> graph = attribution_graph(
        ...     model, ids, (-1, answer), nodes=["backbone.layers.0"], contrast="mean")
        >>> with without(model, graph, [graph.path()[1]]):
        ...     bool(model(ids).logits[0, -1].argmax() == answer)
        False
    """
    removed_by_layer: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    index_of = {id(node): i for i, node in enumerate(graph.nodes)}
    for node in nodes:
        vector = graph.writes[index_of[id(node)]] if id(node) in index_of else None
        if vector is None or node.position is None or node.layer.endswith(".heads"):
            raise OptionError(
                f"nodes has {node}, which cannot be subtracted from a layer's output. Pass "
                "features, directions, whole activations or errors of this graph; for heads use "
                "knock_out."
            )
        removed_by_layer[node.layer].append((node.position, vector))
    with ExitStack() as stack:
        for layer, removed in removed_by_layer.items():
            site = find_site(model, layer)
            hook = hooked(site.module.register_forward_hook, _subtracting(layer, removed))
            stack.enter_context(hook)
        yield


def validate(
    graph: Graph,
    forward_func: Callable[..., Any],
    inputs: Tensor | tuple[Tensor, ...],
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    contrast: Any = None,
    model: nn.Module | None = None,
) -> Truth:
    """Remove the nodes of a graph one by one, and compare the true effects with the estimates.

    Args:
        graph: a graph of the same model, inputs and target, pruned or not.
        forward_func, inputs, target, additional_forward_args, contrast, model: as in
            :func:`~captum_ssm.attribution_graph`, with the same defaults. For ``contrast="all"`` or
            ``"others"`` the true effect is the change of the log-probability or the log-odds.

    Returns:
        The estimated and true effects of every feature, direction and whole activation except
        heads, with the correlation of the two and the share of equal signs.
    """
    tensor, _ = single_input(inputs)
    additional = as_tuple(additional_forward_args)
    module = find_model(forward_func, model)
    nodes = [n for n in graph.nodes if n.kind in _COMPARED and not n.layer.endswith(".heads")]

    def value_without(*removed: Node) -> float:
        with torch.no_grad(), without(module, graph, removed):
            output = logits_of(call_model(forward_func, tensor, additional))
        return float(contrasted(output, target, contrast)[0])

    effects = graph.effects()
    index_of = {id(node): i for i, node in enumerate(graph.nodes)}
    estimated = torch.stack([effects[index_of[id(node)]] for node in nodes])
    whole_value = value_without()
    true = torch.tensor([whole_value - value_without(node) for node in nodes], dtype=torch.double)
    # a difference of two values of this size has an error of a few units
    rounding = 4 * torch.finfo(torch.float32).eps * abs(whole_value)
    examples = [0] * len(nodes)  # a graph describes one example
    return Truth(nodes, examples, estimated, true, rounding)


def _subtracting(layer: str, removed: Sequence[tuple[int, Tensor]]) -> Callable[..., Any]:
    """Return a forward hook that subtracts (position, vector (W,)) pairs from an output."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output with reduced copies of its first floating tensors."""
        is_tuple = isinstance(output, tuple | list)
        tensors = [x for x in (output if is_tuple else [output]) if isinstance(x, Tensor)]
        tensors = [x for x in tensors if x.is_floating_point()]
        width, reduced = len(removed[0][1]), list[Tensor]()
        # a node's vector joins the features of the layer's first tensors
        while tensors and sum(x[0, 0].numel() for x in reduced) < width:
            reduced.append(tensors.pop(0))
        sizes = [x[0, 0].numel() for x in reduced]
        fits = sum(sizes) == width and all(p < x.shape[1] for p, _ in removed for x in reduced)
        if not fits:
            raise LayerError(
                f"layer {layer!r} does not return {width} features for each token, as in the run "
                "of the graph. Run the model on an input with as many tokens as the graph's input."
            )
        copies = {id(x): x.clone() for x in reduced}  # the model may use the output elsewhere
        for position, vector in removed:
            for x, piece in zip(reduced, torch.split(vector, sizes), strict=True):
                copies[id(x)][:, position] -= piece.to(x).view(x.shape[2:])
        if not is_tuple:
            return copies[id(output)]
        return type(output)(copies.get(id(x), x) for x in output)

    return hook
