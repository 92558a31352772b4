"""Check an operator against plain matrices that its author writes down.

Each clause calls one method of :class:`~captum_ssm.operators.Operator`, and compares the result
with the same computation on the matrices. A failure names the clause, the dtype and the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import OptionError, QueryError
from ..operators import Operator, Reduce, Shape
from ..operators.kernels.bands import Band
from ..operators.kernels.rows import Strip

#: Largest errors by dtype, relative to the largest result with absolute values of all terms.
RTOL: Mapping[torch.dtype, float] = {torch.float64: 1e-11, torch.float32: 2e-5}
#: Gradients of coefficients are long sums; their errors may be larger by this factor.
_LONG_SUMS = 10.0
#: A function that returns the context in which the operator's methods are called.
Setting = Callable[[], AbstractContextManager[None]]


def check_operator(
    make: Callable[..., Operator],
    matrices: Tensor | Callable[..., Tensor],
    coefficients: Mapping[str, Tensor] | None = None,
    *,
    offset: Tensor | Callable[..., Tensor] | None = None,
    bound: Tensor | Callable[..., Tensor] | None = None,
    rows: Sequence[range] | None = None,
    lags: Sequence[int] = (-1, 0, 2),
    rtol: Mapping[torch.dtype, float] = RTOL,
    seed: int = 0,
) -> None:
    """Raise unless an operator keeps all promises of :class:`~captum_ssm.operators.Operator`.

    Compare all results and gradients of the operator with the matrices, in float64 and in float32,
    on the CPU and on a GPU if there is one.

    Args:
        make: a function, often the operator's class, that is called with the coefficients as
            keyword arguments and returns the operator.
        matrices: float64 matrices of each channel (B, H * P, L, L) or head (B, H, L, L), or (B, H,
            P, P, L, L) if the channels of a head mix, from the last P to the first. B may be 1 for
            all examples. Pass a function of the coefficients, which is differentiable in those
            with roles, or a tensor if there are no coefficients.
        coefficients: float64 tensors by the names that :meth:`.Operator.tensors` uses. Default:
            None; the operator is then checked in the dtype that ``make()`` chooses, without
            gradients of coefficients.
        offset: the constant term, broadcastable to (B, L, H, P), or a function of the coefficients.
            Default: None, the operator has no constant term.
        bound: matrices whose entries are sums of absolute values, for entries whose terms cancel.
            Errors are relative to this bound. Default: None, the matrices' absolute values.
        rows: the ranges of rows that are requested. Default: None, all rows, the first half, the
            second half and the last row.
        lags: the lags of the band in products with a band. Default: ``(-1, 0, 2)``.
        rtol: the largest relative error by dtype. Default: :data:`RTOL`.
        seed: the seed of the random values. Global generators are not changed. Default: 0.

    Raises:
        AssertionError: if a clause fails; the message names the clause.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import ElementwiseRecurrence
        >>> from captum_ssm.testing.operators import check_operator
        >>> def matrices(decay):  # (B, L, H): alpha[i, j] is the product of decays after j
        ...     total = decay.log().cumsum(1).mT  # (B, H, L)
        ...     return (total[..., None] - total[..., None, :]).exp().tril()
        >>> decay = torch.rand(2, 9, 3, dtype=torch.float64)
        >>> check_operator(ElementwiseRecurrence, matrices, {"decay": decay})
    """
    exact_coefficients = dict(coefficients or {})

    def run(dtype: torch.dtype | None, device: str, setting: Setting) -> None:
        cast = {name: _cast(x, dtype, device) for name, x in exact_coefficients.items()}
        exact = {name: _cast(x, torch.float64, "cpu") for name, x in cast.items()}
        operator = make(**cast)
        arguments: list[Any] = [x(**exact) if callable(x) else x for x in (matrices, offset, bound)]
        plain, size = _plain_and_size(operator.shape, *arguments)
        check, inputs = _Check(operator, rtol, setting), _inputs(operator, rows, lags, seed)
        before = {name: x.clone() for name, x in operator.tensors().items()}
        check.promises(plain)
        check.all(_clauses_of_maps(operator, inputs), plain, size, inputs)
        channels = _Check(operator.per_channel(), rtol, setting)
        clauses = _clauses_of_matrices(channels.operator, inputs)
        channels.all(clauses, plain.per_channel(), size.per_channel(), inputs)
        if exact_coefficients and callable(matrices) and operator.roles:
            check.gradients(make, cast, exact, lambda z: plain.like(matrices(**z)), size, inputs)
        for name, x in operator.tensors().items():
            check.true(f"tensors()[{name!r}] stays as it is", torch.equal(x, before[name]))

    run(torch.float64 if exact_coefficients else None, "cpu", nullcontext)
    if exact_coefficients:  # else the operator may have the default dtype and device
        run(torch.float32, "cpu", _unusual_defaults)
    if exact_coefficients and torch.cuda.is_available():
        run(torch.float64, "cuda", nullcontext)


# --- the matrices, and their answers -------------------------------------------------------------


class _Plain:
    """Computes an operator's results from matrices (B, H, P, L, L) or (B, H, P, P, L, L).

    Args:
        matrices: the matrices of channels, heads or mixing channels.
        offset: the constant term, or None.
        shape: the operator's shape.
        is_size: whether the matrices are bounds on the absolute values of other matrices.
    """

    def __init__(self, matrices: Tensor, offset: Tensor | None, shape: Shape, is_size: bool):
        batch, tokens, heads, per_head = shape
        if matrices.dim() == 4:
            matrices = matrices.expand(batch, -1, tokens, tokens)
            if matrices.shape[1] == heads:  # one for all channels of a head
                matrices = matrices[:, :, None].expand(-1, -1, per_head, -1, -1)
            matrices = matrices.reshape(batch, heads, per_head, tokens, tokens)
        self.matrices, self.offset, self.shape, self.is_size = matrices, offset, shape, is_size

    def like(self, matrices: Tensor) -> _Plain:
        """Return the same with other matrices."""
        return _Plain(matrices, self.offset, self.shape, self.is_size)

    def per_channel(self) -> _Plain:
        """Return the matrices of each channel's own part, without those that mix channels."""
        if self.matrices.dim() == 5:
            return self
        return self.like(self.matrices.diagonal(0, 2, 3).movedim(-1, 2).flatten(1, 2))

    @property
    def mT(self) -> _Plain:
        mixed = self.matrices.dim() == 6
        return self.like(
            self.matrices.mT.transpose(2, 3) if mixed else self.matrices.mT.flatten(1, 2)
        )

    def apply(self, v: Tensor) -> Tensor:
        terms = "bhpqij,...bjhq->...bihp" if self.matrices.dim() == 6 else "bhpij,...bjhp->...bihp"
        return torch.einsum(terms, self.matrices, v)

    def affine(self, v: Tensor) -> Tensor:
        return self.apply(v) if self.offset is None else self.apply(v) + self.offset

    def select(self, heads: Sequence[int]) -> _Plain:
        offset = None if self.offset is None else self.offset.expand(self.shape)[:, :, heads]
        part, shape = self.matrices[:, heads], self.shape._replace(heads=len(heads))
        return _Plain(part if part.dim() == 6 else part.flatten(1, 2), offset, shape, self.is_size)

    def reduced(self, reduce: Reduce) -> Tensor:
        """Return the matrices reduced over channels (B, L, L), or by channel or head."""
        by_channel = self.matrices.flatten(1, 2)
        if reduce is None or reduce == "heads":
            return by_channel if reduce is None else self.matrices.mean(2)
        if callable(reduce):
            return reduce(by_channel.movedim(1, -1))
        if reduce == "mean":
            return by_channel.mean(1)
        if reduce == "product":
            return by_channel.prod(1)
        # the smallest channel has the error of the largest one
        return by_channel.amin(1) if reduce == "min" and not self.is_size else by_channel.amax(1)

    def mean(self, x: Tensor) -> Tensor:
        return torch.einsum("bij,bj->bi", self.reduced("mean"), x)

    def by_head(self, left: Tensor, right: Tensor | None = None) -> Tensor:
        """Sum left[i] matrix[i, j] right[j] over the channels of each head, (B, H, L, L)."""
        right = torch.ones_like(left) if right is None else right
        left, right = left.expand(self.shape), right.expand(self.shape)
        return torch.einsum("bihp,bhpij,bjhp->bhij", left, self.matrices, right)

    def times_band(self, q: _Inputs) -> _Plain:
        """Return the matrices times the matrix whose diagonals are ``q.band``."""
        out, tokens = torch.zeros_like(self.matrices), self.shape.tokens
        for lag, factor in q.band.items():
            columns = factor.expand(self.shape).permute(0, 2, 3, 1)[..., None, :]
            first, last = max(0, -lag), min(tokens, tokens - lag)
            if first < last:
                product = self.matrices * columns
                out[..., first:last] += product[..., first + lag : last + lag]
        return self.like(out.flatten(1, 2))


def _plain_and_size(
    shape: Shape, matrices: Tensor, offset: Tensor | None, bound: Tensor | None
) -> tuple[_Plain, _Plain]:
    """Return the matrices, and bounds on the size of terms that may cancel, as :class:`_Plain`."""
    size = matrices.abs() if bound is None else bound
    constant = None if offset is None else offset.double()
    of_size = None if constant is None else constant.abs()
    plain = _Plain(matrices.detach(), constant, shape, False)
    return plain, _Plain(size.detach(), of_size, shape, True)


# --- the clauses ---------------------------------------------------------------------------------


class _Inputs(NamedTuple):
    """The random values with which an operator's methods are called."""

    u: Tensor  # (B, L, H, P), as the next two
    v: Tensor
    strided: Tensor
    stack: Tensor  # (3, 2, B, L, H, P)
    x: Tensor  # (B, L)
    factors: list[tuple[Tensor, Tensor]]  # of rows and columns, broadcastable
    band: Band
    weight: Tensor  # (Q, B, 1, H, P)
    positions: list[int]
    per_example: Tensor  # (B, Q)
    rows: list[range]

    def map(self, function: Callable[[Tensor], Tensor]) -> _Inputs:
        """Apply a function, such as a conversion to another dtype, to all floating tensors."""
        return self._replace(
            u=function(self.u),
            v=function(self.v),
            strided=function(self.strided),
            stack=function(self.stack),
            x=function(self.x),
            factors=[(function(left), function(right)) for left, right in self.factors],
            band={lag: function(factor) for lag, factor in self.band.items()},
            weight=function(self.weight),
        )


def _inputs(
    operator: Operator, rows: Sequence[range] | None, lags: Sequence[int], seed: int
) -> _Inputs:
    generator = torch.Generator().manual_seed(seed)
    batch, tokens, heads, per_head = shape = operator.shape
    # reorderings have no coefficients, and take values of every dtype
    dtype = operator.dtype if operator.tensors() else torch.float64

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=dtype).to(operator.device)

    sizes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        (shape, shape),
        ((1, 1, 1, 1), (1, 1, 1, 1)),
        ((batch, 1, heads, 1), (1, tokens, 1, per_head)),
        ((batch, tokens, heads, 1), (1, 1, heads, 1)),
        ((1, 1, 1, per_head), shape),
    ]
    half = tokens // 2
    all_rows = [range(tokens), range(half), range(half, tokens), range(tokens - 1, tokens)]
    return _Inputs(
        u=randn(*shape),
        v=randn(*shape),
        strided=randn(per_head, heads, tokens, batch).permute(3, 2, 1, 0),
        stack=randn(3, 2, *shape),
        x=randn(batch, tokens),
        factors=[(randn(*left), randn(*right)) for left, right in sizes],
        band={lag: randn(*shape) for lag in lags},
        weight=randn(3, batch, 1, heads, per_head),
        positions=[tokens - 1, 0, -1, half],
        per_example=torch.randint(-tokens, tokens, (batch, 3), generator=generator),
        rows=[rows_range for rows_range in (all_rows if rows is None else rows) if len(rows_range)],
    )


#: A name, the operator's result, and a function of matrices m and inputs q that returns the same.
Clause = tuple[str, Tensor, Callable[[_Plain, _Inputs], Tensor]]


def _clauses_of_maps(o: Operator, q: _Inputs) -> Iterator[Clause]:
    """Yield the clauses about methods that apply the operator to values."""
    for name in ("v", "strided", "stack"):
        yield from _clauses_of_values(o, q, name)
    yield "affine", o.affine(q.v), lambda m, q: m.affine(q.v)
    if (offset := o.offset()) is not None:
        yield "offset", offset.expand(o.shape), lambda m, q: m.affine(torch.zeros_like(q.v))
    yield "derivative of apply", _gradient(o.apply, q.v, q.u), lambda m, q: m.mT.apply(q.u)
    if all(type(leaf).transpose is not Operator.transpose for leaf in o.leaves()):
        # an adjoint that is not overridden has no graph
        yield "derivative of transpose", _gradient(o.transpose, q.v, q.u), lambda m, q: m.apply(q.u)
    twice = _gradient(partial(_gradient, o.apply, q.v), q.u, q.v)
    yield "second derivative of apply", twice, lambda m, q: m.apply(q.v)
    yield "apply without graphs", _unrecorded(o.apply, q.v), lambda m, q: m.apply(q.v)
    yield "transpose without graphs", _unrecorded(o.transpose, q.v), lambda m, q: m.mT.apply(q.v)
    heads = [o.shape.heads - 1, 0, o.shape.heads // 2]
    part, v = o.select(heads), q.v[:, :, heads]
    yield f"select({heads})", part.affine(v), lambda m, q: m.affine(q.v)[:, :, heads]
    adjoint = part.transpose(v)
    yield f"select({heads}), transpose", adjoint, lambda m, q: m.mT.apply(q.v)[:, :, heads]
    names = {leaf.component for leaf in o.leaves() if leaf.component}
    if (part_of_all := o.restrict(names)) is not None:
        yield f"restrict({names})", part_of_all.affine(q.v), lambda m, q: m.affine(q.v)


def _clauses_of_values(o: Operator, q: _Inputs, name: str) -> Iterator[Clause]:
    x = getattr(q, name)
    yield f"apply({name})", o.apply(x), lambda m, q: m.apply(getattr(q, name))
    yield f"transpose({name})", o.transpose(x), lambda m, q: m.mT.apply(getattr(q, name))


def _clauses_of_matrices(o: Operator, q: _Inputs) -> Iterator[Clause]:
    """Yield the clauses about methods that return or reduce the matrices of channels."""
    yield "mean_matvec", o.mean_matvec(q.x), lambda m, q: m.mean(q.x)
    yield "mean_rmatvec", o.mean_rmatvec(q.x), lambda m, q: m.mT.mean(q.x)
    of_map, of_adjoint = (_gradient(f, q.x, q.x) for f in (o.mean_matvec, o.mean_rmatvec))
    yield "derivative of mean_matvec", of_map, lambda m, q: m.mT.mean(q.x)
    yield "derivative of mean_rmatvec", of_adjoint, lambda m, q: m.mean(q.x)
    for by in ("mean", "max", "min", "product", "heads", None, _largest_channel):
        yield from _clauses_of_reduction(o, q, by)
    yield "unit_rows", o.unit_rows(q.per_example.T % o.shape.tokens, q.weight), _unit_rows
    for i in range(-1, len(q.factors)):
        yield from _clauses_of_entries(o, q, i)
    lags = f"with lags {[*q.band]}"
    if (band := o.after_band(q.band)) is not None:
        yield f"after_band {lags}", _band_matrices(o, band), lambda m, q: m.times_band(q).matrices


def _clauses_of_reduction(o: Operator, q: _Inputs, by: Reduce) -> Iterator[Clause]:
    yield f"dense({by!r})", o.dense(by), lambda m, q: m.reduced(by)
    found = o.rows(q.per_example, by)
    yield (
        f"rows of each example, {by!r}",
        found,
        lambda m, q: torch.stack(
            [matrix[..., at, :] for matrix, at in zip(m.reduced(by), q.per_example, strict=True)]
        ),
    )
    if by not in ("mean", None):  # the others differ in how channels are combined, checked above
        return
    found = o.rows(q.positions, by)
    yield f"rows({q.positions}, {by!r})", found, lambda m, q: m.reduced(by)[..., q.positions, :]
    found = o.dense(by, heads=[-1, 0])
    yield f"dense({by!r}, heads=[-1, 0])", found, lambda m, q: m.select([-1, 0]).reduced(by)


def _clauses_of_entries(o: Operator, q: _Inputs, i: int) -> Iterator[Clause]:
    """Yield the clauses about ``entries`` for pair ``i`` of the factors; -1 is the band."""
    rows = q.rows if i <= 0 else [range(o.shape.tokens), q.rows[i % len(q.rows)]]
    left, right = q.factors[i]
    left, band = (q.u, q.band) if i < 0 else (left, {0: right})
    sizes = " and ".join(str(tuple(x.shape)) for x in (left, right))
    for row_range, by_head in product(rows, (False, True)):
        found = _full_rows(o.entries(left, band, row_range, by_head), o.shape, row_range)
        about = f"entries({row_range}, by_head={by_head}) of {sizes} with lags {[*band]}"
        yield about, found, partial(_entries, i=i, rows=row_range, by_head=by_head)


def _entries(m: _Plain, q: _Inputs, i: int, rows: range, by_head: bool) -> Tensor:
    """Return the entries of :func:`_clauses_of_entries`, computed from matrices."""
    found = m.times_band(q).by_head(q.u) if i < 0 else m.by_head(*q.factors[i])
    return (found if by_head else found.sum(1))[..., rows.start : rows.stop, :]


# --- how they are checked ------------------------------------------------------------------------


class _Check:
    """Compares the results of an operator's methods with results from matrices."""

    def __init__(
        self, operator: Operator, rtol: Mapping[torch.dtype, float], setting: Setting
    ) -> None:
        self.operator, self.rtol, self.setting = operator, rtol, setting
        self.dtype = operator.dtype if operator.tensors() else None

    def all(self, clauses: Iterator[Clause], plain: _Plain, size: _Plain, q: _Inputs) -> None:
        """Compare each clause's results with plain matrices; arguments must stay unchanged."""
        exact = q.map(lambda x: x.detach().cpu().double().clone())
        largest = exact.map(torch.Tensor.abs)
        tensors = _tensors(q)
        copies, clause = [x.clone() for x in tensors], "nothing"
        while True:
            try:
                with self.setting():
                    clause, found, wanted = next(clauses)
            except StopIteration:
                break
            except Exception as error:
                about = self._about(f"after {clause}")
                raise AssertionError(f"{about}, the next method raised {error!r}.") from error
            unchanged = all(map(torch.equal, tensors, copies))
            self.true(f"after {clause}, values and factors are unchanged", unchanged)
            self.close(clause, found, wanted(plain, exact), wanted(size, largest))

    def close(
        self, clause: str, found: Tensor, wanted: Tensor, size: Tensor, looser: float = 1.0
    ) -> None:
        """Raise unless ``found`` equals ``wanted``, with errors relative to ``size``."""
        about = self._about(clause)
        if found.shape != wanted.shape:
            raise AssertionError(f"{about} has shape {(*found.shape,)}; return {(*wanted.shape,)}.")
        if self.dtype not in (None, found.dtype) or found.device != self.operator.device:
            raise AssertionError(
                f"{about} is in {found.dtype} on {found.device}, but the coefficients are in "
                f"{self.dtype} on {self.operator.device}. Return both the same."
            )
        if not found.numel():
            return
        largest = float(size.detach().max())
        if not math.isfinite(largest):
            raise AssertionError(f"{about}: matrices or bound are not finite. Pass finite ones.")
        allowed = looser * self.rtol[found.dtype] * largest
        error = (found.detach().double().cpu() - wanted.detach()).abs()
        worst = float(error.max())
        if not worst <= allowed:  # NaN is wrong, too
            flat = error.nan_to_num(nan=torch.inf).argmax()
            at = tuple(int(i) for i in torch.unravel_index(flat, error.shape))
            raise AssertionError(
                f"{about} is wrong: the largest error, {worst:.1e} at {at}, exceeds {allowed:.1e}. "
                f"Found {float(found[at]):.6g}; return {float(wanted[at]):.6g}, as by the matrices."
            )

    def true(self, clause: str, holds: bool) -> None:
        """Raise an error that names the clause if ``holds`` is False."""
        if not holds:
            raise AssertionError(f"{self._about(clause)}: the operator must keep this promise.")

    def raises(self, clause: str, error: type[Exception], ask: Callable[[], Any]) -> None:
        """Raise unless the call ``ask()`` raises an error of class ``error``."""
        try:
            ask()
        except error:
            return
        except Exception as other:
            raise AssertionError(f"{self._about(clause)} must not raise {other!r}.") from other
        raise AssertionError(f"{self._about(clause)} must raise {error.__name__}, but did not.")

    def promises(self, plain: _Plain) -> None:
        """Check the clauses that need no random values, such as shapes and refused arguments."""
        o, dense = self.operator, plain.per_channel().reduced(None)
        batch, tokens, heads, per_head = o.shape
        self.true(f"shape is {o.shape}", dense.shape == (batch, heads * per_head, tokens, tokens))
        self.true("mixes_tokens", o.mixes_tokens or not dense.tril(-1).any() | dense.triu(1).any())
        self.true("offset() is None without one", o.offset() is None or plain.offset is not None)
        of_leaves = [x for leaf in o.leaves() for x in leaf.tensors().values()]
        addresses = {x.data_ptr() for x in o.tensors().values()}
        self.true(
            "tensors() are the tensors of leaves()", addresses == {x.data_ptr() for x in of_leaves}
        )
        self.true("tensors() are frozen", not any(x.requires_grad for x in of_leaves))
        parts = [{leaf.component for leaf in x.leaves()} for x in (o, o.select(range(heads)))]
        self.true("select keeps components", parts[0] == parts[1])
        structural = any(leaf.component is None for leaf in o.leaves())
        self.true("restrict(()) keeps structural parts", (o.restrict(()) is not None) == structural)
        own = o.per_channel()
        for positions in ([tokens], [-tokens - 1], []):
            self.raises(f"rows({positions})", QueryError, partial(own.rows, positions))
        for heads_outside in ([heads], [-heads - 1], []):
            ask = partial(own.dense, "mean", heads_outside)
            self.raises(f"dense(heads={heads_outside})", OptionError, ask)
        for ask in (partial(own.dense, "no reduction"), partial(own.rows, [0], "no reduction")):
            self.raises("a reduction that is not known", OptionError, ask)

    def gradients(
        self,
        make: Callable[..., Operator],
        coefficients: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
        plain: Callable[[Mapping[str, Tensor]], _Plain],
        size: _Plain,
        q: _Inputs,
    ) -> None:
        """Check that coefficients are frozen; check ``backward``, ``at`` and ``vjp``."""
        o, names = self.operator, [name for name in coefficients if name in self.operator.roles]
        output_size = size.apply(q.v.double().cpu().abs()).max()

        def by_matrices(
            point: Mapping[str, Tensor], v: Tensor, upstream: Tensor
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            """Return the output at ``point``, and the gradients of v and of the coefficients."""
            leaves = {name: point[name].clone().requires_grad_() for name in names}
            v = v.double().cpu().requires_grad_()
            out = plain({**point, **leaves}).apply(v)
            gradients = torch.autograd.grad(
                out, [v, *leaves.values()], upstream.double().cpu(), materialize_grads=True
            )
            return out, gradients[0], dict(zip(names, gradients[1:], strict=True))

        def compare(clause: str, found: Mapping[str, Tensor], expected: dict[str, Tensor]) -> None:
            self.true(f"{clause} has gradients of {names}", set(found) == set(expected))
            # with one token most gradients are 0 except for rounding, so compare with the output
            sizes = torch.stack([*(x.abs().max() for x in expected.values()), output_size])
            for name, x in expected.items():
                self.close(f"{clause}, of {name}", found[name], x, sizes, _LONG_SUMS)

        live = make(**{n: x.clone().requires_grad_(n in names) for n, x in coefficients.items()})
        frozen = not live.apply(q.v).requires_grad
        self.true("coefficients are frozen if they require gradients", frozen)
        self.true(f"live holds {names}", set(live.live) == set(names))
        _, of_values, gradients = by_matrices(exact, q.v, q.u)
        found, of_coefficients = o.backward(q.v, q.u)
        self.close("backward, of values", found, of_values, of_values.abs(), _LONG_SUMS)
        compare("backward", of_coefficients, gradients)
        # vjp evaluates the map at several values of each coefficient, but of steps
        movable = [name for name in names if o.roles[name] != "step"]
        stacks = {
            name: torch.stack([coefficients[name], 0.5 * coefficients[name]]) for name in movable
        }
        values, upstream = q.stack[:2, 0], q.stack[:2, 1]
        for name in names:
            half = o.at({name: 0.5 * coefficients[name]})
            same = (type(half), half.shape, half.component) == (type(o), o.shape, o.component)
            self.true(f"at({{{name!r}}}) is an operator of this kind", same)
            point = {**exact, name: 0.5 * exact[name]}
            expected = plain(point).apply(q.v.double().cpu())
            self.close(f"at({{{name!r}}})", half.apply(q.v), expected, expected.abs(), _LONG_SUMS)
        out, pull = o.vjp(values, stacks)
        of_stack, found_coefficients = pull(upstream)
        totals: dict[str, Tensor] = {}
        for i in range(2):
            point = {**exact, **{name: x[i].double().cpu() for name, x in stacks.items()}}
            expected, of_values, gradients = by_matrices(point, values[i], upstream[i])
            self.close("vjp, the map", out[i], expected, expected.abs(), _LONG_SUMS)
            self.close("vjp, of values", of_stack[i], of_values, of_values.abs(), _LONG_SUMS)
            totals = {name: x + totals.get(name, 0) for name, x in gradients.items()}
        compare("vjp", found_coefficients, totals)

    def _about(self, clause: str) -> str:
        dtype = "no dtype of its own" if self.dtype is None else str(self.dtype)
        return f"{type(self.operator).__name__} ({dtype}): {clause}"


@contextmanager
def _unusual_defaults() -> Iterator[None]:
    """Make tensors float16 on the meta device by default, so that methods must name both."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(default)


def _cast(x: Tensor, dtype: torch.dtype | None, device: str) -> Tensor:
    """Move a coefficient to a device, and convert it to ``dtype`` if it is floating."""
    return x.detach().to(device, dtype if x.is_floating_point() else None)


def _unit_rows(m: _Plain, q: _Inputs) -> Tensor:
    """Return the rows at the positions ``per_example``, times ``weight``."""
    rows = [matrix[:, :, at] for matrix, at in zip(m.matrices, q.per_example, strict=True)]
    return torch.stack(rows).permute(3, 0, 4, 1, 2) * q.weight  # (Q, B, L, H, P)


def _tensors(x: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        return _tensors([*x.values()])
    return [y for item in x for y in _tensors(item)] if isinstance(x, list | tuple) else []


def _largest_channel(channels: Tensor) -> Tensor:
    """Return the largest absolute value of the channels, as an example of a custom reduction."""
    return channels.abs().amax(-1)


def _gradient(function: Callable[[Tensor], Tensor], at: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of a linear function, or zeros if its output has no graph."""
    at = at.detach().requires_grad_()
    out = function(at)
    if not out.requires_grad:
        return torch.zeros_like(at)
    return torch.autograd.grad(out, at, upstream, create_graph=upstream.requires_grad)[0]


def _unrecorded(function: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """Return ``function(v)`` under no_grad, and check that no graph is recorded."""
    with torch.no_grad():
        out = function(v.clone().requires_grad_())
    assert not out.requires_grad, "it must record no graph under torch.no_grad()"
    with torch.inference_mode():
        assert torch.equal(out, function(v.clone())), "its result differs in inference_mode"
    return out


def _full_rows(strip: Strip, shape: Shape, rows: range) -> Tensor:
    """Check a strip's rows and shape; return these rows of the matrix with all columns."""
    assert strip.rows == rows, f"its rows are {strip.rows}, but must be {rows}"
    by_head = [shape.heads] if strip.entries.dim() == 4 else []
    size = (shape.batch, *by_head, len(rows), len(strip.columns))
    assert strip.entries.shape == size, f"its entries have shape {tuple(strip.entries.shape)}"
    return strip.full(shape.tokens)


def _band_matrices(operator: Operator, band: Band) -> Tensor:
    """Return dense matrices (B, H, P, L, L) in which only the diagonals in ``band`` are set."""
    batch, tokens, heads, per_head = operator.shape
    size = batch, heads, per_head, tokens, tokens
    out = torch.zeros(size, dtype=operator.dtype, device=operator.device)
    for lag, factor in band.items():
        by_row = factor.expand(operator.shape).permute(0, 2, 3, 1)  # (B, H, P, L)
        diagonal = out.diagonal(-lag, -2, -1)  # empty if it lies beyond the ends
        first = max(0, lag)
        diagonal += by_row[..., first : first + diagonal.shape[-1]]
    return out
