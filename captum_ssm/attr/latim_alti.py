"""LATIM (ALTI): each token's share in each token of a layer (LATIM, eq. 6 and table 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError
from ..operators.kernels.rows import Positions
from ..tracing import Layer
from .call import checks
from .call.progress import shown
from .call.query import Query
from .engine.fold import carry, check_row, stages, verify_layer
from .engine.method import ImplicitMethod
from .engine.run import Run
from .vectors.latim import LatimMethod, query_index, read_options
from .vectors.shares import AltiShares

AGGREGATES = ("rollout", "mean")


class LatimALTI(LatimMethod, ImplicitMethod):
    """LATIM (ALTI): C[i, j] proportional to relu(||y_i||_1 - ||y_i - T_i(x_j)||_1).

    T_i(x_j) is the part of a mixer's output at token i that is due to token j; y_i is the sum over
    j (LATIM, eqs. 6 and 16-25; Ferrando et al. 2022 for transformers). Rows sum to 1. Parallel
    mixers of one block have one joint map. :meth:`maps` returns the maps, and :meth:`attribute`
    the query's row of the product, or of the mean, of all maps.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.
        residual: whether the residual stream x_i is added to y_i and to T_i(x_i). False leaves the
            residual stream out, as in the paper's maps of Mamba. Default: True.
        activation: the rule that divides an activation among the taps of the convolution before it:
            ``"linearized"`` (exact), ``"silu"`` (as in the paper), ``"taylor1"``, ``"taylor2"``,
            ``"relu"`` or ``"identity"``. Default: ``"linearized"``.

    Raises:
        ModelNotFoundError: if no module is found from forward_func and ``model`` is None.
        NoMixerError, UnsupportedMixerError: if the model has no mixer, or none with an adapter.

    Example:
        >>> import torch
        >>> from captum_ssm import LatimALTI
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> [tuple(m.shape) for m in LatimALTI(model).maps(ids, positions=[-1])]
        [(1, 1, 4), (1, 1, 4)]
    """

    needs_streams = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: nn.Module | None = None,
        layers: Sequence[str | nn.Module] | None = None,
        *,
        residual: bool = True,
        activation: str = "linearized",
    ) -> None:
        super().__init__(forward_func, model, layers, activation=activation)
        checks.flags(residual=residual)
        self.residual = residual

    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        query: Query = None,
        aggregate: str = "rollout",
        start_layer: int = 0,
        per_token: bool = False,
        internal_batch_size: int | None = None,
        verify: bool | float = True,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the query's row of the product, or mean, of all maps; it sums to 1.

        The rollout needs every row of all maps but the last. It takes time quadratic in L, and
        memory linear in L.

        Args:
            inputs, target, additional_forward_args, query, start_layer, per_token: as in
                :meth:`ImplicitAttention.attribute`, with the same defaults.
            internal_batch_size, verify: as in :meth:`ImplicitAttention.attribute`, too.
            aggregate: ``"rollout"``, the product of the maps with later layers on the left; or
                ``"mean"``. The rollout needs ``residual=True``. Default: ``"rollout"``.

        Returns:
            The relevance, as in :meth:`ImplicitAttention.attribute`.

        Raises:
            CaptumSSMError: as in :meth:`ImplicitAttention.attribute`.
        """
        options = read_options(start_layer, verify)
        checks.choice("aggregate", aggregate, AGGREGATES)
        if aggregate == "rollout" and not self.residual:
            raise OptionError(
                "aggregate='rollout' multiplies maps that include the residual stream, but this "
                "method has residual=False. Pass aggregate='mean', or create it with residual=True."
            )

        def relevance(run: Run) -> Tensor:
            """Multiply the query weights by all maps, last first; or by each one, and average."""
            used_stages = stages(options.used(run.layers))
            row, mean, latest = run.weights, torch.zeros_like(run.weights), run.layers[-1]
            with torch.no_grad():
                for stage in shown(used_stages[::-1]):
                    row = carry(row.to(stage[-1].values), latest, stage[-1])
                    mean, latest = carry(mean.to(row), latest, stage[-1]), stage[-1]
                    out = check_row(self._mixing(stage, run, options.verify).rmatvec(row), latest)
                    if aggregate == "rollout":
                        row = out
                    else:
                        mean = mean + out / len(used_stages)
                return carry(row if aggregate == "rollout" else mean, latest, run.layers[0])

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
        """Return the maps; entry (i, j) is the share of token j in token i.

        Args:
            inputs: as in :meth:`attribute`.
            layers: indices of the maps, in the order in which layers ran; negative ones count from
                the end. Parallel mixers of a block have one map, and so have a mixer and the mixer
                that reads its output directly. Default: None, all.
            positions: the tokens whose rows are returned: Q positions for all examples, or a
                tensor (B, Q). Default: None, all.
            additional_forward_args: further positional arguments of forward_func. Default: None.
            verify: as in :meth:`attribute`. Default: True.

        Returns:
            One tensor (B, Q, L) per map, in which rows sum to 1. The row of a padded token is 1 at
            this token.
        """
        options = read_options(0, verify)

        def map_of(run: Run, stage: Sequence[Layer]) -> Tensor:
            """Return the rows (B, Q, L) of the map of a layer, or of joint layers."""
            mixing = self._mixing(stage, run, options.verify)
            last = stage[-1]
            index = query_index(positions, last.operator.shape[:2], last.values.device)
            return mixing.rows(index).to(run.request.inputs.device)

        return self._of_layers(inputs, layers, additional_forward_args, options, map_of, stages)

    def _mixing(self, stage: Sequence[Layer], run: Run, verify: bool | float) -> AltiShares:
        """Verify parallel layers, and return the mixing matrix of the sum of their outputs."""
        for layer in stage:
            verify_layer(layer, verify)
        return AltiShares(
            stage, run.streams, residual=self.residual, activation=self.activation, mask=run.mask
        )
