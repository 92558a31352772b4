"""Class-specific rollout of implicit attention (hidden-attention paper, eqs. 23-24)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import GradientModeError, OptionError
from ..operators import Operator, Reduce
from ..operators.kernels.rows import Strip
from ..tracing import Layer
from .call import checks
from .call.query import Query
from .engine import published
from .engine.fold import LayerMatrix, fold
from .engine.method import ImplicitMethod, options
from .engine.run import Run
from .engine.strips import Budget, MemoryBudget, in_strips

#: In-place functions that treat negative matrix entries, by the value of ``clamp``.
CLAMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda matrix: matrix.clamp_min_(0),
    "abs": torch.abs_,
    "none": lambda matrix: matrix,
}


class MambaAttribution(ImplicitMethod):
    """Mamba-Attribution: rollout of the implicit attention weighted by the target's gradient.

    The relevance is the query's row of the product over layers, later ones on the left, of beta = I
    + (g . mean over channels of alpha)+ (hidden-attention paper, eqs. 23-24). g[i] is the mean over
    channels of the target's gradient at the mixer's output for token i. The class works for all
    architectures (the unified paper calls it Griffin- or RWKV-attribution). Tokens that a network
    merges are treated as in :class:`~captum_ssm.ImplicitAttentionRollout`.

    If the residual stream is only read by LayerNorms (ViT, GPT-2, GPT-NeoX, RWKV), use the rollout
    instead. A LayerNorm ignores a shift of all channels, so g is 0 up to rounding.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.

    Raises:
        ModelNotFoundError: if no module is found from forward_func and ``model`` is None.
        NoMixerError, UnsupportedMixerError: if the model has no mixer, or none with an adapter.

    Example:
        >>> import torch
        >>> from captum_ssm import MambaAttribution
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> MambaAttribution(model).attribute(ids, target=(-1, 3)).shape
        torch.Size([1, 4])
    """

    needs_gradient = True

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
        clamp: str = "relu",
        normalize_rows: bool = False,
        start_layer: int = 0,
        recipe: str = "paper",
        per_token: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float = True,
        memory_budget: MemoryBudget = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the relevance of every input token to the target.

        Args:
            inputs, additional_forward_args, query, components, reduce, heads, start_layer: as in
                :meth:`ImplicitAttention.attribute`, with the same defaults.
            per_token, internal_batch_size, verify: as in :meth:`ImplicitAttention.attribute`, too.
            target: in Captum's forms: a class for outputs (B, classes), a tuple (position, token)
                for outputs (B, L, V), or a list or tensor with one of them per example. Default:
                None, for models that return one number per example.
            clamp: the treatment of negative entries of the weighted matrices: ``"relu"`` (zero),
                ``"abs"`` or ``"none"`` (hidden-attention paper, table 6). Default: ``"relu"``.
            normalize_rows: divide every row of beta by its sum. Default: False.
            recipe: ``"paper"``, or ``"published_code"`` for the authors' scripts: with
                ``components="s6"`` the script of the hidden-attention paper, else of the unified
                paper. Default: ``"paper"``.
            memory_budget: memory for the matrix rows that exist at the same time: bytes, or a
                string such as ``"512MiB"``. The model and its operators need additional memory.
                Default: None, a share of the free memory.

        Returns:
            The relevance, as in :meth:`ImplicitAttention.attribute`.

        Raises:
            CaptumSSMError: as in :meth:`ImplicitAttention.attribute`.
            GradientModeError: under ``torch.inference_mode()``.
        """
        settings = options(components, reduce, heads, start_layer, recipe, verify)
        budget = Budget.parse(memory_budget)
        checks.flags(normalize_rows=normalize_rows)
        checks.choice("clamp", clamp, CLAMPS)
        if recipe == "published_code" and (clamp != "relu" or normalize_rows):
            raise OptionError(
                f"{recipe=} needs clamp='relu' and normalize_rows=False, but {clamp=} and "
                f"{normalize_rows=}. Pass these two values, or recipe='paper'."
            )

        def relevance(run: Run) -> Tensor:
            """Return the query's row of the product of all beta, for the current target."""
            used_layers = settings.used(run.layers)
            gradients = _gradients(run, used_layers)
            if recipe == "paper":
                weights = {layer: g.mean(-1, keepdim=True) for layer, g in gradients.items()}

                def matrix_of(layer: Layer, operator: Operator) -> LayerMatrix:
                    """Return a layer's matrix (g . alpha)+, computed a few rows at a time."""
                    gradient = layer.in_order(weights[layer].to(layer.values))  # (B, L, 1)

                    def weigh_and_clamp(strip: Strip) -> Tensor:  # in place, as `in_strips` allows
                        gradient_of_rows = gradient[:, strip.rows.start : strip.rows.stop]
                        return CLAMPS[clamp](strip.entries.mul_(gradient_of_rows))

                    # kept for further targets, if memory allows; else None
                    alpha = run.once(
                        layer,
                        elements=operator.shape.batch * operator.shape.tokens**2,
                        limit=budget.on(operator.device) // operator.dtype.itemsize,
                        make=lambda: operator.dense(settings.reduce),
                    )
                    return in_strips(operator, settings.reduce, budget, weigh_and_clamp, alpha)

                return fold(run.layers, run.weights, matrix_of, settings, normalize_rows)

            query_at = published.query_positions(run.weights)

            def row_of(layer: Layer, operator: Operator) -> Tensor:
                """Return the query's row r of the scripts, weighted by the gradient."""
                rows = published.rows(layer, operator, query_at, settings)
                gradient = layer.in_order(gradients[layer])
                return published.class_row(rows, gradient, run.mask, settings)

            return published.fold(run.layers, query_at, row_of, settings)

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


def _gradients(run: Run, layers: Sequence[Layer]) -> dict[Layer, Tensor]:
    """Return the target's gradient at each layer's output, (B, L, E); raise if one is missing."""
    outputs, names = [layer.output for layer in layers], [layer.name for layer in layers]
    gradients = run.gradients(outputs, names)
    for layer in run.layers:
        if layer.stage and not layer.is_reached:  # layers of the first stage have none before them
            raise GradientModeError(
                f"No gradient passes through layer {layer.name!r} to earlier layers. Is its input "
                "detached, or computed under no_grad or by a kernel without a backward pass? Use a "
                "method without gradients: LatimALTI, LatimNorm, ImplicitAttentionRollout."
            )
    return dict(zip(layers, gradients, strict=True))
