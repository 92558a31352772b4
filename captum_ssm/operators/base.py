"""The interface of operators: frozen linear maps over tokens, one per channel.

Shape glossary, used throughout the package:

====  =============================================================
B     batch
S     stack of vectors that are mapped together
L     tokens
H     heads (in Mamba-1 every channel is a head)
P     value channels per head
C, D  channels, H * P; C next to T is chunks of tokens; D is the channels of a model's mixer
G     groups of H / G neighboring heads that share vectors
N     state size of a recurrence
K     taps of a short convolution
Q     query positions
R, W  rows and columns of a strip; W next to T is windows
T     neighboring tokens, such as the tokens of a chunk or a window
E     width of the residual stream
====  =============================================================

A *band* is a matrix with a few nonzero diagonals, stored by lag: lag k of row i is column i - k.
A *strip* is some neighboring rows of a matrix, without columns that are zero in all these rows.

In a product of operators the *outer* one is on the left and acts last; the *inner* one is on the
right and acts first.

An operator maps values ``v`` (..., B, L, H, P) to outputs of the same shape.  It never mixes
channels: channel c has one implicit attention matrix ``alpha_c`` (L, L).  ``v`` may have any
leading dimensions, so one call can map a stack of vectors.

:mod:`.generic` derives every method of :class:`Operator` from :meth:`Operator.apply` and its
adjoint; subclasses override the methods for which they have a faster algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import generic
from .kernels.arithmetic import linear_map
from .kernels.bands import Band
from .kernels.rows import Positions, Strip
from .reduction import Reduce

#: Names of the parts of a mixer, as users pass them in ``components=``.
COMPONENTS = frozenset({"conv", "activation", "scan", "skip", "gate", "norm"})
#: Roles of a mixer's factors: the values that are mixed, the keys that queries are multiplied by,
#: the queries, the gates that scale the output, and the steps or decays of the state.
Role = Literal["content", "key", "query", "gate", "step"]
#: Function from the outputs' gradient to the values' gradient and coefficients' gradients by name.
Pull = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]


class Shape(NamedTuple):
    """Sizes (B, L, H, P) of the values that an operator maps.

    Attributes:
        batch: number of examples, B.
        tokens: number of tokens, L.
        heads: number of heads, H; in Mamba-1 every channel is a head.
        per_head: number of value channels per head, P.

    Example:
        >>> from captum_ssm.operators import Shape
        >>> Shape(batch=2, tokens=5, heads=3, per_head=4).tokens
        5
    """

    batch: int
    tokens: int
    heads: int
    per_head: int


class Operator:
    """A frozen linear map over tokens, y[i] = sum over j of alpha[i, j] v[j], channel by channel.

    This is the base class of all operators.  A subclass detaches its coefficients, sets
    :attr:`shape` and :attr:`component`, and defines :meth:`apply`, :meth:`tensors` and
    :meth:`select`; it overrides :attr:`mixes_tokens` and :attr:`data_dependent` if they are False.
    Every other method has a slow default that calls these methods.

    Attributes:
        component: name of the mixer's part: ``conv``, ``activation``, ``scan`` (any token mixing
            except a short convolution), ``skip``, ``gate`` or ``norm``. Default: None, for
            structural parts such as masks, which :meth:`restrict` keeps.
        shape: sizes of the values to map, a :class:`Shape`.
        roles: role of each coefficient that may depend on the input, by the coefficient's name in
            :meth:`tensors`; see :mod:`.coefficients`. Default: no roles.
        live: coefficients with roles that were passed with an autograd graph, by name, not
            detached. Default: none.
        at_rest: value of the gates at zero gate input, such as 0.5 for a sigmoid. Default: 0.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Operator, Shape
        >>> class Half(Operator):
        ...     component = "skip"
        ...     mixes_tokens = data_dependent = False
        ...     def __init__(self, shape):
        ...         self.shape = shape
        ...     def apply(self, v):
        ...         return 0.5 * v
        ...     def tensors(self):
        ...         return {"weight": torch.tensor(0.5)}
        ...     def select(self, heads):
        ...         return Half(self.shape._replace(heads=len(heads)))
        >>> half = Half(Shape(batch=1, tokens=3, heads=2, per_head=1))
        >>> bool((half.dense() == 0.5 * torch.eye(3)).all())
        True
    """

    component: str | None = None
    shape: Shape
    roles: Mapping[str, Role] = MappingProxyType({})
    live: Mapping[str, Tensor] = MappingProxyType({})
    at_rest: float | Tensor = 0.0
    #: Whether the coefficients depend on the input, not only on parameters.
    data_dependent = True
    #: Whether computing whole matrices is faster than computing rows, for one channel per head.
    quick_heads = False
    #: Up to this many rows, :meth:`rows` computes their mean over channels faster than a strip.
    few_rows: int = 0

    def __repr__(self) -> str:
        _, tokens, heads, per_head = self.shape
        leaf_names = [type(leaf).__name__ for leaf in self.leaves() if leaf is not self]
        prefix = f"{', '.join(leaf_names)}: " if leaf_names else ""
        return f"{type(self).__name__}({prefix}{tokens} tokens, {heads} heads of {per_head})"

    # --- defined by a subclass -------------------------------------------------------------

    def apply(self, v: Tensor) -> Tensor:
        """Return alpha v: every channel's matrix times the channel's values.

        The map is linear and differentiable in ``v``, with :meth:`transpose` as its derivative.

        Args:
            v: values (..., B, L, H, P), with any leading dimensions.

        Returns:
            The outputs, in the shape of ``v``.
        """
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return the frozen coefficients by name; they are checked for NaN and infinity."""
        raise NotImplementedError

    def select(self, heads: Sequence[int]) -> Operator:
        """Restrict the operator to some heads.

        Args:
            heads: indices of the heads, from 0, in the order that the result has.

        Returns:
            An operator on values (B, L, len(heads), P).
        """
        raise NotImplementedError

    # --- its dependence on its coefficients ------------------------------------------------

    def at(self, coefficients: Mapping[str, Tensor]) -> Operator:
        """Return a copy with new values of some coefficients that have roles.

        Args:
            coefficients: the new coefficients by name.
        """
        raise NotImplementedError

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradient of the values, and the gradients of coefficients with roles, by name.

        Args:
            values: the input (B, L, H, P).
            gradient: gradient of the output (B, L, H, P).
        """
        if self.roles:  # a subclass with roles defines this method
            raise NotImplementedError
        return self.transpose(gradient), {}

    def vjp(self, values: Tensor, coefficients: Mapping[str, Tensor]) -> tuple[Tensor, Pull]:
        """Map S stacked values; return alpha v and its pullback (vector-Jacobian product).

        Args:
            values: stacked values (S, B, L, H, P).
            coefficients: new keys, queries and gates by name, (S, B, ...). Coefficients with the
                role "step" cannot be replaced, because the whole stack shares them.

        Returns:
            alpha v, and a function of its gradient. The function returns the gradient of the
            values, and of the coefficients with roles by name; they are sums over the stack.
        """
        return generic.vjp(self, values, coefficients)

    # --- how tokens are mixed --------------------------------------------------------------

    @property
    def mixes_tokens(self) -> bool:
        """Whether an output depends on tokens other than its own."""
        return True

    # --- the parts it is made of -----------------------------------------------------------

    def leaves(self) -> Iterator[Operator]:
        """Yield the elementary operators that this operator is composed of."""
        yield self

    def restrict(self, components: Collection[str]) -> Operator | None:
        """Keep the named components, and operators without a component.

        Args:
            components: names of the components to keep, such as ``{"scan", "gate"}``.

        Returns:
            The operator, or None if it is left out. A factor of a :class:`.Chain` that is left out
            counts as the identity, a summand of a :class:`.Sum` as zero. If a whole operator is
            left out, the caller uses the identity.
        """
        return self if self.component is None or self.component in components else None

    def per_channel(self) -> Operator:
        """Remove mixing between channels: an output channel depends only on the same input channel.

        Implicit attention matrices are matrices of single channels, so the result defines them.
        """
        return self

    def after_band(self, band: Band) -> Band | None:
        """Return the product self . band as a band, or None if this operator is not a band.

        A :class:`.Chain` thus joins diagonals and short convolutions at the ends of its product.

        Args:
            band: the inner factor: by lag, factors broadcastable to (B, L, H, P).
        """
        return None

    # --- the map, its adjoint and its constant term ----------------------------------------

    def transpose(self, u: Tensor) -> Tensor:
        """Apply the adjoint: every channel's transposed matrix times ``u``.

        For all u and v, ``u * apply(v)`` and ``transpose(u) * v`` have the same sum.

        Args:
            u: gradients of outputs (..., B, L, H, P), with any leading dimensions.

        Returns:
            alpha-transposed u, in the shape of ``u``.
        """
        return generic.transpose(self, u)

    def offset(self) -> Tensor | None:
        """Return the constant that biases add to the output (B, L, H, P); None without biases."""
        return None

    def affine(self, v: Tensor) -> Tensor:
        """Return alpha v + offset, the mixer's output before its output projection."""
        offset = self.offset()
        out = self.apply(v)
        return out if offset is None else out + offset

    def mean_matvec(self, x: Tensor) -> Tensor:
        """Return (mean over channels of alpha) x, for ``x`` (B, L), without forming a matrix."""
        return linear_map(x, self._mean_forward, self._mean_adjoint)

    def mean_rmatvec(self, r: Tensor) -> Tensor:
        """Return r (mean over channels of alpha), for ``r`` (B, L), without forming a matrix."""
        return linear_map(r, self._mean_adjoint, self._mean_forward)

    # --- its matrices, by rows or whole ----------------------------------------------------

    def rows(self, positions: Positions, reduce: Reduce = "mean") -> Tensor:
        """Return rows of the implicit attention matrices.

        Args:
            positions: query positions: a list of Q for all examples, or a tensor (B, Q).
            reduce: how channels are combined: ``"mean"``, ``"max"``, ``"min"``, ``"product"`` or a
                function over the last dimension. None keeps every channel; ``"heads"`` returns the
                mean over the channels of each head. Default: ``"mean"``.

        Returns:
            (B, Q, L), or (B, C, Q, L) with ``reduce=None``, or (B, H, Q, L) with ``"heads"``.

        Raises:
            QueryError: for positions outside the sequence.
            OptionError: for an unknown reduction.
        """
        return generic.rows(self, positions, reduce)

    def unit_rows(self, positions: Positions, weight: Tensor | None = None) -> Tensor:
        """Return rows of every channel's matrix at Q positions, (Q, B, L, H, P).

        Args:
            positions: indices of the rows: Q for all examples, or a tensor (Q, B).
            weight: factors of the rows, broadcastable to (Q, B, 1, H, P). Default: None, all 1.
        """
        return generic.unit_rows(self, positions, weight)

    def dense(self, reduce: Reduce = "mean", heads: Sequence[int] | None = None) -> Tensor:
        """Return the implicit attention matrices; entry (i, j) is the weight of token j in token i.

        Args:
            reduce: as in :meth:`rows`. Default: ``"mean"``.
            heads: the heads to use; negative numbers count from the end. Default: None, all heads.

        Returns:
            (B, L, L), or (B, C, L, L) with ``reduce=None``, or (B, H, L, L) with ``"heads"``.

        Raises:
            OptionError: for a head or a reduction that does not exist.
        """
        return generic.dense(self, reduce, heads)

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        """Return rows i of the sum over channels c of left[i, c] (alpha_c band_c)[i, j].

        Args:
            left: row factors, broadcastable to (B, L, H, P).
            band: the inner factor: by lag, column factors broadcastable to (B, L, H, P).
            rows: neighboring rows, ascending; at least one. Only these are computed.
            by_head: whether to sum over each head separately. Default: False, over all heads.

        Returns:
            The strip: entries (B, R, W) or (B, H, R, W), with the ranges of rows and columns.
        """
        return generic.entries(self, left, band, rows, by_head)

    # --- helpers ---------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the coefficients."""
        return self._any_coefficient().device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the coefficients."""
        return self._any_coefficient().dtype

    def _mean_forward(self, x: Tensor) -> Tensor:
        """Return (mean over channels of alpha) x; :meth:`mean_matvec` makes it differentiable."""
        return self.apply(self._in_all_channels(x)).mean((-1, -2))

    def _mean_adjoint(self, r: Tensor) -> Tensor:
        """Return r (mean over channels of alpha)."""
        return self.transpose(self._in_all_channels(r)).mean((-1, -2))

    def _in_all_channels(self, x: Tensor) -> Tensor:
        """Expand ``x`` (B, L) to (B, L, H, P)."""
        return x[..., None, None].expand(self.shape)

    def _any_coefficient(self) -> Tensor:
        """Return the first coefficient; :attr:`dtype` and :attr:`device` are read from it."""
        for leaf in self.leaves():
            for coefficient in leaf.tensors().values():
                return coefficient
        return next(self.leaves())._coefficient_substitute()

    def _coefficient_substitute(self) -> Tensor:
        """Return a tensor to read dtype and device from, for an operator without coefficients."""
        return torch.zeros(())

    def _zeros(self, *size: int, factor: Tensor | None = None) -> Tensor:
        """Return zeros in the dtype of the coefficients, or of their products with ``factor``."""
        dtype = self.dtype if factor is None else torch.promote_types(self.dtype, factor.dtype)
        return torch.zeros(size, dtype=dtype, device=self.device)

    def _ones(self, *size: int) -> Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.device)
