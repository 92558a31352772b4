"""Make an attribution graph, with one forward run and one backward pass for each node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..attr.call import checks
from ..attr.call.given import with_argument_advice
from ..attr.call.inputs import BatchPart, single_input
from ..attr.call.progress import bar
from ..attr.call.targets import Against, target_index
from ..attr.engine.baselines import Baselines, out_of_tuple
from ..attr.engine.linear_method import Rules, first_that_fits, linear_run, numbers_of, start_of
from ..attr.engine.run import Request
from ..attr.flow import FlowMethod
from ..errors import InputError, OptionError
from ..linear import Rule, find_site
from ..tracing import find_mixers, find_model
from .features import Dictionary, Feature
from .graph import Graph, check_share
from .layer import Layer
from .parts import Parts

#: Accepted values of ``nodes``: a dict from layers to dictionaries, or a list of layers and
#: features.
Nodes = Mapping[Layer, Dictionary | None] | Sequence[Layer | Feature]


@with_argument_advice
def attribution_graph(
    forward_func: Callable[..., Any],
    inputs: Tensor | tuple[Tensor, ...],
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    nodes: Nodes | None = None,
    contrast: Any = None,
    rule: Rule | None = None,
    baselines: Baselines = None,
    top: int = 512,
    keep: float | None = 0.8,
    tokens: Sequence[str] | None = None,
    model: nn.Module | None = None,
    layers: Sequence[Layer] | None = None,
    show_progress: bool = False,
    verify: bool | float | None = None,
    recompute: bool | None = None,
) -> Graph:
    """Decompose an output, and each node inside the model, into exact contributions of other nodes.

    The function takes one forward run of :class:`~captum_ssm.LatimFlow`'s linear network, and one
    backward pass per node. The contributions to a node sum to its activation.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        inputs: token ids (1, L), embeddings (1, L, E) or an image (1, C, H, W), or a tuple of one
            such tensor. An image becomes one node.
        target, additional_forward_args, contrast, rule, baselines, verify: as in
            :meth:`LatimFlow.attribute() <captum_ssm.LatimFlow.attribute>`, but ``rule`` is
            ``"frozen"`` by default: edges are exact parts of the output.
        nodes: the layers whose outputs are decomposed: a list of layers and :class:`Feature`
            objects, or a dict from layers to dictionaries of features. Such a dictionary is an
            object with ``encode`` and ``decode``, such as a sparse autoencoder. A layer in a list,
            or with None in place of a dictionary, has one node per token, or per token and head for
            ``"backbone.layers.0.mixer.heads"``. Default: None, the blocks of all mixers.
        top: the number of features with the largest contributions to the target that become nodes;
            all other features are part of the error node of their layer and token. Default: 512.
        keep: the share of influence that :meth:`Graph.pruned` keeps, or None. Default: 0.8.
        tokens: a text for each position. Default: None, token ids, or positions without ids.
        model: the module, if it cannot be found in forward_func. Default: None.
        layers: names or modules of the mixers to linearize with their adapters. Default: None, all.
        show_progress: show a progress bar over the nodes. Default: False.
        recompute: as in :class:`~captum_ssm.LatimFlow`, for each node. A block with one of the
            layers inside keeps its graph. Default: None, only after the device's memory was too
            small.

    Returns:
        The :class:`Graph`.

    Raises:
        LayerError: for a layer outside the model, one that did not run or ran several times, or a
            part of a mixer.
        OptionError: for a wrong value of ``nodes`` or of a different option.
        InputError, TargetError, GradientModeError, NotLinearError, NonFiniteError,
        ReconstructionError: as in LatimFlow.attribute().

    Example:
        >>> import torch
        >>> from captum_ssm import attribution_graph
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> text = "anna owns the lamp . anna owns the"
        >>> ids = torch.tensor([tokenizer.encode(text)])
        >>> blocks = ["backbone.layers.0", "backbone.layers.1"]
        >>> graph = attribution_graph(
        ...     model, ids, (-1, ids[0, 3]), nodes=blocks, contrast="mean", tokens=text.split())
        >>> [node.label or (node.layer, node.position) for node in graph.path()]
        ['lamp', ('backbone.layers.0', 3), ('backbone.layers.1', 7), 'lamp']
    """
    if checks.count("top", top) is None:
        raise OptionError("top=None is not a number. Pass an integer of at least 1.")
    if keep is not None:
        check_share("keep", keep)
    tensor, _ = single_input(inputs)
    if len(tensor) != 1:
        raise InputError(
            f"inputs has {len(tensor)} examples; a graph needs one. Pass inputs[i : i + 1]."
        )
    maker = _Maker(forward_func, model, layers, recompute=recompute)
    question = Against(target, contrast)
    start = out_of_tuple(baselines)
    rules = maker.rules(rule, verify)
    by_layer = _by_layer(_blocks(maker) if nodes is None else nodes)
    with bar("attribution_graph", show_progress):
        parts = maker.parts(tensor, question, additional_forward_args, by_layer, rules, start, top)
    return parts.graph(tokens, tensor, keep)


def _blocks(maker: _Maker) -> list[Layer]:
    """Return mixers' blocks as default layers; or all mixers, if one has no block or several."""
    model = find_model(maker.forward_func, maker.model)
    mixers = find_mixers(model, maker.layers)
    in_blocks = all(len(mixer.blocks) == 1 and mixer.blocks[0] is not model for mixer in mixers)
    return list(dict.fromkeys(mixer.blocks[0] if in_blocks else mixer.module for mixer in mixers))


def _by_layer(nodes: Any) -> list[tuple[Layer, Any]]:
    """Convert ``nodes`` to pairs of a layer and None, a dictionary or a list of features."""
    if isinstance(nodes, Mapping) and nodes:
        return list(nodes.items())
    if not isinstance(nodes, list | tuple) or not nodes:
        raise OptionError(
            f"nodes={nodes!r} is not accepted. Pass a dict from layers to dictionaries or None, or "
            "a list of layers and features, with at least one entry."
        )
    by_layer: dict[Layer, list[Feature] | None] = {}
    for node in nodes:
        features = [node] if isinstance(node, Feature) else None
        layer = node.layer if isinstance(node, Feature) else node
        features_before = by_layer.setdefault(layer, features)
        if (features_before is None) != (features is None):
            raise OptionError(
                f"nodes contains {layer!r} and also features of it. Pass only one of them."
            )
        # if it is the same list, setdefault has just stored it
        if features_before is not None and features is not None and features_before is not features:
            features_before += features
    return list(by_layer.items())


def _refuse_of_another(dictionary: Any, layer: str, model: nn.Module) -> None:
    """Raise OptionError for a dictionary that was made for a different layer of the model."""
    own = getattr(dictionary, "layer", "")
    if isinstance(own, str) and own and own != layer and own in dict(model.named_modules()):
        raise OptionError(
            f"nodes has a dictionary for {own!r} at {layer!r}. Pass nodes={{{own!r}: dictionary}}."
        )


class _Maker(FlowMethod):
    """The method of :func:`attribution_graph`: run a model, and compute the contributions."""

    name = "attribution_graph"
    default_rule: Rule = "frozen"

    def rules(self, rule: Rule | None, verify: bool | float | None) -> Rules:
        """Check the user's options, and return the rules of the linear network."""
        return self._rules(rule, False, verify, by_layer=False)

    def parts(
        self,
        inputs: Tensor,
        question: Against,
        additional_forward_args: Any,
        nodes: Sequence[tuple[Layer, Any]],
        rules: Rules,
        baselines: Baselines,
        top: int,
    ) -> Parts:
        """Run the model once, and compute the contributions to each node of the given layers."""
        model = find_model(self.forward_func, self.model)
        selections = {find_site(model, layer, self.layers): selection for layer, selection in nodes}
        for site, selection in selections.items():
            _refuse_of_another(selection, site.name, model)

        def explain(request: Request, questions: Sequence[Against], _: BatchPart) -> list[Parts]:
            """Return the only example's nodes and contributions, in a list for the only target."""
            request = replace(request, cuts=tuple(selections))

            def run(recompute: bool) -> Parts:
                """Run the linear network, and take all gradients before its graph is freed."""
                run_rules = replace(rules, recompute=recompute)
                with linear_run(request, questions, run_rules) as (network, output, kept):
                    ((value, constant),) = numbers_of(network, output, kept, questions)
                    # only the shape is used, to find the target's indices
                    full_output = output if kept is None else kept.whole(output)
                    index = target_index(question.target, full_output)
                    start = start_of(network, rules, baselines)
                    parts = Parts(network, selections, value, constant, start, index)
                    return parts.keep_strongest(top)

            return [first_that_fits(run, rules.recompute)]

        ((parts,),) = self._by_parts(inputs, [question], additional_forward_args, None, explain)
        return parts
