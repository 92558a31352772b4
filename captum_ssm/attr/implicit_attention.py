"""Implicit attention matrices of mixers, and raw attention, the mean of the matrices' rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..operators import Reduce
from ..tracing import Layer
from .call.progress import shown
from .call.query import Query
from .engine import published
from .engine.factors import Factors, prepare_factors, prepare_states
from .engine.fold import carry
from .engine.method import ImplicitMethod, options
from .engine.run import Run
from .engine.strips import Budget, reduced


class ImplicitAttention(ImplicitMethod):
    """The implicit attention matrix of every mixer, and the rows of these matrices as relevance.

    At a given input a mixer is a linear map over tokens: for Mamba
    alpha = diag(gate) . scan . diag(activation) . conv, one matrix per channel (hidden-attention
    paper, eqs. 10-20; unified paper, eqs. 4-34).  :meth:`attribute` is raw attention: the query's
    row of the mean over layers of the channel-reduced matrices.  If the network merges tokens
    between layers, as MambaVision does, rows are converted to the tokens of the first layer, as in
    :class:`~captum_ssm.ImplicitAttentionRollout`.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.

    Raises:
        ModelNotFoundError: if no module is found from forward_func and ``model`` is None.
        NoMixerError, UnsupportedMixerError: if the model has no mixer, or none with an adapter.

    Example:
        >>> import torch
        >>> from captum_ssm import ImplicitAttention
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> [tuple(m.shape) for m in ImplicitAttention(model).matrices(ids)]
        [(1, 4, 4), (1, 4, 4)]
    """

    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        query: Query = None,
        components: str | Collection[str] = "unified",
        reduce: Reduce = "mean",
        heads: Sequence[int] | None = None,
        start_layer: int = 0,
        recipe: str = "paper",
        per_token: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float = True,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return raw attention: the query's row of the matrices, as the mean over layers.

        Args:
            inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); or a tuple of
                one such tensor.
            target: in Captum's forms; used only to find the query: for outputs (B, L, V) a tuple
                (position, token). Default: None.
            additional_forward_args: further positional arguments of forward_func, for example an
                attention mask. Default: None.
            query: the token whose row is returned: ``"cls"``, ``"last"``, ``"mean"``, a position,
                several positions (the mean of the rows), or a tensor with one position per example.
                Default: None, the target's position; without one, the tokens that the output
                depends on, such as a class token; or the last unpadded token.
            components: ``"s6"``, ``"unified"``, ``"exact"``, one of them minus some components
                (``"unified-conv"``), or a set of component names. Default: ``"unified"``.
            reduce: the reduction of channels to one matrix: ``"mean"``, ``"max"``, ``"min"``,
                ``"product"``, or a function over the last dimension. Default: ``"mean"``.
            heads: use only these heads (for Mamba-1: channels). Default: None, all.
            start_layer: leave out the layers before this one. Default: 0.
            recipe: ``"paper"``, or ``"published_code"`` for the authors' scripts: the mean of the
                min-max normalized rows (:meth:`MambaAttribution.attribute`). Default: ``"paper"``.
            per_token: return one number per token, (B, L), or for images per patch (B, h, w), if
                there is a patch grid. Default: False.
            internal_batch_size: largest number of examples per run. Default: None, all.
            verify: check every operator against its module's output; a number is the tolerance.
                Default: True.

        Returns:
            The relevance in the inputs' shape. For embeddings, a token's relevance is divided
            equally among its E features; for images, patches are interpolated bilinearly.

        Raises:
            OptionError: if an option is not known, or if options exclude each other.
            InputError, TargetError, QueryError: if inputs, target or query do not fit the model.
            NonFiniteError: if an operator contains NaN or infinity.
            ReconstructionError: if ``verify`` finds an operator that differs from its module.
        """
        settings = options(components, reduce, heads, start_layer, recipe, verify)

        def relevance(run: Run) -> Tensor:
            """Sum the layers' rows, last layer first; carry sums to the tokens of each layer."""
            used_layers = settings.used(run.layers)
            query_positions = None  # set for the authors' scripts, which have one query token
            if recipe == "published_code":
                query_positions = published.query_positions(run.weights)
            weights, total, latest = run.weights, torch.zeros_like(run.weights), run.layers[-1]
            with torch.no_grad():
                for layer in shown(used_layers[::-1]):
                    operator = settings.operator(layer)
                    if query_positions is None:
                        weights = carry(weights.to(layer.values), latest, layer)
                        row = reduced(operator, settings.reduce, Budget()).rmatvec(weights)
                        row = layer.linear.branch_scale * row  # the block scales the output
                    else:
                        published.check_tokens(layer, latest)
                        is_real = None if run.mask is None else run.mask.to(operator.device)
                        rows = published.rows(layer, operator, query_positions, settings)
                        row = published.raw_row(rows, is_real)
                    total, latest = carry(total.to(row), latest, layer) + row, layer
                mean = carry(total, latest, run.layers[0]) / len(used_layers)
            return mean if query_positions is None else published.finish(mean, query_positions)

        return self._attribute(
            inputs,
            target,
            additional_forward_args,
            relevance,
            query=query,
            per_token=per_token,
            internal_batch_size=internal_batch_size,
            verify=verify,
        )

    def matrices(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        layers: Sequence[int] | None = None,
        reduce: Reduce = "mean",
        components: str | Collection[str] = "unified",
        heads: Sequence[int] | None = None,
        additional_forward_args: Any = None,
        *,
        verify: bool | float = True,
    ) -> list[Tensor]:
        """Return the implicit attention matrices; entry (i, j) is token j's weight in token i.

        Args:
            inputs: as in :meth:`attribute`.
            layers: indices of layers, in the order in which they ran; negative ones count from the
                end. Default: None, all.
            reduce: as in :meth:`attribute`; also None for every channel and ``"heads"`` for every
                head. Default: ``"mean"``.
            components: as in :meth:`attribute`. Default: ``"unified"``.
            heads: use only these heads (for Mamba-1: channels). Default: None, all.
            additional_forward_args: further positional arguments of forward_func. Default: None.
            verify: as in :meth:`attribute`. Default: True.

        Returns:
            One tensor per layer: (B, L, L), or (B, C, L, L) with ``reduce=None``, or (B, H, L, L)
            with ``"heads"``. For a mixer of windows of a 2-D map, L is the number of tokens of the
            map, in row-major order, and entries between different windows are 0.
        """
        settings = options(components, reduce, heads, 0, "paper", verify, keep_channels=True)

        def matrix_of(run: Run, layer: Layer) -> Tensor:
            # a view would keep a wider matrix in memory
            matrix = settings.operator(layer).dense(settings.reduce).contiguous()
            return matrix.to(run.request.inputs.device)

        return self._of_layers(inputs, layers, additional_forward_args, settings, matrix_of)

    def states(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        channels: Sequence[int],
        layers: Sequence[int] | None = None,
        components: str | Collection[str] = "s6",
        additional_forward_args: Any = None,
        *,
        verify: bool | float = True,
    ) -> list[Tensor]:
        """Return one matrix per state of some channels (hidden-attention paper, eq. 16).

        A channel's matrix is the sum over states. Layers must be recurrences with a diagonal decay.

        Args:
            inputs: as in :meth:`attribute`.
            channels: channel indices, as in ``reduce=None``. Each channel has N matrices.
            layers: as in :meth:`matrices`. Default: None, all.
            components: as in :meth:`attribute`; with the scan, without the skip. Default: ``"s6"``.
            additional_forward_args: further positional arguments of forward_func. Default: None.
            verify: as in :meth:`matrices`, with the same defaults.

        Returns:
            One tensor (B, len(channels), N, L, L) per layer.  Bidirectional mixers have 2 N states,
            first of the forward direction, then of the backward direction, in the order of tokens.
        """
        settings, matrices_of = prepare_states(channels, components, verify)
        return self._of_layers(inputs, layers, additional_forward_args, settings, matrices_of)

    def factors(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        channels: Sequence[int],
        layers: Sequence[int] | None = None,
        simplified: bool = False,
        additional_forward_args: Any = None,
        *,
        verify: bool | float = True,
    ) -> list[Factors]:
        """Return the query, key and history factors of :meth:`states` for Mamba and Mamba-2.

        Args:
            inputs, channels, layers, additional_forward_args, verify: as in
                :meth:`states`, with the same defaults.
            simplified: replace softplus by relu (eqs. 18-20). Default: False, exact (eq. 17).

        Returns:
            One :class:`~captum_ssm.attr.engine.selection.Factors` per layer, with the states in the
            order of :meth:`states`.
        """
        settings, factors_of = prepare_factors(channels, simplified, verify)
        return self._of_layers(inputs, layers, additional_forward_args, settings, factors_of)
