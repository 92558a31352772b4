"""LATIM (l_p): norms of the contribution vectors of tokens (LATIM, eq. 5 and table 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError
from ..operators.kernels.arithmetic import underflow_flushed
from ..operators.kernels.rows import Positions
from ..operators.kernels.truths import all_finite
from ..tracing import Layer
from .call import checks
from .call.progress import shown
from .call.query import Query
from .engine.fold import carry, verify_layer
from .engine.method import ImplicitMethod
from .engine.run import Run
from .vectors.contributions import Contributions, tiles
from .vectors.latim import LatimMethod, query_index, read_options, weighted_rows


class LatimNorm(LatimMethod, ImplicitMethod):
    """LATIM (l_p): C[i, j] = || T_i(x_j) ||_p, one map per layer.

    T_i(x_j) is the part of a mixer's output at token i that is due to token j (LATIM, eqs. 16-25);
    for attention, the transformed vectors of Kobayashi et al. 2020. :meth:`maps` returns the maps,
    and :meth:`attribute` the mean over layers of the query's rows. Rows are not normalized, so
    layers with large outputs count more.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.
        p: the norm, 1 or 2. Default: 2.
        activation: the rule that divides an activation among the taps of the convolution before it:
            ``"linearized"`` (exact), ``"silu"`` (as in the paper), ``"taylor1"``, ``"taylor2"``,
            ``"relu"`` or ``"identity"``. Default: ``"linearized"``.

    Raises:
        ModelNotFoundError: if no module is found from forward_func and ``model`` is None.
        NoMixerError, UnsupportedMixerError: if the model has no mixer, or none with an adapter.

    Example:
        >>> import torch
        >>> from captum_ssm import LatimNorm
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> [tuple(m.shape) for m in LatimNorm(model).maps(ids, positions=[-1])]
        [(1, 1, 4), (1, 1, 4)]
    """

    needs_streams = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: nn.Module | None = None,
        layers: Sequence[str | nn.Module] | None = None,
        *,
        p: int = 2,
        activation: str = "linearized",
    ) -> None:
        super().__init__(forward_func, model, layers, activation=activation)
        self.p = checks.choice("p", p, (1, 2))

    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        query: Query = None,
        start_layer: int = 0,
        per_token: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float = True,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the mean over layers of the query's rows.

        Args:
            inputs, target, additional_forward_args, query, start_layer, per_token: as in
                :meth:`ImplicitAttention.attribute`, with the same defaults.
            internal_batch_size, verify: as in :meth:`ImplicitAttention.attribute`, too.

        Returns:
            The relevance, as in :meth:`ImplicitAttention.attribute`.

        Raises:
            CaptumSSMError: as in :meth:`ImplicitAttention.attribute`.
            NonFiniteError: also if a norm overflows.
        """
        options = read_options(start_layer, verify)

        def relevance(run: Run) -> Tensor:
            """Sum the layers' rows, last layer first; carry sums to the tokens of each layer."""
            used_layers = options.used(run.layers)
            weights, total, latest = run.weights, torch.zeros_like(run.weights), run.layers[-1]
            for layer in shown(used_layers[::-1]):
                verify_layer(layer, options.verify)
                weights = carry(weights.to(layer.values), latest, layer)
                total = carry(total.to(weights), latest, layer) + self._row(layer, weights)
                latest = layer
            return carry(total, latest, run.layers[0]) / len(used_layers)

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

    def maps(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        layers: Sequence[int] | None = None,
        positions: Positions | None = None,
        additional_forward_args: Any = None,
        *,
        verify: bool | float = True,
    ) -> list[Tensor]:
        """Return the maps; entry (i, j) is the norm of token j's contribution to token i.

        Args:
            inputs: as in :meth:`attribute`.
            layers: indices of layers, in the order in which they ran; negative ones count from the
                end. Default: None, all.
            positions: the tokens whose rows are returned: Q positions for all examples, or a
                tensor (B, Q). Default: None, all.
            additional_forward_args: further positional arguments of forward_func. Default: None.
            verify: as in :meth:`attribute`. Default: True.

        Returns:
            One tensor (B, Q, L) per layer. Rows and columns of padded tokens are zero.
        """
        options = read_options(0, verify)

        def map_of(run: Run, layer: Layer) -> Tensor:
            """Return the rows (B, Q, L) of a layer's map, with 0 for padded tokens."""
            verify_layer(layer, options.verify)
            index = query_index(positions, layer.operator.shape[:2], layer.values.device)
            norms = self._map(layer, Contributions(layer, self.activation), index)
            if run.mask is not None:
                is_real = run.mask.to(norms)
                norms *= is_real[:, None] * is_real.gather(1, index)[..., None]
            return norms.to(run.request.inputs.device)

        return self._of_layers(inputs, layers, additional_forward_args, options, map_of)

    @underflow_flushed()  # a CPU is slow with tiny numbers, such as decayed vectors
    def _map(self, layer: Layer, contributions: Contributions, queries: Tensor) -> Tensor:
        """Return the norms (B, Q, L) of contribution vectors to ``queries`` (B, Q)."""
        out = contributions.weight.new_zeros(*queries.shape, contributions.shape.tokens)
        for tile in tiles([contributions], queries):
            norms = torch.linalg.vector_norm(tile.vectors, self.p, dim=-1)
            out[:, tile.queries, tile.sources] = norms
        if not all_finite(out):
            raise NonFiniteError(
                f"Layer {layer.name!r}: with p={self.p}, norms of contribution vectors overflow in "
                f"{out.dtype}. Pass p=1, or the model in float64."
            )
        return out

    def _row(self, layer: Layer, weights: Tensor) -> Tensor:
        """Return the sum of a layer's rows (B, L), weighted by the query weights (B, L)."""
        # vectors as they are added to the residual stream, unlike in `maps`
        contributions = Contributions(layer, self.activation, layer.way)
        return weighted_rows(weights, lambda queries: self._map(layer, contributions, queries))
