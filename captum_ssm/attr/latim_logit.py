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
        make: function that returns the mixing matrix with which relevance is traced back.
        verify: whether operators are checked against their modules; a number is the tolerance.
    """

    make: MakeShares
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
        chosen = self._options(mixing, verify)

        def explain(
            request: Request, questions: Sequence[Against], cut: BatchPart
        ) -> list[Explained]:
            with layout_of(request, per_token) as layout:
                run, found = self._contributions(request, questions, chosen)
                rows = run.laid_out([parts.tokens for parts in found], layout)
            return [(row, parts.delta) for row, parts in zip(rows, found, strict=True)]

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
        chosen = self._options(mixing, verify)
        ((found,),) = self._by_parts(
            single_input(inputs)[0],
            [Against(target, contrast)],
            additional_forward_args,
            None,
            lambda request, questions, cut: self._contributions(
                request, questions, chosen, by_layer=True
            )[1],
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
        found = self.decompose(
            inputs, target, additional_forward_args, contrast=contrast, mixing=mixing
        )
        return self._delta(found, [found.tokens], attributions)

    def _options(self, mixing: str, verify: bool | float) -> _Options:
        make = MIXINGS[checks.choice("mixing", mixing, MIXINGS)]
        chosen = read_options(0, verify)
        return _Options(make, chosen.verify)

    def _contributions(
        self,
        request: Request,
        questions: Sequence[Against],
        chosen: _Options,
        by_layer: bool = False,
    ) -> tuple[Run, list[LogitContributions]]:
        """Run the model once; return the run, and the contributions to the value of each target."""
        request = replace(request, direct=True, verify=chosen.verify is not False)
        kept = kept_positions(request.forward_func, request.inputs, request.additional, questions)
        run = traced(replace(request, kept=kept))
        if kept is not None and not kept.fit(run.output):
            run = traced(request)
        with ExitStack() as stack:
            for device in {layer.output.device for layer in run.layers}:
                stack.enter_context(full_precision(device))
            for layer in run.layers:
                verify_layer(layer, chosen.verify)
            run = replace(run, questions=[_question(run, each) for each in questions])
            found = contributions_to(run, self.activation, chosen.make, by_layer=by_layer)
        if self.activation == "linearized" and chosen.verify is not False:
            _require_sums(found, run)
        numbers = [(q, x.output) for q, x in zip(questions, found, strict=True)]
        require_alone(run, chosen.verify, numbers)
        return run, found


def _question(run: Run, asked: Against) -> Question:
    """Return a target with the value to explain (B,), whose graph has only direct paths."""
    kept = run.request.kept
    whole = run.output if kept is None else kept.whole(run.output)
    require_real_target(target_index(asked.target, whole), whole, run.mask)
    with torch.enable_grad():
        number, constant = contrasted(run.output, asked.target, asked.contrast, kept)
    if not number.requires_grad:
        raise not_reached()
    return Question(asked.target, torch.zeros_like(number), number, constant)


def _require_sums(found: Sequence[LogitContributions], run: Run) -> None:
    """Raise unless the contributions for each target sum to the explained value."""
    if not {layer.output.dtype for layer in run.layers} <= {torch.float32, torch.float64}:
        return  # large terms that cancel may have rounding errors above the tolerance
    for parts, question in zip(found, run.questions, strict=True):
        written = torch.cat([parts.layers, parts.locals, parts.embedding[None]])  # (parts, B, L)
        if not sums_up(parts, written.transpose(0, 1), together=True):
            assert question.selected is not None
            raise not_linear(question.selected)
