"""LatimFlow: the exact end-to-end decomposition of an output over the input tokens.

MambaLRP: conservative layer-wise relevance propagation, for every supported architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from captum.log import log_usage
from torch import Tensor

from ..linear import Gate
from ..tracing import find_model, weights_blamed
from .call import checks
from .call.inputs import as_tuple, check_batch, single_input
from .call.layout import PatchGrid
from .call.targets import Against, as_asked, each_of, several
from .engine.decompose import Decomposition
from .engine.linear_run import LinearRuns, Rules
from .engine.method import ImplicitMethod

GATES = ("frozen", "half")


class LatimFlow(ImplicitMethod):
    """The exact decomposition of an output over the tokens and features of the input.

    At a given input every part of the network is frozen into a linear map: mixers into their
    operators, activations and norms into their ratios, attention and routing into their weights.
    The network is then linear in its input, and one backward pass says what each feature of each
    token adds to the output, through all layers and at a cost linear in the length.  Relevance and
    what the biases add sum to the output exactly.

    Args:
        forward_func: the model, wrapped or not, one of its bound methods, or a function that runs
            it.
        model: the module, where forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers that have adapters to use. Default: None, all.

    Raises:
        ModelNotFoundError: when forward_func leads to no module and ``model`` is not given.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or one without an adapter.

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

    name = "LATIM Flow"
    needs_gradient = True
    default_gate: Gate = "frozen"

    @property
    def multiplies_by_inputs(self) -> bool:
        """Relevance is a coefficient times the input."""
        return True

    def has_convergence_delta(self) -> bool:
        """True: :meth:`attribute` returns one if asked."""
        return True

    @log_usage(part_of_slo=True)  # type: ignore[untyped-decorator]
    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        contrast: Any = None,
        gate: Gate | None = None,
        zero_bias: bool = False,
        per_token: bool = False,
        internal_batch_size: int | None = None,
        return_convergence_delta: bool = False,
        verify: bool | float | None = None,
    ) -> Any:
        """What each input token, feature or pixel adds to the target.

        Args:
            inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); or a tuple of
                one such tensor.
            target: in Captum's forms: an int or a list of ints for outputs (B, classes), a tuple
                (position, token) for outputs (B, L, V), a list or tensor of them per example.
                Default: None, for models that return one number per example.
            additional_forward_args: further positional arguments of forward_func, for example an
                attention mask. Default: None.
            contrast: what the target is held against: None, nothing; a second target, whose output
                is taken off; ``"mean"``, the mean of all entries; ``"others"``, the log-odds
                against all other entries; ``"all"``, the log-probability. Default: None.
            gate: where the relevance of a gated product goes: ``"frozen"``, all of it to the
                stream; ``"half"``, in equal parts to stream and gate, the rule of layer-wise
                relevance propagation. Default: None, the rule of the method: ``"frozen"`` for
                LatimFlow, ``"half"`` for MambaLRP.
            zero_bias: explain the network without biases and all else that does not depend on the
                input, class tokens included; relevance alone sums to its output. Default: False.
            per_token: one number per token, (B, L), or for images the patch grid (B, h, w).
                Default: False.
            internal_batch_size: run at most so many examples at a time. Default: None, all.
            return_convergence_delta: also return output - relevance - biases per example, (B,),
                which rounding alone keeps from 0. Default: False.
            verify: check that every operator reproduces its module's output, which the delta does
                not tell: it is that of the network made of the operators. A number is the
                tolerance. Default: None, which is True, or with ``zero_bias`` False: what is
                compared is there already, but without biases it takes a third of the time more.

        Returns:
            The relevance in the inputs' shape, with the delta if asked for.

        Raises:
            OptionError: for a gate or a contrast that is not known.
            InputError, TargetError: for inputs or a target that do not fit.
            GradientModeError: under ``torch.inference_mode()``, or when the output does not depend
                on the inputs.
            NotLinearError: when the model uses a function of which no linear form is known, or the
                parts do not sum to the output.
            NonFiniteError: when an operator holds NaN or infinity.
            ReconstructionError: when ``verify`` finds an operator that is not its module.
        """
        checks.flags(per_token=per_token, return_convergence_delta=return_convergence_delta)
        tensor, in_tuple = single_input(inputs)
        grid = PatchGrid(find_model(self.forward_func, self.model)) if tensor.dim() == 4 else None
        questions = [Against(each, contrast) for each in several(target)]
        found = self._decompositions(
            tensor,
            questions,
            additional_forward_args,
            self._rules(gate, zero_bias, verify, by_layer=False),
            internal_batch_size,
            grid,
        )

        def laid_out(of: Decomposition) -> Tensor:
            if tensor.dim() == 2 or (per_token and tensor.dim() == 3):
                return of.tokens
            return grid.sums(of.inputs) if per_token and grid is not None else of.inputs

        relevance = as_asked([laid_out(each) for each in found], target)
        relevance = relevance.detach().to(tensor.device).contiguous()
        result = (relevance,) if in_tuple else relevance
        if not return_convergence_delta:
            return result
        return result, as_asked([each.delta for each in found], target).to(tensor.device)

    def decompose(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        contrast: Any = None,
        gate: Gate | None = None,
        zero_bias: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float | None = None,
    ) -> Decomposition:
        """All that :meth:`attribute` sums up: features, layers, biases.

        Args:
            inputs, target, additional_forward_args, contrast, gate, zero_bias: as in
                :meth:`attribute`, with the same defaults.
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
            gate=gate,
            zero_bias=zero_bias,
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
        gate: Gate | None = None,
        zero_bias: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float | None = None,
    ) -> list[Decomposition]:
        """:meth:`decompose` for several targets, at the cost of one forward run.

        Args:
            inputs, additional_forward_args, contrast, gate, zero_bias: as in :meth:`attribute`,
                with the same defaults.
            targets: targets in Captum's forms, each for the whole batch.
            internal_batch_size, verify: as in :meth:`attribute`, with the same defaults.

        Returns:
            One decomposition for each target.
        """
        questions = [Against(target, contrast) for target in each_of(targets).targets]
        return self._decompositions(
            inputs,
            questions,
            additional_forward_args,
            self._rules(gate, zero_bias, verify, by_layer=True),
            internal_batch_size,
        )

    def compute_convergence_delta(
        self,
        attributions: Tensor | tuple[Tensor, ...],
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        contrast: Any = None,
        gate: Gate | None = None,
        zero_bias: bool = False,
        verify: bool | float | None = None,
    ) -> Tensor:
        """output - attributions - biases per example (B,).

        Args:
            attributions: what :meth:`attribute` returned.
            inputs, target, additional_forward_args, contrast, gate, zero_bias, verify: what it was
                given, with the same defaults.

        Returns:
            (B,), which rounding alone keeps from 0.
        """
        given, _ = single_input(attributions, "attributions")
        found = self.decompose(
            inputs,
            target,
            additional_forward_args,
            contrast=contrast,
            gate=gate,
            zero_bias=zero_bias,
            verify=verify,
        )
        return found.delta + (found.inputs.flatten(1).sum(1) - given.flatten(1).sum(1)).to(
            found.output
        )

    def _rules(
        self, gate: Gate | None, zero_bias: bool, verify: bool | float | None, *, by_layer: bool
    ) -> Rules:
        chosen: Gate = self.default_gate if gate is None else checks.choice("gate", gate, GATES)
        checks.flags(zero_bias=zero_bias)
        verify = not zero_bias if verify is None else checks.tolerance("verify", verify)
        return Rules(chosen, constants=not zero_bias, by_layer=by_layer, verify=verify)

    def _decompositions(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        questions: Sequence[Against],
        additional_forward_args: Any,
        rules: Rules,
        internal_batch_size: int | None,
        grid: PatchGrid | None = None,
    ) -> list[Decomposition]:
        """One decomposition for each question."""
        tensor, _ = single_input(inputs)
        additional = as_tuple(additional_forward_args)
        check_batch(tensor, additional)
        self._check_mode()
        model = find_model(self.forward_func, self.model)
        runs = LinearRuns(self.forward_func, model, self.layers, rules, grid)
        with weights_blamed(model):
            return runs.decompositions(tensor, questions, additional, internal_batch_size)


class MambaLRP(LatimFlow):
    """Layer-wise relevance propagation as gradient times input of the linearised network.

    Activations pass relevance on by their frozen ratio, norms by their frozen scale; the step
    sizes, input and output vectors of the recurrences and the probabilities of attention are
    coefficients; a gated product gives half to each factor.  It is :class:`LatimFlow` with
    ``gate="half"``: one engine, other rules.  With ``zero_bias=True`` relevance is conserved, as
    in the paper: it sums to the output of the network without biases.

    LRP is patented for commercial use in some countries; whether that concerns you, you decide.

    Args:
        forward_func: the model, wrapped or not, one of its bound methods, or a function that runs
            it.
        model: the module, where forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers that have adapters to use. Default: None, all.

    Raises:
        ModelNotFoundError: when forward_func leads to no module and ``model`` is not given.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or one without an adapter.

    Example:
        >>> import torch
        >>> from captum_ssm import MambaLRP
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> tuple(MambaLRP(model).attribute(ids, target=(-1, 5)).shape)
        (1, 4)
    """

    name = "Mamba LRP"
    default_gate: Gate = "half"
