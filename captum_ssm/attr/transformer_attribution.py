"""Transformer-Attribution: rollout of attention weighted by relevance and gradient per head."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..mixers.base import LinearMixer
from ..operators import Operator
from ..operators.kernels.portions import at_a_time
from ..operators.reduction import sums_by_head
from ..tracing import Layer
from ..tracing.gradients import recordable
from .call import checks
from .call.query import Query
from .call.targets import Against
from .engine.fold import LayerMatrix, fold, stored
from .engine.linear_method import coefficients
from .engine.method import ImplicitMethod, options
from .engine.run import Run

FORMS = ("lrp", "gradient")

#: Largest number of elements of the heads' matrices computed at a time (16 MiB in float32).
_MATRIX_ELEMENTS = 2**22


class TransformerAttribution(ImplicitMethod):
    """Transformer-Attribution (Chefer et al. 2021), for attention and all other mixers.

    The relevance is the query's row of the product over layers, later ones on the left, of beta = I
    + mean over heads of (grad . R)+, with entrywise products. grad is the gradient of the target
    with respect to a head's matrix A, and R is the relevance of A:

    - ``form="lrp"`` ("Transformer Interpretability Beyond Attention Visualization"): R is A times
      the gradient in the linear network of layer-wise relevance propagation. The rules are those of
      :class:`MambaLRP`, with attention probabilities as constants. The authors' rules differ: they
      treat positive and negative contributions differently (alpha-beta rule), and divide relevance
      between both factors of a product in attention.
    - ``form="gradient"`` ("Generic Attention-model Explainability"): R = A.

    With y = A v, G the gradient with respect to y, and sums over a head's channels,

        grad[i, j] = sum of G[i] v[j],      R[i, j] = sum of A[i, j] g[i] v[j]

    where g is G in the linear network. With ``form="gradient"``, grad . A is the sum of A[i, j]
    G[i] v[j]. In attention all channels of a head have the same matrix; if the matrices differ,
    grad is the gradient with respect to a term added to all of them. In Mamba-1 every channel is a
    head.

    LRP is patented in some countries: check whether this concerns your commercial use.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.
        form: ``"lrp"``, which runs the model twice, or ``"gradient"``. Default: ``"lrp"``.

    Raises:
        ModelNotFoundError: if no module is found from forward_func and ``model`` is None.
        NoMixerError, UnsupportedMixerError: if the model has no mixer, or none with an adapter.

    Example:
        >>> import torch
        >>> from captum_ssm import TransformerAttribution
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> TransformerAttribution(model).attribute(ids, target=(-1, 3)).shape
        torch.Size([1, 4])
    """

    needs_gradient = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: nn.Module | None = None,
        layers: Sequence[str | nn.Module] | None = None,
        *,
        form: str = "lrp",
    ) -> None:
        super().__init__(forward_func, model, layers)
        self.form = checks.choice("form", form, FORMS)

    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        query: Query = None,
        components: str | Collection[str] = "unified",
        heads: Sequence[int] | None = None,
        normalize_rows: bool = False,
        start_layer: int = 0,
        per_token: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float = True,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the relevance of every input token to the target.

        Args:
            inputs, additional_forward_args, query, heads, start_layer, per_token: as in
                :meth:`ImplicitAttention.attribute`, with the same defaults.
            internal_batch_size, verify: as in :meth:`ImplicitAttention.attribute`, too.
            target, normalize_rows: as in :meth:`MambaAttribution.attribute`, too.
            components: the components of A, for mixers other than attention; see
                :meth:`ImplicitAttention.attribute`. Default: ``"unified"``.

        Returns:
            The relevance, as in :meth:`ImplicitAttention.attribute`.

        Raises:
            CaptumSSMError: as in :meth:`ImplicitAttention.attribute`.
            GradientModeError: under ``torch.inference_mode()``.
        """
        settings = options(components, "mean", heads, start_layer, "paper", verify)
        checks.flags(normalize_rows=normalize_rows)

        # the coefficients g of all layers, for each target still to explain: the first call of
        # ``relevance`` computes all from one run, and every call takes one entry
        pending: list[list[Tensor]] = []

        def relevance(run: Run) -> Tensor:
            """Return the query's row of the product of all beta, for the current target."""
            layers = settings.used(run.layers)
            at_outputs = run.gradients([x.output for x in layers], [x.name for x in layers])
            gradients = dict(zip(layers, at_outputs, strict=True))
            if self.form == "lrp" and not pending:
                targets = [Against(question.target, None) for question in run.questions]
                pending.extend(found for _, found in coefficients(run.request, targets))
            # with form="gradient" nothing is pending
            of_layers = pending.pop(0) if pending else [None] * len(run.layers)
            coefficient_of = dict(zip(run.layers, of_layers, strict=True))

            def matrix_of(layer: Layer, operator: Operator) -> LayerMatrix:
                gradient, coefficient = gradients[layer], coefficient_of[layer]
                return stored(_beta(layer, operator, gradient, coefficient, settings.heads))

            with recordable(run.request.model):  # gradients pass the output projections again
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


def _beta(
    layer: Layer,
    operator: Operator,
    gradient: Tensor,
    coefficient: Tensor | None,
    heads: Sequence[int] | None,
) -> Tensor:
    """Return a layer's matrix beta - I, the mean over heads of (grad . R)+, (B, L, L).

    ``gradient`` (G) and ``coefficient`` (g) are at the layer's output (B, L, E). Without a
    coefficient, R = A, the ``operator`` restricted to ``heads``.
    """
    linear, factor = layer.linear, layer.factor  # factor: by which hooks multiply the output
    used_heads = range(linear.operator.shape.heads) if heads is None else heads
    gradient = gradient if factor is None else gradient * factor
    gradient = _before_projection(linear, layer.in_order(gradient))[:, :, used_heads]
    if coefficient is not None:
        coefficient = _before_projection(linear, layer.in_order(coefficient))[:, :, used_heads]
    return _mean_over_heads(operator, linear.values[:, :, used_heads], gradient, coefficient)


def _before_projection(linear: LinearMixer, gradient: Tensor) -> Tensor:
    """Return the gradient (B, L, H, P) before the output projection, from (B, L, E) after it."""
    with torch.enable_grad():
        before = torch.zeros_like(linear.values, requires_grad=True)  # any value: project is affine
        out = linear.project(before)
        (gradient_before,) = torch.autograd.grad(out, before, gradient.to(out))
    return gradient_before


def _mean_over_heads(
    operator: Operator, values: Tensor, gradient: Tensor, coefficient: Tensor | None
) -> Tensor:
    """Return the mean over heads of (grad . R)+ (B, L, L), computed for some heads at a time.

    ``operator`` is A. ``values`` v, ``gradient`` G and ``coefficient`` g are (B, L, H, P).
    """
    batch, tokens, heads, per_head = operator.shape
    total = values.new_zeros(batch, tokens, tokens)
    heads_at_once = max(1, at_a_time(_MATRIX_ELEMENTS, values.device) // (batch * tokens * tokens))
    for start in range(0, heads, heads_at_once):
        block = range(start, min(start + heads_at_once, heads))
        matrices = operator.select(block)
        v, grad_y = values[:, :, start : block.stop], gradient[:, :, start : block.stop]
        if coefficient is None:  # A[i, j] G[i] v[j]
            weighted = sums_by_head(matrices, grad_y, v)  # (B, h, L, L)
        elif per_head == 1:  # the product of sums over one channel is one sum
            weighted = sums_by_head(matrices, coefficient[:, :, start : block.stop] * grad_y, v * v)
        else:  # R = sum of A[i, j] g[i] v[j], times grad = sum of G[i] v[j]
            weighted = sums_by_head(matrices, coefficient[:, :, start : block.stop], v)
            weighted *= grad_y.transpose(1, 2) @ v.transpose(1, 2).mT
        total += weighted.clamp_min_(0).sum(1)
    return total / heads
