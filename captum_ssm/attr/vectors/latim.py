"""Base class of LATIM's methods, and products of rows with their token-to-token maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import OptionError, QueryError
from ...operators.kernels.portions import at_a_time
from ...operators.kernels.rows import Positions
from ...operators.kernels.truths import are_noted, nonzero_range
from ...tracing import Layer
from ..engine.fold import Options
from ..engine.method import SSMAttribution, options
from .contributions import Contributions
from .taps import check_activation

#: The number of rows of a token-to-token map computed at a time, on a CPU and on other devices.
_ROWS, _ROWS_LAUNCHED = 256, 4096


class LatimMethod(SSMAttribution):
    """Base of the methods that compute contribution vectors (LATIM, eqs. 16-25).

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.
        activation: the rule that divides an activation among the taps of the convolution before it:
            ``"linearized"`` (its frozen ratio, exact), ``"silu"`` (the model's activation of each
            tap), ``"taylor1"`` or ``"taylor2"`` (SiLU's expansion at 0), ``"relu"``, or
            ``"identity"``. Default: ``"linearized"``.
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: nn.Module | None = None,
        layers: Sequence[str | nn.Module] | None = None,
        *,
        activation: str = "linearized",
    ) -> None:
        super().__init__(forward_func, model, layers)
        check_activation(activation)
        self.activation = activation

    def decomposition_error(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        layers: Sequence[int] | None = None,
        additional_forward_args: Any = None,
    ) -> list[float]:
        """Return the relative error of each mixer's contribution vectors (LATIM, figure 4).

        The error is ``mean |y_i - sum over j of T_i(x_j) - constant| / mean |y_i|``, where y is the
        module's output. Means are over unpadded tokens and features.

        Args:
            inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); or a tuple of
                one such tensor.
            layers: indices of layers, in the order in which they ran; negative ones count from the
                end. Default: None, all.
            additional_forward_args: further positional arguments of forward_func. Default: None.

        Returns:
            One number per layer; with ``activation="linearized"`` it is 0 up to rounding.
        """
        return self._of_layers(
            inputs,
            layers,
            additional_forward_args,
            read_options(0, False),
            lambda run, layer: _relative_error(layer, self.activation, run.mask),
        )


def read_options(start_layer: int, verify: bool | float) -> Options:
    """Check the options that all LATIM methods have, before the model runs."""
    return options("exact", "mean", None, start_layer, "paper", verify)


def query_index(positions: Positions | None, size: tuple[int, int], device: torch.device) -> Tensor:
    """Return nonnegative query positions (B, Q) for a ``size`` (B, L); None means all L tokens."""
    batch, tokens = size
    index = _read_positions(range(tokens) if positions is None else positions).to(device)
    if index.dim() == 2 and len(index) != batch:
        raise QueryError(
            f"positions has {len(index)} rows, but the batch has {batch}. Pass positions (B, Q)."
        )
    if bool(((index < -tokens) | (index >= tokens)).any()):
        raise QueryError(f"positions={positions!r}. Pass positions from {-tokens} to {tokens - 1}.")
    return (index % tokens).expand(batch, -1)


def _read_positions(positions: Positions) -> Tensor:
    """Check the option ``positions``, and return it as a tensor (Q,) or (B, Q)."""
    try:
        index = torch.as_tensor(positions)
    except (TypeError, ValueError, RuntimeError):
        index = torch.tensor(False)  # refused below, like other values that are not integers
    if not index.numel():
        raise QueryError("positions is empty. Pass at least one position, or None for all.")
    of_integers = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
    if index.dim() not in (1, 2) or not of_integers:
        raise OptionError(
            f"positions={positions!r} does not contain integers. Pass a list of integers, or a "
            "tensor of integers (B, Q)."
        )
    return index.long()


def weighted_rows(
    weights: Tensor, rows: Callable[[Tensor], Tensor], within: range | None = None
) -> Tensor:
    """Return ``weights`` (..., B, L) times a map (B, L, L), with a few map rows at a time.

    Args:
        weights: one weight per row of the map; rows with weight 0 are not computed.
        rows: function from query positions (B, Q) to rows of the map (B, Q, L).
        within: a range that includes all nonzero weights, to avoid a synchronization. Default:
            None, not known.
    """
    out = torch.zeros_like(weights)
    batch, length = weights.shape[-2:]
    if are_noted(weights):  # find the rows without waiting for the GPU
        query_range = nonzero_range(weights) if within is None else within
        queries = torch.tensor(query_range, dtype=torch.long, device="cpu")
    else:
        queries = weights.reshape(-1, length).ne(0).any(0).nonzero().flatten()
    for tokens in torch.split(queries, at_a_time(_ROWS, weights.device, _ROWS_LAUNCHED)):
        map_rows = rows(tokens.expand(batch, -1))
        out += torch.einsum("...bq,bqj->...bj", weights[..., tokens], map_rows)
    return out


def _relative_error(layer: Layer, activation: str, mask: Tensor | None) -> float:
    """Return the relative error of one layer's vectors, see :meth:`decomposition_error`."""
    contributions = Contributions(layer, activation)
    vector_sum = contributions.total() + contributions.constant()  # sum of T_i(x_j), and constant
    module_output = layer.in_order(layer.output).to(vector_sum)
    error, magnitude = (module_output - vector_sum).abs(), module_output.abs()
    if mask is not None:
        is_real = mask.to(module_output.device)
        error, magnitude = error[is_real], magnitude[is_real]
    # an output of zeros has the error 0 / tiny
    return float(error.mean() / magnitude.mean().clamp_min(torch.finfo(magnitude.dtype).tiny))
