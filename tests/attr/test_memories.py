"""What states hold of each token, against the matrices of operators that read one entry of them."""

from __future__ import annotations

import math

import pytest
import torch
from operators.kinds import KINDS, PER_CHANNEL, STATES, Case, conv, diagonal, randn
from torch import Tensor

from captum_ssm.attr.engine import cache as caches
from captum_ssm.attr.engine.cache import Cache
from captum_ssm.attr.engine.memories import memories_of
from captum_ssm.operators import Chain, DenseHeads, Permute, ScalarDecayHeads, Shape, Sum

B, L, H, P = 2, 7, 3, 2
#: Kinds with states, and what reads these.
READS = {
    "scan": "C", "scan of groups": "C", "scalar decay of one group": "query",
    "vector decay": "query", "delta rule": "query", "delta rule, decay": "query",
    "delta rule, decay of channels": "query", "delta rule of two keys, decay of channels": "query",
    "elementwise": "", "feedback": "gate",
}  # fmt: skip
#: Coefficients with which a token leaves the states as they are.
NO_STEP = {"log_decay": 0.0, "beta": 0.0, "erase_step": 0.0, "dt": 0.0, "decay": 1.0, "write": 0.0}


def drawn(kind: str) -> Case:
    build, single = KINDS[kind]
    return build(Shape(B, L, H, 1 if single else P))


def states(kind: str, case: Case, values: Tensor, **changed: Tensor) -> Tensor:
    """The states (B, L, H, N, P) that values leave."""
    z, name = {**case.coefficients, **changed}, READS[kind]
    if kind == "feedback":
        out = torch.einsum("bhpqij,bjhq->bihp", case.matrices(**z), values)
        return (out / z["gate"])[..., None]
    units = torch.eye(STATES).double()
    read = [{name: z[name] * 0 + unit} for unit in units] if name else [{}]
    each = [
        case.matrices(**z, **unit) if not name else case.matrices(**{**z, **unit}) for unit in read
    ]
    of_heads = torch.stack([m[:, :: values.shape[-1]] for m in each], 2)  # (B, H, N, L, L)
    return torch.einsum("bhnij,bjhp->bihnp", of_heads, values)


def alone(values: Tensor, token: int) -> Tensor:
    out = torch.zeros_like(values)
    out[:, token] = values[:, token]
    return out


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", READS)
def test_shares_are_what_a_token_alone_leaves_in_the_state(kind: str) -> None:
    case = drawn(kind)
    values = randn(*case.operator.shape)
    (memory,) = memories_of(case.operator, values)
    tokens = [5, 0, L - 1, 2, 5]
    close(memory.states(tokens), states(kind, case, values)[:, tokens])
    each = [states(kind, case, alone(values, j)).flatten(-2).norm(dim=-1) for j in range(L)]
    for token in tokens:
        close(memory.sizes(token), torch.stack([x[:, token] for x in each], -1))


@pytest.mark.parametrize("kind", READS)
def test_what_comes_back_without_each_token(kind: str) -> None:
    """A token that is left out forgets and erases nothing, and is no source."""
    case = drawn(kind)
    values = randn(*case.operator.shape)
    (memory,) = memories_of(case.operator, values)
    for source, token in ((1, L - 1), (3, 4), (2, 2), (4, 3)):
        found = memory.without(source, token)
        for missing in range(L):
            changed = {n: x.clone() for n, x in case.coefficients.items() if n in NO_STEP}
            for name, x in changed.items():
                if missing > source:
                    x[:, missing] = NO_STEP[name]
            left = states(kind, case, alone(values, source), **changed)[:, token]
            close(found[..., missing], left.flatten(-2).norm(dim=-1))
        assert found.any() == (source <= token)


def test_each_step_of_a_delta_rule_takes_what_the_share_is_shorter_after_it() -> None:
    case = drawn("delta rule, decay")
    values = randn(*case.operator.shape)
    (memory,) = memories_of(case.operator, values)
    left = states("delta rule, decay", case, alone(values, 1))[:, 1:]
    unit = left[:, 0] / left[:, 0].flatten(-2).norm(dim=-1)[..., None, None]
    along = (left * unit[:, None]).sum((-1, -2)).movedim(1, -1)
    erased = memory.erased(1, L - 1)
    close(erased[..., 2:], along[..., :-1] - along[..., 1:])
    assert not erased[..., :2].any() and not memory.erased(1, 1).any()


def test_decays_take_in_proportion_to_their_logarithms() -> None:
    log = torch.tensor([[0.0], [-1.0], [-2.0], [-5.0]]).double()[None]
    key = torch.ones(1, 4, 1, 1).double()
    memory = memories_of(ScalarDecayHeads(key, key, log, None, 1), key)[0]
    share = memory.erased(0, 2)[0, 0]
    wanted = torch.tensor([0, 1, 2, 0]).double() / 3 * -torch.tensor(-3.0).expm1()
    assert torch.allclose(share, wanted)
    assert torch.allclose(memory.half_lives(), torch.tensor(0.5 * math.log(2)).double())


def test_what_stands_around_a_recurrence() -> None:
    """A convolution before it is part of what is written, a flip turns the order of tokens."""
    case, shape = drawn("elementwise"), Shape(B, L, H, 1)
    case.coefficients = {"decay": torch.rand(B, L, H).double()}
    scan, first_conv = case.operator, conv(0, 1, bias=PER_CHANNEL)(shape).operator
    flip = Permute(torch.arange(L - 1, -1, -1), shape)
    gate, values = diagonal()(shape).operator, randn(*shape)
    first, second = memories_of(Sum(Chain(gate, scan, first_conv), Chain(flip, scan, flip)), values)
    close(first.states([3]), states("elementwise", case, first_conv.affine(values))[:, [3]])
    close(second.states([3]), states("elementwise", case, values.flip(1))[:, [L - 1 - 3]])
    held = second.sizes(3)
    assert not held[..., :3].any()
    assert (held[..., 3:] != 0).any()
    end = second.without(L - 2, 2)  # read backwards: those between are 2 to 4
    assert torch.allclose(end[..., L - 2], second.sizes(2)[..., L - 2], rtol=0, atol=1e-12)
    assert (end[..., 2 : L - 2] > end[..., -1:]).any(-1).all()
    assert memories_of(first_conv, values) == []


# --- caches of attention --------------------------------------------------------------------------


def attention(window: int = L, padded: int = 0) -> DenseHeads:
    """Causal attention of a window, whose first tokens are padding."""
    at = torch.arange(L)
    distance = at[:, None] - at
    pairs = (distance >= 0) & (distance < window) & (at >= padded) & (at[:, None] >= padded)
    scores = torch.randn(B, H, L, L).double().masked_fill(~pairs, -torch.inf)
    return DenseHeads(scores.softmax(-1).nan_to_num(0), P)


@pytest.mark.parametrize("window, padded", [(L, 0), (3, 0), (L, 2), (3, 2)])
def test_a_cache_keeps_values_for_as_long_as_they_are_read(window: int, padded: int) -> None:
    operator = attention(window, padded)
    values, weight = randn(B, L, H, P), randn(H, P, 6)
    (found,) = memories_of(operator, values)
    assert isinstance(found, Cache)
    cache = found._replace(weight=weight)
    kept: dict[int, Tensor] = {}
    for token in range(L):
        if token >= padded:
            kept[token] = values[:, token]
        kept.pop(token - window, None)
        (state,) = cache.states([token]).unbind(1)
        sizes = cache.sizes(token)
        for j in range(L):
            value = kept.get(j, torch.zeros(B, H, P).double())
            assert torch.equal(state[:, :, j], value)
            written = torch.einsum("bhp,hpe->bhe", value, weight).norm(dim=-1)
            assert torch.allclose(sizes[..., j], written, rtol=0, atol=1e-12)
    assert cache.half_lives().isinf().all()


def test_what_a_window_leaves_behind() -> None:
    operator = attention(window=3)
    values = randn(B, L, H, P)
    (cache,) = memories_of(operator, values)
    size = values[:, 1].norm(dim=-1)
    assert not cache.erased(1, 3).any()
    erased = cache.erased(1, 6)
    assert torch.allclose(erased[..., 4], size)
    assert not erased[..., [0, 1, 2, 3, 5, 6]].any()
    back = cache.without(1, 6)
    assert torch.allclose(back[..., 4], size)
    assert torch.equal(cache.without(1, 3), size[..., None].expand(-1, -1, L))
    (whole,) = memories_of(attention(), values)
    assert not whole.erased(1, L - 1).any()


@pytest.mark.parametrize("rows", [2, 256])
def test_attention_that_reads_what_comes_later_has_no_cache(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "_ROWS", rows)
    values = randn(B, L, H, P)
    both = DenseHeads(torch.rand(B, H, L, L).double(), P)
    assert memories_of(both, values) == []
    nearly = attention().matrices.clone()
    nearly[1, 0, L - 2, L - 1] = 1e-9
    assert memories_of(DenseHeads(nearly, P), values) == []
