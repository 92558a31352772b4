"""Attribute an output to the elements of an activation inside a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from captum.attr import LayerAttribution
from torch import Tensor, nn

from ..attr.call import checks
from ..attr.call.inputs import BatchPart, single_input
from ..attr.call.targets import Against
from ..attr.engine.baselines import Baselines, out_of_tuple
from ..attr.engine.decompose import Decomposition, stacked
from ..attr.engine.linear_method import decompositions
from ..attr.engine.run import Request
from ..attr.flow import FlowMethod
from ..errors import LayerError
from ..linear import Rule, Site, find_site
from ..tracing import find_model

#: A module of the model, or the module's qualified name.
Layer = str | nn.Module


class LayerLatimFlow(FlowMethod, LayerAttribution):
    """Divide an output exactly among the elements of an activation inside the model.

    The network is linearized as in :class:`~captum_ssm.LatimFlow`, and begins at a layer. If all
    paths go through the layer, as through a block's output, relevance and the contributions of
    later biases sum to the output. If a residual stream bypasses the layer, as for a mixer, the
    convergence delta is the contribution of the stream.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        layer: a module of the model, the module's qualified name, or a list of them. A mixer's name
            with the suffix ``.heads`` selects all channels of all heads, (B, L, H, P), before the
            heads are mixed.
        model: the module, if it cannot be found in forward_func. Default: None.
        layers: names or modules of the mixers to linearize with their adapters. Default: None, all.
        rule: the rule for calls without ``rule``. Default: None, the default of the class.
        recompute: as in :class:`~captum_ssm.LatimFlow`. A block with the layer inside, or at its
            input, keeps its graph. Default: None, only after the device's memory was too small.

    Raises:
        ModelNotFoundError: when forward_func leads to no module and ``model`` is not given.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or none with an adapter.
        LayerError: for a layer outside the model, or a part of a mixer.

    Example:
        >>> import torch
        >>> from captum_ssm import LayerLatimFlow
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> relevance, delta = LayerLatimFlow(model, "backbone.layers.0").attribute(
        ...     ids, target=(-1, 5), return_convergence_delta=True)
        >>> tuple(relevance.shape), bool(delta.abs() < 1e-4)
        ((1, 4, 64), True)
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Layer | Sequence[Layer],
        model: nn.Module | None = None,
        layers: Sequence[Layer] | None = None,
        *,
        rule: Rule | None = None,
        recompute: bool | None = None,
    ) -> None:
        super().__init__(forward_func, model, layers, rule=rule, recompute=recompute)
        self.layer: Any = layer
        for layer_or_name in self._layer_list():
            self._site(layer_or_name, at_input=False)  # raise now, not at the first call

    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        attribute_to_layer_input: bool = False,
        *,
        contrast: Any = None,
        rule: Rule | None = None,
        baselines: Baselines = None,
        zero_bias: bool = False,
        internal_batch_size: int | None = None,
        return_convergence_delta: bool = False,
        verify: bool | float | None = None,
    ) -> Any:
        """Attribute the target to each element of the activation.

        Args:
            inputs, target, additional_forward_args, contrast, rule, zero_bias, verify: as in
                :meth:`LatimFlow.attribute() <captum_ssm.LatimFlow.attribute>`, with the same
                defaults.
            attribute_to_layer_input: attribute to the layer's input. Default: False, to its output.
            baselines: the activation to compare with: a tensor that can be broadcast to the
                activation's shape, a number, or ``"mean"``, each example's mean over unpadded
                tokens. Default: None, 0 with ``"frozen"`` and ``"half"`` and ``"mean"`` with other
                rules.
            internal_batch_size: the largest number of examples per run. Default: None, all.
            return_convergence_delta: also return output - relevance - biases per example, (B,): the
                contribution of paths around the layer. Default: False.

        Returns:
            Relevance in the activation's shape, and the delta if ``return_convergence_delta`` is
            True. A tuple if the layer returns several tensors; lists for a list of layers.

        Raises:
            LayerError: when the layer did not run, ran several times, or does not depend on the
                inputs.
            OptionError, InputError, TargetError, GradientModeError, NotLinearError,
            NonFiniteError, ReconstructionError: as in LatimFlow.attribute().
        """
        checks.flags(
            attribute_to_layer_input=attribute_to_layer_input,
            return_convergence_delta=return_convergence_delta,
        )
        options = {"contrast": contrast, "rule": rule, "zero_bias": zero_bias, "verify": verify}
        results = [
            self._decompose_at(
                layer,
                attribute_to_layer_input,
                inputs,
                target,
                additional_forward_args,
                baselines=baselines,
                internal_batch_size=internal_batch_size,
                **options,
            )
            for layer in self._layer_list()
        ]
        device = single_input(inputs)[0].device
        by_layer = [  # a decomposition's inputs are relevance, of all tensors of the layer
            tuple(x.to(device) for x in torch.split(result.inputs, list(result.sizes), -1))
            for result in results
        ]
        relevance = [tensors[0] if len(tensors) == 1 else tensors for tensors in by_layer]
        deltas = [(result.delta + result.virtual).to(device) for result in results]
        if not isinstance(self.layer, list | tuple):
            return (relevance[0], deltas[0]) if return_convergence_delta else relevance[0]
        return (relevance, deltas) if return_convergence_delta else relevance

    def decompose(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        attribute_to_layer_input: bool = False,
        *,
        contrast: Any = None,
        rule: Rule | None = None,
        baselines: Baselines = None,
        zero_bias: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float | None = None,
    ) -> Decomposition:
        """Return relevance, the contributions of biases, and the contribution of bypassing paths.

        Args:
            inputs, target, additional_forward_args, attribute_to_layer_input: as in
                :meth:`attribute`, with the same defaults.
            contrast, rule, baselines, zero_bias, internal_batch_size, verify: likewise, with the
                same defaults.

        Returns:
            A :class:`~captum_ssm.attr.engine.decompose.Decomposition`. ``inputs`` is the relevance
            of the layer's activation, and ``virtual`` the contribution of paths around the layer.

        Raises:
            LayerError: for a list of layers.
        """
        if isinstance(self.layer, list | tuple):
            raise LayerError(
                f"layer is a list of {len(self.layer)} layers. Create {self.name} with one layer "
                "for each call of decompose()."
            )
        return self._decompose_at(
            self.layer,
            attribute_to_layer_input,
            inputs,
            target,
            additional_forward_args,
            baselines=baselines,
            internal_batch_size=internal_batch_size,
            contrast=contrast,
            rule=rule,
            zero_bias=zero_bias,
            verify=verify,
        )

    def compute_convergence_delta(
        self,
        attributions: Tensor | tuple[Tensor, ...],
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        attribute_to_layer_input: bool = False,
        **options: Any,
    ) -> Tensor:
        """Return output - attributions - biases (B,), the contribution of bypassing paths.

        Args:
            attributions: the output of :meth:`attribute`.
            inputs, target, additional_forward_args, attribute_to_layer_input: the arguments of this
                call of :meth:`attribute`, with the same defaults.
            **options: all other arguments of this call of :meth:`attribute`.
        """
        decomposition = self.decompose(
            inputs, target, additional_forward_args, attribute_to_layer_input, **options
        )
        tensors = attributions if isinstance(attributions, tuple) else (attributions,)
        # in the layout of ``inputs``, the relevance of the layer's tensors
        joined = torch.cat([x.to(decomposition.inputs) for x in tensors], -1)
        return decomposition.virtual + self._delta(decomposition, [decomposition.inputs], joined)

    def attribute_each(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError, because not every activation has tokens."""
        raise NotImplementedError(
            f"{self.name} has no attribute_each(). Call attribute() for each target."
        )

    def _layer_list(self) -> Sequence[Layer]:
        return list(self.layer) if isinstance(self.layer, list | tuple) else [self.layer]

    def _site(self, layer: Layer, *, at_input: bool) -> Site:
        model = find_model(self.forward_func, self.model)
        return find_site(model, layer, self.layers, at_input=at_input)

    def _decompose_at(
        self,
        layer: Layer,
        at_input: bool,
        inputs: Any,
        target: Any,
        additional_forward_args: Any,
        *,
        baselines: Baselines,
        internal_batch_size: int | None,
        contrast: Any,
        rule: Rule | None,
        zero_bias: bool,
        verify: bool | float | None,
    ) -> Decomposition:
        """Decompose the target over one layer, and concatenate the results of all sub-batches."""
        rules = self._rules(rule, zero_bias, verify, by_layer=False)
        site = self._site(layer, at_input=at_input)
        baseline = out_of_tuple(baselines)

        def explain(
            request: Request, questions: Sequence[Against], part: BatchPart
        ) -> list[Decomposition]:
            return decompositions(replace(request, begins=site), questions, rules, part(baseline))

        questions = [Against(target, contrast)]
        tensor, _ = single_input(inputs)
        (parts,) = self._by_parts(  # for the only target
            tensor, questions, additional_forward_args, internal_batch_size, explain
        )
        return stacked(parts)


class LayerMambaLRP(LayerLatimFlow):
    """Layer-wise relevance propagation down to an activation inside the model.

    This is :class:`LayerLatimFlow` with the rule of :class:`~captum_ssm.MambaLRP`, ``rule="half"``.

    Args:
        forward_func, layer, model, layers: as in :class:`LayerLatimFlow`, with the same defaults.

    Example:
        >>> import torch
        >>> from captum_ssm import LayerMambaLRP
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> heads = LayerMambaLRP(model, "backbone.layers.1.mixer.heads")
        >>> tuple(heads.attribute(ids, target=(-1, 5)).shape)
        (1, 4, 128, 1)
    """

    default_rule: Rule = "half"
