"""Attribute a neuron or an activation inside a model to the input tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from captum.attr import NeuronAttribution
from torch import Tensor, nn

from ..attr.call import checks
from ..attr.call.inputs import single_input
from ..attr.call.targets import Against
from ..attr.engine.baselines import Baselines, out_of_tuple
from ..attr.engine.decompose import Decomposition, stacked
from ..attr.engine.linear_method import decompositions
from ..attr.engine.run import Inner
from ..attr.flow import FlowMethod
from ..errors import GradientModeError, NonFiniteError, TargetError
from ..linear import Rule, find_site
from ..operators.kernels.arithmetic import unseen
from ..tracing import find_model
from .layer import Layer

#: A neuron: its index in the activation, or a function that returns one value per example.
Selector = int | tuple[int | slice, ...] | Callable[..., Tensor]


class NeuronLatimFlow(FlowMethod, NeuronAttribution):
    """Divide the activation of a neuron exactly among the tokens of the input.

    The network is linearized as in :class:`~captum_ssm.LatimFlow`, and ends at a neuron. Relevance
    and the contributions of biases sum to the neuron's activation.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        layer: a module of the model, or the module's qualified name. A mixer's name with the suffix
            ``.heads`` selects all channels of all heads, (B, L, H, P), before the heads are mixed.
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
        >>> from captum_ssm import NeuronLatimFlow
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> neuron = NeuronLatimFlow(model, "backbone.layers.0")
        >>> tuple(neuron.attribute(ids, neuron_selector=(-1, 7), per_token=True).shape)
        (1, 4)
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Layer,
        model: nn.Module | None = None,
        layers: Sequence[Layer] | None = None,
        *,
        rule: Rule | None = None,
        recompute: bool | None = None,
    ) -> None:
        super().__init__(forward_func, model, layers, rule=rule, recompute=recompute)
        self.layer: Any = layer
        find_site(find_model(forward_func, model), layer, layers)  # raise now

    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        neuron_selector: Selector,
        additional_forward_args: Any = None,
        attribute_to_neuron_input: bool = False,
        *,
        rule: Rule | None = None,
        baselines: Baselines = None,
        zero_bias: bool = False,
        per_token: bool = False,
        internal_batch_size: int | None = None,
        return_convergence_delta: bool = False,
        verify: bool | float | None = None,
    ) -> Any:
        """Attribute a neuron to each input token, feature or pixel.

        Args:
            inputs, additional_forward_args, rule, baselines, zero_bias, per_token, verify: as in
                :meth:`LatimFlow.attribute() <captum_ssm.LatimFlow.attribute>`, with the same
                defaults.
            internal_batch_size: the largest number of examples per run. Default: None, all.
            neuron_selector: an index, or a tuple of indices and slices, into one example's
                activation, such as (position, feature). For slices, the sum of the selected entries
                is explained. Or a function that returns one number per example, (B,), from the
                activation, or from a tuple of tensors if the layer returns several.
            attribute_to_neuron_input: use the layer's input. Default: False, the layer's output.
            return_convergence_delta: also return activation - relevance - biases per example, (B,),
                which is only rounding error. Default: False.

        Returns:
            Relevance in the inputs' shape; with ``return_convergence_delta`` also the delta.

        Raises:
            LayerError: when the layer did not run, ran several times, or does not depend on the
                inputs.
            TargetError: for a selector that selects no neuron, or that reads padded tokens.
            OptionError, InputError, GradientModeError, NotLinearError, NonFiniteError,
            ReconstructionError: as in LatimFlow.attribute().
        """
        return self._relevance(
            inputs,
            Against(None, None),
            additional_forward_args,
            self._rules(rule, zero_bias, verify, by_layer=False),
            baselines,
            per_token=per_token,
            internal_batch_size=internal_batch_size,
            return_convergence_delta=return_convergence_delta,
            ends=self._ends(neuron_selector, attribute_to_neuron_input),
        )

    def decompose(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        neuron_selector: Selector,
        additional_forward_args: Any = None,
        attribute_to_neuron_input: bool = False,
        *,
        rule: Rule | None = None,
        baselines: Baselines = None,
        zero_bias: bool = False,
        roles: bool = True,
        features: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float | None = None,
    ) -> Decomposition:
        """Return the relevance of features and layers, and the contributions of biases.

        Args:
            inputs, neuron_selector, additional_forward_args, attribute_to_neuron_input: as in
                :meth:`attribute`, with the same defaults.
            rule, baselines, zero_bias, internal_batch_size, verify: likewise, with the same
                defaults.
            roles, features: as in
                :meth:`LatimFlow.decompose() <captum_ssm.LatimFlow.decompose>`, with the same
                defaults.

        Returns:
            A :class:`~captum_ssm.attr.engine.decompose.Decomposition`, whose ``inputs`` and
            ``biases`` sum to ``output``, the neuron's activation.
        """
        options = {"by_role": roles, "features": features}
        rules = self._rules(rule, zero_bias, verify, by_layer=True, **options)
        ends = self._ends(neuron_selector, attribute_to_neuron_input)
        baseline = out_of_tuple(baselines)
        (parts,) = self._by_parts(
            single_input(inputs)[0],
            [Against(None, None)],
            additional_forward_args,
            internal_batch_size,
            lambda request, questions, cut: decompositions(
                replace(request, ends=ends), questions, rules, cut(baseline)
            ),
        )
        return stacked(parts)

    def compute_convergence_delta(
        self,
        attributions: Tensor | tuple[Tensor, ...],
        inputs: Tensor | tuple[Tensor, ...],
        neuron_selector: Selector,
        additional_forward_args: Any = None,
        attribute_to_neuron_input: bool = False,
        **options: Any,
    ) -> Tensor:
        """Return activation - attributions - biases per example (B,).

        Args:
            attributions: the output of :meth:`attribute`.
            inputs, neuron_selector, additional_forward_args, attribute_to_neuron_input: the
                arguments of this call of :meth:`attribute`, with the same defaults.
            **options: all other arguments of this call of :meth:`attribute`.

        Returns:
            The differences (B,), which are only rounding error.
        """
        # the model runs again, without passes by role, which the sum does not need
        decomposition = self.decompose(
            inputs,
            neuron_selector,
            additional_forward_args,
            attribute_to_neuron_input,
            roles=False,
            **options,
        )
        relevance = decomposition.inputs
        return self._delta(decomposition, [relevance], attributions)

    def attribute_each(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError, because a neuron is selected without a target."""
        raise NotImplementedError(f"{self.name} has no targets. Call attribute() for each neuron.")

    def _ends(self, selector: Selector, at_input: bool) -> Inner:
        """Return the layer at which the network ends, with a function that selects the neuron."""
        checks.flags(attribute_to_neuron_input=at_input)
        model = find_model(self.forward_func, self.model)
        site = find_site(model, self.layer, self.layers, at_input=at_input)

        def select(tensors: Sequence[Tensor], mask: Tensor | None) -> Tensor:
            """Return the neuron's value (B,) from the layer's tensors; see :class:`.Inner`."""
            value = _selected_value(selector, tensors, site.name)
            _check(value, tensors, mask, site.name)
            return value

        return Inner(site, select)


class NeuronMambaLRP(NeuronLatimFlow):
    """Layer-wise relevance propagation from an activation inside the model.

    This is :class:`NeuronLatimFlow` with the rule of :class:`~captum_ssm.MambaLRP`,
    ``rule="half"``.

    Args:
        forward_func, layer, model, layers: as in :class:`NeuronLatimFlow`, with the same defaults.

    Example:
        >>> import torch
        >>> from captum_ssm import NeuronMambaLRP
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> neuron = NeuronMambaLRP(model, "backbone.layers.1.mixer.heads")
        >>> tuple(neuron.attribute(ids, neuron_selector=(-1, 7, 0)).shape)
        (1, 4)
    """

    default_rule: Rule = "half"


def _selected_value(selector: Any, tensors: Sequence[Tensor], layer: str) -> Tensor:
    """Return the value that ``selector`` selects from each example's activation, (B,)."""
    shapes = [tuple(x.shape) for x in tensors]
    where = f"of layer {layer!r}, whose activation is {shapes[0] if len(shapes) == 1 else shapes}"
    if callable(selector):
        value = selector(tensors[0] if len(tensors) == 1 else tuple(tensors))
        if not isinstance(value, Tensor) or value.shape != (len(tensors[0]),):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TargetError(
                f"neuron_selector returned {got} {where}. Return one number per example, a tensor "
                f"({len(tensors[0])},)."
            )
        return value
    if len(tensors) > 1:
        raise TargetError(
            f"neuron_selector={selector!r} selects no neuron {where}, several tensors. Pass a "
            "function that takes all of them and returns one number per example."
        )
    (activation,) = tensors
    index = selector if isinstance(selector, tuple) else (selector,)
    # None for an entry that is neither a slice nor an integer, which _selects refuses
    entries = [x if isinstance(x, slice) else checks.as_integer(x) for x in index]
    fits = len(index) == activation.dim() - 1 and all(map(_selects, entries, activation.shape[1:]))
    if not fits:
        raise TargetError(
            f"neuron_selector={selector!r} is not a neuron {where}. Pass {activation.dim() - 1} "
            "indices or slices into one example, or a function that returns one number per example."
        )
    entries_of_neuron = activation[(slice(None), *entries)]
    if entries_of_neuron.dim() > 1:  # slices
        entries_of_neuron = entries_of_neuron.flatten(1).sum(1)
    return entries_of_neuron


def _selects(entry: int | slice | None, size: int) -> bool:
    """Return True if an index or slice selects at least one entry of a dimension of this size."""
    if not isinstance(entry, slice):
        return entry is not None and -size <= entry < size
    try:  # torch does not support negative steps
        return len(range(size)[entry]) > 0 and (entry.step is None or entry.step > 0)
    except (TypeError, ValueError):
        return False


def _check(value: Tensor, tensors: Sequence[Tensor], mask: Tensor | None, layer: str) -> None:
    """Raise if a selected value (B,) cannot be explained, or depends on padded tokens."""
    if not bool(value.detach().isfinite().all()):
        raise NonFiniteError(
            f"neuron_selector selects {value.detach().tolist()} in layer {layer!r}, which is not "
            "finite. Pass a selector of finite values, or run the model in a wider dtype than "
            f"{value.dtype}."
        )
    if not value.requires_grad:
        raise GradientModeError(
            f"The result of neuron_selector does not depend linearly on layer {layer!r}. Return "
            "entries of the activation or sums of entries, and do not detach them."
        )
    if mask is None or mask.shape != tensors[0].shape[:2]:
        return  # no padding, or the layer has other tokens
    with unseen():
        gradients = torch.autograd.grad(value.sum(), tensors, retain_graph=True, allow_unused=True)
    is_read = [x.flatten(2).any(2) for x in gradients if x is not None]
    if any(bool((x & ~mask.to(x.device)).any()) for x in is_read):
        raise TargetError(
            f"neuron_selector reads layer {layer!r} at padded tokens. Select real tokens of every "
            "example, or explain each example in a separate call."
        )
