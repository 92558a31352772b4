"""LatimLogit: what each token adds to a logit through each layer (LATIM, table 1)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from captum.log import log_usage
from torch import Tensor

from ..errors import InputError
from ..linear import direct_paths
from ..operators.kernels.arithmetic import unseen
from ..tracing import (
    Graph,
    find_model,
    require_deterministic,
    require_layers,
    require_real_tokens,
    trace,
)
from .call import checks
from .call.inputs import call_model, explained_ids, single_input
from .call.query import Query
from .call.targets import (
    Against,
    Each,
    as_asked,
    contrasted,
    logits_of,
    require_real_target,
    several,
    target_index,
)
from .engine.decompose import not_linear, not_reached, sums_up
from .engine.fold import verify_layer
from .engine.run import Run
from .engine.sharing import begin, chained, followed
from .vectors.latim import LatimMethod, read_options
from .vectors.logit import MIXINGS, LogitContributions, LogitQuestion, LogitRun, contributions_to


class LatimLogit(LatimMethod):
    """LATIM (ALTI-Logit): the additions to an output, traced back to the input tokens.

        C[w <- k] = sum over layers and j of (T_i(x_j) . U_w) R[j, k],    R = P ... P of the layers
                                                                          before

    What a mixer writes to the stream at the token that the head reads is taken apart by its
    source tokens, along the direct path through the final norm, frozen, and the unembedding; the
    source tokens of a layer are traced back by the mixings of the layers before.  What acts within
    tokens, such as an MLP, is credited to its own token, the embeddings to theirs.  Rows of a
    mixing sum to 1, so that contributions and biases add up to the output.

    Args:
        forward_func: the model, wrapped or not, one of its bound methods, or a function that runs
            it.
        model: the module, where forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.
        activation: how an activation behind a short convolution is divided among its taps; see
            :class:`LatimALTI`. Default: ``"linearized"``, the one with which the delta is 0.

    Raises:
        ModelNotFoundError: when forward_func leads to no module and ``model`` is not given.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or one without an adapter.

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

    name = "LATIM Logit"

    @property
    def multiplies_by_inputs(self) -> bool:
        """Contributions are of the input itself."""
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
        mixing: str = "alti",
        per_token: bool = False,
        show_progress: bool = False,
        internal_batch_size: int | None = None,
        return_convergence_delta: bool = False,
        verify: bool | float = True,
    ) -> Any:
        """What each input token adds to the target.

        Args:
            inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); or a tuple of
                one such tensor.
            target: in Captum's forms; for outputs (B, L, V) a tuple (position, token). Default:
                None, for models that return one number per example.
            additional_forward_args: further positional arguments of forward_func, for example an
                attention mask. Default: None.
            contrast: what the target is held against: None, nothing; a second target; ``"mean"``;
                ``"others"``, for log-odds; ``"all"``, for the log-probability; see
                :meth:`LatimFlow.attribute`. Default: None.
            mixing: how tokens are traced back: ``"alti"``, the paper's, which needs every row of
                the maps of all layers but the last, and so time quadratic in L, whatever the
                number of targets: for a layer of Mamba-1 at 1024 tokens that of 40 to 60 forward
                and backward passes through it; or ``"projection"``, the cheap choice, linear in
                L, of signed shares; see :mod:`.vectors.shares`. Default: ``"alti"``.
            per_token: one number per token, (B, L), or for images the patch grid (B, h, w) where
                there is one. Default: False.
            show_progress: show a progress bar over layers. Default: False.
            internal_batch_size: run at most so many examples at a time. Default: None, all.
            return_convergence_delta: also return output - relevance - biases per example, (B,).
                Default: False.
            verify: hold every operator to what its module returned in the run; a number is the
                tolerance. Default: True.

        Returns:
            The relevance, in the inputs' shape, with the delta if asked for; for embeddings it
            sums to the token's relevance over E, for images it is bilinear in the patch grid.

        Raises:
            OptionError: for an option that is not known.
            InputError, TargetError: for inputs or a target that do not fit.
            GradientModeError: when the output does not depend on what the mixers write.
            NotLinearError: when the model uses a function of which no linear form is known.
            NonFiniteError: when an operator holds NaN or infinity.
            ReconstructionError: when ``verify`` finds an operator that is not its module.
        """
        checks.flags(return_convergence_delta=return_convergence_delta)
        found: list[LogitContributions] = []
        relevance = self._traced_back(
            inputs,
            Each([Against(each, contrast) for each in several(target)]),
            additional_forward_args,
            found,
            mixing=mixing,
            per_token=per_token,
            show_progress=show_progress,
            internal_batch_size=internal_batch_size,
            verify=verify,
        )
        in_tuple = isinstance(relevance, tuple)
        relevance = as_asked(relevance[0] if in_tuple else relevance, target)
        result = (relevance,) if in_tuple else relevance
        if not return_convergence_delta:
            return result
        count = len(several(target))
        deltas = [torch.cat([part.delta for part in found[i::count]]) for i in range(count)]
        return result, as_asked(deltas, target).to(relevance.device)

    def decompose(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        contrast: Any = None,
        mixing: str = "alti",
        show_progress: bool = False,
        verify: bool | float = True,
    ) -> LogitContributions:
        """All that :meth:`attribute` sums up: contributions by layer, biases.

        What each layer adds is traced back by itself, in a time that grows with the square of the
        number of layers; :meth:`attribute` traces back their sum.

        Args:
            inputs, target, additional_forward_args, contrast, mixing, show_progress, verify: as in
                :meth:`attribute`, with the same defaults.

        Returns:
            A :class:`~captum_ssm.attr.vectors.logit.LogitContributions`.
        """
        found: list[LogitContributions] = []
        self._traced_back(
            inputs,
            Each([Against(target, contrast)]),
            additional_forward_args,
            found,
            mixing=mixing,
            per_token=True,
            show_progress=show_progress,
            internal_batch_size=None,
            verify=verify,
            by_layer=True,
        )
        return found[0]

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
        """output - attributions - biases per example (B,).

        Args:
            attributions: what :meth:`attribute` returned for token ids or embeddings.
            inputs, target, additional_forward_args, contrast, mixing: what it was given, with the
                same defaults.

        Returns:
            (B,), which rounding alone keeps from 0 with ``activation="linearized"``.

        Raises:
            InputError: for images, whose relevance is spread over pixels, and has no sum to check.
        """
        given, _ = single_input(attributions, "attributions")
        if single_input(inputs)[0].dim() == 4:
            raise InputError(
                "inputs are images, whose relevance is bilinear in the patch grid and does not sum "
                "to the output. attribute(..., return_convergence_delta=True) returns the delta."
            )
        found = self.decompose(
            inputs, target, additional_forward_args, contrast=contrast, mixing=mixing
        )
        return found.output - given.flatten(1).sum(1).to(found.output) - found.bias

    def _traced_back(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Each,
        additional_forward_args: Any,
        found: list[LogitContributions],
        *,
        mixing: str,
        per_token: bool,
        show_progress: bool,
        internal_batch_size: int | None,
        verify: bool | float,
        by_layer: bool = False,
    ) -> Any:
        """The relevance laid out; the contributions of each part of the batch go to ``found``."""
        make = MIXINGS[checks.choice("mixing", mixing, MIXINGS)]
        chosen = read_options(0, show_progress, verify)

        ready: list[LogitContributions] = []  # to the questions of a run yet to be asked

        def relevance(run: Run) -> Tensor:
            assert isinstance(run, LogitRun)
            # frozen coefficients are not the network's business
            with unseen():
                if not ready:
                    for layer in run.layers:
                        verify_layer(layer, chosen.verify)
                    bar = self.name if chosen.show_progress else None
                    ready.extend(
                        contributions_to(run, self.activation, make, bar, by_layer=by_layer)
                    )
                    if self.activation == "linearized" and verify is not False:
                        _require_sums(ready, run)
                found.append(ready.pop(0))
                return found[-1].tokens

        return self._attribute(
            inputs,
            target,
            additional_forward_args,
            relevance,
            query="mean",
            per_token=per_token,
            internal_batch_size=internal_batch_size,
            verify=verify,
        )

    def _run(
        self,
        inputs: Tensor,
        target: Any,
        additional: tuple[Any, ...],
        query: Query,
        stack: ExitStack,
        graph: Graph = "outputs",
        *,
        verify: bool | float = True,
        folds: bool = True,
    ) -> Run:
        model = find_model(self.forward_func, self.model)
        require_deterministic(model)
        ids = explained_ids(inputs, additional)
        with ExitStack() as hooks:
            tokens = followed(model, self.layers, hooks)
            paths = stack.enter_context(direct_paths(model, ids, layers=self.layers, follow=tokens))
            t = hooks.enter_context(
                trace(
                    model,
                    layers=self.layers,
                    verify=verify is not False,
                    streams=True,
                    follow=tokens,
                    watchers=(paths,),
                )
            )
            if tokens is not None:
                hooks.enter_context(tokens)
            start = paths.mode.begun(inputs)
            begin(tokens, start if start.is_floating_point() else ids)
            output = logits_of(call_model(self.forward_func, start, additional))
            origin = None if tokens is None else tokens.origin(output)
        require_layers(t, model)
        chain = chained(t, origin, folds)
        questions = []
        with unseen():
            mask = t.mask
            require_real_tokens(mask)
            for asked in several(target):
                require_real_target(target_index(asked.target, output), output, mask)
                number, constant = contrasted(output, asked.target, asked.contrast)
                if not number.requires_grad:
                    raise not_reached()
                questions.append(LogitQuestion(torch.zeros_like(number), number, constant))
        given = None if chain is None else chain.given
        return LogitRun(t.layers, mask, questions, paths, chain, given=given)


def _require_sums(found: Sequence[LogitContributions], run: LogitRun) -> None:
    """Raise unless the parts of every output sum to it."""
    if not {layer.output.dtype for layer in run.layers} <= {torch.float32, torch.float64}:
        return  # what cancels out on the way may round to more than the sum
    for parts, question in zip(found, run.questions, strict=True):
        written = torch.cat([parts.layers, parts.locals, parts.embedding[None]])  # (parts, B, L)
        if not sums_up(parts, written.transpose(0, 1), together=True):
            assert question.selected is not None
            raise not_linear(question.selected)
