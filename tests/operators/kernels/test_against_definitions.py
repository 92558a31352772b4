"""Every kernel against its naive version, over drawn sizes and decays, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import kernels as naive
from oracles import token_loops
from torch import Tensor

from captum_ssm.operators.kernels import chunk_tree, chunks, pivot_strip, pivot_tree, ut_transform
from captum_ssm.operators.kernels.arithmetic import fading_log_sums
from captum_ssm.operators.kernels.attention_backward import attend
from captum_ssm.operators.kernels.bands import convolve_band
from captum_ssm.operators.kernels.chunks import Chunk, ChunkSteps, runs_of_chunks
from captum_ssm.operators.kernels.odd_even import FadingSteps
from captum_ssm.operators.kernels.pivot_strip import Fades, strip_by_pivot
from captum_ssm.operators.kernels.portions import Heads
from captum_ssm.operators.kernels.rows import Strip
from captum_ssm.operators.kernels.scan_backward import selective_scan
from captum_ssm.operators.kernels.token_loop import ScanSteps
from captum_ssm.operators.kernels.within_chunk import Decays, decayed

SEEDS = st.integers(0, 2**31)
TOKENS = st.integers(1, 21)
COUNTS = st.integers(1, 3)
drawn = settings(max_examples=20)


def randn(*size: int) -> Tensor:
    """Normal numbers, a tenth of them zero."""
    x = torch.randn(*size, dtype=torch.float64)
    return x.where(torch.rand_like(x) > 0.1, 0)


def decays(*size: int) -> Tensor:
    """Numbers between 0 and 1, a fifth of them at either end."""
    x = torch.rand(*size, dtype=torch.float64)
    return x.where(torch.rand_like(x) > 0.2, torch.randint_like(x, 2))


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def in_order(tokens: int, size: int, backwards: bool) -> list[slice]:
    """So many tokens at a time, as a state runs."""
    parts = [slice(t, min(t + size, tokens)) for t in range(0, tokens, size)]
    return parts[::-1] if backwards else parts


@contextmanager
def small_chunks() -> Iterator[None]:
    """Chunks of 4 tokens, two of a head held at a time, tiles of a few elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_tree, "CHUNK", 4)
        patch.setattr(chunk_tree, "_TILE_ELEMENTS", 20)
        patch.setattr(chunks, "_HELD", 16)
        yield


@drawn
@given(SEEDS, TOKENS, st.integers(1, 21), COUNTS, COUNTS, st.booleans())
def test_odd_even(
    seed: int, tokens: int, size: int, stack: int, batch: int, transposed: bool
) -> None:
    torch.manual_seed(seed)
    decay, x = decays(batch, tokens, 3), randn(stack, batch, tokens, 3)
    steps = FadingSteps(lambda part: decay[:, part], decay, transposed)
    found = torch.empty_like(x)
    for part in in_order(tokens, size, transposed):
        steps(x[:, :, part], part, found[:, :, part])
    assert_close(found, naive.recurrence(decay, x, transposed))


@drawn
@given(SEEDS, TOKENS, st.integers(1, 9), COUNTS, COUNTS, st.sampled_from([0, 1, 2, 4]))
def test_token_loop(seed: int, tokens: int, size: int, stack: int, batch: int, groups: int) -> None:
    """``groups`` of heads share keys and queries, 4 sharing none; 0 where all heads share them."""
    torch.manual_seed(seed)
    dt = randn(batch, tokens, 4).exp() * (torch.rand(batch, tokens, 4) > 0.2)
    a = -randn(4, 3).exp()
    a[0] = 0
    vectors = (batch, tokens, groups, 3) if groups else (batch, tokens, 3)
    b, c = randn(*vectors), randn(*vectors)
    scan = SimpleNamespace(dt=dt, a=a, b=b, c=c)
    matrices, x = naive.selective_scan(dt, a, b, c), randn(stack, batch, tokens, 4)
    for transposed in (False, True):
        steps = ScanSteps(scan, stack, min(size, tokens), transposed)
        found = torch.empty_like(x)
        for part in in_order(tokens, 2 * size, transposed):
            steps(x[:, :, part], part, found[:, :, part])
        wanted = torch.einsum("bhij,sbjh->sbih", matrices.mT if transposed else matrices, x)
        assert_close(found, wanted)


class FadingHeads:
    """Heads whose states fade apart, by their chunks and as matrices.

    Args:
        groups: of heads that share what they read and write. None: factors of their own.
    """

    def __init__(self, batch: int, tokens: int, groups: int | None) -> None:
        self.batch, self.tokens, self.groups = batch, tokens, groups
        shared = 4 if groups is None else groups
        states = 3 if groups is None else 1
        self.decay = decays(batch, 4, tokens, states)
        self.reads, self.writes = (randn(batch, shared, tokens, 3) for _ in range(2))

    def each(self) -> tuple[Tensor, Tensor, Tensor]:
        """Decays, reads and writes of every head, (B, H, T, N)."""
        vectors = (x.repeat_interleave(4 // x.shape[1], 1) for x in (self.reads, self.writes))
        return self.decay.expand(-1, -1, -1, 3), *vectors

    def matrices(self) -> Tensor:
        return naive.semiseparable(*self.each())

    def chunk(self, part: slice, length: int) -> Chunk:
        length = min(length, part.stop - part.start)
        decay, reads, writes = (
            torch.unflatten(x[:, :, part], 2, (-1, length)) for x in self.each()
        )
        since = decay.cumprod(-2)
        until = torch.cat(
            [decay.flip(-2).cumprod(-2).flip(-2)[..., 1:, :], decay[..., :1, :] * 0 + 1], -2
        )
        inner = naive.semiseparable(decay, reads, writes)
        total = since[..., -1, :, None]  # (B, H, C, N, 1)
        if self.groups is None:
            return Chunk(part, inner, reads * since, writes * until, total)
        common = (
            torch.unflatten(x[:, :, part], 2, (-1, length)) for x in (self.reads, self.writes)
        )
        faded = since[..., :1], until[..., :1]
        return Chunk(part, inner, *common, total[..., :1, :], faded)


#: Every number of groups is tried: few draws would leave one out now and then.
of_groups = pytest.mark.parametrize("groups", [None, 1, 2, 4])
fewer = settings(max_examples=8)


@fewer
@given(SEEDS, TOKENS, st.integers(1, 8), COUNTS, COUNTS, st.booleans())
@of_groups
def test_chunks(
    groups: int | None, seed: int, tokens: int, length: int, stack: int, batch: int, back: bool
) -> None:
    torch.manual_seed(seed)
    heads = FadingHeads(batch, tokens, groups)
    matrices, v = heads.matrices(), randn(stack, batch, tokens, 4, 2)
    with small_chunks():
        steps = ChunkSteps(heads.chunk, length, back)
        found = chunks.run(steps, v, slice(0, tokens), length, back)
    assert_close(found, torch.einsum("bhij,sbjhp->sbihp", matrices.mT if back else matrices, v))


@fewer
@given(SEEDS, TOKENS, COUNTS, st.data())
@of_groups
def test_chunk_tree(
    groups: int | None, seed: int, tokens: int, batch: int, data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    start = data.draw(st.integers(0, tokens - 1))
    rows = range(start, data.draw(st.integers(start + 1, tokens)))
    heads = FadingHeads(batch, tokens, groups)
    matrices, left, right = heads.matrices(), *randn(2, batch, 4, tokens, 2)
    shares = torch.einsum("bhip,bhij,bhjp->bhij", left, matrices, right)[..., : rows.stop]
    one_channel = left[..., :1] * matrices * right[..., :1].mT
    out = torch.zeros(1, batch, len(rows), rows.stop, dtype=torch.float64)
    with small_chunks():
        every = chunk_tree.chunks_up_to(heads.chunk, range(tokens), batch * 4)
        whole = chunk_tree.assemble(every, torch.zeros_like(matrices))
        asked = chunk_tree.chunks_up_to(heads.chunk, rows, batch * 4)
        sums = chunk_tree.sums_over_channels(asked, left, [right], out.clone())
        weighed = [chunk_tree.weigh(chunk, left[..., :1], right[..., :1]) for chunk in asked]
        total = chunk_tree.sum_over_heads(weighed, out[0].clone())
        if groups is not None:
            values = (x.transpose(1, 2) for x in (heads.reads, heads.writes, left, right))
            query, key, above, aside = values
            decay = heads.decay[..., 0].transpose(1, 2)
            grouped = chunk_tree.sums_over_groups(decay, query, key, above, [aside], out.clone())
            assert_close(grouped[0], shares.sum(1)[:, rows.start : rows.stop])
            assert_close(
                chunk_tree.decay_matrices(decay), naive.decays_between(heads.decay[..., 0])
            )
    assert_close(whole, matrices)
    assert_close(sums[0], shares.sum(1)[:, rows.start : rows.stop])
    assert_close(total, one_channel.sum(1)[:, rows.start : rows.stop, : rows.stop])


@drawn
@given(SEEDS, TOKENS, COUNTS, COUNTS, st.integers(-3, 3), st.data())
def test_pivot_tree(
    seed: int, tokens: int, batch: int, lags: int, first_lag: int, data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    start = data.draw(st.integers(0, tokens - 1))
    rows = range(start, data.draw(st.integers(start + 1, tokens)))
    wanted, blocks = 0.0, []
    for width in (1, 3):
        decay, above = decays(batch, tokens, width), randn(batch, tokens, width)
        columns = [randn(batch, tokens, width) for _ in range(lags)]
        wanted = wanted + naive.banded_semiseparable(decay, above, columns, first_lag)
        until = slice(rows.stop)
        copies = [column[:, until].clone() for column in columns]
        blocks.append((decay[:, until].clone(), above[:, start : rows.stop].clone(), copies))
    found = pivot_tree.semiseparable_strip(blocks, batch, tokens, rows, first_lag)
    assert_close(found.whole(tokens), wanted[:, rows.start : rows.stop])


class Recurrence:
    """What a recurrence offers to be cut at a pivot; C, B and decays are (B, L, H, N)."""

    def __init__(self, carry: Tensor, read: Tensor, write: Tensor) -> None:
        self.carry, self.read, self.write = carry, read, write
        self.shape = (*carry.shape[:3], 1)

    def cut(self, tokens: slice) -> Recurrence:
        return Recurrence(*(x[:, tokens] for x in (self.carry, self.read, self.write)))

    def strip_of_product(self, left: Tensor, band: dict[int, Tensor], rows: range) -> Strip:
        none = torch.zeros_like(left)
        lags = range(min(band), max(band) + 1)
        columns = [(band.get(lag, none) * self.write).flatten(2) for lag in lags]
        above = (left * self.read).flatten(2)
        whole = naive.banded_semiseparable(self.carry.flatten(2), above, columns, lags[0])
        return Strip(whole[:, rows.start : rows.stop], rows, range(self.shape[1]))

    def by_memory(self, tokens: slice) -> Tensor:
        return self.carry[:, tokens].sum((0, 1, 3)).argsort()

    def fades(self, token: int, tokens: int, heads: Heads) -> Fades:
        between = naive.decays_between(self.carry[:, :tokens].permute(0, 2, 3, 1))
        both = between + between.mT - between * torch.eye(tokens)
        products = both[..., token].permute(0, 3, 2, 1)  # (B, T, N, H)
        return lambda part: products[:, part][..., heads].clone()

    def reads(self, tokens: slice, heads: Heads) -> Tensor:
        return self.read[:, tokens, heads].mT

    def writes(self, tokens: slice, heads: Heads) -> Tensor:
        return self.write[:, tokens, heads].mT

    def entering(self, values: Tensor) -> Tensor:
        return values


@drawn
@given(SEEDS, st.integers(2, 21), COUNTS, st.sets(st.integers(-3, 4), min_size=1), st.data())
def test_pivot_strip(
    seed: int, tokens: int, batch: int, lags: set[int], data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    start = data.draw(st.integers(1, tokens - 1))
    rows = range(start, data.draw(st.integers(start + 1, tokens)))
    carry, read, write = decays(batch, tokens, 3, 2), *randn(2, batch, tokens, 3, 2)
    whole = Recurrence(carry, read, write)
    left, band = randn(*whole.shape), {lag: randn(*whole.shape) for lag in lags}
    wanted = whole.strip_of_product(left, band, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pivot_strip, "_COLUMNS", data.draw(st.integers(1, 9)))
        patch.setattr(pivot_strip, "_ELEMENTS", 40)
        found = strip_by_pivot(whole, left, band, rows)
    assert found.rows == rows
    assert_close(found.whole(tokens), wanted.entries)


@drawn
@given(SEEDS, TOKENS, COUNTS, COUNTS, st.booleans())
def test_within_chunk(seed: int, tokens: int, batch: int, kinds: int, shared: bool) -> None:
    """``shared``: one decay for all key channels."""
    torch.manual_seed(seed)
    size = (batch, 2, tokens, 4)
    decay = decays(*size[:3], 1 if shared else 4)
    rows, columns = [randn(*size) for _ in range(kinds)], randn(*size)
    found = decayed(decay.log(), rows, columns)
    each, since = decay.expand(size), decay.cumprod(-2)
    for row, gram, read in zip(rows, found.grams, found.reads, strict=True):
        assert_close(gram, naive.semiseparable(each, row, columns))
        assert_close(read, row * since)
    until = naive.decays_between(each.mT)[..., -1, :].mT
    assert_close(found.writes, columns * until)
    assert_close(found.total, since[..., -1:, :])
    products = Decays(decay[..., 0])
    assert_close(products.between.tril(), naive.decays_between(decay[..., 0]))


@drawn
@given(SEEDS, TOKENS, st.integers(1, 8), COUNTS, st.sampled_from([None, 1, 3]), st.booleans())
def test_ut_transform(
    seed: int, tokens: int, length: int, batch: int, decayed_by: int | None, two_keys: bool
) -> None:
    """Chunks as matrices and by corrected values; no decay, one per head, or per key channel."""
    torch.manual_seed(seed)
    query, key = randn(2, batch, tokens, 2, 3)
    beta = torch.rand(batch, tokens, 2, 1, dtype=torch.float64) * (torch.rand(2, 1) > 0.2)
    logs = None if decayed_by is None else decays(batch, tokens, 2, decayed_by).log()
    erase, step = randn(batch, tokens, 2, 3) / 2, torch.rand(batch, tokens, 2, 3).double()
    loop = SimpleNamespace(
        query=query, key=key, beta=beta[..., 0], shape=(batch, tokens, 2, 5), erase=erase,
        erase_step=step if two_keys else None,
        log_decay=None if logs is None else logs.squeeze(-1) if decayed_by == 1 else logs,
    )  # fmt: skip
    matrices, v = token_loops.matrices(token_loops.delta_rule, loop), randn(batch, tokens, 2, 5)

    def corrected_of(part: slice, length: int) -> ut_transform.Corrected:
        cut = [
            None if x is None else chunks.in_chunks(x[:, part], length)
            for x in (query, beta * key, erase, step * erase if two_keys else None, logs)
        ]
        return ut_transform.corrected(*cut)

    with small_chunks():
        pieces = list(runs_of_chunks(range(tokens), length, batch * 2))
        whole = chunk_tree.assemble(
            [corrected_of(part, length).chunk(part) for part in pieces], torch.zeros_like(matrices)
        )
        for transposed in (False, True):
            steps = ut_transform.CorrectedSteps(corrected_of, length, transposed)
            found = chunks.run(steps, v, slice(0, tokens), length, transposed)
            by_matrix = matrices.mT if transposed else matrices
            assert_close(found, torch.einsum("bhij,bjhp->bihp", by_matrix, v))
    assert_close(whole, matrices)


@drawn
@given(SEEDS, st.integers(1, 40), COUNTS)
def test_inverses_of_triangles(seed: int, side: int, batch: int) -> None:
    torch.manual_seed(seed)
    below = randn(batch, 2, side, side).tril(-1) / side**0.5
    assert_close(ut_transform.unit_lower_inverse(below), naive.unit_lower_inverse(below))


def assert_same_gradients(found: Tensor, wanted: Tensor, leaves: Sequence[Tensor]) -> None:
    seed = randn(*found.shape)
    pair = (torch.autograd.grad(x, leaves, seed, materialize_grads=True) for x in (found, wanted))
    for one, other in zip(*pair, strict=True):
        assert_close(one, other)


@pytest.mark.slow
@drawn
@given(SEEDS, st.integers(1, 70), COUNTS)
def test_scan_backward(seed: int, tokens: int, batch: int) -> None:
    torch.manual_seed(seed)
    dt, a = randn(batch, 4, tokens).exp() * (torch.rand(batch, 4, tokens) > 0.2), -randn(4, 3).exp()
    x, b, c = randn(batch, 4, tokens), randn(batch, 3, tokens), randn(batch, 3, tokens)
    leaves = [t.requires_grad_() for t in (x, dt, a, b, c)]
    found = selective_scan(x, dt, a, b, c)
    assert isinstance(found, Tensor)
    matrices = naive.selective_scan(dt.mT, a, b.mT, c.mT)
    wanted = torch.einsum("bhij,bhj->bhi", matrices, x)
    assert_close(found, wanted)
    assert_same_gradients(found, wanted, leaves)


@drawn
@given(SEEDS, st.integers(1, 40), COUNTS, st.booleans())
def test_attention_backward(seed: int, tokens: int, batch: int, has_bonus: bool) -> None:
    torch.manual_seed(seed)
    query, key = randn(2, batch, tokens, 2, 3).requires_grad_()
    logs, v = decays(batch, tokens, 2, 3).log().requires_grad_(), randn(batch, tokens, 2, 5)
    bonus = randn(2, 3) if has_bonus else None
    leaves = [query, key, logs, v.requires_grad_()]
    found = attend(*(x[:, :, None] for x in (query, key, v)), logs, bonus)[:, :, 0]
    plain = SimpleNamespace(query=query, key=key, log_decay=logs, bonus=bonus)
    wanted = token_loops.vector_decay(plain, v)
    assert_close(found, wanted)
    assert_same_gradients(found, wanted, leaves)


LAGS = st.sets(st.integers(-4, 9), min_size=1, max_size=4)


@drawn
@given(SEEDS, TOKENS, COUNTS, LAGS, LAGS)
def test_bands(seed: int, tokens: int, batch: int, after: set[int], before: set[int]) -> None:
    torch.manual_seed(seed)
    taps = {lag: randn(3, 2) for lag in after}
    band = {lag: randn(batch, tokens, 3, 1) for lag in before}
    found = naive.band_matrix(convolve_band(taps, band, tokens), tokens)
    every = {lag: weight[None, None] for lag, weight in taps.items()}
    wanted = naive.band_matrix(every, tokens) @ naive.band_matrix(band, tokens)
    assert_close(found, wanted)


@drawn
@given(SEEDS, TOKENS, COUNTS)
def test_log_sums(seed: int, tokens: int, batch: int) -> None:
    torch.manual_seed(seed)
    scores, log_decay = decays(batch, tokens, 4).log() * 50, decays(4).clamp_min(1e-3).log()
    assert_close(fading_log_sums(scores, log_decay), naive.fading_log_sums(scores, log_decay))
