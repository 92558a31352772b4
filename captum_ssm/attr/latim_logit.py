"""LatimLogit: contributions of tokens to a logit through each layer (LATIM, table 1)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..operators.kernels.arithmetic import full_precision
from .call import checks
from .call.head import kept_positions
from .call.inputs import BatchPart, single_input
from .call.targets import Against, contrasted, require_real_target, target_index
from .engine.alone import require_alone
from .engine.decompose import not_linear, not_reached, sums_up
from .engine.fold import verify_layer
from .engine.linear_method import Explained, LinearMethod
from .engine.run import Question, Request, Run, layout_of, traced
from .vectors.latim import LatimMethod, read_options
from .vectors.logit import MIXINGS, LogitContributions, MakeShares, contributions_to


@dataclass(frozen=True)
class _Options:
    """The checked options of a :class:`LatimLogit` call.

    Attributes:
        make_shares: function that returns the mixing matrix for tracing relevance back.
        verify: whether operators are checked against their modules; a number is the tolerance.
    """

    make_shares: MakeShares
    verify: bool | float


class LatimLogit(LatimMethod, LinearMethod):
    """LATIM (ALTI-Logit): contributions of layers to an output, traced back to the input tokens.

        C[w <- k] = sum over layers and j of (T_i(x_j) . U_w) R[j, k],    R = P ... P (earlier)

    Each mixer contributes to the output along its direct path, through the frozen final norm and
    the unembedding. This contribution is divided among source tokens j. The mixing matrices P of
    earlier layers trace the sources back to input tokens. Contributions of MLPs and embeddings
    start at the token where they are computed. Rows of P sum to 1, so contributions and biases sum
    to the output.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.
        activation: the rule that divides an activation among the taps of the convolution before it;
            see :class:`LatimALTI`. Default: ``"linearized"``, for which the delta is 0.

    Raises:
        ModelNotFoundError: if no module is found from forward_func and ``model`` is None.
        NoMixerError, UnsupportedMixerError: if the model has no mixer, or none with an adapter.

    Example:
        >>> import torch
        >>> from captum_ssm import LatimLogit
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> relevance, delta = LatimLogit(model).attribute(
        ...     ids, target=(-1, 5), return_convergence_delta=True)
        >>> tuple(relevance.shape), bool(delta.abs() < 1e-4)
        ((1, 4), True)
    """

    needs_streams = True
    sums_pixels = False

    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        contrast: Any = None,
        mixing: str = "alti",
        per_token: bool = False,
        internal_batch_size: int | None = None,
        return_convergence_delta: bool = False,
        verify: bool | float = True,
    ) -> Any:
        """Attribute the target to each input token.

        Args:
            inputs, additional_forward_args, per_token, internal_batch_size, verify:
                as in :meth:`ImplicitAttention.attribute`, with the same defaults.
            target: in Captum's forms; for outputs (B, L, V) a tuple (position, token). Default:
                None, for models that return one number per example.
            contrast: the alternative to the target: a second target, ``"mean"``, ``"others"``,
                ``"all"`` or ``"runner-up"``; see :meth:`LatimFlow.attribute`. Default: None.
            mixing: the matrices that trace tokens back: ``"alti"``, as in the paper, or
                ``"projection"``, signed shares (:mod:`.vectors.shares`) in time linear in L.
                ``"alti"`` needs every row of all maps but the last: for any number of targets, a
                Mamba-1 layer at 1024 tokens takes as long as 48 forward and backward passes
                through the layer. Default: ``"alti"``.
            return_convergence_delta: also return output - relevance - biases per example, (B,).
                Default: False.

        Returns:
            The relevance, as in :meth:`ImplicitAttention.attribute`, and on request the delta.

        Raises:
            OptionError: if an option is not known.
            InputError, TargetError: if the inputs or the target do not fit the model.
            GradientModeError: if the output does not depend on the mixers' outputs.
            NotLinearError: if the model uses a function without a known linear form.
            NonFiniteError: if an operator contains NaN or infinity.
            ReconstructionError: if ``verify`` finds an operator that differs from its module.
        """
        checks.flags(per_token=per_token)
        options = self._options(mixing, verify)

        def explain(
            request: Request, targets: Sequence[Against], batch_part: BatchPart
        ) -> list[Explained]:
            """Return each target's relevance, and its delta (B,), for one part of the batch."""
            with layout_of(request, per_token) as layout:
                run, contributions = self._contributions(request, targets, options)
                rows = run.laid_out([x.tokens for x in contributions], layout)
            return [(row, x.delta) for row, x in zip(rows, contributions, strict=True)]

        return self._attribute(
            inputs,
            target,
            contrast,
            additional_forward_args,
            explain,
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
        mixing: str = "alti",
        verify: bool | float = True,
    ) -> LogitContributions:
        """Return the contributions of layers and biases, which :meth:`attribute` sums.

        Each layer's contribution is traced back separately, in time quadratic in the number of
        layers.

        Args:
            inputs, target, additional_forward_args, contrast, mixing, verify: as in
                :meth:`attribute`, with the same defaults.

        Returns:
            A :class:`~captum_ssm.attr.vectors.logit.LogitContributions`.
        """
        options = self._options(mixing, verify)
        ((contributions,),) = self._by_parts(
            single_input(inputs)[0],
            [Against(target, contrast)],
            additional_forward_args,
            None,
            lambda request, targets, batch_part: self._contributions(
                request, targets, options, by_layer=True
            )[1],
        )
        return contributions

    def compute_convergence_delta(
        self,
        attributions: Tensor | tuple[Tensor, ...],
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        contrast: Any = None,
        mixing: str = "alti",
    ) -> Tensor:
        """Return output - attributions - biases per example (B,).

        Args:
            attributions: the output of :meth:`attribute` for token ids or embeddings.
            inputs, target, additional_forward_args, contrast, mixing: the arguments of that call,
                with the same defaults.

        Returns:
            The delta (B,), 0 up to rounding with ``activation="linearized"``.

        Raises:
            InputError: if the inputs are images, whose relevance is interpolated over pixels.
        """
        if (images := single_input(inputs)[0]).dim() == 4:
            raise InputError(
                f"inputs {tuple(images.shape)} are images, whose relevance is interpolated and has "
                "no exact sum. For the delta, call attribute(..., return_convergence_delta=True)."
            )
        contributions = self.decompose(
            inputs, target, additional_forward_args, contrast=contrast, mixing=mixing
        )
        return self._delta(contributions, [contributions.tokens], attributions)

    def _options(self, mixing: str, verify: bool | float) -> _Options:
        """Check the options of a call."""
        make_shares = MIXINGS[checks.choice("mixing", mixing, MIXINGS)]
        common = read_options(0, verify)
        return _Options(make_shares, common.verify)

    def _contributions(
        self,
        request: Request,
        targets: Sequence[Against],
        options: _Options,
        by_layer: bool = False,
    ) -> tuple[Run, list[LogitContributions]]:
        """Run the model once; return the run, and the contributions to the value of each target."""
        request = replace(request, direct=True, verify=options.verify is not False)
        head = kept_positions(request.forward_func, request.inputs, request.additional, targets)
        run = traced(replace(request, kept=head))
        if head is not None and not head.fit(run.output):
            run = traced(request)  # the model ignored the argument: use its logits at all positions
        with ExitStack() as stack:
            for device in {layer.output.device for layer in run.layers}:
                stack.enter_context(full_precision(device))
            for layer in run.layers:
                verify_layer(layer, options.verify)
            run = replace(run, questions=[_question_for(run, t) for t in targets])
            results = contributions_to(run, self.activation, options.make_shares, by_layer=by_layer)
        if self.activation == "linearized" and options.verify is not False:
            _check_sums(results, run)
        values = [(t, x.output) for t, x in zip(targets, results, strict=True)]
        require_alone(run, options.verify, values)
        return run, results


def _question_for(run: Run, target: Against) -> Question:
    """Return a target with its value (B,), whose graph has direct paths only (``direct=True``)."""
    head_positions = run.request.kept
    all_logits = run.output if head_positions is None else head_positions.whole(run.output)
    require_real_target(target_index(target.target, all_logits), all_logits, run.mask)
    with torch.enable_grad():
        value, constant = contrasted(run.output, target.target, target.contrast, head_positions)
    if not value.requires_grad:
        raise not_reached()
    # query weights are a required field, but this method uses none
    return Question(target.target, torch.zeros_like(value), value, constant)


def _check_sums(contributions: Sequence[LogitContributions], run: Run) -> None:
    """Raise unless the contributions for each target sum to the explained value."""
    if not {layer.output.dtype for layer in run.layers} <= {torch.float32, torch.float64}:
        return  # large terms that cancel may have rounding errors above the tolerance
    for x, question in zip(contributions, run.questions, strict=True):
        terms = torch.cat([x.layers, x.locals, x.embedding[None]])  # (terms, B, L)
        if not sums_up(x, terms.transpose(0, 1), together=True):
            assert question.selected is not None
            raise not_linear(question.selected)
