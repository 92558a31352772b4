"""How little work a quantity can be, by kind of operator: the bounds that times are held to.

Counts are of float32 work on one thread, in the units of :mod:`benchmarks.calibration`; B and the
mean over its examples are left out because every count is a multiple of B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from torch import Tensor

from benchmarks.calibration import Calibration
from captum_ssm.operators import (
    DeltaRule,
    DenseHeads,
    Diagonal,
    ElementwiseRecurrence,
    Operator,
    Permute,
    ScalarDecayHeads,
    SelectiveScan,
    ShortConv,
    VectorDecayHeads,
)

#: Tokens of a chunk: the compromise between matrices within chunks and states between them.
CHUNK = 64


@dataclass(frozen=True)
class Work:
    """Units of each kind of work."""

    products: float = 0
    exponentials: float = 0
    steps: float = 0
    bytes: float = 0
    calls: float = 0

    def seconds(self, unit: Calibration) -> float:
        """The least time it takes: arithmetic, or moving what it needs if that takes longer."""
        arithmetic = (
            self.products * unit.product
            + self.exponentials * unit.exponential
            + self.steps * unit.step
            + self.calls * unit.call
        )
        return max(arithmetic, self.bytes * unit.byte)


def cores(operator: Operator) -> list[Operator]:
    """The leaves of an operator that carry tokens far: one, or one per direction."""
    found = [leaf for leaf in operator.leaves() if isinstance(leaf, tuple(ROW))]
    if not found:
        raise ValueError(f"no bound is known for {[type(x).__name__ for x in operator.leaves()]}")
    return found


def total(works: Iterable[Work]) -> Work:
    """All of them together."""
    every = list(works)
    kinds = (field.name for field in fields(Work))
    return Work(**{kind: sum(getattr(work, kind) for work in every) for kind in kinds})


def row(operator: Operator) -> Work:
    """A row vector times the mean over channels of an operator's matrices.

    What stands around the cores takes a step for each of its coefficients and channels, and every
    coefficient is read once.  Channels are added up in the end: with the factors of what acts
    last, which makes a convolution there a matrix product, or in a step for each if that is a core.
    """
    vectors = _vectors(operator)
    leaves = list(operator.leaves())
    *others, last = leaves
    coefficients = sum(_stored(t) for leaf in leaves for t in leaf.tensors().values())
    return total(
        [
            *(ROW[type(core)](core, vectors) for core in cores(operator)),
            *(Work(steps=_around(leaf)) for leaf in others if type(leaf) not in ROW),
            _added_up(last, vectors),
            Work(bytes=4 * coefficients),
        ]
    )


def _added_up(last: Operator, vectors: int) -> Work:
    """What acts last, and the sum over channels."""
    if isinstance(last, ShortConv):
        return Work(products=_around(last))
    if type(last) in ROW:
        return Work(steps=math.prod(last.shape[:3]) * vectors)
    return Work(steps=_around(last))


def matrix(operator: Operator) -> Work:
    """The mean over channels of an operator's matrices; what stands around the cores is small.

    What is found is written, too.

    Where heads' matrices are multiplied by the factors around them entry by entry, each tap of a
    convolution that differs by channel does so at columns of its own.
    """
    vectors = _vectors(operator)
    convolutions = [leaf for leaf in operator.leaves() if isinstance(leaf, ShortConv)]
    taps = math.prod(len(leaf.lags) for leaf in convolutions) if vectors > 1 else 1
    found = Work(bytes=4 * operator.shape.batch * operator.shape.tokens**2)
    return total([found, *(MATRIX[type(core)](core, vectors, taps) for core in cores(operator))])


def _vectors(operator: Operator) -> int:
    """Channels of a head to be told apart, P; 1 where one will do.

    That is where all channels of a head are alike on one side of the cores: a sum over them is
    taken on the other side.
    """
    leaves = list(operator.leaves())
    places = [i for i, leaf in enumerate(leaves) if type(leaf) in ROW]
    sides = leaves[: places[0]], leaves[places[-1] + 1 :]
    both = all(any(_tells_apart(leaf) for leaf in side) for side in sides)
    return operator.shape.per_head if both else 1


def _tells_apart(leaf: Operator) -> bool:
    if isinstance(leaf, Diagonal):
        return leaf.weight.shape[-1] > 1
    return not isinstance(leaf, Permute) and leaf.shape.per_head > 1


def _around(leaf: Operator) -> float:
    """Steps of what is no core: one for each tap or factor of each value that differs."""
    batch, tokens, heads, per_head = leaf.shape
    if isinstance(leaf, ShortConv):
        taps = len(leaf.lags)
        return batch * tokens * heads * per_head * taps if taps > 1 else 0  # one is a mere delay
    if isinstance(leaf, Diagonal):
        return batch * tokens * heads * leaf.weight.shape[-1]
    return 0


def _stored(x: Tensor) -> int:
    """Numbers of a tensor that are not repeated."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride)


def _mapped(entries: float, vectors: int) -> Work:
    """So many entries of matrices, each times as many vectors.

    With a single vector every entry is read for one multiplication and addition, which no product
    of matrices is: it is a step.
    """
    return Work(steps=entries) if vectors == 1 else Work(products=entries * vectors)


def _scan_row(core: SelectiveScan, _: int) -> Work:
    elements = core.dt.numel() * core.a.shape[-1]
    return Work(exponentials=elements, steps=elements)


def _scan_matrix(core: SelectiveScan, *_: int) -> Work:
    elements = core.dt.numel() * core.a.shape[-1]
    return Work(products=elements * core.shape.tokens / 2, exponentials=elements)


def _elementwise_row(core: ElementwiseRecurrence, _: int) -> Work:
    return Work(steps=core.decay.numel())


def _elementwise_matrix(core: ElementwiseRecurrence, *_: int) -> Work:
    return Work(products=core.decay.numel() * core.shape.tokens / 2)


def _scalar_row(core: ScalarDecayHeads, vectors: int) -> Work:
    _, _, groups, state = core.query.shape
    heads, every = core.shape.heads, core.shape.batch * core.shape.tokens
    decays = Work(exponentials=every * heads, steps=every * heads * CHUNK / 2)
    inside = Work(products=every * groups * CHUNK / 2 * state)
    shared = heads // groups * vectors  # the vectors that meet the same keys and queries
    between = _mapped(every * groups * 2 * state, shared)
    carried = _carried(every * heads * state * vectors)
    return total([decays, inside, _mapped(every * heads * CHUNK / 2, vectors), between, carried])


def _scalar_matrix(core: ScalarDecayHeads, vectors: int, taps: int) -> Work:
    """Products of queries and keys times the heads' decays, which are those of channels' sums."""
    _, tokens, groups, state = core.query.shape
    pairs = core.shape.batch * tokens * tokens / 2
    sums = Work(products=pairs * core.shape.heads * vectors * taps, steps=pairs * groups * taps)
    return total([Work(products=pairs * groups * state), sums])


def _vector_row(core: VectorDecayHeads, vectors: int) -> Work:
    state, every = core.key.shape[-1], core.log_decay.numel()
    fading = Work(exponentials=every, steps=2 * every)  # of keys and of queries
    if core.bonus is not None:  # keys times the bonus, and these times queries
        fading = total([fading, Work(steps=2 * every)])
    if vectors == 1:
        return total([fading, Work(steps=every)])  # of the state, token by token
    inside = Work(products=every * CHUNK / 2 * (1 + vectors / state))
    return total([fading, inside, Work(products=every * 2 * vectors), _carried(every * vectors)])


def _vector_matrix(core: VectorDecayHeads, vectors: int, taps: int) -> Work:
    pairs = core.log_decay[..., 0].numel() * core.shape.tokens / 2
    return total(
        [
            Work(products=pairs * core.key.shape[-1], exponentials=core.log_decay.numel()),
            _weighted(pairs, vectors, taps),
        ]
    )


def _delta_row(core: DeltaRule, vectors: int) -> Work:
    state, every = core.key.shape[-1], core.beta.numel()
    inside = Work(products=every * (CHUNK * state + CHUNK * CHUNK / 6))
    carried = Work() if core.log_decay is None else _carried(every * state * vectors)
    return total([inside, _mapped(every * (CHUNK + 3 * state), vectors), carried])


def _carried(elements: float) -> Work:
    """States that decay from one chunk to the next, given how many all tokens together have."""
    return Work(steps=elements / CHUNK)


def _delta_matrix(core: DeltaRule, vectors: int, taps: int) -> Work:
    pairs = core.beta.numel() * core.shape.tokens / 2
    return total([Work(products=pairs * 3 * core.key.shape[-1]), _weighted(pairs, vectors, taps)])


def _dense_row(core: DenseHeads, _: int) -> Work:
    return Work(steps=core.matrices.numel() / 2)  # of a causal matrix; all of it is read


def _dense_matrix(core: DenseHeads, vectors: int, taps: int) -> Work:
    read = Work(bytes=4 * core.matrices.numel())
    return total([read, _weighted(core.matrices.numel(), vectors, taps)])


def _weighted(pairs: float, vectors: int, taps: int) -> Work:
    """Entries of heads' matrices times the sum over channels of the factors around them."""
    return Work(products=pairs * vectors * taps, steps=pairs * taps) if vectors > 1 else Work()


Count = Callable[..., Work]
ROW: dict[type[Operator], Count] = {
    SelectiveScan: _scan_row,
    ElementwiseRecurrence: _elementwise_row,
    ScalarDecayHeads: _scalar_row,
    VectorDecayHeads: _vector_row,
    DeltaRule: _delta_row,
    DenseHeads: _dense_row,
}
MATRIX: dict[type[Operator], Count] = {
    SelectiveScan: _scan_matrix,
    ElementwiseRecurrence: _elementwise_matrix,
    ScalarDecayHeads: _scalar_matrix,
    VectorDecayHeads: _vector_matrix,
    DeltaRule: _delta_matrix,
    DenseHeads: _dense_matrix,
}
