"""LatimFlow: the exact end-to-end decomposition of an output over the input tokens.

MambaLRP: conservative layer-wise relevance propagation, for every supported architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn

from ..errors import OptionError
from ..linear import FAMILY, Rule
from .call import checks
from .call.inputs import BatchPart
from .call.layout import PatchGrid
from .call.targets import Against, each_of
from .engine.baselines import Baselines, out_of_tuple
from .engine.decompose import Decomposition, stacked
from .engine.linear_method import Explained, LinearMethod, Rules, decompositions, in_turn
from .engine.run import Inner, Request

T = TypeVar("T")


class FlowMethod(LinearMethod):
    """Base of the methods that read a network made linear by one of the rules."""

    needs_gradient = True
    default_rule: Rule = "balanced"

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: nn.Module | None = None,
        layers: Sequence[str | nn.Module] | None = None,
        *,
        rule: Rule | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__(forward_func, model, layers)
        checks.flags(recompute=recompute)
        self.recompute = recompute
        if rule is not None:
            self.default_rule = checks.choice("rule", rule, FAMILY)

    def _rules(
        self,
        rule: Rule | None,
        zero_bias: bool,
        verify: bool | float | None,
        *,
        by_layer: bool,
        **more: bool,
    ) -> Rules:
        """Check the options of the linear network."""
        chosen: Rule = self.default_rule if rule is None else checks.choice("rule", rule, FAMILY)
        checks.flags(zero_bias=zero_bias, **more)
        if zero_bias and chosen not in ("frozen", "half"):
            raise OptionError(
                f"zero_bias=True leaves constants out, but with rule={chosen!r} the references' "
                "part is a constant. Use rule='frozen' or 'half', or keep the constants."
            )
        verify = not zero_bias if verify is None else checks.tolerance("verify", verify)
        options = {**more, "recompute": self.recompute}
        return Rules(chosen, constants=not zero_bias, by_layer=by_layer, verify=verify, **options)

    def _relevance(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        asked: Against,
        additional_forward_args: Any,
        rules: Rules,
        baselines: Baselines,
        *,
        per_token: bool,
        internal_batch_size: int | None,
        return_convergence_delta: bool,
        ends: Inner | None = None,
    ) -> Any:
        """Return relevance in the inputs' shape or per token, with the delta if asked for."""
        checks.flags(per_token=per_token)
        start = out_of_tuple(baselines)

        def explain(
            request: Request, questions: Sequence[Against], cut: BatchPart
        ) -> list[Explained]:
            request = replace(request, ends=ends)
            images = any(x.dim() == 4 for x in (request.inputs, *request.others))
            grid = PatchGrid(request.model) if images and per_token else None
            with nullcontext() if grid is None else grid.watch():
                found = decompositions(request, questions, rules, cut(start))
            ids = request.inputs.dim() == 2

            def shown(relevance: Tensor) -> Tensor:
                if not per_token:
                    return relevance
                if grid is not None and relevance.dim() == 4:
                    return grid.sums(relevance)
                return relevance.flatten(min(2, relevance.dim() - 1)).sum(-1)

            return [
                (
                    each.tokens if ids else shown(each.inputs),
                    each.delta,
                    *map(shown, each.others),
                )
                for each in found
            ]

        return self._attribute(
            inputs,
            asked.target,
            asked.contrast,
            additional_forward_args,
            explain,
            internal_batch_size=internal_batch_size,
            return_convergence_delta=return_convergence_delta,
        )


class LatimFlow(FlowMethod):
    """The exact decomposition of an output over the tokens and features of the input.

    At a given input every part of the network is frozen into a linear map. Mixers become their
    operators, activations and norms their ratios, attention and routing their weights. One backward
    pass through this linear network finds the contribution of each feature of each token, at a cost
    linear in the length. Relevance and the contributions of biases sum to the output exactly.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers that have adapters to use. Default: None, all.
        rule: the default ``rule`` of calls; see :meth:`attribute`. Default: None, ``"balanced"``.
        recompute: keep no graph inside the model's blocks, and run each again, one at a time, in
            backward passes. Memory grows with depth by one residual stream a block; calls take up
            to twice as long. Default: False.

    Raises:
        ModelNotFoundError: when forward_func leads to no module and ``model`` is not given.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or none with an adapter.
        OptionError: when ``rule`` is not known.

    Example:
        >>> import torch
        >>> from captum_ssm import LatimFlow
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> relevance, delta = LatimFlow(model).attribute(
        ...     ids, target=(-1, 5), return_convergence_delta=True)
        >>> tuple(relevance.shape), bool(delta.abs() < 1e-4)
        ((1, 4), True)
    """

    takes_others = True

    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        contrast: Any = None,
        rule: Rule | None = None,
        baselines: Baselines = None,
        zero_bias: bool = False,
        per_token: bool = False,
        internal_batch_size: int | None = None,
        return_convergence_delta: bool = False,
        verify: bool | float | None = None,
    ) -> Any:
        """Attribute the target to each input token, feature or pixel.

        Args:
            inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); or a tuple of one
                such tensor. The tuple may hold further floating inputs, such as the images of a
                text: ``forward_func(*inputs, *additional_forward_args)``.
            target: an int for outputs (B, classes), a tuple (position, token) for outputs (B, L,
                V), or a list or tensor of them per example, as in Captum.
                Default: None, for models that return one number per example.
            additional_forward_args: further positional arguments of forward_func, for example an
                attention mask. Default: None.
            contrast: the alternative to subtract: a second target (for a (position, token) target,
                a token), ``"mean"``, the mean of all entries, or ``"runner-up"``, the greatest
                other entry. ``"others"`` gives the log-odds against all other entries, ``"all"``
                the log-probability. Default: None.
            rule: how a mixer's output is divided among its factors. ``"frozen"``: all to the
                content it moves. ``"half"``: equally to content and gates, as in layer-wise
                relevance propagation. ``"equal"``: to keys and queries as well. ``"centered"``:
                also to steps, and to keys and queries by their excess over the average so far.
                ``"balanced"``: the gradient, whole for content and half for all other factors.
                Default: None, ``"balanced"`` for LatimFlow and ``"half"`` for MambaLRP.
            baselines: the reference input, whose contribution counts as a constant. A tensor
                broadcastable to the embeddings, a number, or ``"mean"``, each example's mean over
                real tokens or pixels. Several inputs take a tuple. Default: None, 0 with
                ``"frozen"`` and ``"half"``, behind a cache, and for further inputs; ``"mean"``
                with other rules.
            zero_bias: explain the network without biases, class tokens and other constants;
                relevance alone then sums to its output. Default: False.
            per_token: one number per token, (B, L), or for images the patch grid (B, h, w).
                Default: False.
            internal_batch_size: run at most so many examples at a time; not with several inputs.
                Default: None, all.
            return_convergence_delta: also return output - relevance - biases per example, (B,),
                which is 0 but for rounding. Default: False.
            verify: check that every operator reproduces its module's output; a number is the
                tolerance. The delta cannot show this, since it compares the operators' own output.
                Default: None, True, or with ``zero_bias`` False, as the check then takes a third
                more time.

        Returns:
            The relevance in the inputs' shape, with the delta if asked for.

        Raises:
            OptionError: for an unknown rule or contrast.
            InputError, TargetError: for inputs or a target that do not fit.
            GradientModeError: under ``torch.inference_mode()``, or when the output does not depend
                on the inputs.
            NotLinearError: when the model uses a function without a known linear form, or the parts
                do not sum to the output.
            NonFiniteError: when an operator holds NaN or infinity.
            ReconstructionError: when ``verify`` finds an operator that is not its module.
            UnsupportedMixerError: when a mixer without an adapter runs.
        """
        return self._relevance(
            inputs,
            Against(target, contrast),
            additional_forward_args,
            self._rules(rule, zero_bias, verify, by_layer=False),
            baselines,
            per_token=per_token,
            internal_batch_size=internal_batch_size,
            return_convergence_delta=return_convergence_delta,
        )

    def decompose(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        contrast: Any = None,
        rule: Rule | None = None,
        baselines: Baselines = None,
        zero_bias: bool = False,
        roles: bool = True,
        features: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float | None = None,
    ) -> Decomposition:
        """Return all that :meth:`attribute` sums up: features, layers, biases.

        Args:
            inputs, target, additional_forward_args, contrast, rule, baselines, zero_bias: as in
                :meth:`attribute`, with the same defaults.
            roles: whether relevance is divided by role, which takes up to four more backward passes
                if ``rule`` is not ``"frozen"``. Default: True.
            features: whether relevance of streams and mixers is kept by feature, (B, L, E) each,
                for directions. Default: False, (B, L).
            internal_batch_size, verify: as in :meth:`attribute`, with the same defaults.

        Returns:
            A :class:`~captum_ssm.attr.engine.decompose.Decomposition`; its ``inputs`` and
            ``biases`` sum to its ``output``.
        """
        (found,) = self.decompose_each(
            inputs,
            [target],
            additional_forward_args,
            contrast=contrast,
            rule=rule,
            baselines=baselines,
            zero_bias=zero_bias,
            roles=roles,
            features=features,
            internal_batch_size=internal_batch_size,
            verify=verify,
        )
        return found

    def decompose_each(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        targets: Sequence[Any],
        additional_forward_args: Any = None,
        *,
        contrast: Any = None,
        rule: Rule | None = None,
        baselines: Baselines = None,
        zero_bias: bool = False,
        roles: bool = True,
        features: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float | None = None,
    ) -> list[Decomposition]:
        """Decompose several targets, at the cost of one forward run; see :meth:`decompose`.

        Args:
            inputs, additional_forward_args, contrast, rule, baselines, zero_bias: as in
                :meth:`attribute`, with the same defaults.
            targets: targets in Captum's forms, each for the whole batch.
            roles, features: as in :meth:`decompose`, with the same defaults.
            internal_batch_size, verify: as in :meth:`attribute`, with the same defaults.

        Returns:
            One decomposition for each target.
        """
        baselines = out_of_tuple(baselines)
        more = {"by_role": roles, "features": features}
        rules = self._rules(rule, zero_bias, verify, by_layer=True, **more)
        one, others = self._inputs(inputs)
        found = self._by_parts(
            one,
            [Against(target, contrast) for target in each_of(targets).targets],
            additional_forward_args,
            internal_batch_size,
            lambda request, questions, cut: decompositions(
                request, questions, rules, cut(baselines)
            ),
            others,
        )
        return list(map(stacked, found))

    def answer_in_turn(
        self,
        inputs: Tensor,
        positions: Sequence[int],
        ask: Callable[[Callable[[], Tensor]], Generator[Against, Decomposition, T]],
        additional_forward_args: Any = None,
        *,
        rule: Rule | None = None,
        baselines: Baselines = None,
        zero_bias: bool = False,
        verify: bool | float | None = None,
    ) -> T:
        """Answer questions to one forward run, each of which may depend on earlier answers.

        Args:
            inputs: one example.
            positions: the positions of the explained output.
            ask: see :func:`~captum_ssm.attr.engine.linear_method.in_turn`.
            additional_forward_args, rule, baselines, zero_bias, verify: as in :meth:`attribute`,
                with the same defaults.

        Returns:
            The result of the generator that ``ask`` returns.
        """
        rules = self._rules(rule, zero_bias, verify, by_layer=False)
        start = out_of_tuple(baselines)
        ((found,),) = self._by_parts(
            inputs,
            [None],
            additional_forward_args,
            None,
            lambda request, _, cut: [in_turn(request, positions, ask, rules, start)],
        )
        return found

    def compute_convergence_delta(
        self,
        attributions: Tensor | tuple[Tensor, ...],
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        contrast: Any = None,
        rule: Rule | None = None,
        baselines: Baselines = None,
        zero_bias: bool = False,
        verify: bool | float | None = None,
    ) -> Tensor:
        """Return output - attributions - biases per example (B,).

        Args:
            attributions: the output of :meth:`attribute`.
            inputs, target, additional_forward_args, contrast, rule, baselines, zero_bias, verify:
                its arguments, with the same defaults.

        Returns:
            (B,), 0 but for rounding.
        """
        found = self.decompose(
            inputs,
            target,
            additional_forward_args,
            contrast=contrast,
            rule=rule,
            baselines=baselines,
            zero_bias=zero_bias,
            roles=False,
            verify=verify,
        )
        return self._delta(found, [found.inputs, *found.others], attributions)


class MambaLRP(LatimFlow):
    """Layer-wise relevance propagation as gradient times input of the linearized network.

    It is :class:`LatimFlow` with ``rule="half"``. Activations pass relevance on by their frozen
    ratio, norms by their frozen scale. Step sizes, input and output vectors of recurrences and
    attention probabilities are coefficients, and a gated product gives half to each factor. With
    ``zero_bias=True`` relevance is conserved, as in the paper: it sums to the output of the network
    without biases.

    LRP is patented in some countries: check whether this concerns your commercial use.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers that have adapters to use. Default: None, all.
        rule: the default ``rule`` of calls; see :meth:`attribute`. Default: None, ``"half"``.
        recompute: keep no graph inside the model's blocks, and run each again, one at a time, in
            backward passes. Memory grows with depth by one residual stream a block; calls take up
            to twice as long. Default: False.

    Raises:
        ModelNotFoundError: when forward_func leads to no module and ``model`` is not given.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or none with an adapter.
        OptionError: when ``rule`` is not known.

    Example:
        >>> import torch
        >>> from captum_ssm import MambaLRP
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> tuple(MambaLRP(model).attribute(ids, target=(-1, 5)).shape)
        (1, 4)
    """

    default_rule: Rule = "half"
