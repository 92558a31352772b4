"""Class-specific rollout (hidden-attention paper, eqs. 23-24)."""

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

#: What becomes of negative entries, in place.
CLAMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda matrix: matrix.clamp_min_(0),
    "abs": torch.abs_,
    "none": lambda matrix: matrix,
}


class MambaAttribution(ImplicitMethod):
    """Mamba-Attribution: rollout of the implicit attention weighted by the target's gradient.

    beta = I + (g . mean over channels of alpha)+ for every layer, where g[i] is the mean over
    channels of the gradient of the target with respect to the mixer's output at token i
    (hidden-attention paper, eqs. 23-24); the relevance is the query's row of the product, later
    layers on the left.  The same class serves every architecture (the unified paper calls it
    Griffin- or RWKV-attribution).

    Where a convolution makes the map of tokens coarser between layers (the stages of MambaVision),
    the product passes it as in :class:`~captum_ssm.ImplicitAttentionRollout`.

    Where everything that reads the residual stream is a LayerNorm (ViT, GPT-2, GPT-NeoX, RWKV), a
    shift of all channels changes nothing, so that g is zero but for rounding and the relevance is
    the query's own entry alone.  Use the rollout there.

    Args:
        forward_func: the model, wrapped or not, one of its bound methods, or a function that runs
            it.
        model: the module, where forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.

    Raises:
        ModelNotFoundError: when forward_func leads to no module and ``model`` is not given.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or none with an adapter.

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
        show_progress: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float = True,
        memory_budget: MemoryBudget = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Relevance of every input token to the target.

        Args:
            inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); or a tuple of
                one such tensor.
            target: what is explained, in Captum's forms: a class for outputs (B, classes), a tuple
                (position, token) for outputs (B, L, V), a list or tensor of them per example.
                Default: None, for models that return one number per example.
            additional_forward_args: further positional arguments of forward_func, for example an
                attention mask. Default: None.
            query: the token whose row is asked for; see :meth:`ImplicitAttention.attribute`.
                Default: None, found from the target and the model.
            components: ``"s6"``, ``"unified"``, ``"exact"``, one of them without some parts
                (``"unified-conv"``), or a set of component names. Default: ``"unified"``.
            reduce: how channels become one matrix: ``"mean"``, ``"max"``, ``"min"``,
                ``"product"``, or a function over the last dimension such as
                ``discard_smallest(0.4)``. Default: ``"mean"``.
            heads: use only these heads (for Mamba-1: channels). Default: None, all.
            clamp: what becomes of negative entries of the weighted matrices: ``"relu"`` (zero),
                ``"abs"`` or ``"none"`` (hidden-attention paper, table 6). Default: ``"relu"``.
            normalize_rows: divide every row of beta by its sum. Default: False.
            start_layer: leave out the layers before this one. Default: 0.
            recipe: ``"paper"``, or ``"published_code"`` for what the authors' scripts compute:
                with ``components="s6"`` that of the hidden-attention paper, else that of the
                unified paper. Default: ``"paper"``.
            per_token: one number per token, (B, L), or for images the patch grid (B, h, w) where
                there is one. Default: False.
            show_progress: show a progress bar over layers. Default: False.
            internal_batch_size: run at most so many examples at a time. Default: None, all.
            verify: hold every operator to what its module returned in the run; a number is the
                tolerance. Default: True.
            memory_budget: what the rows of a layer's matrix that exist at a time may take: bytes,
                or a string such as ``"512MiB"``.  What the model takes, and the parts from which
                rows are made, comes on top. Default: None, a share of the memory that is free.

        Returns:
            The relevance, in the inputs' shape; for embeddings it sums to the token's relevance
            over E, for images it is bilinear in the patch grid.

        Raises:
            OptionError: for an option that is not known, or that another one excludes.
            InputError, TargetError, QueryError: for inputs, a target or a query that do not fit.
            GradientModeError: under ``torch.inference_mode()``.
            NonFiniteError: when an operator holds NaN or infinity.
            ReconstructionError: when ``verify`` finds an operator that is not its module.
        """
        chosen = options(components, reduce, heads, start_layer, recipe, show_progress, verify)
        budget = Budget.parse(memory_budget)
        checks.flags(normalize_rows=normalize_rows)
        checks.choice("clamp", clamp, CLAMPS)
        if recipe == "published_code" and (clamp != "relu" or normalize_rows):
            raise OptionError(
                "recipe='published_code' fixes clamping and normalisation; leave clamp and "
                "normalize_rows at their defaults."
            )

        def relevance(run: Run) -> Tensor:
            used = chosen.used(run.layers)
            gradients = _gradients(run, used)
            if recipe == "paper":
                weights = {layer: of.mean(-1, keepdim=True) for layer, of in gradients.items()}

                def step(layer: Layer, operator: Operator) -> LayerMatrix:
                    gradient = layer.in_order(weights[layer].to(layer.values))  # (B, L, 1)

                    def weighted(strip: Strip) -> Tensor:
                        of_rows = gradient[:, strip.rows.start : strip.rows.stop]
                        return CLAMPS[clamp](strip.entries.mul_(of_rows))

                    alpha = run.once(
                        layer,
                        operator.shape.batch * operator.shape.tokens**2,
                        budget.on(operator.device) // operator.dtype.itemsize,
                        lambda: operator.dense(chosen.reduce),
                    )
                    return in_strips(operator, chosen.reduce, budget, weighted, alpha)

                return fold(run.layers, run.weights, step, chosen, self.name, normalize_rows)

            query_at = published.query_positions(run.weights)

            def row_of(layer: Layer, operator: Operator) -> Tensor:
                rows = published.rows(layer, operator, query_at, chosen)
                gradient = layer.in_order(gradients[layer])
                return published.class_row(rows, gradient, run.mask, chosen)

            return published.fold(run.layers, query_at, row_of, chosen, self.name)

        return self._attribute(
            inputs,
            target,
            additional_forward_args,
            relevance,
            query=query,
            per_token=per_token,
            internal_batch_size=internal_batch_size,
            graph="outputs",
            verify=verify,
        )


def _gradients(run: Run, layers: Sequence[Layer]) -> dict[Layer, Tensor]:
    """The gradient with respect to each layer's output, (B, L, E)."""
    outputs, names = [layer.output for layer in layers], [layer.name for layer in layers]
    found = run.gradients(outputs, names)
    for layer in run.layers:
        if layer.stage and not layer.is_reached:
            raise GradientModeError(
                f"No gradient passes layer {layer.name!r} to the layers before it. Is its input "
                "computed under no_grad, detached, or written by a kernel without a backward pass? "
                "Use a method without gradients: LatimALTI, LatimNorm, ImplicitAttentionRollout."
            )
    return dict(zip(layers, found, strict=True))
