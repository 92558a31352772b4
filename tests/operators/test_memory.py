"""What states hold of each token, against loops over tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from captum_ssm.operators import (
    Chain,
    DeltaRule,
    DenseHeads,
    Diagonal,
    ElementwiseRecurrence,
    FeedbackRecurrence,
    Operator,
    Permute,
    ScalarDecayHeads,
    SelectiveScan,
    ShortConv,
    Sum,
    VectorDecayHeads,
)
from captum_ssm.operators.readings import cache as caches
from captum_ssm.operators.readings.cache import Cache
from captum_ssm.operators.readings.memory import memories_of

B, L, H, N, P = 2, 7, 3, 4, 2


def logs(*size: int) -> Tensor:
    return -torch.rand(*size).double()


def vectors(heads: int = H) -> Tensor:
    return torch.randn(B, L, heads, N).double()


#: By name: the operator, and what one step does to a state (B, H, N, P) of a token's value.
Step = Callable[[Tensor, Tensor, int], Tensor]


def selective() -> tuple[Operator, Step, int]:
    dt, a = torch.rand(B, L, H).double(), -torch.rand(H, N).double()
    b, c = torch.randn(2, B, L, N).double()

    def step(state: Tensor, v: Tensor, t: int) -> Tensor:
        state = state * (dt[:, t, :, None] * a).exp()[..., None]
        return state + (dt[:, t, :, None] * b[:, t, None])[..., None] * v[:, :, None]

    return SelectiveScan(dt, a, b, c), step, 1


def scalar() -> tuple[Operator, Step, int]:
    query, key, log, scale = vectors(1), vectors(1), logs(B, L, H), torch.rand(B, L, H).double()

    def step(state: Tensor, v: Tensor, t: int) -> Tensor:
        written = key[:, t, :, :, None] * (scale[:, t, :, None] * v)[:, :, None]
        return state * log[:, t].exp()[..., None, None] + written

    return ScalarDecayHeads(query, key, log, scale, P), step, P


def vector() -> tuple[Operator, Step, int]:
    query, key, log = vectors(), vectors(), logs(B, L, H, N)

    def step(state: Tensor, v: Tensor, t: int) -> Tensor:
        return state * log[:, t].exp()[..., None] + key[:, t, :, :, None] * v[:, :, None]

    return VectorDecayHeads(query, key, log, P), step, P


def delta(decays: str) -> tuple[Operator, Step, int]:
    query, key, beta = vectors(), vectors(), torch.rand(B, L, H).double()
    key = key / key.norm(dim=-1, keepdim=True)
    log = {"none": None, "heads": logs(B, L, H), "channels": logs(B, L, H, N)}[decays]

    def step(state: Tensor, v: Tensor, t: int) -> Tensor:
        if log is not None:
            now = log[:, t] if log.dim() == 4 else log[:, t, :, None]
            state = state * now.exp()[..., None]
        found = torch.einsum("bhn,bhnp->bhp", key[:, t], state)
        missing = beta[:, t, :, None] * (v - found)
        return state + key[:, t, :, :, None] * missing[:, :, None]

    return DeltaRule(query, key, beta, log, P), step, P


def two_keys() -> tuple[Operator, Step, int]:
    query, key, erase, log = vectors(), vectors(), vectors(), logs(B, L, H, N)
    erase = erase / erase.norm(dim=-1, keepdim=True)
    rate, beta = torch.rand(B, L, H, N).double(), torch.rand(B, L, H).double()

    def step(state: Tensor, v: Tensor, t: int) -> Tensor:
        found = torch.einsum("bhn,bhnp->bhp", erase[:, t], state)
        state = state * log[:, t].exp()[..., None]
        state = state - (rate * erase)[:, t, :, :, None] * found[:, :, None]
        return state + (beta[:, t, :, None] * key[:, t])[..., None] * v[:, :, None]

    return DeltaRule(query, key, beta, log, P, erase=erase, erase_step=rate), step, P


def elementwise() -> tuple[Operator, Step, int]:
    decay = torch.rand(B, L, H).double()
    decay[0, 4, 1] = 0  # a reset

    def step(state: Tensor, v: Tensor, t: int) -> Tensor:
        return state * decay[:, t, :, None, None] + v[:, :, None]

    return ElementwiseRecurrence(decay), step, 1


def feedback() -> tuple[Operator, Step, int]:
    decay, write, gate = torch.rand(3, B, L, H, N).double()
    fed = torch.randn(H, N, N).double()

    def step(state: Tensor, v: Tensor, t: int) -> Tensor:
        heard = torch.einsum("hmn,bhn->bhm", fed, gate[:, t - 1] * state[..., 0])
        return (decay[:, t] * state[..., 0] + write[:, t] * (v + heard))[..., None]

    return FeedbackRecurrence(decay, write, gate, fed), step, N


KINDS = {
    "selective scan": selective,
    "scalar decay": scalar,
    "vector decay": vector,
    "delta rule": lambda: delta("none"),
    "delta rule, decay of heads": lambda: delta("heads"),
    "delta rule, decay of channels": lambda: delta("channels"),
    "delta rule of two keys": two_keys,
    "elementwise": elementwise,
    "feedback": feedback,
}
#: Those that take what the share is shorter along itself.
ALONG = ("delta", "feedback")


def run(step: Step, values: Tensor, last: int, width: int) -> Tensor:
    state = torch.zeros(B, H, width, values.shape[-1]).double()
    for t in range(last + 1):
        state = step(state, values[:, t], t)
    return state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", [0, 4, L - 1])
def test_shares_are_what_a_token_alone_leaves_in_the_state(kind: str, token: int) -> None:
    operator, step, per_head = KINDS[kind]()
    values = torch.randn(B, L, H, per_head).double()
    (memory,) = memories_of(operator, values)
    width = memory.key.shape[-1]
    whole = run(step, values, token, width)
    assert torch.allclose(memory.states([token])[:, 0], whole, rtol=0, atol=1e-12)
    sizes = memory.sizes(token)
    for j in range(L):
        alone = torch.zeros_like(values)
        alone[:, j] = values[:, j]
        expected = run(step, alone, token, width).flatten(2).norm(dim=-1)
        assert torch.allclose(sizes[..., j], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_states_after_several_tokens_in_any_order(kind: str) -> None:
    operator, step, per_head = KINDS[kind]()
    values = torch.randn(B, L, H, per_head).double()
    (memory,) = memories_of(operator, values)
    tokens = [5, 0, L - 1, 2, 5]
    found = memory.states(tokens)
    assert found.shape[1] == len(tokens)
    for state, token in zip(found.unbind(1), tokens, strict=True):
        expected = run(step, values, token, memory.key.shape[-1])
        assert torch.allclose(state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source, token", [(1, L - 1), (0, 4), (3, 4), (2, 2), (4, 3)])
def test_what_comes_back_without_each_token(kind: str, source: int, token: int) -> None:
    """The loop leaves the token's step out: it writes nothing of the source's share."""
    operator, step, per_head = KINDS[kind]()
    values = torch.zeros(B, L, H, per_head).double()
    values[:, source] = torch.randn(B, H, per_head).double()
    (memory,) = memories_of(operator, values)
    found = memory.without(source, token)
    for missing in range(L):
        state = torch.zeros(B, H, memory.key.shape[-1], per_head).double()
        for t in range(token + 1):
            if t != missing or t <= source:
                state = step(state, values[:, t], t)
        expected = state.flatten(2).norm(dim=-1)
        assert torch.allclose(found[..., missing], expected, rtol=0, atol=1e-12)
    assert found.any() == (source <= token)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_erased_is_all_that_is_missing(kind: str) -> None:
    operator, step, per_head = KINDS[kind]()
    values = torch.randn(B, L, H, per_head).double()
    (memory,) = memories_of(operator, values)
    width, source = memory.key.shape[-1], 1
    alone = torch.zeros_like(values)
    alone[:, source] = values[:, source]
    written, left = (run(step, alone, token, width) for token in (source, L - 1))
    if kind.startswith(ALONG):
        unit = written / written.flatten(2).norm(dim=-1)[..., None, None]
        expected = ((written - left) * unit).sum((-1, -2))
    else:  # entries keep their signs
        value = values[:, source].norm(dim=-1)
        key = (written.flatten(2).norm(dim=-1) > 0) * 1.0
        sizes = [x.norm(dim=-1).sum(-1) for x in (written, left)]
        expected = (sizes[0] - sizes[1]) * key
        assert (value > 0).all()
    erased = memory.erased(source, L - 1)
    assert torch.allclose(erased.sum(-1), expected, rtol=0, atol=1e-12)
    assert not erased[..., : source + 1].any()
    assert not memory.erased(source, source).any()


def test_each_step_of_a_delta_rule_takes_what_the_share_is_shorter_after_it() -> None:
    operator, step, per_head = delta("heads")
    values = torch.randn(B, L, H, per_head).double()
    (memory,) = memories_of(operator, values)
    alone = torch.zeros_like(values)
    alone[:, 1] = values[:, 1]
    states = [run(step, alone, token, N) for token in range(1, L)]
    unit = states[0] / states[0].flatten(2).norm(dim=-1)[..., None, None]
    along = torch.stack([(state * unit).sum((-1, -2)) for state in states], -1)
    erased = memory.erased(1, L - 1)[..., 2:]
    assert torch.allclose(erased, along[..., :-1] - along[..., 1:], rtol=0, atol=1e-12)


def test_decays_take_in_proportion_to_their_logarithms() -> None:
    log = torch.tensor([[0.0], [-1.0], [-2.0], [-5.0]]).double()[None]
    key = torch.ones(1, 4, 1, 1).double()
    memory = memories_of(ScalarDecayHeads(key, key, log, None, 1), key)[0]
    share = memory.erased(0, 2)[0, 0]
    assert torch.allclose(
        share, torch.tensor([0, 1, 2, 0]).double() / 3 * -torch.tensor(-3.0).expm1()
    )
    assert torch.allclose(
        memory.half_lives(), torch.tensor(0.5 * torch.log(torch.tensor(2.0))).double()
    )


def test_what_stands_around_a_recurrence() -> None:
    """A convolution before it is part of what is written, a flip turns the order of tokens."""
    scan, step, _ = elementwise()
    flip = Permute(torch.arange(L - 1, -1, -1), scan.shape)
    conv = ShortConv(torch.randn(H, 1, 2).double(), scan.shape, torch.randn(1, 1, H, 1).double())
    gate = Diagonal(torch.randn(B, L, H, 1).double(), scan.shape, "gate")
    forward = Chain(gate, scan, conv)
    backward = Chain(flip, scan, flip)
    values = torch.randn(B, L, H, 1).double()
    first, second = memories_of(Sum(forward, backward), values)
    assert torch.allclose(first.states([3])[:, 0], run(step, conv.affine(values), 3, 1))
    assert torch.allclose(second.states([3])[:, 0], run(step, values.flip(1), L - 1 - 3, 1))
    held = second.sizes(3)
    assert not held[..., :3].any()
    assert (held[..., 3:] != 0).any()
    end = second.without(L - 2, 2)  # read backwards: those between are 2 to 4
    assert torch.allclose(end[..., L - 2], second.sizes(2)[..., L - 2], rtol=0, atol=1e-12)
    assert (end[..., 2 : L - 2] > end[..., -1:]).any(-1).all()
    assert memories_of(conv, values) == []


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
    values, weight = torch.randn(B, L, H, P).double(), torch.randn(H, P, 6).double()
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
    values = torch.randn(B, L, H, P).double()
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
    values = torch.randn(B, L, H, P).double()
    both = DenseHeads(torch.rand(B, H, L, L).double(), P)
    assert memories_of(both, values) == []
    nearly = attention().matrices.clone()
    nearly[1, 0, L - 2, L - 1] = 1e-9
    assert memories_of(DenseHeads(nearly, P), values) == []
