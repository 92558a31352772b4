"""LatimFlow, an exact end-to-end decomposition of an output over the input tokens.

MambaLRP is conservative layer-wise relevance propagation, for every supported architecture.
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
    """Base of the methods that linearize the network; a ``rule`` divides products in mixers."""

    needs_gradient = True
    default_rule: Rule = "balanced"

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: nn.Module | None = None,
        layers: Sequence[str | nn.Module] | None = None,
        *,
        rule: Rule | None = None,
        recompute: bool | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        super().__init__(forward_func, model, layers)
        self.chunk_tokens = checks.count("chunk_tokens", chunk_tokens)
        if self.chunk_tokens is not None and self.chunk_tokens < 3:
            raise OptionError(
                f"chunk_tokens={chunk_tokens} is below 3, but models run a single token by other "
                "code. Pass a larger number, such as 1024, or None."
            )
        if recompute is not None:
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
        **flags: bool,
    ) -> Rules:
        """Check the options, and return them as :class:`.Rules`; ``flags`` are its other flags."""
        name: Rule = self.default_rule if rule is None else checks.choice("rule", rule, FAMILY)
        checks.flags(zero_bias=zero_bias, **flags)
        if zero_bias and name not in ("frozen", "half"):
            raise OptionError(
                f"zero_bias=True removes constants, but rule={name!r} needs the constant "
                "contribution of the baselines. Pass rule='frozen' or 'half', or zero_bias=False."
            )
        verify = not zero_bias if verify is None else checks.tolerance("verify", verify)
        return Rules(
            name,
            constants=not zero_bias,
            by_layer=by_layer,
            verify=verify,
            recompute=self.recompute,
            chunk_tokens=self.chunk_tokens,
            **flags,
        )

    def _relevance(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Against,
        additional_forward_args: Any,
        rules: Rules,
        baselines: Baselines,
        *,
        per_token: bool,
        internal_batch_size: int | None,
        return_convergence_delta: bool,
        ends: Inner | None = None,
    ) -> Any:
        """Return relevance in the inputs' shape or per token, and on request the delta.

        ``ends`` is a value inside the network to explain; None for the output.
        """
        checks.flags(per_token=per_token)
        references = out_of_tuple(baselines)

        def explain(
            request: Request, targets: Sequence[Against], batch_part: BatchPart
        ) -> list[Explained]:
            """Return for each target the relevance, delta (B,), and relevance of further inputs."""
            request = replace(request, ends=ends)
            has_images = any(x.dim() == 4 for x in (request.inputs, *request.others))
            grid = PatchGrid(request.model) if has_images and per_token else None
            with nullcontext() if grid is None else grid.watch():
                results = decompositions(request, targets, rules, batch_part(references))
            # ids, or one number for each token: `tokens` has the shape of the inputs
            by_token = request.inputs.dim() == 2

            def summed(relevance: Tensor) -> Tensor:
                """Sum over the features or pixels of each token, if ``per_token``."""
                if not per_token:
                    return relevance
                if grid is not None and relevance.dim() == 4:
                    return grid.sums(relevance)
                # (B, L, ...) -> (B, L); of a tensor (B, F) without tokens, the sum is (B,)
                return relevance.flatten(min(2, relevance.dim() - 1)).sum(-1)

            return [
                (x.tokens if by_token else summed(x.inputs), x.delta, *map(summed, x.others))
                for x in results
            ]

        return self._attribute(
            inputs,
            target.target,
            target.contrast,
            additional_forward_args,
            explain,
            internal_batch_size=internal_batch_size,
            return_convergence_delta=return_convergence_delta,
        )


class LatimFlow(FlowMethod):
    """The exact decomposition of an output over the tokens and features of the input.

    At a given input every part of the network is replaced by a linear map. Mixers become fixed
    operators over tokens, activations and norms fixed factors, attention and routing fixed weights.
    One backward pass through this linear network computes the contribution of each feature of each
    token, at a cost linear in the length. Relevance and the contributions of biases sum to the
    output exactly.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers whose adapters are used. Default: None, all.
        rule: the default ``rule`` of calls; see :meth:`attribute`. Default: None, ``"balanced"``.
        recompute: keep no autograd graph inside the model's blocks, and run each block again in
            backward passes. Each block then keeps only one residual stream in memory, and calls
            take up to twice as long. Default: None, only after the device's memory was too small
            without.
        chunk_tokens: run a language model of transformers on chunks of at most this number of
            tokens. A call then needs the memory of one chunk and of the model's cache, and takes up
            to twice as long. Default: None, the whole sequence at once.

    Raises:
        ModelNotFoundError: if no module is found from forward_func and ``model`` is None.
        NoMixerError, UnsupportedMixerError: if the model has no mixer, or none with an adapter.
        OptionError: if ``rule`` is not known.

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
                V), or a list or tensor of them per example, as in Captum. Default: None, for models
                that return one number per example.
            additional_forward_args: further positional arguments of forward_func, for example an
                attention mask. Default: None.
            contrast: the alternative to subtract from the target. A second target (or a token, for
                a (position, token) target); ``"mean"``, the mean of all entries; or
                ``"runner-up"``, the largest other entry. ``"others"`` explains the log-odds
                against all other entries, and ``"all"`` the log-probability. Default: None.
            rule: the rule that divides a mixer's output among its factors. ``"frozen"``: all to the
                content (the values that the mixer moves). ``"half"``: equally to content and
                gates, as in layer-wise relevance propagation. ``"centered"``: also to steps, and to
                keys and queries by their excess over the average so far. ``"balanced"``: the
                gradient, whole for content and half for all other factors; keys and queries of
                softmax attention as with ``"centered"``. Default: None, ``"balanced"`` for
                LatimFlow, and ``"half"`` for MambaLRP.
            baselines: the reference input, whose contribution counts as a constant. A tensor
                broadcastable to the embeddings, a number, or ``"mean"``, each example's mean over
                unpadded tokens or pixels. For several inputs, a tuple. Default: None, which is
                ``"mean"`` for the first input with ``"centered"`` and ``"balanced"`` in calls
                without a cache, and 0 otherwise.
            zero_bias: explain the network without biases, class tokens and other constants, so that
                relevance sums to the output of this network. Default: False.
            per_token: return one number per token, (B, L), or for images per patch, (B, h, w).
                Default: False.
            internal_batch_size: largest number of examples per run; not with several inputs.
                Default: None, all.
            return_convergence_delta: also return output - relevance - biases per example (B,),
                which is 0 up to rounding. Default: False.
            verify: check every operator against its module's output; a number is the tolerance. The
                delta cannot detect a wrong operator, because the output comes from the operators,
                too. Default: None, which is True, or False with ``zero_bias``, where the check
                would take a third more time.

        Returns:
            The relevance in the inputs' shape; with ``return_convergence_delta`` also the delta.

        Raises:
            OptionError: if the rule or contrast is not known.
            InputError, TargetError: if the inputs or the target do not fit the model.
            GradientModeError: under ``torch.inference_mode()``, or if the output does not depend
                on the inputs.
            NotLinearError: if the model uses a function without a known linear form, or if
                contributions do not sum to the output.
            NonFiniteError: if an operator contains NaN or infinity.
            ReconstructionError: if ``verify`` finds an operator that differs from its module.
            UnsupportedMixerError: if a mixer without an adapter runs.
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
        """Return the contributions of features, layers and biases, which :meth:`attribute` sums.

        Args:
            inputs, target, additional_forward_args, contrast, rule, baselines, zero_bias: as in
                :meth:`attribute`, with the same defaults.
            roles: whether relevance is divided by role, which takes up to four more backward passes
                if ``rule`` is not ``"frozen"``. Default: True.
            features: whether the relevance of residual streams and mixers is kept by feature,
                (B, L, E). Default: False, (B, L).
            internal_batch_size, verify: as in :meth:`attribute`, with the same defaults.

        Returns:
            A :class:`~captum_ssm.attr.engine.decompose.Decomposition`, whose ``inputs`` and
            ``biases`` sum to ``output``.
        """
        (decomposition,) = self.decompose_each(
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
        return decomposition

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
        flags = {"by_role": roles, "features": features}
        rules = self._rules(rule, zero_bias, verify, by_layer=True, **flags)
        first, further = self._inputs(inputs)
        by_target = self._by_parts(
            first,
            [Against(target, contrast) for target in each_of(targets).targets],
            additional_forward_args,
            internal_batch_size,
            lambda request, targets, batch_part: decompositions(
                request, targets, rules, batch_part(baselines)
            ),
            further,
        )
        return list(map(stacked, by_target))

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
        """Decompose targets of one forward run, which may depend on earlier decompositions.

        Args:
            inputs: one example, with a batch dimension.
            positions: all output positions that targets may have, counted from the end.
            ask: see :func:`~captum_ssm.attr.engine.linear_method.in_turn`.
            additional_forward_args, rule, baselines, zero_bias, verify: as in :meth:`attribute`,
                with the same defaults.

        Returns:
            The return value of the generator that ``ask`` returns.
        """
        rules = self._rules(rule, zero_bias, verify, by_layer=False)
        references = out_of_tuple(baselines)
        ((result,),) = self._by_parts(
            inputs,
            [None],
            additional_forward_args,
            None,
            lambda request, _, batch_part: [in_turn(request, positions, ask, rules, references)],
        )
        return result

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
                the arguments of that call, with the same defaults.

        Returns:
            The delta (B,), 0 up to rounding.
        """
        result = self.decompose(
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
        return self._delta(result, [result.inputs, *result.others], attributions)


class MambaLRP(LatimFlow):
    """Layer-wise relevance propagation as gradient times input of the linearized network.

    It is :class:`LatimFlow` with ``rule="half"``. Activations and norms are constant factors. Step
    sizes, input and output vectors of recurrences, and attention probabilities are constants. A
    gated product gives half of its relevance to each factor. With ``zero_bias=True`` relevance is
    conserved, as in the paper: it sums to the output of the network without biases.

    LRP is patented in some countries: check whether this concerns your commercial use.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers whose adapters are used. Default: None, all.
        rule: the default ``rule`` of calls; see :meth:`attribute`. Default: None, ``"half"``.
        recompute: keep no autograd graph inside the model's blocks, and run each block again in
            backward passes. Each block then keeps only one residual stream in memory, and calls
            take up to twice as long. Default: None, only after the device's memory was too small
            without.
        chunk_tokens: run a language model of transformers on chunks of at most this number of
            tokens. A call then needs the memory of one chunk and of the model's cache, and takes up
            to twice as long. Default: None, the whole sequence at once.

    Raises:
        ModelNotFoundError: if no module is found from forward_func and ``model`` is None.
        NoMixerError, UnsupportedMixerError: if the model has no mixer, or none with an adapter.
        OptionError: if ``rule`` is not known.

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
