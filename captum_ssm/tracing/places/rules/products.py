"""Products, whose rules tell which dimensions are contracted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from .along import union
from .groups import (
    Call,
    Groups,
    TokensMeet,
    settled,
    tidied,
)

Labels = Sequence[Any]


def _contracted(
    call: Call, factors: Sequence[tuple[Any, Labels]], out: Labels, summands: Iterable[Any] = ()
) -> Sequence[Groups]:
    """A product of factors with labelled dimensions; those that ``out`` lacks are summed over."""
    groups = [g for x in summands for g in union(call, [x])]
    for x, labels in factors:
        if not call.groups(x):
            continue
        if len(set(labels)) < len(labels):
            raise TokensMeet  # a diagonal
        ours = [label for label in out if label in labels]
        gone = [d for d, label in enumerate(labels) if label not in out]
        order = [labels.index(label) for label in ours]
        new: Any = tuple(slice(None) if label in labels else None for label in out)
        for group in call.groups(x):
            places = settled(group.places, gone).permute(order + gone)
            for _ in gone:
                places = places.squeeze(-1)
            groups.append(group.through(places[new]))
    return [tidied(groups)]


def _of_matrices(call: Call, a: Any, b: Any, summands: Iterable[Any] = ()) -> Sequence[Groups]:
    m, n = len(call.shape(a)), len(call.shape(b))
    batch = list(range(-max(m, n), -2))
    left = [*batch[len(batch) + 2 - m :], "i", "k"] if m > 1 else ["k"]
    right = [*batch[len(batch) + 2 - n :], "k", "j"] if n > 1 else ["k"]
    out = [*batch, *"i" * (m > 1), *"j" * (n > 1)]
    return _contracted(call, [(a, left), (b, right)], out, summands)


def matmul(call: Call) -> Sequence[Groups]:
    a, b = call.argument(0, "input self"), call.argument(1, "other mat2 vec tensor")
    return _of_matrices(call, *((b, a) if call.name == "__rmatmul__" else (a, b)))


def with_summand(call: Call) -> Sequence[Groups]:
    """addmm, baddbmm and addmv."""
    a = call.argument(1, "mat1 batch1 mat")
    return _of_matrices(call, a, call.argument(2, "mat2 batch2 vec"), [call.first])


def linear(call: Call) -> Sequence[Groups]:
    x, weight, bias = call.first, call.argument(1, "weight"), call.argument(2, "bias")
    before: list[Any] = list(range(len(call.shape(x)) - 1))
    rows = ["j"] if len(call.shape(weight)) > 1 else []
    factors = [(x, [*before, "k"]), (weight, [*rows, "k"])]
    return _contracted(call, factors, [*before, *rows], [bias])


def grouped_mm(call: Call) -> Sequence[Groups]:
    """Rows times the matrix of the group that they are in."""
    x, weight = call.first, call.argument(1, "weight mat_b mat2")
    rows, matrices = len(call.shape(x)), len(call.shape(weight))
    if call.groups(weight) or matrices != 3:
        raise TokensMeet
    labels = ["t", "k"] if rows == 2 else ["g", "t", "k"]
    return _contracted(call, [(x, labels)], ["g", "t", "j"][3 - call.results[0].dim() :])


def einsum(call: Call) -> Sequence[Groups]:
    equation, *operands = call.args
    if not isinstance(equation, str):
        raise TokensMeet
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    equation = equation.replace(" ", "")
    given, arrow, out = equation.partition("->")
    terms = given.split(",")
    if not arrow:
        letters = given.replace(",", "").replace(".", "")
        out = "..." * ("..." in given) + "".join(
            sorted(c for c in set(letters) if letters.count(c) == 1)
        )
    counts = [
        len(call.shape(x)) - len(t.replace("...", "")) for x, t in zip(operands, terms, strict=True)
    ]

    def labels(term: str, count: int) -> list[Any]:
        before, _, behind = term.partition("...")
        return [*before, *range(-count, 0), *behind] if "..." in term else list(term)

    factors = [(x, labels(t, n)) for x, t, n in zip(operands, terms, counts, strict=True)]
    return _contracted(call, factors, labels(out, max(counts)))


def inner(call: Call) -> Sequence[Groups]:
    a, b = call.args
    left = [f"a{d}" for d in range(len(call.shape(a)) - 1)]
    right = [f"b{d}" for d in range(len(call.shape(b)) - 1)]
    return _contracted(call, [(a, [*left, "k"]), (b, [*right, "k"])], [*left, *right])


def outer(call: Call) -> Sequence[Groups]:
    a, b = call.args
    return _contracted(call, [(a, ["i"]), (b, ["j"])], ["i", "j"])


def attention(call: Call) -> Sequence[Groups]:
    """scaled_dot_product_attention."""
    query, key, value = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    batch = list(range(2 - len(call.shape(query)), 0))
    mask = call.argument(3, "attn_mask")
    if call.groups(mask) or len({len(call.shape(x)) for x in (query, key, value)}) > 1:
        raise TokensMeet
    factors = [(query, [*batch, "l", "e"]), (key, [*batch, "s", "e"]), (value, [*batch, "s", "f"])]
    return _contracted(call, factors, [*batch, "l", "f"])


def convolution(call: Call) -> Sequence[Groups]:
    """Channels are mixed; positions are not by a kernel of size 1, nor where all are one token."""
    x, weight = call.first, call.argument(1, "weight")
    count = int(call.name[-2])
    if call.groups(weight) or call.groups(call.argument(2, "bias")):
        raise TokensMeet
    if len(call.shape(x)) != count + 2:
        raise TokensMeet
    stride, padding = call.argument(3, "stride", 1), call.argument(4, "padding", 0)
    by_channel = weight.shape[1] == 1 and call.argument(6, "groups", 1) == weight.shape[0]

    def move(places: Tensor) -> Tensor:
        places = places if by_channel else settled(places, (1,))
        for i in range(count):
            if places.size(2 + i) == 1:
                continue
            step = stride if isinstance(stride, int) else stride[i % len(stride)]
            pad = padding if isinstance(padding, int | str) else padding[i % len(padding)]
            if weight.shape[2 + i] > 1 or pad not in (0, "valid", "same"):
                raise TokensMeet
            places = places[(slice(None),) * (2 + i) + (slice(None, None, step),)]
        return places

    return [tidied(g.through(move(g.places)) for g in call.groups(x))]
