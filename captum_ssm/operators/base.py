"""The operator contract: a frozen linear map over tokens, per channel.

Shape glossary, used throughout the package:

====  =============================================================
B     batch
S     stack of vectors, mapped at once
L     tokens
H     heads (in Mamba-1 every channel is a head)
P     value channels per head
C, D  channels, H * P; C beside T is chunks of tokens, D the channels of a model's mixer
G     groups of heads that share vectors, H / G heads in a row each
N     state size of a recurrence
K     taps of a short convolution
Q     query positions
R, W  rows and columns of a strip; W beside T is windows
T     some tokens in a row, such as those of a chunk or a window
E     width of the residual stream
====  =============================================================

A *band* is a matrix of a few diagonals, held by lag: lag k of row i is column i - k.  A *strip* is
some neighboring rows of a matrix, of which only the columns that can differ from zero are held.

In a product of operators the *outer* one is on the left and acts last; the *inner* one is on the
right and acts first.

An operator maps values ``v`` (..., B, L, H, P) to outputs of the same shape.  It never mixes
channels: channel c has one implicit attention matrix ``alpha_c`` (L, L).  Leading dimensions are
free: a stack of vectors is mapped at once.

Everything in :class:`Operator` follows from :meth:`Operator.apply` and its adjoint, as
:mod:`.generic` derives it; subclasses override what they can do faster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import generic
from .kernels.arithmetic import linear_map
from .kernels.bands import Band
from .kernels.portions import SMALL, Portion, Stream
from .kernels.rows import Positions, Strip
from .reduction import Reduce

#: Names of the parts of mixers, of which users choose components.
COMPONENTS = frozenset({"conv", "activation", "scan", "skip", "gate", "norm"})
#: Roles of a mixer's factors: the values that are moved, the vectors that they are matched by, the
#: vectors that ask, how much is let through, and how far a state moves on.
Role = Literal["content", "key", "query", "gate", "step"]
#: From the gradient of outputs to those of values and coefficients, by name.
Pull = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]


class Shape(NamedTuple):
    """Sizes an operator acts on.

    Attributes:
        batch: examples, B.
        tokens: tokens, L.
        heads: heads, H; in Mamba-1 every channel is one.
        per_head: value channels per head, P.

    Example:
        >>> from captum_ssm.operators import Shape
        >>> Shape(batch=2, tokens=5, heads=3, per_head=4).tokens
        5
    """

    batch: int
    tokens: int
    heads: int
    per_head: int


class Mixing(Enum):
    """How an operator mixes tokens: the classes of theorem 1 of the hidden-attention paper.

    The theorem asks of a layer whether the part that mixes its tokens depends on the data.  It
    follows from the parts an operator is made of, whatever numbers they hold.  Several steps of
    fixed mixing with gates between are data-controlled, as is a recurrence whose decays follow from
    the data: the weight of token j for token i depends on the tokens between.  A mask of padding
    does not count as data.

    Attributes:
        NONE: no output reads another token.
        FIXED: by one matrix per channel, the same for every input (S4, DSS).
        GATED: by diag(r) . fixed . diag(w), where r and w may follow from the input (GSS, Hyena).
        CONTROLLED: by matrices that follow from the input in any other way (S6, attention).

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Chain, Diagonal, LongConv, Shape
        >>> shape = Shape(batch=1, tokens=3, heads=1, per_head=1)
        >>> conv = LongConv(torch.ones(1, 1, 3), shape)
        >>> gate = Diagonal(torch.arange(3.0).view(1, 3, 1, 1), shape, "gate")
        >>> conv.mixing.value, Chain(gate, conv, gate).mixing.value
        ('fixed', 'gated')
    """

    NONE = "none"
    FIXED = "fixed"
    GATED = "gated"
    CONTROLLED = "controlled"


class Operator:
    """A frozen linear map over tokens, y[i] = sum over j of alpha[i, j] v[j], channel by channel.

    The base of all operators.  A subclass detaches its coefficients, sets :attr:`shape` and
    :attr:`component`, and defines :meth:`apply`, :meth:`tensors` and :meth:`select`; it overrides
    :attr:`mixes_tokens` and :attr:`data_dependent` where they are not True.  Everything else
    follows, if slowly.

    Attributes:
        component: the part of a mixer: ``conv``, ``activation``, ``scan`` (any mixing of tokens but
            a short convolution), ``skip``, ``gate`` or ``norm``. Default: None, for structural
            parts, which :meth:`restrict` keeps.
        shape: the sizes it acts on, a :class:`Shape`.
        roles: role of each coefficient that may follow from the input, by its name in
            :meth:`tensors`; see :mod:`.coefficients`. Default: none.
        live: the coefficients with roles that came with their autograd graph. Default: none.
        at_rest: value of its gates where their own input is zero. Default: 0.

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
        >>> bool((half.dense() == 0.5 * torch.eye(3)).all()), half.mixing.value
        (True, 'none')
    """

    component: str | None = None
    shape: Shape
    roles: Mapping[str, Role] = MappingProxyType({})
    live: Mapping[str, Tensor] = MappingProxyType({})
    at_rest: float | Tensor = 0.0
    #: Whether whole matrices of heads are quicker made than rows of all channels.
    quick_heads = False
    #: Up to how many rows of the channels' mean are quicker found by :meth:`rows` than in a strip.
    few_rows: int = 0

    def __repr__(self) -> str:
        _, tokens, heads, per_head = self.shape
        inside = [type(leaf).__name__ for leaf in self.leaves() if leaf is not self]
        made_of = f"{', '.join(inside)}: " if inside else ""
        return f"{type(self).__name__}({made_of}{tokens} tokens, {heads} heads of {per_head})"

    # --- defined by a subclass -------------------------------------------------------------

    def apply(self, v: Tensor) -> Tensor:
        """alpha v: every channel's matrix times its values.

        Linear and differentiable in ``v``, with :meth:`transpose` as its derivative.

        Args:
            v: values (..., B, L, H, P); leading dimensions are free.

        Returns:
            The outputs, in the shape of ``v``.
        """
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return the frozen coefficients by name, as they are checked for NaN and infinity."""
        raise NotImplementedError

    def select(self, heads: Sequence[int]) -> Operator:
        """Restrict the operator to some heads.

        Args:
            heads: the heads, counted from 0, in the order wanted.

        Returns:
            An operator on (B, L, len(heads), P).
        """
        raise NotImplementedError

    # --- its dependence on its coefficients ------------------------------------------------

    def at(self, coefficients: Mapping[str, Tensor]) -> Operator:
        """Replace some of the coefficients that have roles.

        Args:
            coefficients: the new ones, by name.
        """
        raise NotImplementedError

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return gradients of the values, and of the coefficients that have roles, by name.

        Args:
            values: the input (B, L, H, P).
            gradient: gradient of the output (B, L, H, P).
        """
        if self.roles:
            raise NotImplementedError
        return self.transpose(gradient), {}

    def vjp(self, values: Tensor, coefficients: Mapping[str, Tensor]) -> tuple[Tensor, Pull]:
        """Map S stacked values; return alpha v and its pullback (vector-Jacobian product).

        Args:
            values: (S, B, L, H, P).
            coefficients: replace its own keys, queries and gates, (S, B, ...) by name. Those of the
                role "step" cannot be replaced: the stack shares them.

        Returns:
            alpha v, and a function from its gradient to that of the values, and to those of the
            coefficients that have roles: sums over the stack, by name.
        """
        return generic.vjp(self, values, coefficients)

    # --- how tokens are mixed --------------------------------------------------------------

    @property
    def mixes_tokens(self) -> bool:
        """Whether outputs read other tokens than their own."""
        return True

    @property
    def data_dependent(self) -> bool:
        """Whether the coefficients follow from the input, not from parameters alone."""
        return True

    @property
    def mixing(self) -> Mixing:
        """The class of its token mixing."""
        if not self.mixes_tokens:
            return Mixing.NONE
        return Mixing.CONTROLLED if self.data_dependent else Mixing.FIXED

    # --- the parts it is made of -----------------------------------------------------------

    def leaves(self) -> Iterator[Operator]:
        """The elementary operators this one is made of."""
        yield self

    def restrict(self, components: Collection[str]) -> Operator | None:
        """This operator with only the named components; all others become the identity.

        Args:
            components: the names of those to keep.

        Returns:
            The operator, or None if only the identity is left.
        """
        return self if self.component is None or self.component in components else None

    def per_channel(self) -> Operator:
        """Reduce every part that mixes channels to each channel's own share.

        Implicit attention matrices belong to single channels, so methods read them from this.
        """
        return self

    def after_band(self, band: Band) -> Band | None:
        """Return the band self . band, or None if this operator is not banded (a few lags).

        Args:
            band: the inner factor: (B, L, H, P), broadcastable, by lag.
        """
        return None

    # --- the map, its adjoint and its constant term ----------------------------------------

    def transpose(self, u: Tensor) -> Tensor:
        """Apply the adjoint: every channel's transposed matrix times ``u``.

        For all u and v, ``u * apply(v)`` and ``transpose(u) * v`` have the same sum.

        Args:
            u: (..., B, L, H, P); leading dimensions are free.

        Returns:
            alpha-transposed u, in the shape of ``u``.
        """
        return generic.transpose(self, u)

    def offset(self) -> Tensor | None:
        """Return the constant that biases add to the output (B, L, H, P); None for none."""
        return None

    def affine(self, v: Tensor) -> Tensor:
        """alpha v + offset: the module's own output before its output projection."""
        offset = self.offset()
        out = self.apply(v)
        return out if offset is None else out + offset

    def stream(self, transposed: bool, longest: int) -> Stream | None:
        """Return a form of this operator, or of its adjoint, that is fed a few tokens at a time.

        Args:
            transposed: whether it is the adjoint, which is fed from the last token to the first.
            longest: the most tokens fed at a time.

        Returns:
            A function of values (B, T, H, P) and the slice of tokens that they are. None if tokens
            cannot be mapped in this order, or are mapped faster all at once.
        """
        return None

    @property
    def portion(self) -> Portion:
        """How many tokens to feed to a :meth:`stream` at a time."""
        return SMALL

    def mean_matvec(self, x: Tensor) -> Tensor:
        """Return (mean over channels of alpha) x, for ``x`` (B, L), without forming a matrix."""
        return linear_map(x, self._mean_forward, self._mean_adjoint)

    def mean_rmatvec(self, r: Tensor) -> Tensor:
        """r (mean over channels of alpha), for a row vector (B, L), without forming a matrix."""
        return linear_map(r, self._mean_adjoint, self._mean_forward)

    # --- its matrices, by rows or whole ----------------------------------------------------

    def rows(self, positions: Positions, reduce: Reduce = "mean") -> Tensor:
        """Return rows of the implicit attention matrices.

        Args:
            positions: query positions, common to all examples (a list of Q) or per example (B, Q).
            reduce: how channels are combined: ``"mean"``, ``"max"``, ``"min"``, ``"product"`` or a
                function over the last dimension. None keeps every channel; ``"heads"`` every head,
                as the mean over its channels. Default: ``"mean"``.

        Returns:
            (B, Q, L), or (B, C, Q, L) with ``reduce=None``, or (B, H, Q, L) with ``"heads"``.

        Raises:
            QueryError: for positions outside the sequence.
            OptionError: for a reduction that is not known.
        """
        return generic.rows(self, positions, reduce)

    def unit_rows(self, positions: Positions, weight: Tensor | None = None) -> Tensor:
        """Return rows of every channel's matrix at Q positions, (Q, B, L, H, P).

        Args:
            positions: the rows, (Q,) or per example (Q, B).
            weight: factors on the rows (Q, B, 1, H, P), broadcastable. Default: None, no factors.
        """
        return generic.unit_rows(self, positions, weight)

    def dense(self, reduce: Reduce = "mean", heads: Sequence[int] | None = None) -> Tensor:
        """Return the implicit attention matrices; entry (i, j) is the weight of token j in token i.

        Args:
            reduce: as in :meth:`rows`. Default: ``"mean"``.
            heads: use these heads only; negative ones count from the end. Default: None, all.

        Returns:
            (B, L, L), or (B, C, L, L) with ``reduce=None``, or (B, H, L, L) with ``"heads"``.

        Raises:
            OptionError: for a head or a reduction that does not exist.
        """
        return generic.dense(self, reduce, heads)

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        """Return rows of the sum over channels of left[i, c] (alpha_c band_c)[i, j].

        Args:
            left: row factors (B, L, H, P), broadcastable.
            band: the inner factor by lag, column factors included: (B, L, H, P), broadcastable.
            rows: neighboring rows, ascending; at least one. No others are formed.
            by_head: sum the channels of each head by themselves. Default: False, of all heads.

        Returns:
            Their entries (B, R, W), or (B, H, R, W), with the rows and the columns of the entries.
        """
        return generic.entries(self, left, band, rows, by_head)

    # --- helpers ---------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the coefficients are."""
        return self._example().device

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""
        return self._example().dtype

    def _mean_forward(self, x: Tensor) -> Tensor:
        return generic.channel_mean(self, x, transposed=False)

    def _mean_adjoint(self, r: Tensor) -> Tensor:
        return generic.channel_mean(self, r, transposed=True)

    def _example(self) -> Tensor:
        """One coefficient, for its dtype and device."""
        for leaf in self.leaves():
            for coefficient in leaf.tensors().values():
                return coefficient
        return next(self.leaves())._without_coefficients()

    def _without_coefficients(self) -> Tensor:
        """A number of the dtype and on the device of an operator that has no coefficients."""
        return torch.zeros(())

    def _zeros(self, *size: int, factor: Tensor | None = None) -> Tensor:
        """Zeros to hold coefficients, or products of them with a factor."""
        dtype = self.dtype if factor is None else torch.promote_types(self.dtype, factor.dtype)
        return torch.zeros(size, dtype=dtype, device=self.device)

    def _ones(self, *size: int) -> Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.device)
