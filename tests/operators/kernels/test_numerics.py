"""Where numbers are extreme: long inputs, underflow, resets, weak decays, large exponents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from operators.kinds import elementwise, wkv
from oracles import kernels as naive
from oracles import relative_error, scan_matrices, times
from torch import Tensor

from captum_ssm.attr.engine.selection import selection_factors
from captum_ssm.attr.engine.states import terms_of
from captum_ssm.operators import WKV, SelectiveScan, Shape
from captum_ssm.operators.kernels import triangle
from captum_ssm.operators.kernels.arithmetic import (
    exponential,
    fading_log_sums,
    fading_log_sums_at_once,
)
from captum_ssm.operators.kernels.odd_even import FadingSteps
from captum_ssm.operators.kernels.truths import all_finite
from captum_ssm.operators.kernels.within_chunk import decayed_grams

# for any draw, of sums over up to 1024 tokens; typical is 3e-7
FLOAT32 = 1e-5
EXACT = 1e-12


# --- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_as_exact_as_the_exponent_allows(dtype: torch.dtype) -> None:
    x = -80 * torch.rand(3, 1001, dtype=dtype) ** 3
    wanted = x.double().exp()
    error = (exponential(x).double() - wanted).abs() / wanted
    # one rounding of the exponent, and one of the power
    assert bool((error <= (1 - 2 * x.double()) * torch.finfo(dtype).eps).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "bad"), [((1,), float("nan")), ((2, 67, 33), -float("inf"))])
def test_one_bad_entry_anywhere_is_found(
    dtype: torch.dtype, size: tuple[int, ...], bad: float
) -> None:
    x = torch.randn(size).to(dtype)
    x.flatten()[0] = torch.finfo(dtype).max
    assert all_finite(x)
    for place in torch.randint(x.numel(), (20,)).tolist():
        found = x.flatten().clone()
        found[place] = bad
        assert not all_finite(found.view(size))
        assert not all_finite(found.view(size).movedim(0, -1))


@pytest.mark.parametrize("log_sums", [fading_log_sums, fading_log_sums_at_once])
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_tokens_that_add_nothing(log_sums: Callable[..., Tensor], tokens: int) -> None:
    """Before the first score there is nothing; later, what there was fades."""
    scores = torch.randn(3, tokens, 4, dtype=torch.float64)
    scores[0, : tokens // 2 + 1] = -torch.inf
    scores[1, tokens // 3 :] = -torch.inf
    scores[2] = -torch.inf
    log_decay = -torch.rand(4, dtype=torch.float64)
    found, wanted = log_sums(scores, log_decay), naive.fading_log_sums(scores, log_decay)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_a_distant_past_keeps_its_size() -> None:
    """What no exponential could hold: one score, fading by 50 with every token."""
    scores = torch.full((1, 100, 1), -torch.inf, dtype=torch.float64)
    scores[:, 0] = 3.0
    found = fading_log_sums(scores, torch.tensor([-50.0], dtype=torch.float64))
    assert torch.equal(found[0, :, 0], 3.0 - 50.0 * torch.arange(100, dtype=torch.float64))


# --- decays --------------------------------------------------------------------------------------


def test_products_of_many_weak_decays_keep_their_precision() -> None:
    logs = torch.full((1, 64, 1), -1e-3) * torch.rand(1, 64, 1)
    one = torch.ones_like(logs)
    found = decayed_grams(logs.exp(), [one.clone()], one).grams[0]
    assert relative_error(found, naive.decays_between(logs.double().exp()[..., 0])) <= 2e-6


def test_what_decays_to_nothing_stays_finite() -> None:
    """No quotient of decays, and no sum of their logarithms, is ever formed."""
    decay, x = torch.full((2, 300, 5), 1e-30), torch.randn(3, 2, 300, 5)
    decay[:, ::7] = 1.0
    found = torch.empty_like(x)
    FadingSteps(lambda part: decay[:, part], decay, False)(x, slice(0, 300), found)
    assert relative_error(found, naive.recurrence(decay.double(), x.double(), False)) <= 1e-6


def drawn(
    batch: int, tokens: int, lags: int, width: int = 3
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Decays with resets and without any decay among them, row factors, column factors by lag."""
    decay = torch.rand(batch, tokens, width, dtype=torch.float64)
    decay = decay.where(torch.rand_like(decay) > 0.1, torch.randint_like(decay, 2))
    rows, *columns = torch.randn(lags + 1, batch, tokens, width, dtype=torch.float64)
    return decay, rows, columns


@pytest.mark.parametrize("rate", [0.01, 0.5])
@pytest.mark.parametrize(
    ("batch", "rows", "first_lag", "lags"),
    [(1, range(640), 0, 1), (3, range(600), -1, 4), (2, range(1100, 1116), 0, 3)],
)
def test_what_is_forgotten(batch: int, rows: range, rate: float, first_lag: int, lags: int) -> None:
    """Entries far from the diagonal are left out where they are below rounding, and no others."""
    tokens = rows.stop
    fading, lasting = drawn(batch, tokens, lags), drawn(batch, tokens, lags)
    fading[0].copy_((-rate * (0.8 + 0.4 * torch.rand_like(fading[0]))).exp())
    lasting[0].clamp_(min=0.999)
    factors, own = [fading, lasting, fading], slice(rows.start, rows.stop)
    blocks = [triangle.block_of(u[:, own], columns, decay) for decay, u, columns in factors]
    reached = range(first_lag, first_lag + lags)
    found = triangle.semiseparable_strip(blocks, batch, tokens, rows, reached).full(tokens)
    wanted = sum(naive.banded_semiseparable(*f, first_lag) for f in factors)[:, own]
    assert relative_error(found, wanted) <= 1e-12
    alone = triangle.semiseparable_strip(blocks[::2], batch, tokens, rows, reached).full(tokens)
    assert bool((alone[:, -1, 0] == 0).all()) == (rate > 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("lags", [(63,), (64,), (100, 95), (140,)])
def test_bands_that_reach_further_back_than_a_pivot_lies(lags: tuple[int, ...]) -> None:
    case = elementwise(Shape(2, 150, 5, 1))
    case.check(rows=[range(64, 70), range(120, 150)], lags=lags)


# --- selective scans -----------------------------------------------------------------------------


def check_everything(operator: SelectiveScan, tolerance: float) -> None:
    alpha = scan_matrices(operator.dt, operator.a, operator.b, operator.c)
    v = torch.randn(operator.shape).to(operator.dt)
    found = {
        "apply": (operator.apply(v), times(alpha, v)),
        "transpose": (operator.transpose(v), times(alpha.mT, v)),
        "dense": (operator.dense(), alpha.mean(1)),
        "channels": (operator.dense(None), alpha),
    }
    for name, (is_, wanted) in found.items():
        assert torch.isfinite(is_).all(), name
        assert relative_error(is_, wanted) <= tolerance, name


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [0.0, 1e-6, 80.0, 1e4])
def test_extreme_steps(step: float, dtype: torch.dtype, tokens: int) -> None:
    """Steps of 80 forget everything before, and their decays underflow, without harm."""
    operator = SelectiveScan(
        torch.full((2, tokens, 3), step, dtype=dtype),
        -torch.rand(3, 4, dtype=dtype) - 0.5,
        torch.randn(2, tokens, 4, dtype=dtype),
        torch.randn(2, tokens, 4, dtype=dtype),
    )
    if step == 0:
        assert not operator.dense(None).any()
        assert not operator.apply(torch.randn(operator.shape).to(dtype)).any()
    check_everything(operator, 1e-12 if dtype == torch.float64 else FLOAT32)


@pytest.mark.parametrize("step", [1e-30, 1e-6, 0.5, 0.6931, 0.6932, 1.0, 30.0, 1e4])
def test_softplus_is_inverted_at_any_size(step: float) -> None:
    """relu(log(e^dt - 1)) is the largest S_Delta that is not negative: log1p without overflow."""
    dt = torch.tensor([[[0.0]], [[step]]])
    one = torch.ones(2, 1, 1)
    (terms,) = [terms_of(SelectiveScan(dt, -torch.ones(1, 1), one, one))]
    assert terms is not None
    factors = selection_factors(terms, [0], simplified=True)
    assert factors is not None
    exact = torch.tensor(step).double()
    wanted = (exact + torch.log1p(-torch.exp(-exact))).relu()
    assert factors.key[0] == 0
    assert abs(float(factors.key[1]) - float(wanted)) <= 2e-7 * max(1.0, step)


# --- WKV -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [200.0, 1e4])
def test_wkv_with_keys_of_any_size(scale: float) -> None:
    """Weights of a row are those of its softmax, as exact as the exponents."""
    case = wkv(Shape(2, 70, 3, 1))
    key, log_decay, bonus = case.coefficients.values()
    wanted = case.matrices(key=scale * key, log_decay=log_decay, bonus=bonus)
    found = WKV(scale * key, log_decay, bonus).dense(None)
    rounding = 40 * torch.finfo(torch.float64).eps * scale * float(key.abs().max())
    assert relative_error(found, wanted) <= rounding
