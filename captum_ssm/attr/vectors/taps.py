"""Shares of tokens in the activation that follows a short convolution (LATIM, eqs. 16-21).

    u[t] = b + sum over k of w[k] x[t - k]          act(u[t]) ~ sum over k of phi[k][t]

where the share phi[k][t] depends only on token t - k.  Linearized, phi[k][t] = s[t] w[k] x[t - k]
with the frozen ratio s = act(u) / u; the sum is exact up to the constant s b.  The paper replaces
the activation by a function f that it treats as additive: phi[k][t] = f(w[k] x[t - k]), with the
bias b added in tap k = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import UnsupportedMixerError
from ...mixers.base import LinearMixer
from ...operators import Chain, Diagonal, Operator, Permute, ShortConv, Sum
from ...operators.kernels.bands import shift_tokens
from ..call import checks
from ..engine.states import products_of

Function = Callable[[Tensor], Tensor]
#: Pairs of a lag k and phi[k] (B, L, H, P); phi[k][t] is due to position t - k.
TapShares = Sequence[tuple[int, Tensor]]

#: Functions f of a tap, by name.  For ``"silu"``, :func:`_find_activation` finds the model's own.
FUNCTIONS: dict[str, Function] = {
    "silu": F.silu,
    "taylor1": lambda x: x / 2,
    "taylor2": lambda x: x / 2 + x.square() / 4,
    "relu": torch.relu,
    "identity": lambda x: x,
}
ACTIVATIONS = ("linearized", *FUNCTIONS)

#: Attribute names under which modules store their activation function.
_ACTIVATION_NAMES = ("act", "act_fn", "activation_fn", "activation")
#: Largest relative difference between a module's activation and the operator's frozen activation.
_SAME_FUNCTION = 1e-3


@dataclass(frozen=True, eq=False)
class TapPath:
    """A linear operator over positions, and the contributions of positions to the operator's input.

    Attributes:
        operator: the operator.
        shares: the contributions phi[k], by lag k.
        token: the token at each position (L,), on the CPU; None if position t is token t.
    """

    operator: Operator
    shares: TapShares
    token: Tensor | None = None

    def total(self) -> Tensor:
        """Return the operator's output for the summed contributions of all tokens, (B, L, H, P)."""
        return self.operator.apply(torch.stack([phi for _, phi in self.shares]).sum(0))

    def toward(self, direction: Tensor) -> Tensor:
        """Return each token's contribution (..., B, L) to the inner product <output, direction>."""
        weight = self.operator.transpose(direction)  # of each position of the operator's input
        out = torch.zeros_like(weight[..., 0, 0])
        for lag, phi in self.shares:  # phi at position t is due to t - lag
            at_lag = (weight * phi).sum((-1, -2))[..., None, None]
            out += shift_tokens(at_lag, -lag)[..., 0, 0]
        return out if self.token is None else out.index_select(-1, self.position_of(out))

    def position_of(self, like: Tensor) -> Tensor:
        """Return the position of each token (L,), on the device of ``like``."""
        assert self.token is not None  # a permutation, whose argsort is its inverse
        return self.token.argsort().to(like.device)


def check_activation(activation: str) -> None:
    """Raise unless ``activation`` is one of :data:`ACTIVATIONS`."""
    checks.choice("activation", activation, ACTIVATIONS)


def paths_of(linear: LinearMixer, module: nn.Module, activation: str) -> list[TapPath]:
    """Expand a mixer's operator into a sum of paths, with the contribution of each token.

    A mixer without an activation before the recurrence is one path for any ``activation``.

    Args:
        linear: the linearized mixer.
        module: the mixer, whose activation function is used with ``"silu"``.
        activation: one of :data:`ACTIVATIONS`.
    """
    operator, values = linear.operator, linear.values
    if activation == "linearized" or not _holds_activation(operator):
        return [TapPath(operator, [(0, values)])]
    return [_path(parts, values, module, activation) for parts in products(operator)]


def products(operator: Operator) -> list[tuple[Operator, ...]]:
    """Expand an operator into a sum of products; sums without an activation are not expanded."""
    return products_of(operator, _holds_activation)


def silenced(operator: Operator) -> Operator:
    """Replace activations with 0, so that only constants added after activations are left."""
    if isinstance(operator, Chain):
        return Chain(*(silenced(part) for part in operator.parts))
    if isinstance(operator, Sum):
        return Sum(*(silenced(part) for part in operator.parts))
    if _is_activation(operator):
        return Diagonal(operator.tensors()["weight"].new_zeros(1, 1, 1, 1), operator.shape)
    return operator


def _path(parts: Sequence[Operator], values: Tensor, module: nn.Module, activation: str) -> TapPath:
    """Convert a product outer . activation . conv . inner to a path: outer, and its input by lag.

    Without an activation, the path is the whole product and the mixer's values.
    """
    activations = [i for i, part in enumerate(parts) if _is_activation(part)]
    if not activations and not any(_holds_activation(part) for part in parts):
        return TapPath(Chain(*parts), [(0, values)])
    place = activations[0] if len(activations) == 1 else -1  # -1 is refused below
    conv, inner = _split_conv(parts[place + 1 :])
    if place < 0 or not all(isinstance(part, Diagonal | Permute) for part in inner):
        raise UnsupportedMixerError(
            f"activation={activation!r} needs an activation with at most a short convolution "
            f"before it, but {type(module).__name__} has a different structure. Pass "
            "activation='linearized', which works for every mixer."
        )
    token: Tensor | None = None
    for part in reversed(inner):  # innermost first, as in the mixer: they move or scale tokens
        values = part.apply(values)
        if isinstance(part, Permute):
            token = part.on_host if token is None else token[part.on_host]
    taps = _taps(conv, values)
    function = FUNCTIONS[activation]
    if activation == "silu":  # the model's own function
        function = _find_activation(module, sum(taps.values()), parts[place].tensors()["weight"])
    one = values.new_ones(1, 1, 1, 1)
    outer = parts[:place] or [Diagonal(one, parts[place].shape)]  # nothing follows: the identity
    return TapPath(Chain(*outer), [(lag, function(tap)) for lag, tap in taps.items()], token)


def _taps(conv: ShortConv | None, values: Tensor) -> dict[int, Tensor]:
    """Split a convolution's output by lag into tensors (B, L, H, P); lag 0 has the bias, too."""
    if conv is None:
        return {0: values}
    taps = {0: torch.zeros_like(values)}
    for lag, weight in conv.by_lag().items():
        tap = weight * shift_tokens(values, lag)
        taps[lag] = taps[lag] + tap if lag in taps else tap
    if conv.bias is not None:
        taps[0] = taps[0] + conv.bias
    return taps


def _find_activation(module: Any, u: Any, ratio: Tensor) -> Function:
    """Find the module's activation: the function act whose act(u) / u is the frozen ``ratio``.

    ``u`` is the activation's input, the sum of all taps.
    """
    candidates = [F.silu, *(getattr(module, name, None) for name in _ACTIVATION_NAMES)]
    output = ratio * u
    for function in candidates:
        if callable(function) and function(u).sub(output).abs().max() <= (
            _SAME_FUNCTION * output.abs().max()
        ):
            return function
    raise UnsupportedMixerError(
        f"activation='silu' needs the activation function of {type(module).__name__}, but none of "
        f"the attributes {_ACTIVATION_NAMES} is this function. Pass activation='linearized'."
    )


def _split_conv(parts: Sequence[Operator]) -> tuple[ShortConv | None, Sequence[Operator]]:
    """Split off the outermost operator if it is a convolution; else return None and ``parts``."""
    first = parts[0] if parts else None
    return (first, parts[1:]) if isinstance(first, ShortConv) else (None, parts)


def _holds_activation(operator: Operator) -> bool:
    return any(_is_activation(leaf) for leaf in operator.leaves())


def _is_activation(operator: Operator) -> bool:
    return isinstance(operator, Diagonal) and operator.component == "activation"
