"""A check of an operator names the clause that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operators.kinds import PER_CHANNEL, Kind, conv, diagonal, elementwise, scalar_decay
from torch import Tensor

from captum_ssm.operators import Diagonal, Operator, Shape
from captum_ssm.operators.kernels.rows import Strip
from captum_ssm.testing.operators import check_operator

SHAPE = Shape(2, 5, 4, 1)
CONV, HEADS = conv(0, 1, bias=PER_CHANNEL), scalar_decay()


def larger(found: Any) -> Any:
    """An answer that is a little wrong."""
    if isinstance(found, Strip):
        return found._replace(entries=larger(found.entries))
    if isinstance(found, Tensor):
        return found * 1.001
    if isinstance(found, dict):
        return {name: larger(x) for name, x in found.items()}
    if isinstance(found, tuple):
        return tuple(larger(x) for x in found)
    return lambda *args: larger(found(*args))  # what pulls gradients back


#: A kind, the method that is wrong, and the first clause that follows from it.
WRONG: list[tuple[Kind, str, str]] = [
    *((elementwise, name, name) for name in ("apply", "transpose", "mean_matvec", "mean_rmatvec")),
    *((elementwise, name, name) for name in ("dense", "at")),
    (elementwise, "unit_rows", "rows"), (elementwise, "entries", "dense"),
    (CONV, "affine", "affine"), (CONV, "rows", "rows"), (CONV, "offset", "affine|offset"),
    (CONV, "entries", "dense"), (CONV, "after_band", "dense"),
    (HEADS, "backward", "backward"), (HEADS, "vjp", "vjp"), (HEADS, "entries", "dense"),
    (diagonal(), "entries", "dense"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "method", "clause"), WRONG)
def test_a_wrong_method_is_named(
    kind: Kind, method: str, clause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = kind(SHAPE)
    of = type(case.operator)
    right = getattr(of, method)
    if method == "at":  # an operator, and no answer
        monkeypatch.setattr(of, "at", lambda self, _: self)
    else:
        monkeypatch.setattr(of, method, lambda self, *x, **by: larger(right(self, *x, **by)))
    with pytest.raises(AssertionError, match=rf"^{of.__name__} .*{clause}"):
        case.check()


made = Diagonal.__init__


def overwrites(self: Diagonal, v: Tensor) -> Tensor:
    return v.mul_(self.weight)


def in_single_precision(self: Diagonal, v: Tensor) -> Tensor:
    return (self.weight * v).float()


def by_default(self: Diagonal, v: Tensor) -> Tensor:
    return self.weight * v + torch.zeros(())


def cut_off(self: Diagonal, v: Tensor) -> Tensor:
    return self.weight * v.detach()


def keeps_graphs(self: Diagonal, weight: Tensor, *args: Any) -> None:
    made(self, weight, *args)
    self.weight = weight


def of_no_component(self: Diagonal, heads: Any) -> Operator:
    weight = self.weight[:, :, list(heads)]
    return Diagonal(weight, Shape(*weight.shape), None)


@pytest.mark.parametrize(("methods", "message"), [
    ({"apply": overwrites}, "are unchanged"),
    ({"apply": in_single_precision}, "apply.* is in torch.float32"),
    ({"transpose": by_default}, r"raised|transpose.* on meta"),
    ({"apply": cut_off}, "derivative of apply"),
    ({"__init__": keeps_graphs}, "coefficients are frozen"),
    ({"select": of_no_component}, "select keeps components"),
    ({"restrict": lambda self, _: self}, r"restrict\(\(\)\)"),
    ({"rows": lambda self, *_: torch.zeros(2, 1, 5)}, "rows.* must raise QueryError"),
])  # fmt: skip
def test_a_broken_promise_is_named(
    methods: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = diagonal()(SHAPE)
    case.check()
    for name, method in methods.items():
        monkeypatch.setattr(Diagonal, name, method)
    with pytest.raises(AssertionError, match=message):
        case.check()


def test_matrices_without_coefficients() -> None:
    weight = torch.rand(2, 5, 4, 1)
    matrices = torch.diag_embed(weight.squeeze(-1).mT).double()
    check_operator(lambda: Diagonal(weight, SHAPE), matrices)
    with pytest.raises(AssertionError, match=r"Diagonal \(torch.float32\): apply\(v\) is wrong"):
        check_operator(lambda: Diagonal(weight, SHAPE), 2 * matrices)
