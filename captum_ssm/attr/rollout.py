"""Rollout of implicit attention over layers (hidden-attention paper, eqs. 21-22)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError
from ..operators import Operator, Reduce
from ..tracing import Layer
from .call import checks
from .call.query import Query
from .engine import published
from .engine.fold import LayerMatrix, fold, scaled, stored
from .engine.method import ImplicitMethod, options
from .engine.run import Run
from .engine.strips import Budget, MemoryBudget, in_strips, reduced


class ImplicitAttentionRollout(ImplicitMethod):
    """Rollout: the query's row of the product over layers of I + alpha.

    rho = prod over layers (I + mean over channels of alpha), later layers on the left
    (hidden-attention paper, eqs. 21-22; Abnar & Zuidema 2020 for transformers). It does not depend
    on the target class. Only one row is multiplied through the layers, so the cost is linear in L
    with ``reduce="mean"`` and without ``absolute`` and ``discard_ratio``.

    If a convolution between layers merges tokens, as in MambaVision, a merged token's relevance is
    divided equally among the tokens in the convolution's window. The result has the tokens of the
    first layer; convolutions before this layer count as a patch embedding.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.

    Raises:
        ModelNotFoundError: if no module is found from forward_func and ``model`` is None.
        NoMixerError, UnsupportedMixerError: if the model has no mixer, or none with an adapter.

    Example:
        >>> import torch
        >>> from captum_ssm import ImplicitAttentionRollout
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> ImplicitAttentionRollout(model).attribute(ids).shape
        torch.Size([1, 4])
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
        normalize_rows: bool = False,
        absolute: bool = False,
        discard_ratio: float = 0.0,
        start_layer: int = 0,
        recipe: str = "paper",
        per_token: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float = True,
        memory_budget: MemoryBudget = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the relevance of every input token to the query, over all layers.

        Args:
            inputs, target, additional_forward_args, query, components, reduce, heads, start_layer:
                as in :meth:`ImplicitAttention.attribute`, with the same defaults.
            per_token, internal_batch_size, verify: as in :meth:`ImplicitAttention.attribute`, too.
            normalize_rows: divide every row of I + alpha by its sum. Default: False.
            absolute: take absolute values of the reduced matrices. Default: False.
            discard_ratio: set this fraction of the nonzero entries of each reduced matrix, the
                smallest ones, to 0. It needs each layer's whole matrix in memory, for any value of
                memory_budget. Default: 0.0.
            recipe: ``"paper"``, or ``"published_code"`` for the authors' scripts; see
                :meth:`MambaAttribution.attribute`. Default: ``"paper"``.
            memory_budget: as in :meth:`MambaAttribution.attribute`; used only with ``absolute`` or
                with a reduction other than the mean. Default: None.

        Returns:
            The relevance, as in :meth:`ImplicitAttention.attribute`.

        Raises:
            CaptumSSMError: as in :meth:`ImplicitAttention.attribute`.
        """
        settings = options(components, reduce, heads, start_layer, recipe, verify)
        checks.flags(normalize_rows=normalize_rows, absolute=absolute)
        discard_ratio = checks.ratio("discard_ratio", discard_ratio)
        budget = Budget.parse(memory_budget)
        changes_entries = absolute or discard_ratio > 0
        if recipe == "published_code" and (changes_entries or normalize_rows):
            raise OptionError(
                f"{recipe=} needs the defaults of {normalize_rows=}, {absolute=} and "
                f"{discard_ratio=}. Leave these options out, or pass recipe='paper'."
            )

        def matrix_of(layer: Layer, operator: Operator) -> LayerMatrix:
            """Return a layer's alpha; kept as a whole only if the smallest entries are dropped."""
            scale = layer.linear.branch_scale
            if not changes_entries:
                return scaled(reduced(operator, settings.reduce, budget), scale)
            if discard_ratio == 0:  # only ``absolute`` is set
                return in_strips(
                    operator, settings.reduce, budget, lambda x: x.entries.mul_(scale).abs_()
                )
            matrix = scale * operator.dense(settings.reduce)
            return stored(_drop_smallest(matrix.abs() if absolute else matrix, discard_ratio))

        def relevance(run: Run) -> Tensor:
            """Return the query's row of the product over layers, (B, L)."""
            if recipe == "published_code":
                query_at = published.query_positions(run.weights)
                return published.fold(
                    run.layers,
                    query_at,
                    lambda layer, op: published.rows(layer, op, query_at, settings).mean(1),
                    settings,
                )
            return fold(run.layers, run.weights, matrix_of, settings, normalize_rows)

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


def _drop_smallest(matrix: Tensor, ratio: float) -> Tensor:
    """Set each example's smallest nonzero entries to 0: a fraction ``ratio`` of them."""
    flat = matrix.flatten(1)
    is_nonzero = flat != 0
    order = flat.masked_fill(~is_nonzero, torch.inf).argsort(-1)  # zeros last
    # each entry's place in the order, the inverse permutation
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(flat.shape[1], device=flat.device).expand_as(order)
    )
    is_dropped = rank < (ratio * is_nonzero.sum(-1, keepdim=True)).long()
    return torch.where(is_dropped, 0, flat).view_as(matrix)
