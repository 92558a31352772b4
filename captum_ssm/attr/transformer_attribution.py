"""Transformer-Attribution: rollout of attention weighted by relevance and gradient, by head."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..mixers.base import LinearMixer
from ..operators import Operator
from ..operators.kernels.portions import at_a_time
from ..tracing import Layer
from ..tracing.gradients import recordable
from .call import checks
from .call.query import Query
from .call.targets import Against
from .engine.fold import LayerMatrix, fold, formed
from .engine.linear_method import coefficients
from .engine.method import ImplicitMethod, options
from .engine.run import Run

FORMS = ("lrp", "gradient")

#: Elements of the matrices of heads formed at a time (16 MiB in float32).
_MATRIX_ELEMENTS = 2**22


class TransformerAttribution(ImplicitMethod):
    """Transformer-Attribution (Chefer et al. 2021), for attention and for every other mixer.

    beta = I + mean over heads of (grad . R)+ for every layer, products entry by entry; the
    relevance is the query's row of the product, later layers on the left.  grad is the gradient of
    the target with respect to the matrices A of a head, R their relevance:

    - ``form="lrp"`` ("Transformer Interpretability Beyond Attention Visualization"): by layer-wise
      relevance propagation, R = A . the gradient in the network that LRP's rules make linear.  The
      authors' rules are not used: theirs divide relevance by the signs of the contributions (the
      alpha-beta rule) and between both factors of each product of attention; here they are the
      conservative ones of :class:`MambaLRP`, by which probabilities are coefficients, so that the
      entries of R say what each token adds to the target through each other one.
    - ``form="gradient"`` ("Generic Attention-model Explainability"): R = A.

    With y = A v, G the gradient with respect to y, and sums over a head's channels,

        grad[i, j] = sum of G[i] v[j],      R[i, j] = sum of A[i, j] g[i] v[j]

    where g is G of the linear network, and in ``form="gradient"`` grad . A is the sum of
    A[i, j] G[i] v[j].  Matrices common to a head, such as attention's, are the authors' case; where
    they differ between its channels, grad is with respect to what is added to all of them alike.
    In Mamba-1 every channel is a head.  The matrices of a few heads are formed at a time.

    LRP is patented for commercial use in some countries; whether that concerns you, you decide.

    Args:
        forward_func: the model, wrapped or not, one of its bound methods, or a function that runs
            it.
        model: the module, where forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.
        form: ``"lrp"`` or ``"gradient"``; the former runs the model once more, under the rules.
            Default: ``"lrp"``.

    Raises:
        ModelNotFoundError: when forward_func leads to no module and ``model`` is not given.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or none with an adapter.

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
        show_progress: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float = True,
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
            components: what A includes, for mixers that are more than attention: ``"s6"``,
                ``"unified"``, ``"exact"``, one of them without some parts (``"unified-conv"``), or
                a set of component names. Default: ``"unified"``.
            heads: use only these heads (for Mamba-1: channels). Default: None, all.
            normalize_rows: divide every row of beta by its sum. Default: False.
            start_layer: leave out the layers before this one. Default: 0.
            per_token: one number per token, (B, L), or for images the patch grid (B, h, w) where
                there is one. Default: False.
            show_progress: show a progress bar over layers. Default: False.
            internal_batch_size: run at most so many examples at a time. Default: None, all.
            verify: hold every operator to what its module returned in the run; a number is the
                tolerance. Default: True.

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
        chosen = options(components, "mean", heads, start_layer, "paper", show_progress, verify)
        checks.flags(normalize_rows=normalize_rows)

        # For each question that is left, the coefficients g of all layers.  ``relevance`` is called
        # for each question of a run in turn: the first call fills the list for all of them.
        pending: list[list[Tensor]] = []

        def relevance(run: Run) -> Tensor:
            used = chosen.used(run.layers)
            found = run.gradients([layer.output for layer in used], [layer.name for layer in used])
            gradients = dict(zip(used, found, strict=True))
            if self.form == "lrp" and not pending:
                asked = [Against(question.target, None) for question in run.questions]
                pending.extend(found for _, found in coefficients(run.request, asked))
            of_layers = pending.pop(0) if pending else [None] * len(run.layers)
            propagated = dict(zip(run.layers, of_layers, strict=True))

            def step(layer: Layer, operator: Operator) -> LayerMatrix:
                return formed(
                    _beta(layer, operator, gradients[layer], propagated[layer], chosen.heads)
                )

            with recordable(run.request.model):  # gradients pass the output projections again
                return fold(run.layers, run.weights, step, chosen, self.name, normalize_rows)

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
    """Return a layer's matrix beta, the mean over heads of (G . R)+, (B, L, L).

    ``gradient`` and ``coefficient`` are at the layer's output (B, L, E), the gradient behind hooks
    of others; without a coefficient R = A, the ``operator`` of the ``heads``, None for all.
    """
    linear, factor = layer.linear, layer.factor
    at = range(linear.operator.shape.heads) if heads is None else heads
    gradient = gradient if factor is None else gradient * factor
    gradient = _before_projection(linear, layer.in_order(gradient))[:, :, at]
    if coefficient is not None:
        coefficient = _before_projection(linear, layer.in_order(coefficient))[:, :, at]
    return _weighted(operator, linear.values[:, :, at], gradient, coefficient)


def _before_projection(linear: LinearMixer, gradient: Tensor) -> Tensor:
    """Pull a gradient at a mixer's output (B, L, E) back to before W_out, (B, L, H, P)."""
    with torch.enable_grad():
        before = torch.zeros_like(linear.values, requires_grad=True)
        out = linear.project(before)
        (found,) = torch.autograd.grad(out, before, gradient.to(out))
    return found


def _weighted(
    operator: Operator, values: Tensor, gradient: Tensor, coefficient: Tensor | None
) -> Tensor:
    """Return the mean over heads of (G . R)+, some heads at a time, (B, L, L).

    Args:
        operator: A.
        values: v (B, L, H, P).
        gradient: G (B, L, H, P).
        coefficient: g (B, L, H, P), or None for R = A.
    """
    batch, tokens, heads, per_head = operator.shape
    total = values.new_zeros(batch, tokens, tokens)
    size = max(1, at_a_time(_MATRIX_ELEMENTS, values.device) // (batch * tokens * tokens))
    for start in range(0, heads, size):
        some = range(start, min(start + size, heads))
        part = operator.select(some)
        v, upper = values[:, :, start : some.stop], gradient[:, :, start : some.stop]
        if coefficient is None:
            weighted = part.contract_heads(upper, v)  # (B, h, L, L)
        elif per_head == 1:  # the product of sums over one channel is one sum
            weighted = part.contract_heads(coefficient[:, :, start : some.stop] * upper, v * v)
        else:
            weighted = part.contract_heads(coefficient[:, :, start : some.stop], v)
            weighted *= upper.transpose(1, 2) @ v.transpose(1, 2).mT
        total += weighted.clamp_min_(0).sum(1)
    return total / heads
