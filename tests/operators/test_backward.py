"""Gradients of coefficients, against autograd through plain loops over tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from types import SimpleNamespace

import oracles.kernels
import pytest
import torch
from oracles import token_loops
from torch import Tensor
from torch.nn.functional import normalize

from captum_ssm.operators import (
    WKV,
    Chain,
    DeltaProduct,
    DeltaRule,
    Diagonal,
    ElementwiseRecurrence,
    FeedbackRecurrence,
    Operator,
    ScalarDecayHeads,
    SelectiveScan,
    Shape,
    Sum,
    VectorDecayHeads,
)
from captum_ssm.operators.base import Operator as Base
from captum_ssm.operators.combine import DirectSum
from captum_ssm.operators.heads import HeadOperator, ScoredHeads, SoftmaxHeads
from captum_ssm.operators.readings.coefficients import Gradients, live_coefficients, vjp
from captum_ssm.operators.reorder import Permute, Windowed, Windows

BATCH, HEADS, STATES, VALUES = 2, 4, 5, 3
Coefficients = Mapping[str, Tensor]
Plain = Callable[[Coefficients, Tensor], Tensor]


class Case:
    """An operator by its coefficients, and what it makes of values, without the package."""

    def __init__(
        self,
        coefficients: Coefficients,
        make: Callable[[Coefficients], Operator],
        plain: Plain,
        per_head: int = VALUES,
    ) -> None:
        self.coefficients, self.make, self.plain, self.per_head = (
            coefficients,
            make,
            plain,
            per_head,
        )


def randn(*size: int) -> Tensor:
    return torch.randn(BATCH, *size, dtype=torch.float64)


def log_decays(*size: int) -> Tensor:
    """Of decays between 0 and 1, some of them so small that nothing is left."""
    x = torch.rand(BATCH, *size, dtype=torch.float64)
    return x.log().where(torch.rand_like(x) > 0.1, -1e4)


def diagonal(*broadcast: int) -> Callable[[int], Case]:
    def build(tokens: int) -> Case:
        shape = Shape(BATCH, tokens, HEADS, VALUES)
        size = [full if keep else 1 for full, keep in zip(shape, broadcast, strict=True)]
        return Case(
            {"weight": torch.randn(size, dtype=torch.float64)},
            lambda z: Diagonal(z["weight"], shape, "gate"),
            lambda z, v: z["weight"] * v,
        )

    return build


def elementwise(tokens: int) -> Case:
    def plain(z: Coefficients, v: Tensor) -> Tensor:
        return oracles.kernels.recurrence(z["decay"], v[None, ..., 0], False)[0, ..., None]

    decay = log_decays(tokens, HEADS).exp()
    return Case({"decay": decay}, lambda z: ElementwiseRecurrence(z["decay"]), plain, 1)


def feedback(tokens: int) -> Case:
    fed = torch.randn(HEADS, VALUES, VALUES, dtype=torch.float64)

    def plain(z: Coefficients, v: Tensor) -> Tensor:
        state = heard = torch.zeros_like(v[:, 0])
        out = []
        for t in range(v.shape[1]):
            state = z["decay"][:, t] * state + z["write"][:, t] * (v[:, t] + heard)
            out.append(z["gate"][:, t] * state)
            heard = torch.einsum("hpq,bhq->bhp", fed.to(v), out[-1])
        return torch.stack(out, 1)

    given = {name: torch.rand_like(randn(tokens, HEADS, VALUES)) for name in ("decay", "gate")}
    given["write"] = 0.2 * randn(tokens, HEADS, VALUES)
    return Case(
        given,
        lambda z: FeedbackRecurrence(z["decay"], z["write"], z["gate"], fed.to(z["gate"])),
        plain,
    )


def wkv(tokens: int) -> Case:
    log_decay, bonus = -torch.rand(HEADS).double(), torch.randn(HEADS).double()

    def plain(z: Coefficients, v: Tensor) -> Tensor:
        i, j = torch.arange(tokens)[:, None, None], torch.arange(tokens)[:, None]
        scores = (i - 1 - j) * log_decay + z["key"][:, None]  # (B, i, j, H)
        scores = scores.where(i != j, bonus + z["key"][:, None]).where(j <= i, -torch.inf)
        return torch.einsum("bijh,bjhp->bihp", scores.softmax(2), v)

    return Case(
        {"key": 3 * randn(tokens, HEADS)},
        lambda z: WKV(z["key"], log_decay.to(z["key"]), bonus.to(z["key"])),
        plain,
        1,
    )


def scan(groups: int | None) -> Callable[[int], Case]:
    def build(tokens: int) -> Case:
        vectors = (tokens, STATES) if groups is None else (tokens, groups, STATES)
        given = {
            "dt": 0.3 * randn(tokens, HEADS).exp() * (randn(tokens, HEADS) > -1),
            "B": randn(*vectors),
            "C": randn(*vectors),
        }
        a = -randn(HEADS, STATES)[0].exp()

        def plain(z: Coefficients, v: Tensor) -> Tensor:
            matrices = oracles.kernels.selective_scan(z["dt"], a, z["B"], z["C"])
            return torch.einsum("bhij,bjhp->bihp", matrices, v)

        return Case(
            given, lambda z: SelectiveScan(z["dt"], a.to(z["dt"]), z["B"], z["C"]), plain, 1
        )

    return build


def by_loop(loop: token_loops.Loop, **constants: Tensor | None) -> Plain:
    def plain(z: Coefficients, v: Tensor) -> Tensor:
        return loop(SimpleNamespace(**{**constants, **z}, shape=Shape(*v.shape)), v)

    return plain


def scalar_decay(groups: int, scaled: bool) -> Callable[[int], Case]:
    def build(tokens: int) -> Case:
        given = {
            "query": randn(tokens, groups, STATES),
            "key": randn(tokens, groups, STATES),
            "log_decay": log_decays(tokens, HEADS),
            **({"scale": randn(tokens, HEADS).exp()} if scaled else {}),
        }
        return Case(
            given,
            lambda z: ScalarDecayHeads(
                z["query"], z["key"], z["log_decay"], z.get("scale"), VALUES
            ),
            by_loop(token_loops.scalar_decay, scale=None),
        )

    return build


def vector_decay(has_bonus: bool) -> Callable[[int], Case]:
    def build(tokens: int) -> Case:
        bonus = randn(HEADS, STATES)[0] if has_bonus else None
        given = {
            "query": randn(tokens, HEADS, STATES),
            "key": randn(tokens, HEADS, STATES),
            "log_decay": log_decays(tokens, HEADS, STATES),
        }

        def make(z: Coefficients) -> Operator:
            own = None if bonus is None else bonus.to(z["key"])
            return VectorDecayHeads(z["query"], z["key"], z["log_decay"], VALUES, own)

        return Case(given, make, by_loop(token_loops.vector_decay, bonus=bonus))

    return build


def delta_rule(*decay: int, erase: bool = False, steps: bool = False) -> Callable[[int], Case]:
    def build(tokens: int) -> Case:
        own = {
            **({"erase": normalize(randn(tokens, HEADS, STATES), dim=-1)} if erase else {}),
            **({"erase_step": randn(tokens, HEADS, STATES).sigmoid()} if steps else {}),
        }
        given = {
            "query": randn(tokens, HEADS, STATES),
            "key": normalize(randn(tokens, HEADS, STATES), dim=-1),
            "beta": randn(tokens, HEADS).sigmoid(),
            **({"log_decay": log_decays(tokens, *decay)} if decay else {}),
            **own,
        }
        return Case(
            given,
            lambda z: DeltaRule(
                z["query"],
                z["key"],
                z["beta"],
                z.get("log_decay"),
                VALUES,
                erase=z.get("erase"),
                erase_step=z.get("erase_step"),
            ),
            by_loop(token_loops.delta_rule, log_decay=None),
        )

    return build


def softmax(has_mask: bool) -> Callable[[int], Case]:
    def build(tokens: int) -> Case:
        hidden = torch.ones(BATCH, 1, tokens, tokens, dtype=torch.bool).triu(1)
        if has_mask:
            hidden[1, :, :, :1] = True  # the first token is padding, and reads nothing
        else:
            hidden[:] = False

        def probabilities(query: Tensor, key: Tensor) -> Tensor:
            scores = (0.7 * query @ key.mT).masked_fill(hidden, -1e9)
            return scores.softmax(-1).masked_fill(hidden, 0)

        def plain(z: Coefficients, v: Tensor) -> Tensor:
            out = torch.zeros_like(v)
            for b, h, i in product(range(BATCH), range(HEADS), range(tokens)):
                read = [j for j in range(tokens) if not hidden[b, 0, i, j]]
                if read:
                    weights = (0.7 * z["key"][b, read, h] @ z["query"][b, i, h]).exp()
                    out[b, i, h] = (weights / weights.sum()) @ v[b, read, h]
            return out

        given = {name: randn(tokens, HEADS, STATES) for name in ("query", "key")}
        return Case(
            given,
            lambda z: SoftmaxHeads(z["query"], z["key"], probabilities, 0.7, VALUES),
            plain,
        )

    return build


def delta_product(decays: bool) -> Callable[[int], Case]:
    writes = (1, 0, 0, 2)

    def build(tokens: int) -> Case:
        given = {
            "query": randn(tokens, HEADS, STATES),
            "key": normalize(randn(tokens, 3, HEADS, STATES), dim=-1),
            "beta": randn(tokens, 3, HEADS).sigmoid(),
            **({"log_decay": log_decays(tokens, HEADS)} if decays else {}),
        }

        def make(z: Coefficients) -> Operator:
            rows = z["query"], z["key"], z["beta"], z.get("log_decay")
            return DeltaProduct(*rows, writes, VALUES)

        return Case(given, make, by_loop(token_loops.delta_product, log_decay=None, writes=writes))

    return build


def scores(reads: Callable[[int], Case], forgets: bool, padded: bool) -> Callable[[int], Case]:
    """Softmax attention by the matrices of another operator."""

    def build(tokens: int) -> Case:
        inner = reads(tokens)
        given = dict(inner.coefficients)
        if forgets:
            given["forget"] = randn(tokens, HEADS).sigmoid().log()
        mask = torch.ones(BATCH, tokens, dtype=torch.bool)
        if padded:
            mask[1, : tokens // 2] = False

        def make(z: Coefficients) -> Operator:
            own = inner.make({name: x for name, x in z.items() if name != "forget"})
            assert isinstance(own, HeadOperator)
            return ScoredHeads(own, z.get("forget"), VALUES, mask if padded else None)

        def plain(z: Coefficients, v: Tensor) -> Tensor:
            eye = torch.eye(tokens, dtype=torch.float64)[:, None].expand(BATCH, -1, HEADS, -1)
            found = inner.plain(z, eye)  # (B, i, H, j)
            rows = []
            for i in range(tokens):
                row = [found[:, i, :, j] for j in range(i + 1)]
                if forgets:
                    row = [x + z["forget"][:, j + 1 : i + 1].sum(1) for j, x in enumerate(row)]
                weights = torch.stack(row, -1).exp() * mask[:, None, : i + 1]  # (B, H, j)
                weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
                out = torch.einsum("bhj,bjhp->bhp", weights, v[:, : i + 1])
                rows.append(out * mask[:, i, None, None])
            return torch.stack(rows, 1)

        return Case(given, make, plain)

    return build


CASES = {
    "Diagonal": diagonal(1, 1, 1, 1),
    "Diagonal of heads": diagonal(1, 1, 1, 0),
    "Diagonal of channels": diagonal(0, 0, 1, 1),
    "ElementwiseRecurrence": elementwise,
    "FeedbackRecurrence": feedback,
    "WKV": wkv,
    "SelectiveScan": scan(None),
    "SelectiveScan in groups": scan(2),
    "ScalarDecayHeads": scalar_decay(HEADS, scaled=False),
    "ScalarDecayHeads in groups": scalar_decay(2, scaled=True),
    "ScalarDecayHeads in one group": scalar_decay(1, scaled=True),
    "VectorDecayHeads": vector_decay(has_bonus=False),
    "VectorDecayHeads with a bonus": vector_decay(has_bonus=True),
    "SoftmaxHeads": softmax(has_mask=False),
    "SoftmaxHeads with a mask": softmax(has_mask=True),
    "DeltaRule": delta_rule(),
    "DeltaRule with a decay": delta_rule(HEADS),
    "DeltaRule with a decay of channels": delta_rule(HEADS, STATES),
    "DeltaRule of two keys": delta_rule(HEADS, STATES, erase=True, steps=True),
    "DeltaRule of two keys, a decay": delta_rule(HEADS, erase=True, steps=True),
    "DeltaRule of two keys, no decay": delta_rule(erase=True, steps=True),
    "DeltaRule asked by another key": delta_rule(HEADS, erase=True),
    "DeltaProduct": delta_product(decays=False),
    "DeltaProduct with a decay": delta_product(decays=True),
    "ScoredHeads": scores(scalar_decay(HEADS, scaled=False), forgets=True, padded=False),
    "ScoredHeads by delta rules": scores(
        delta_rule(erase=True, steps=True), forgets=False, padded=True
    ),
}


def wanted_gradients(
    plain: Plain, coefficients: Coefficients, v: Tensor, seed: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {name: x.clone().requires_grad_() for name, x in coefficients.items()}
    v = v.clone().requires_grad_()
    found = torch.autograd.grad(
        plain(leaves, v), [v, *leaves.values()], seed, materialize_grads=True
    )
    return found[0], dict(zip(leaves, found[1:], strict=True))


def assert_close(found: Tensor, wanted: Tensor, name: str, tolerance: float) -> None:
    assert found.shape == wanted.shape, name
    assert oracles.relative_error(found, wanted) <= tolerance or torch.equal(found, wanted), name


@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 70])
@pytest.mark.parametrize("kind", CASES)
def test_gradients_are_those_of_loops(kind: str, tokens: int) -> None:
    case = CASES[kind](tokens)
    operator = case.make(case.coefficients)
    v, seed = randn(tokens, HEADS, case.per_head), randn(tokens, HEADS, case.per_head)
    of_values, of_coefficients = operator.backward(v, seed)
    wanted, each = wanted_gradients(case.plain, case.coefficients, v, seed)
    assert_close(of_values, wanted, "values", 1e-11)
    assert set(of_coefficients) == set(each) <= set(operator.roles)
    for name, x in each.items():
        # with few tokens a decay has nothing to act on, and 0 is found but for rounding
        if float(x.abs().max()) < 1e-12:
            assert float(of_coefficients[name].abs().max()) < 1e-10, name
        else:
            assert_close(of_coefficients[name], x, name, 1e-10)


@pytest.mark.parametrize("kind", CASES)
def test_gradients_in_single_precision(kind: str) -> None:
    tokens = 200
    case = CASES[kind](tokens)
    v, seed = randn(tokens, HEADS, case.per_head), randn(tokens, HEADS, case.per_head)
    single = case.make({name: x.float() for name, x in case.coefficients.items()})
    double = case.make({name: x.float().double() for name, x in case.coefficients.items()})
    of_values, of_coefficients = single.backward(v.float(), seed.float())
    wanted, each = double.backward(v.float().double(), seed.float().double())
    assert of_values.dtype == torch.float32
    assert_close(of_values, wanted, "values", 1e-5)
    for name, x in each.items():
        assert_close(of_coefficients[name], x, name, 1e-4)


@pytest.mark.parametrize("kind", CASES)
def test_other_coefficients_take_the_place_of_some(kind: str) -> None:
    case, other = CASES[kind](20), CASES[kind](20)
    operator, v = case.make(case.coefficients), randn(20, HEADS, case.per_head)
    for name in case.coefficients:
        mixed = {**case.coefficients, name: other.coefficients[name]}
        moved = operator.at({name: other.coefficients[name]})
        assert type(moved) is type(operator)
        assert moved.component == operator.component and moved.shape == operator.shape
        torch.testing.assert_close(moved.apply(v), case.plain(mixed, v))


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("kind", CASES)
def test_a_stack_is_one_after_the_other(kind: str, tokens: int) -> None:
    """Of several values and coefficients, steps being those of the operator."""
    case, others = CASES[kind](tokens), [CASES[kind](tokens) for _ in range(3)]
    operator, roles = case.make(case.coefficients), case.make(case.coefficients).roles
    v, seed = torch.randn(2, 3, *operator.shape, dtype=torch.float64)
    for names in ([], [name for name in case.coefficients if roles[name] != "step"]):
        moved = {n: torch.stack([other.coefficients[n] for other in others]) for n in names}
        out, back = operator.vjp(v, moved)
        of_values, found = back(seed)
        wanted: dict[str, Tensor] = {}
        for i in range(3):
            here = {**case.coefficients, **{n: x[i] for n, x in moved.items()}}
            torch.testing.assert_close(out[i], case.plain(here, v[i]))
            own, each = wanted_gradients(case.plain, here, v[i], seed[i])
            torch.testing.assert_close(of_values[i], own)
            wanted = {n: x + wanted.get(n, 0) for n, x in each.items()}
        torch.testing.assert_close({n: found[n] for n in wanted}, wanted)


def every_class(base: type[Base]) -> set[type[Base]]:
    found = set(base.__subclasses__())
    return found.union(*map(every_class, found))


def test_every_class_whose_coefficients_have_roles_is_held_to_a_loop() -> None:
    held = {type(build(3).make(build(3).coefficients)) for build in CASES.values()}
    own = {c for c in every_class(Operator) if c.__module__.startswith("captum_ssm.")}
    assert {c for c in own if c.backward is not Operator.backward} == held
    assert {c for c in own if c.roles} <= held


def test_a_part_between_others_is_reached_through_all_that_is_around_it() -> None:
    """Chains, sums, operators side by side, windows and other orders of the tokens."""
    tokens = 6
    shape, one = Shape(BATCH, tokens, HEADS, 1), Shape(2 * BATCH, 3, HEADS, 1)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    windows = Windows(torch.tensor([[4, 0, 2], [1, 5, 3]]))
    leaves = [randn(tokens, HEADS, 1).requires_grad_() for _ in range(3)]
    inside = torch.randn(one, dtype=torch.float64, requires_grad=True)
    left, right = (x.requires_grad_() for x in (randn(tokens, 1), randn(tokens, HEADS - 1)))
    gates = [Diagonal(x, shape, "gate") for x in leaves]
    operator = Chain(
        gates[0],
        Sum(Chain(Permute(order, shape), gates[1]), Diagonal(torch.ones(1, 1, 1, 1), shape)),
        DirectSum(ElementwiseRecurrence(left), ElementwiseRecurrence(right)),
        Windowed(Diagonal(inside, one, "gate"), windows),
        gates[2],
    )

    def plain(v: Tensor) -> Tensor:
        x = (leaves[2] * v)[:, [[4, 0, 2], [1, 5, 3]]].flatten(0, 1) * inside
        back = torch.empty(BATCH, tokens, HEADS, 1, dtype=torch.float64)
        back[:, [4, 0, 2, 1, 5, 3]] = x.view(BATCH, tokens, HEADS, 1)
        decay = torch.cat([left, right], 2)
        x = oracles.kernels.recurrence(decay, back[None, ..., 0], False)[0, ..., None]
        return leaves[0] * ((leaves[1] * x)[:, order] + x)

    v, seed = randn(tokens, HEADS, 1).requires_grad_(), randn(tokens, HEADS, 1)
    torch.testing.assert_close(operator.apply(v.detach()), plain(v).detach())
    found: Gradients = {}
    out, back = vjp(operator, v.detach()[None], {}, torch.ones(1, 1, 1, 1, 1))
    of_values = back(seed[None], found)[0]
    torch.testing.assert_close(out[0], plain(v).detach())
    live = live_coefficients(operator)
    told = [leaves[0], leaves[1], left, right, inside, leaves[2]]
    assert all(x is y for x, y in zip(live.values(), told, strict=True))
    wanted = torch.autograd.grad(plain(v), [v, *live.values()], seed)
    torch.testing.assert_close(of_values, wanted[0])
    for (leaf, name), gradient in zip(live, wanted[1:], strict=True):
        torch.testing.assert_close(found[leaf][name], gradient)
